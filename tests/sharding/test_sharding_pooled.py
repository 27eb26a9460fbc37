"""Every plan of a pooled collection trains as the unsharded collection does."""

import pytest
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_training import train_beside

WORLDS = [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2)]
WHOLE_ROWS = ["table_wise", "column_wise", "table_column_wise"]
SPREAD_ROWS = ["row_wise", "table_row_wise", "grid_shard"]
OPTIMIZERS = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1},
    "adam": {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.02},
}


def tables_of(kind: str, world: int, local: int) -> list[Table]:
    """Three tables: of other widths, of several features, and sharing a feature."""
    dims = (8, 4, 12)
    features = (["a"], ["b", "c"], ["a", "d"])
    return [
        Table(f"t{i}", list(features[i]), usual_plan(kind, dims[i], world, local, i), dims[i])
        for i in range(3)
    ]


@pytest.mark.parametrize("world, local", WORLDS)
@pytest.mark.parametrize("kind", WHOLE_ROWS + SPREAD_ROWS)
def test_plan_trains_as_unsharded(kind: str, world: int, local: int) -> None:
    case = Case(tables_of(kind, world, local), exact=kind in WHOLE_ROWS)
    rows = workers.run(train_beside, case, world_size=world, local_size=local)
    assert sum(rows) > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", WHOLE_ROWS + SPREAD_ROWS)
def test_optimizer_does_not_depend_on_plan(kind: str, optimizer: str) -> None:
    case = Case(tables_of(kind, 4, 2), exact=kind in WHOLE_ROWS, fused_params=OPTIMIZERS[optimizer])
    workers.run(train_beside, case, world_size=4, local_size=2)


@pytest.mark.parametrize("name", ["EXACT_ROWWISE_ADAGRAD", "PARTIAL_ROWWISE_ADAM"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "table_row_wise"])
def test_rowwise_optimizer_where_rows_are_whole(kind: str, name: str) -> None:
    fused_params = {"optimizer": EmbOptimType[name], "learning_rate": 0.05}
    case = Case(tables_of(kind, 2, 2), exact=kind == "table_wise", fused_params=fused_params)
    workers.run(train_beside, case, world_size=2)


@pytest.mark.parametrize("kind", WHOLE_ROWS + SPREAD_ROWS)
def test_thousands_of_ids(kind: str) -> None:
    case = Case(
        tables_of(kind, 4, 2),
        exact=kind in WHOLE_ROWS,
        batch_sizes=[120] * 4,
        longest_bag=20,
        known_ids=300,
        steps=2,
    )
    rows = workers.run(train_beside, case, world_size=4, local_size=2)
    assert sum(rows) > 900


def test_rows_spread_evenly() -> None:
    case = Case([Table("t", ["a"], usual_plan("row_wise", 8, 4, 4))], exact=False,
                batch_sizes=[200] * 4, longest_bag=10, known_ids=400, steps=1)  # fmt: skip
    rows = workers.run(train_beside, case, world_size=4)
    share = sum(rows) / 4
    assert max(abs(count - share) for count in rows) < 5 * share**0.5


def test_all_types_in_one_collection() -> None:
    kinds = WHOLE_ROWS + SPREAD_ROWS
    tables = [
        Table(kind, [f"f{i}", "shared"], usual_plan(kind, 8, 4, 2, i))
        for i, kind in enumerate(kinds)
    ]
    case = Case(tables, exact=False)
    workers.run(train_beside, case, world_size=4, local_size=2)


@pytest.mark.parametrize("kind", WHOLE_ROWS + SPREAD_ROWS)
@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
def test_rows_of_half_precision(kind: str, data_type: str) -> None:
    tables = tables_of(kind, 2, 2)
    for table in tables:
        table.data_type = data_type
    case = Case(tables, exact=kind in WHOLE_ROWS, tolerance=2e-2)
    workers.run(train_beside, case, world_size=2)
