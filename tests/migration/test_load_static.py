"""load_static: checkpoints of static tables, sharded or not, fill dynamic ones under any plan."""

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_training import Holder, collection_of, shard
from static_collections import OPTIMIZERS, assert_same_rows, batch, ebc, loss_of
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
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import apply_delta, export_delta, mark
from torchrec_dyn.migration import from_static
from torchrec_dyn.migration.static_checkpoint import load_static

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Checkpoints of TorchRec's own sharded tables

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
    return DistributedModelParallel(Holder(collection), plan=plan, sharders=sharders)


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
        shards = one.table(table).shards
    rows, found = dyn.lookup_rows(one, table, ids)
    assert found.all() and dyn.read_num_rows(one, table) == ROWS
    return rows, [(s.first_column, s.columns, dict(s.export_state())) for s in shards]


@mock.patch.object(knobs, "CHUNK_BYTES", 4 * 8 * 10)  # rows 0 to 9, 10 to 19, ...
def load(case: Case, folder: str) -> dict[str, Any]:
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


@pytest.mark.everyday(9)
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


# Checkpoints of unsharded collections, and what is refused


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "CHUNK_BYTES", 5 * 4 * 8)


def trained(kind: str) -> tuple[Any, Any]:
    """A static collection and its keyed optimizer after two steps."""
    static = ebc()
    keyed = KeyedOptimizerWrapper(dict(static.named_parameters(prefix="m")), OPTIMIZERS[kind])
    for step in range(2):
        loss_of(static, batch(static, random.Random(step))).backward()
        keyed.step()
        keyed.zero_grad()
    return static, keyed


def save(path: Path, static: Any, keyed: Any, **others: Any) -> Path:
    model = static.state_dict(prefix="m.")
    dcp.save({"model": model, "optim": keyed.state_dict(), **others}, checkpoint_id=path)
    return path


def dynamic(kind: str, dim: int = 8, rows: int = 100) -> Any:
    first, second = ebc().embedding_bag_configs()
    first = replace(first, embedding_dim=dim)
    configs = [first, replace(second, num_embeddings=rows, init_fn=None)]
    return dyn.DynamicEmbeddingBagCollection(configs, fused_params={"optimizer": kind})


def state_of(one: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(table.export_state()) for name, table in one.local_tables().items()}


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for table in one:
        assert one[table].keys() == other[table].keys()
        for name in one[table]:
            assert torch.equal(one[table][name], other[table][name]), (table, name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_gives_what_the_collection_itself_gives(tmp_path: Path, kind: str) -> None:
    static, keyed = trained(kind)
    made = dynamic(kind)
    load_static(made, save(tmp_path / "c", static, keyed), "m")
    assert_same(state_of(made), state_of(from_static(static, keyed)))
    made.train()(batch(static, random.Random(0)))
    assert made.local_tables()["a"].step == (1 if kind == "EXACT_SGD" else 3)


def test_what_was_there_goes_and_the_limit_does_not_count(tmp_path: Path) -> None:
    static, keyed = trained("EXACT_SGD")
    made = dynamic("EXACT_SGD", rows=7)  # of 30
    made.table("b").assign(torch.tensor([1, -9]), torch.ones(2, 4))
    load_static(made, save(tmp_path / "c", static, keyed))
    assert_same_rows(made, static)


def test_deltas_go_on_across_a_load(tmp_path: Path) -> None:
    static, keyed = trained("EXACT_ADAGRAD")
    path = save(tmp_path / "c", static, keyed)
    made = dynamic("EXACT_ADAGRAD")
    made.table("b").assign(torch.tensor([1, -9]), torch.ones(2, 4))
    follower, before = copy.deepcopy(made), mark(made)
    load_static(made, path)
    export_delta(made, tmp_path / "delta", before)
    apply_delta(follower, tmp_path / "delta")
    assert_same(state_of(follower), state_of(made))


def test_copies_of_a_model_and_collections_of_one_name(tmp_path: Path) -> None:
    """One optimizer trained the model and its average; another collection has tables of the same names."""
    (static, keyed), (other, others) = trained("EXACT_ADAGRAD"), trained("EXACT_ADAGRAD")
    for state in others.state.values():
        state["sum"].add_(1)
    average = {f"m.{key}": value * 2 for key, value in static.state_dict().items()}
    inner = {f"tower.{key}": value for key, value in other.state_dict(prefix="m.").items()}
    states = keyed.state_dict()
    states["state"] |= {f"tower.{key}": one for key, one in others.state_dict()["state"].items()}
    model = {**static.state_dict(prefix="m."), **inner}
    saved = {"model": model, "ema": average, "optim": states}
    dcp.save(saved, checkpoint_id=tmp_path / "c")
    plain, of_tower = from_static(static, keyed), from_static(other, others)
    cases = {
        ("model.m", "state.m"): (static.state_dict(), plain),
        ("ema.m", "state.m"): (average, plain),
        ("tower.m", None): (other.state_dict(), of_tower),
    }
    for (fqn, optimizer_fqn), (weights, expected) in cases.items():
        made = dynamic("EXACT_ADAGRAD")
        load_static(made, tmp_path / "c", fqn, optimizer_fqn=optimizer_fqn)
        got, right = state_of(made), state_of(expected)
        for table in ("a", "b"):
            assert torch.equal(got[table]["momentum1"], right[table]["momentum1"]), (fqn, table)
            [weight] = [value for key, value in weights.items() if f".{table}.w" in f".{key}"]
            assert torch.equal(made.table(table).lookup(torch.arange(len(weight)))[0], weight)
    with pytest.raises(ValueError, match=r"got \[\]\. .* pass `optimizer_fqn` if"):
        load_static(made, tmp_path / "c", "ema.m")
    with pytest.raises(
        ValueError, match=r"got \['optim.state.m.*'optim.state.tower.m.*`optimizer_fqn`"
    ):
        load_static(made, tmp_path / "c", "model.m", optimizer_fqn="m")


def test_weights_alone(tmp_path: Path) -> None:
    static, keyed = trained("ADAM")
    path = save(tmp_path / "c", static, keyed)
    made = dynamic("EXACT_ADAGRAD")
    load_static(made, path, with_optimizer=False, step=9)
    assert_same_rows(made, static)
    assert not made.local_tables()["a"].export_state()["momentum1"].any()
    assert made.local_tables()["a"].step == 9


def without_steps(path: Path) -> Path:
    static, keyed = trained("ADAM")
    for state in keyed.state.values():
        del state["step"]
    return save(path, static, keyed)


def twice(path: Path) -> Path:
    static, keyed = trained("EXACT_SGD")
    return save(path, static, keyed, again=static.state_dict(prefix="n."))


def of_dynamic(path: Path) -> Path:
    made = from_static(ebc())
    dcp.save({"model": made.state_dict(prefix="m.")}, checkpoint_id=path)
    return path


def damaged(path: Path, how: Callable[[Path], Any]) -> Path:
    save(path, *trained("EXACT_SGD"))
    how(path)
    return path


def shorten(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-700])


def overwrite(path: Path) -> None:
    """Spoils the archive of the last table only: the first has been filled when it is read."""
    (file,) = path.glob("*.distcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for index, at in metadata.storage_data.items():
        if index.fqn.endswith(".b.weight"):
            data = bytearray(file.read_bytes())
            data[at.offset : at.offset + at.length] = b"x" * at.length
            file.write_bytes(data)


WRONG: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "nothing": (lambda p: p, {}, "expected a checkpoint of torch.distributed.checkpoint"),
    "torn": (lambda p: damaged(p, lambda c: (c / ".metadata").unlink()), {}, "It is torn"),
    "truncated": (lambda p: damaged(p, shorten), {}, "it is truncated"),
    "spoiled": (lambda p: damaged(p, overwrite), {}, "expected an archive of torch.save"),
    "other names": (
        lambda p: save(p, *trained("EXACT_SGD")),
        {"fqn": "x"},
        r"expected one key that ends with 'x.embedding_bags.a.weight', got \[\]",
    ),
    "two of a name": (twice, {}, r"got \['model.m.embedding_bags.a.weight', 'again.n.embed.*`fqn`"),
    "dynamic": (of_dynamic, {}, "table 'a': expected a static table, got a dynamic one. Load it"),
    "dim": (
        lambda p: save(p, *trained("EXACT_SGD")),
        {"dim": 6},
        r"table 'a': expected rows \[N, 6\], got \[12, 8\]",
    ),
    "no state": (
        lambda p: save(p, *trained("EXACT_SGD")),
        {"kind": "EXACT_ADAGRAD"},
        r"expected optimizer state \['momentum1'\] of EXACT_ADAGRAD, got \[\]",
    ),
    "more state": (lambda p: save(p, *trained("ADAM")), {}, r"\[\] of EXACT_SGD, got \['momentum1"),
    "state by row": (
        lambda p: save(p, *trained("EXACT_ROWWISE_ADAGRAD")),
        {"kind": "EXACT_ADAGRAD"},
        r"expected momentum1 of EXACT_ADAGRAD as \[12, 8\], got \[12, 1\]",
    ),
    "state by column": (
        lambda p: save(p, *trained("EXACT_ADAGRAD")),
        {"kind": "EXACT_ROWWISE_ADAGRAD"},
        r"expected momentum1 of EXACT_ROWWISE_ADAGRAD as \[12\], got \[12, 8\]",
    ),
    "no steps": (without_steps, {"kind": "ADAM"}, "the training steps of ADAM.* Pass step="),
    "no steps of ADAMW": (without_steps, {"kind": "ADAMW"}, "the training steps of ADAMW.* Pass"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, name: str) -> None:
    make, options, message = WRONG[name]
    path = make(tmp_path / "c")
    made = dynamic(options.pop("kind", "EXACT_SGD"), options.pop("dim", 8))
    for table, columns in (("a", made.embedding_bag_configs()[0].embedding_dim), ("b", 4)):
        made.table(table).assign(torch.tensor([1, -9]), torch.ones(2, columns))
    before = state_of(made)
    with pytest.raises(ValueError, match=message):
        load_static(made, path, **options)
    assert_same(before, state_of(made))


def test_steps_that_are_not_saved_are_told(tmp_path: Path) -> None:
    made = dynamic("ADAM")
    load_static(made, without_steps(tmp_path / "c"), step=11)
    assert made.local_tables()["b"].step == 11


def fail_on_one_rank(folder: str) -> list[str]:
    tables = [
        Table(name, [name], usual_plan("row_wise", dim, 2, 2, 0, 100), dim=dim, rows=100)
        for name, dim in (("a", 8), ("b", 4))
    ]
    case = Case(tables, fused_params={"optimizer": "EXACT_SGD", "learning_rate": 0.1})
    one = shard(case, collection_of(case)).module.collection
    ids = torch.arange(-4, 4)
    dyn.assign_rows(one, "a", ids, torch.ones(8, 8))
    faults = []
    for path in ("damaged", "sound" if dist.get_rank() else "nowhere"):
        with pytest.raises(ValueError) as caught:
            load_static(one, f"{folder}/{path}")
        faults.append(f"{caught.value}")
        assert dyn.read_num_rows(one, "a") == 8 and dyn.read_num_rows(one, "b") == 0
        assert torch.equal(dyn.lookup_rows(one, "a", ids)[0], torch.ones(8, 8))
    load_static(one, f"{folder}/sound")
    assert dyn.read_num_rows(one, "a") == 12 and dyn.read_num_rows(one, "b") == 30
    return faults


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    save(tmp_path / "sound", *trained("EXACT_SGD"))
    damaged(tmp_path / "damaged", overwrite)
    everyones = workers.run(fail_on_one_rank, f"{tmp_path}", world_size=2)
    assert everyones[0] == everyones[1]
    spoiled, nowhere = everyones[0]
    assert "expected an archive of torch.save" in spoiled
    assert nowhere.startswith("load_static(rank=0): ") and "got no directory" in nowhere
