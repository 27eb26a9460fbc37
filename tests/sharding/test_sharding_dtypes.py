"""Numbers of 16 bits between ranks: outputs of half precision, and quantized comms."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import (
    EVERY_PLAN,
    FUSED_PARAMS,
    POOLED,
    SEQUENCE,
    Case,
    Table,
    case_of_plans,
    shard_by_hand,
    usual_plan,
)
from sharded_training import (
    batches,
    check_trains_as_unsharded,
    collection_of,
    outputs_by_name,
    parts_of_rank,
    shard,
)
from torchrec.modules.embedding_configs import DataType

# Outputs on all ranks: TorchRec expects what it receives in the dtype of what it sends

DTYPES = {"FP16": torch.float16, "BF16": torch.bfloat16}
NOT_ON_ALL = [kind for kind in POOLED if kind != "row_wise"]


def case_of(kind: str, pooled: bool, output: str, by_torch: bool = False, **options: Any) -> Case:
    plan = usual_plan(kind, 8, 4, 2, 0)
    if kind == "grid_shard":  # both on the first node
        plan = shard_by_hand(kind, [([0, 1], 0, 4), ([0, 1], 4, 4)])
    dtype = DTYPES[output] if by_torch else DataType[output]
    fused_params = {**FUSED_PARAMS, "output_dtype": dtype}
    table = Table("t", ["a", "b"], plan)
    return Case([table], pooled=pooled, fused_params=fused_params, **options)


def check_looks_up_as_unsharded(case: Case) -> None:
    rank, dtype = dist.get_rank(), case.fused_params["output_dtype"]
    expected_dtype = dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype.name]
    unsharded = collection_of(case, fused_params=case.fused_params)
    sharded = shard(case, copy.deepcopy(unsharded))
    for step in range(2):
        per_rank, together = batches(case, step)
        whole = unsharded(together)
        expected = parts_of_rank(case, whole, [5] * 4, rank)
        got = outputs_by_name(case, sharded(per_rank[rank]))
        for name, output in got.items():
            assert output.dtype == expected[name].dtype == expected_dtype
            torch.testing.assert_close(output, expected[name], rtol=1e-2, atol=1e-2)
        torch.autograd.backward(list(got.values()), [torch.ones_like(v) for v in got.values()])
        theirs = list(outputs_by_name(case, whole).values())
        torch.autograd.backward(theirs, [torch.full_like(v, 0.25) for v in theirs])


@pytest.mark.everyday(4)
@pytest.mark.parametrize("output", ["FP16", pytest.param("BF16", marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    "kind, pooled", [*((kind, True) for kind in NOT_ON_ALL), *((kind, False) for kind in SEQUENCE)]
)
def test_ranks_without_tables_get_outputs(kind: str, pooled: bool, output: str) -> None:
    case = case_of(kind, pooled, output)
    for dedup in (False, True)[: 1 if pooled else 2]:
        one = dataclasses.replace(case, dedup=dedup)
        workers.run(check_looks_up_as_unsharded, one, world_size=4, local_size=2)


@pytest.mark.parametrize("output", ["FP16", "BF16"])
def test_means_of_spread_rows_keep_the_dtype_of_the_outputs(output: str) -> None:
    """Sums of that dtype are divided by lengths of float32 (sharding/dists.py)."""
    case = case_of("row_wise", True, output)
    case.tables[0].pooling = "MEAN"
    workers.run(check_looks_up_as_unsharded, case, world_size=4, local_size=2)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_torch_dtype_means_the_same_as_a_data_type(pooled: bool) -> None:
    case = case_of("table_wise", pooled, "FP16", by_torch=True)  # three ranks have no table
    workers.run(check_looks_up_as_unsharded, case, world_size=4, local_size=2)


# Quantized comms round what travels between ranks, and nothing else


@pytest.mark.everyday(3)
@pytest.mark.parametrize("comm", ["FP16", "BF16"])
@pytest.mark.parametrize("plans", EVERY_PLAN)
def test_quantized_comms(plans: str, comm: str) -> None:
    tolerance = 1e-2 if comm == "FP16" else 5e-2
    case = case_of_plans(plans, exact=False, qcomm=comm, tolerance=tolerance)
    workers.run(check_trains_as_unsharded, case, world_size=4, local_size=2)
