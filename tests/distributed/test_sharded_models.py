"""Sharded collections inside models: beside static ones, under DDP, in evaluation, with faults."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn

POOLED = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
]


class Mixed(nn.Module):
    """A static table, a dynamic one, and a dense layer on both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        static = EmbeddingBagConfig(
            name="static", embedding_dim=8, num_embeddings=50, feature_names=["s"]
        )
        dynamic = EmbeddingBagConfig(
            name="dynamic", embedding_dim=8, num_embeddings=1000, feature_names=["d"]
        )
        self.static = EmbeddingBagCollection([static])
        self.dynamic = dyn.DynamicEmbeddingBagCollection([dynamic], fused_params=FUSED_PARAMS)
        self.dense = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Predicts one number per example."""
        static, dynamic = self.static(features), self.dynamic(features)
        return self.dense(torch.cat([static["s"], dynamic["d"]], dim=1)).squeeze(1)


def mixed_batch(step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(4, (12,), generator=generator)
    static = torch.randint(50, (int(lengths[:6].sum()),), generator=generator)
    dynamic = torch.randint(-(2**62), 2**62, (int(lengths[6:].sum()),), generator=generator)
    return KeyedJaggedTensor(
        keys=["s", "d"], values=torch.cat([static, dynamic % 97 - 48]), lengths=lengths
    )


def train_mixed() -> list[float]:
    """Trains under DistributedModelParallel with the dense layer under DDP; returns losses."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Mixed()
    plan = ShardingPlan(
        {
            "static": {"static": shard_by_hand("column_wise", [([0], 0, 4), ([1], 4, 4)], rows=50)},
            "dynamic": {"dynamic": usual_plan("row_wise", 8, world, world)},
        }  # type: ignore[dict-item]
    )
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(fused_params=dict(FUSED_PARAMS)),
        dyn.DynamicEmbeddingBagCollectionSharder(),
    ]
    start = model.static.embedding_bags["static"].weight.detach().clone()
    model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    model.load_state_dict({"static.embedding_bags.static.weight": start}, strict=False)
    assert isinstance(model._dmp_wrapped_module, DistributedDataParallel)
    assert sorted(dict(model._dmp_wrapped_module.module.dense.named_parameters())) == [
        "bias",
        "weight",
    ]
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "dense" in n], lr=0.05)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        predicted = model(mixed_batch(step, rank))
        loss = (predicted - 1).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total / world))
    return losses


def train_mixed_unsharded(world: int) -> list[float]:
    """The same in one process: the global loss is the mean over the ranks' batches."""
    model = Mixed()
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.05)
    static = torch.optim.Adagrad(model.static.parameters(), lr=0.1, eps=1e-8)
    losses = []
    for step in range(4):
        parts = [mixed_batch(step, rank) for rank in range(world)]
        lengths = [part.lengths().view(2, -1) for part in parts]
        values = [part.values().split(part.length_per_key()) for part in parts]
        together = KeyedJaggedTensor(
            keys=["s", "d"],
            values=torch.cat([v[feature] for feature in range(2) for v in values]),
            lengths=torch.cat(lengths, dim=1).flatten(),
        )
        optimizer.zero_grad()
        static.zero_grad()
        loss = (model(together) - 1).square().mean()
        loss.backward()
        optimizer.step()
        static.step()
        losses.append(float(loss.detach()))
    return losses


def test_static_and_dynamic_collections_and_dense_layer_in_one_model() -> None:
    by_rank = workers.run(train_mixed, world_size=2)
    assert by_rank[0] == by_rank[1]
    torch.testing.assert_close(by_rank[0], train_mixed_unsharded(2), rtol=1e-4, atol=1e-5)
    assert by_rank[0][-1] < by_rank[0][0]


def check_evaluate(case: Case) -> None:
    """Evaluation reads what training wrote and changes nothing."""
    rank = dist.get_rank()
    unsharded = collection_of(case, fused_params=case.fused_params)
    model = shard(case, copy.deepcopy(unsharded))
    per_rank, _ = batches(case, 0)
    outputs_by_name(case, model(per_rank[rank]))
    collection = model.module.collection
    before = [collection.table(table.name).stats() for table in case.tables]
    model.eval()
    unseen = KeyedJaggedTensor(
        keys=case.features(),
        values=torch.arange(7_000_000, 7_000_000 + 2 * len(case.features())),
        lengths=torch.ones(2 * len(case.features()), dtype=torch.int64),
    )
    for value in outputs_by_name(case, model(unseen)).values():
        assert value.shape == (2, 8) and not value.any()
    assert [collection.table(table.name).stats() for table in case.tables] == before
    model.train()
    for value in outputs_by_name(case, model(unseen)).values():
        assert bool(value.any())


@pytest.mark.parametrize(
    "pooled, kind",
    [(True, k) for k in POOLED] + [(False, k) for k in ("table_wise", "column_wise", "row_wise")],
)
def test_evaluation_changes_nothing(pooled: bool, kind: str) -> None:
    tables = [Table(f"t{i}", [f"f{i}"], usual_plan(kind, 8, 4, 2, i)) for i in range(2)]
    workers.run(check_evaluate, Case(tables, pooled=pooled), world_size=4, local_size=2)


def check_prefetch(case: Case) -> None:
    """Prefetch makes the rows; the forward of the same batch then finds all ids."""
    rank = dist.get_rank()
    model = shard(case, collection_of(case))
    collection = model.module.collection
    per_rank, _ = batches(case, 0)
    ctx = collection.create_context()
    arrived = collection.input_dist(ctx, per_rank[rank]).wait().wait()
    collection.prefetch(arrived)
    handles = [collection.table(table.name) for table in case.tables]
    rows = [handle.num_rows for handle in handles]
    assert sum(rows) > 0
    outputs = collection.compute_and_output_dist(ctx, arrived)
    outputs_by_name(case, outputs)
    for handle, before in zip(handles, rows, strict=True):
        stats = handle.stats()
        assert stats["rows"] == before
        assert not handle.columns or stats["hits"] == stats["ids_seen"] > 0
    model.eval()
    ctx = collection.create_context()
    later, _ = batches(case, 5)
    collection.prefetch(collection.input_dist(ctx, later[rank]).wait().wait())
    assert [handle.num_rows for handle in handles] == rows


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize(
    "pooled, kind", [(True, "row_wise"), (True, "grid_shard"), (False, "row_wise")]
)
def test_prefetch_makes_the_rows_of_the_next_forward(
    pooled: bool, kind: str, variable: bool
) -> None:
    tables = [Table(f"t{i}", [f"f{i}"], usual_plan(kind, 8, 4, 2, i)) for i in range(2)]
    case = Case(tables, pooled=pooled, variable=variable, longest_bag=9)
    workers.run(check_prefetch, case, world_size=4, local_size=2)


def full_table(case: Case) -> str:
    """Only rank 1's shard is full: it says so, and the other ranks end with an error too."""
    model = shard(case, collection_of(case))
    ids = torch.arange(3000) * 3 + dist.get_rank()
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.cat([torch.zeros(3000, dtype=torch.int64), ids]),
        lengths=torch.full((6000,), 1),
    )
    try:
        value = model(features).values()
        value.sum().backward()
    except Exception as error:
        table = model.module.collection.table("t1")
        dist.destroy_process_group()  # as the end of the process does; else others wait for the time-out
        return f"{type(error).__name__}: {error} rows={table.num_rows}"
    return "no error"


def test_full_table_ends_every_rank() -> None:
    case = Case(
        [
            Table("t0", ["a"], shard_by_hand("table_wise", [([0], 0, 8)])),
            Table("t1", ["b"], shard_by_hand("table_wise", [([1], 0, 8)])),
        ]
    )
    by_rank = workers.run(full_table, case, world_size=2, group_timeout=60)
    assert "expected at most 1000 rows here" in by_rank[1] and by_rank[1].endswith("rows=0")
    assert by_rank[0] != "no error"


def check_wrong_batches(case: Case) -> None:
    model = shard(case, collection_of(case))
    good = {"keys": ["x", "a"], "lengths": torch.tensor([1, 0, 2, 0])}
    ids = torch.tensor([1, 2, 3])
    weights = torch.ones(3) if case.weighted else None

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            model(KeyedJaggedTensor(**{**good, "values": ids, "weights": weights, **changes}))

    for _ in ("as the first batch", "after a good one, whose keys are remembered"):
        refused("expected feature 'a', got features", keys=["x", "y"])
        refused("expected ids of dtype int64, int32 or uint64", values=ids.short())
        refused("lengths", lengths=torch.tensor([1, 0, 1, 0]))
        for other in (ids, None, JaggedTensor(ids, lengths=ids[:1] + 2), {"a": ids}):
            name = type(other).__name__
            with pytest.raises(ValueError, match=f"expected a KeyedJaggedTensor, got {name}. Name"):
                model(other)
        if case.weighted:
            refused("expected weights", weights=None)
        model.eval()(KeyedJaggedTensor(**good, values=ids, weights=weights))
        model.train()
    assert model.module.collection.table("t").num_rows == 0


@pytest.mark.parametrize("pooled, weighted", [(True, False), (True, True), (False, False)])
def test_wrong_batch_is_refused_by_name(pooled: bool, weighted: bool) -> None:
    plan = shard_by_hand("row_wise", [([0], 0, 8)])
    case = Case([Table("t", ["a"], plan)], pooled=pooled, weighted=weighted)
    workers.run(check_wrong_batches, case, world_size=1)


def check_other_dtypes(case: Case) -> None:
    """Ids in int32 or uint64, lengths in int32, weights in float64 on one rank train as int64 and float32.

    So do lengths [F, B] instead of [F * B].

    Without weighted bags that rank alone has weights.
    """
    rank, ends = dist.get_rank(), []
    unsharded = collection_of(case, fused_params=case.fused_params)
    for other in (None, 1, 0):
        model = shard(case, copy.deepcopy(unsharded))
        for step in range(3):
            mine = batches(case, step)[0][rank]
            ids, lengths, weights = (
                mine.values() % 2**20 - 5,
                mine.lengths(),
                mine.weights_or_none(),
            )
            if rank == other:
                ids = ids.int() if other else ids.view(torch.uint64)
                lengths = lengths.int().view(len(mine.keys()), -1)
                weights = torch.rand(ids.numel()) if weights is None else weights.double()
            features = KeyedJaggedTensor(mine.keys(), ids, weights, lengths)
            outputs = outputs_by_name(case, model(features))
            torch.autograd.backward(sum(value.square().sum() for value in outputs.values()))
        ends.append(
            {
                f"{shard.name}, {name}": value
                for table in case.tables
                for shard in model.module.collection.table(table.name).shards
                for name, value in shard.export_state().items()
            }
        )
    for name, value in ends[0].items():
        assert value.numel() and all(torch.equal(end[name], value) for end in ends), name


@pytest.mark.parametrize(
    "pooled, weighted, kind",
    [
        (True, True, "column_wise"),
        (True, True, "row_wise"),
        (True, False, "row_wise"),
        (False, False, "row_wise"),
        (False, False, "table_wise"),
    ],
)
def test_ranks_may_have_batches_of_other_dtypes(pooled: bool, weighted: bool, kind: str) -> None:
    table = Table("t", ["a", "b"], usual_plan(kind, 8, 2, 2))
    case = Case([table], pooled=pooled, weighted=weighted)
    workers.run(check_other_dtypes, case, world_size=2)


def check_keys_in_another_order(case: Case) -> None:
    """TorchRec reads the positions of features off the first batch; later ones may differ."""
    model = shard(case, collection_of(case)).eval()
    handles = [model.module.collection.table(name) for name in ("t0", "t1")]
    for number, handle in enumerate(handles):
        handle.assign(torch.tensor([7]), torch.full((1, 8), number + 1.0))
    for keys in (["b", "x", "a"], ["a", "b"], ["x", "a", "y", "b"]):
        values = torch.tensor([7 if key in "ab" else 9 for key in keys])
        features = KeyedJaggedTensor(
            keys=keys, values=values, lengths=torch.ones(len(keys), dtype=torch.int64)
        )
        out = outputs_by_name(case, model(features))
        assert (out["a"][0, 0], out["b"][0, 0]) == (1.0, 2.0), keys


def check_sizes_in_another_order(case: Case) -> None:
    """As above, with a size per feature: the inverse indices go by name, too."""
    model = shard(case, collection_of(case)).eval()
    ids, row = torch.tensor([7, 8]), torch.ones(8)
    for number in range(2):
        handle = model.module.collection.table(f"t{number}")
        handle.assign(ids, torch.stack([row, row + 1]) + 2 * number)
    for keys in (["b", "x", "a"], ["a", "b"], ["x", "a", "y", "b"]):
        bags = [2 if key == "a" else 1 for key in keys]
        features = KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([ids[:count] for count in bags]),
            lengths=torch.ones(sum(bags), dtype=torch.int64),
            stride_per_key_per_rank=[[count] for count in bags],
            inverse_indices=(keys[::-1], torch.tensor([[n - 1, 0] for n in bags[::-1]])),
        )
        out = outputs_by_name(case, model(features))
        assert out["a"][:, 0].tolist() == [2.0, 1.0] and out["b"][:, 0].tolist() == [3.0, 3.0], keys
    names = ["a", "x", "y"]
    features._inverse_indices = (names, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected inverse_indices of every.*got none of .*'b'"):
        model(features)


@pytest.mark.parametrize("of_batches", [check_keys_in_another_order, check_sizes_in_another_order])
@pytest.mark.parametrize("pooled", [True, False])
def test_features_may_come_in_another_order(
    pooled: bool, of_batches: Callable[[Case], None]
) -> None:
    plan = usual_plan("row_wise", 8, 1, 1)
    tables = [Table(f"t{i}", [f], plan, pooling="MEAN") for i, f in enumerate("ab")]
    workers.run(of_batches, Case(tables, pooled=pooled), world_size=1)
