"""Sharded collections inside models: beside static ones, under DDP, in evaluation, with faults."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard
from torchrec import (
    JaggedTensor,
    KeyedJaggedTensor,
)


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
