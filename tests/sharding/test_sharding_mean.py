"""MEAN pooling is right in every mix of plans, where TorchRec 1.8.0 divides too much or not."""

import pytest
import workers
from sharded_cases import POOLED, SPREAD_ROWS, Case, Table, usual_plan
from sharded_training import check_trains_as_unsharded


def two_tables(first: str, second: str, poolings: tuple[str, str], shared: bool) -> list[Table]:
    return [
        Table("t0", ["a"], usual_plan(first, 8, 4, 2), 8, poolings[0]),
        Table("t1", ["a" if shared else "b", "c"], usual_plan(second, 4, 4, 2, 1), 4, poolings[1]),
    ]


def check_trains(case: Case) -> None:
    workers.run(check_trains_as_unsharded, case, world_size=4, local_size=2)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("kind", POOLED)
def test_mean_of_one_type(kind: str) -> None:
    check_trains(Case(two_tables(kind, kind, ("MEAN", "MEAN"), shared=False), exact=False))


def tables_of_all_kinds(mean: int, features: list[str]) -> list[Table]:
    """Returns a table for each kind, every second one of MEAN, from `mean` on; `mean` 2: all of MEAN."""
    return [
        Table(
            kind,
            [f"f{i}", *features],
            usual_plan(kind, 8, 4, 2, i),
            pooling="SUM" if mean < 2 and (i + mean) % 2 else "MEAN",
        )
        for i, kind in enumerate(POOLED)
    ]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("mean", [0, 1])
@pytest.mark.parametrize("features", [[], ["shared"]], ids=["own features", "shared feature"])
def test_mean_beside_all_other_types(features: list[str], mean: int) -> None:
    check_trains(Case(tables_of_all_kinds(mean, features), exact=False, steps=2))


@pytest.mark.everyday(2)
@pytest.mark.parametrize("kind", SPREAD_ROWS)
@pytest.mark.parametrize("poolings", [("MEAN", "SUM"), ("SUM", "MEAN")])
def test_feature_of_a_sum_and_a_mean_table(kind: str, poolings: tuple[str, str]) -> None:
    check_trains(Case(two_tables(kind, kind, poolings, shared=True), exact=False))


def test_weighted_mean_divides_by_the_number_of_ids() -> None:
    check_trains(Case(tables_of_all_kinds(2, ["shared"]), exact=False, weighted=True))


def test_mean_with_a_batch_size_per_feature() -> None:
    check_trains(Case(tables_of_all_kinds(2, ["shared"]), exact=False, variable=True))
