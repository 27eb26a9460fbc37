"""MEAN pooling is right in every mix of plans, where TorchRec 1.8.0 divides too much or not."""

import itertools

import pytest
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_training import train_beside

KINDS = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
]


def two_tables(first: str, second: str, poolings: tuple[str, str], shared: bool) -> list[Table]:
    return [
        Table("t0", ["a"], usual_plan(first, 8, 4, 2), 8, poolings[0]),
        Table("t1", ["a" if shared else "b", "c"], usual_plan(second, 4, 4, 2, 1), 4, poolings[1]),
    ]


def run(case: Case) -> None:
    workers.run(train_beside, case, world_size=4, local_size=2)


@pytest.mark.parametrize("kind", KINDS)
def test_mean_of_one_type(kind: str) -> None:
    run(Case(two_tables(kind, kind, ("MEAN", "MEAN"), shared=False), exact=False))


@pytest.mark.parametrize("first, second", list(itertools.combinations(KINDS, 2)))
@pytest.mark.parametrize(
    "poolings",
    [("MEAN", "SUM"), ("SUM", "MEAN"), pytest.param(("MEAN", "MEAN"), marks=pytest.mark.deep)],
)
def test_mean_beside_another_type(first: str, second: str, poolings: tuple[str, str]) -> None:
    run(Case(two_tables(first, second, poolings, shared=False), exact=False, steps=2))


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise", "grid_shard"])
@pytest.mark.parametrize("poolings", [("MEAN", "SUM"), ("SUM", "MEAN")])
def test_feature_of_a_sum_and_a_mean_table(kind: str, poolings: tuple[str, str]) -> None:
    run(Case(two_tables(kind, kind, poolings, shared=True), exact=False))


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_mean_divides_by_the_number_of_ids(kind: str) -> None:
    tables = two_tables(kind, "row_wise", ("MEAN", "MEAN"), shared=True)
    run(Case(tables, exact=False, weighted=True))


@pytest.mark.parametrize("kind", KINDS)
def test_mean_with_a_batch_size_per_feature(kind: str) -> None:
    tables = two_tables(kind, "row_wise", ("MEAN", "MEAN"), shared=True)
    run(Case(tables, exact=False, variable=True))
