"""Every plan of a sequence collection trains as the unsharded one, to the bit."""

import pytest
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_training import train_beside

KINDS = ["table_wise", "row_wise", "column_wise"]
WORLDS = [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2)]


def tables_of(kinds: list[str], world: int, local: int) -> list[Table]:
    """Three tables: of one feature, of several, and sharing a feature."""
    features = (["a"], ["b", "c"], ["a", "d"])
    return [
        Table(f"t{i}", list(features[i]), usual_plan(kinds[i % len(kinds)], 8, world, local, i))
        for i in range(3)
    ]


@pytest.mark.parametrize("world, local", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_plan_trains_as_unsharded(kind: str, world: int, local: int) -> None:
    case = Case(tables_of([kind], world, local), pooled=False)
    rows = workers.run(train_beside, case, world_size=world, local_size=local)
    assert sum(rows) > 0


@pytest.mark.parametrize("name", ["EXACT_SGD", "ADAM"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_does_not_depend_on_plan(kind: str, name: str) -> None:
    fused_params = {"optimizer": EmbOptimType[name], "learning_rate": 0.05}
    case = Case(tables_of([kind], 3, 3), pooled=False, fused_params=fused_params)
    workers.run(train_beside, case, world_size=3)


@pytest.mark.parametrize("name", ["EXACT_ROWWISE_ADAGRAD", "PARTIAL_ROWWISE_ADAM"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_rowwise_optimizer_where_rows_are_whole(kind: str, name: str) -> None:
    fused_params = {"optimizer": EmbOptimType[name], "learning_rate": 0.05}
    case = Case(tables_of([kind], 2, 2), pooled=False, fused_params=fused_params)
    workers.run(train_beside, case, world_size=2)


@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_ids(kind: str) -> None:
    case = Case(
        tables_of([kind], 4, 4),
        pooled=False,
        batch_sizes=[120] * 4,
        longest_bag=20,
        known_ids=300,
        steps=2,
    )
    rows = workers.run(train_beside, case, world_size=4)
    assert sum(rows) > 900


@pytest.mark.parametrize("world", [2, 4])
def test_all_types_in_one_collection(world: int) -> None:
    case = Case(tables_of(KINDS, world, world), pooled=False)
    workers.run(train_beside, case, world_size=world)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
def test_rows_of_half_precision(kind: str, data_type: str) -> None:
    tables = tables_of([kind], 2, 2)
    for table in tables:
        table.data_type = data_type
    workers.run(train_beside, Case(tables, pooled=False), world_size=2)
