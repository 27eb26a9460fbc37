"""Handles on sharded tables, rows that were there before sharding, and state dicts."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, check_rows, collection_of, outputs_by_name, shard
from table_cases import ids_of, make_table

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
