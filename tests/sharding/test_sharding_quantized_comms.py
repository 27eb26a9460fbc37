"""Quantized comms round what travels between ranks, and nothing else."""

import pytest
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_training import train_beside

POOLED = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
]


@pytest.mark.parametrize("comm", ["FP16", "BF16"])
@pytest.mark.parametrize("kind", POOLED)
def test_quantized_comms_pooled(kind: str, comm: str) -> None:
    tables = [Table(f"t{i}", [f"f{i}"], usual_plan(kind, 8, 4, 2, i)) for i in range(2)]
    case = Case(tables, exact=False, qcomm=comm, tolerance=1e-2 if comm == "FP16" else 5e-2)
    workers.run(train_beside, case, world_size=4, local_size=2)


@pytest.mark.parametrize("comm", ["FP16", "BF16"])
@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_quantized_comms_sequence(kind: str, comm: str) -> None:
    tables = [Table(f"t{i}", [f"f{i}"], usual_plan(kind, 8, 2, 2, i)) for i in range(2)]
    tolerance = 1e-2 if comm == "FP16" else 5e-2
    case = Case(tables, pooled=False, exact=False, qcomm=comm, tolerance=tolerance)
    workers.run(train_beside, case, world_size=2)
