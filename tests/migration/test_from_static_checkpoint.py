"""load_static: checkpoints of TorchRec's own sharded tables fill dynamic ones under any plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_training import Holder, collection_of, shard
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.migration import trained_collections as from_static_rows
from torchrec_dyn.migration.static_checkpoint import load_static

ROWS = 41
RULE = {"learning_rate": 0.2, "eps": 1e-3}
SAVED = [(2, 2, "row_wise"), (2, 2, "column_wise"), (4, 2, "grid_shard")]
LOADED = [(1, 1, "table_wise"), (2, 2, "table_wise"), (2, 2, "column_wise"), (3, 3, "row_wise")]
LOADED += [(4, 2, "grid_shard")]


def case_of(world: int, local: int, kind: str, optimizer: str, pooled: bool = True) -> Case:
    if kind == "thirds":
        plans = [shard_by_hand("column_wise", [([1], 0, 3), ([0], 3, 3), ([0], 6, 2)], ROWS)] * 2
    else:
        plans = [usual_plan(kind, 8, world, local, turn, ROWS) for turn in (0, 1)]
    tables = [Table("t0", ["a"], plans[0], rows=ROWS), Table("t1", ["b"], plans[1], rows=ROWS)]
    rule = {"optimizer": EmbOptimType[optimizer], **RULE}
    return Case(tables, pooled=pooled, fused_params=rule)


def static_of(case: Case) -> DistributedModelParallel:
    torch.manual_seed(0)
    if case.pooled:
        bags = [EmbeddingBagConfig(ROWS, 8, t.name, feature_names=t.features) for t in case.tables]
        collection, kind = EmbeddingBagCollection(bags), EmbeddingBagCollectionSharder
    else:
        rows = [EmbeddingConfig(ROWS, 8, t.name, feature_names=t.features) for t in case.tables]
        collection, kind = EmbeddingCollection(rows), EmbeddingCollectionSharder
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    sharders = [kind(fused_params=dict(case.fused_params))]
    return DistributedModelParallel(
        Holder(collection), device=torch.device("cpu"), plan=plan, sharders=sharders
    )


def train(model: Any, step: int) -> torch.Tensor:
    """One step on a batch of this rank's own; gives its outputs."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(ROWS, (2 * 5 * 3,), generator=generator)
    out = model(KeyedJaggedTensor(["a", "b"], ids, lengths=torch.full((10,), 3)))
    out = out.wait() if hasattr(out, "wait") else out
    pooled = isinstance(out, KeyedTensor)
    values = out.values() if pooled else torch.cat([out[key].values() for key in ("a", "b")])
    (values - torch.linspace(-1, 1, values.shape[1])).square().sum().backward()
    return values.detach()


def save_static(case: Case, folder: str) -> None:
    model = static_of(case)
    for step in range(3):
        train(model, step)
    state = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives (folder, its tensors by key) of what a plan saved; each plan saves once."""
    done: dict[Any, Any] = {}

    def saved_by(world: int, local: int, kind: str, optimizer: str, pooled: bool = True) -> Any:
        key = (world, local, kind, optimizer, pooled)
        if key not in done:
            folder = tmp_path_factory.mktemp("static")
            case = case_of(*key)
            workers.run(save_static, case, f"{folder}/c", world_size=world, local_size=local)
            dcp_to_torch_save(f"{folder}/c", folder / "plain")
            plain = torch.load(folder / "plain", weights_only=False)
            holder = "embedding_bags" if pooled else "embeddings"
            tensors = {}
            for table in ("t0", "t1"):
                name = f"collection.{holder}.{table}.weight"
                tensors[table] = plain["model"][name]
                states = plain.get("optim", {"state": {}})["state"].get(name, {})
                tensors[f"{table}.momentum1"] = states.get(f"{table}.momentum1")
            done[key] = (Path(folder, "c"), tensors)
        return done[key]

    return saved_by


def contents(one: Any, table: str) -> tuple[Any, list[tuple[int, int, dict[str, torch.Tensor]]]]:
    """All rows, and what each shard here holds: first column, columns, export_state."""
    ids = torch.arange(ROWS)
    if isinstance(one, dyn.DynamicEmbeddingBagCollection | dyn.DynamicEmbeddingCollection):
        shards = [one.local_tables()[table]]
    else:
        shards = one.table(table)._shards
    rows, found = dyn.lookup_rows(one, table, ids)
    assert found.all() and dyn.read_num_rows(one, table) == ROWS
    return rows, [(s.first_column, s.columns, dict(s.export_state())) for s in shards]


def load(case: Case, folder: str) -> dict[str, Any]:
    from_static_rows.CHUNK_BYTES = 4 * 8 * 10  # rows 0 to 9, 10 to 19, ...
    one = shard(case, collection_of(case)).module.collection
    # What was there goes.
    dyn.assign_rows(one, "t0", torch.tensor([5, -7]), torch.ones(2, 8))
    load_static(one, folder)
    return {table: contents(one, table) for table in ("t0", "t1")}


def check(by_rank: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> None:
    """Rows bit for bit; each shard's numbers are means over its columns of the saved ones."""
    for table in ("t0", "t1"):
        weight, moment = tensors[table], tensors[f"{table}.momentum1"]
        seen = 0
        for answers in by_rank:
            rows, shards = answers[table]
            assert torch.equal(rows, weight)
            for first, columns, state in shards:
                ids, last = state["ids"], first + columns
                assert torch.equal(state["weight"], weight[ids, first:last])
                seen += len(ids) * columns
                if moment is not None and moment.dim() == 2:
                    assert torch.equal(state["momentum1"], moment[ids, first:last])
                elif moment is not None:
                    # A number for each column, of the shard that it was saved with.
                    parts = moment.view(-1, ROWS)
                    each = parts.repeat_interleave(8 // len(parts), 0)
                    mean = each[first:last].mean(0)[ids]
                    torch.testing.assert_close(state["momentum1"].flatten(), mean)
        assert seen == ROWS * 8


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: saved[2])
@pytest.mark.parametrize("loaded", [*LOADED, (2, 2, "thirds")], ids=lambda loaded: loaded[2])
def test_any_plan_to_any_plan(checkpoints: Any, saved: Any, loaded: Any) -> None:
    folder, tensors = checkpoints(*saved, "EXACT_ROWWISE_ADAGRAD")
    assert tensors["t0.momentum1"].numel() == ROWS * (1 if saved[2] == "row_wise" else 2)
    case = case_of(*loaded, "EXACT_ROWWISE_ADAGRAD")
    answers = workers.run(load, case, f"{folder}", world_size=loaded[0], local_size=loaded[1])
    check(answers, tensors)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ADAGRAD"])
def test_other_optimizers_and_sequences(checkpoints: Any, optimizer: str, pooled: bool) -> None:
    folder, tensors = checkpoints(2, 2, "column_wise", optimizer, pooled)
    case = case_of(2, 2, "row_wise", optimizer, pooled)
    check(workers.run(load, case, f"{folder}", world_size=2), tensors)
    whole = collection_of(case, fused_params=case.fused_params)
    load_static(whole, folder)
    check([{table: contents(whole, table) for table in ("t0", "t1")}], tensors)


def train_on(case: Case, folder: str) -> None:
    static = static_of(case)
    for step in range(2):
        train(static, step)
    state = {"model": static.state_dict(), "optim": static.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    dynamic = shard(case, collection_of(case))
    load_static(dynamic.module.collection, folder)
    for step in range(2, 5):
        torch.testing.assert_close(train(dynamic, step), train(static, step), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD"])
@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_training_goes_on(tmp_path: Path, kind: str, optimizer: str) -> None:
    workers.run(train_on, case_of(2, 2, kind, optimizer), f"{tmp_path}/c", world_size=2)
