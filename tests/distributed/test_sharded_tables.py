"""Handles on sharded tables, rows that were there before sharding, and state dicts."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import EXTREME_IDS, FUSED_PARAMS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, check_rows, collection_of, outputs_by_name, shard
from table_cases import ids_of, make_table
from torchrec import KeyedJaggedTensor

from torchrec_dyn import ranks
from torchrec_dyn.checkpoint_format import table_config
from torchrec_dyn.distributed import local_shards

POOLED = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
]
BOTH = [(True, kind) for kind in POOLED] + [
    (False, kind) for kind in ("table_wise", "column_wise", "row_wise")
]


def case_of(pooled: bool, kind: str, **options: Any) -> Case:
    plans = [usual_plan(kind, 8, 4, 2, turn) for turn in (1, 2)]
    tables = [Table("t0", ["a"], plans[0]), Table("t1", ["b"], plans[1])]
    return Case(tables, pooled=pooled, exact=False, **options)


def row_of(identity: int, seed: float = 0.0) -> list[float]:
    return [(identity % 1009) / 1009 + seed + column for column in range(8)]


def whole_rows(handle: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts the shards of all ranks together: rows [M, 8] and how many ranks had each id."""
    rows = torch.zeros(len(ids), 8)
    ranks = torch.zeros(len(ids), dtype=torch.long)
    local, found = handle.lookup(ids)
    begin = 0
    for first, width in handle.columns:
        rows[:, first : first + width] = local[:, begin : begin + width]
        begin += width
    ranks += found
    dist.all_reduce(rows)
    dist.all_reduce(ranks)
    return rows, ranks


def check_assign_and_erase(case: Case) -> None:
    rank = dist.get_rank()
    model = shard(case, collection_of(case)).eval()
    handle = model.module.collection.table("t0")
    # Each rank assigns ids of its own, rank 3 none, and all of them the id 77.
    every = [*EXTREME_IDS, *range(200, 260)]
    mine = [*every[rank::3], 77] if rank < 3 else []
    rows = torch.tensor([row_of(i, rank if i == 77 else 0) for i in mine]).view(-1, 8)
    handle.assign(torch.tensor(mine, dtype=torch.int64), rows)
    ids = torch.tensor([*EXTREME_IDS, *range(200, 260)])
    got, ranks = whole_rows(handle, ids)
    torch.testing.assert_close(got, torch.tensor([row_of(i) for i in ids.tolist()]))
    assert bool((ranks > 0).all())
    # Rows are where a batch looks for them.
    asked = KeyedJaggedTensor(
        keys=["a", "b"],
        values=ids,
        lengths=torch.tensor([1] * len(ids) + [0] * len(ids)),
    )
    torch.testing.assert_close(outputs_by_name(case, model(asked))["a"], got)
    last, _ = whole_rows(handle, torch.tensor([77]))
    torch.testing.assert_close(last, torch.tensor([row_of(77, 2)]))
    held = sorted(handle.ids().tolist())
    assert handle.num_rows == len(held) == handle.stats()["rows"]
    everyones: list[Any] = [None] * 4
    dist.all_gather_object(everyones, held)
    assert set().union(*everyones) == {*ids.tolist(), 77}

    gone = [0, -1, 210, 5555] if rank == 0 else [2**63 - 1] if rank == 2 else []
    assert handle.erase(torch.tensor(gone, dtype=torch.int64)) == 4
    _, ranks = whole_rows(handle, torch.tensor([0, -1, 210, 5555, 2**63 - 1, 1, 211]))
    assert (ranks > 0).tolist() == [False] * 5 + [True] * 2


@pytest.mark.parametrize("pooled, kind", BOTH)
def test_assign_and_erase_reach_all_shards(pooled: bool, kind: str) -> None:
    workers.run(check_assign_and_erase, case_of(pooled, kind), world_size=4, local_size=2)


def test_assign_reaches_columns_in_any_order() -> None:
    shards = [([1], 6, 2), ([0], 4, 2), ([1], 0, 2), ([0], 2, 2)]
    tables = [
        Table("t0", ["a"], shard_by_hand("column_wise", shards)),
        Table("t1", ["b"], shard_by_hand("column_wise", shards[::-1])),
    ]
    workers.run(check_assign_and_erase, Case(tables), world_size=4, local_size=2)


def assign_badly(case: Case) -> list[str]:
    rank = dist.get_rank()
    handle = shard(case, collection_of(case)).module.collection.table("t0")
    faults = []
    for ids, rows in [
        (torch.arange(3), torch.zeros(3, 7 if rank == 1 else 8)),
        (torch.arange(3, dtype=torch.int32 if rank == 2 else torch.int64), torch.zeros(3, 8)),
    ]:
        with pytest.raises(ValueError) as caught:
            handle.assign(ids, rows)
        faults.append(str(caught.value))
    with pytest.raises(
        ValueError, match=r"erase\(rank=0\): ids: expected ids \[M\] of int64, got \[2, 2\]"
    ):
        handle.erase(torch.zeros(2, 2, dtype=torch.int64) if rank == 0 else torch.arange(2))
    assert handle.num_rows == 0
    with pytest.raises(RuntimeError, match="at most"):
        handle.assign(torch.arange(5000), torch.zeros(5000, 8))
    return faults


@pytest.mark.parametrize("kind", ["column_wise", "row_wise"])
def test_bad_assign_is_refused_on_every_rank(kind: str) -> None:
    by_rank = workers.run(assign_badly, case_of(True, kind), world_size=4, local_size=2)
    assert by_rank == [by_rank[0]] * 4
    assert (
        "table('t0').assign(rank=1): rows: expected floating point rows of shape [3, 8], got [3, 7]"
        in by_rank[0][0]
    )
    assert (
        "assign(rank=2): ids: expected ids [M] of int64, got [3] of torch.int32." in by_rank[0][1]
    )


def check_unknown_table(case: Case) -> None:
    collection = shard(case, collection_of(case)).module.collection
    with pytest.raises(ValueError, match=r"expected a name among \['t0', 't1'\], got 'x'"):
        collection.table("x")


def test_unknown_table_is_refused() -> None:
    workers.run(check_unknown_table, case_of(True, "table_wise"), world_size=4, local_size=2)


def check_train_then_shard(case: Case, steps_before: int) -> None:
    """Trains unsharded, shards a copy, trains both on: they must stay the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded = collection_of(case, fused_params=case.fused_params)
    copy_of_it = collection_of(case, fused_params=case.fused_params)
    sharded: Any = None
    for step in range(steps_before + 2):
        per_rank, together = batches(case, step)
        theirs = list(outputs_by_name(case, unsharded(together)).values())
        torch.autograd.backward(theirs, [torch.ones_like(v) / world for v in theirs])
        if step < steps_before:
            ours = list(outputs_by_name(case, copy_of_it(together)).values())
            torch.autograd.backward(ours, [torch.ones_like(v) / world for v in ours])
            continue
        if sharded is None:
            sharded = shard(case, copy_of_it)
            assert copy_of_it.table("t0").num_rows > 0
        ours = list(outputs_by_name(case, sharded(per_rank[rank])).values())
        torch.autograd.backward(ours, [torch.ones_like(v) for v in ours])
    check_rows(case, sharded.module.collection, unsharded)


@pytest.mark.everyday(9)
@pytest.mark.parametrize("optimizer", ["EXACT_ADAGRAD", "ADAM"])
@pytest.mark.parametrize("pooled, kind", BOTH)
def test_rows_trained_before_are_carried_over(pooled: bool, kind: str, optimizer: str) -> None:
    fused_params = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1}
    case = case_of(pooled, kind, fused_params=fused_params)
    workers.run(check_train_then_shard, case, 2, world_size=4, local_size=2)


def check_shard_for_another_optimizer(case: Case) -> None:
    trained = collection_of(case, fused_params={"optimizer": EmbOptimType.ADAM})
    _, together = batches(case, 0)
    outputs = list(outputs_by_name(case, trained(together)).values())
    torch.autograd.backward(outputs, [torch.ones_like(v) for v in outputs])
    check_rows(case, shard(case, trained).module.collection, trained)


def test_rows_are_carried_over_to_another_optimizer() -> None:
    case = case_of(True, "grid_shard", fused_params=FUSED_PARAMS)
    workers.run(check_shard_for_another_optimizer, case, world_size=4, local_size=2)


def test_a_rank_without_a_shard_reads_no_rows_that_were_trained_before() -> None:
    trained = make_table()
    trained.assign(ids_of(1, 2), torch.ones(2, 4))
    config = table_config("t", 4, 5, trained.dtype, trained.initializer)
    here = ranks.Table.of_one(trained, "here", config)
    with mock.patch.object(local_shards, "LiveRows", side_effect=MemoryError):
        local_shards.copy_trained_rows(here, replace(here, shards=[]))


def check_state_dict_round_trip(case: Case) -> None:
    """What a model's own state dict says of it, nothing of which is missing or unknown when it comes back."""
    sharded = shard(case, collection_of(case))
    for _ in range(2):
        answer = sharded.load_state_dict(sharded.state_dict(), strict=True)
        assert not answer.missing_keys and not answer.unexpected_keys


@pytest.mark.parametrize("pooled", [True, False])
def test_a_model_loads_its_own_state_dict(pooled: bool) -> None:
    case = case_of(pooled, "table_wise")
    if pooled:
        # Uneven columns, with which TorchRec 1.8.0 cannot load its own state dict.
        uneven = [([0], 0, 5), ([1], 5, 3)]
        case.tables[0].plan = shard_by_hand("column_wise", uneven)
    workers.run(check_state_dict_round_trip, case, world_size=4, local_size=2)
