"""MAX pooling is the unsharded one in every mix of plans: outputs and rows, to the bit."""

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import POOLED, SPREAD_ROWS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, check_trains_as_unsharded, collection_of, shard


def check_trains(case: Case, world_size: int = 4, local_size: int = 2) -> None:
    workers.run(check_trains_as_unsharded, case, world_size=world_size, local_size=local_size)


def two_tables(kind: str, poolings: tuple[str, str], data_type: str = "FP32") -> list[Table]:
    """Returns tables of two widths with a shared feature."""
    return [
        Table("t0", ["a", "b"], usual_plan(kind, 8, 4, 2), 8, poolings[0], data_type),
        Table("t1", ["b", "c"], usual_plan(kind, 4, 4, 2, 1), 4, poolings[1], data_type),
    ]


def tables_of_all_kinds(pooling: str) -> list[Table]:
    """Returns a table of a maximum for each kind, with another of the same plan."""
    return [
        Table(f"{kind} {k}", [f"f{i}", "shared"], usual_plan(kind, 8, 4, 2, i), pooling=each)
        for i, kind in enumerate(POOLED)
        for k, each in enumerate(("MAX", pooling))
    ]


@pytest.mark.everyday(3)
@pytest.mark.parametrize("kind", POOLED)
def test_max_of_one_type(kind: str) -> None:
    check_trains(Case(two_tables(kind, ("MAX", "MAX"))))


@pytest.mark.parametrize("kind", SPREAD_ROWS)
def test_max_of_rows_in_half_precision(kind: str) -> None:
    check_trains(Case(two_tables(kind, ("MAX", "MAX"), "BF16")))


@pytest.mark.everyday(2)
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize("variable", [False, True], ids=["one size", "a size per feature"])
def test_max_beside_other_poolings(pooling: str, variable: bool) -> None:
    case = Case(tables_of_all_kinds(pooling), exact=False, variable=variable)
    check_trains(case)


@pytest.mark.parametrize("kind", POOLED)
def test_max_with_a_batch_size_per_feature(kind: str) -> None:
    check_trains(Case(two_tables(kind, ("MAX", "MAX")), variable=True))


@pytest.mark.parametrize("variable", [False, True], ids=["one size", "a size per feature"])
def test_max_without_ids_on_some_ranks(variable: bool) -> None:
    case = Case(tables_of_all_kinds("MAX"), batch_sizes=[3, 0, 5, 1], variable=variable)
    check_trains(case)


def test_max_of_empty_bags_only() -> None:
    check_trains(Case(tables_of_all_kinds("MAX"), longest_bag=0, backward=False))


def test_max_of_column_shards_that_differ_in_width() -> None:
    plans = [
        shard_by_hand("column_wise", [([0], 0, 8), ([0], 8, 4), ([1], 12, 8)]),
        shard_by_hand("grid_shard", [([0, 1], 0, 12), ([2, 3], 12, 8)]),
    ]
    tables = [Table(f"t{i}", ["a", f"f{i}"], plan, 20, "MAX") for i, plan in enumerate(plans)]
    check_trains(Case(tables))


def overwrite_before_reading(case: Case) -> None:
    model = shard(case, collection_of(case))
    batch, _ = batches(case, 0)
    mine = batch[dist.get_rank()]
    model(mine).values()  # the ids have rows from now on
    expected = model(mine).values().detach().clone()
    output = model(mine)
    mine.lengths().zero_()
    mine.values().zero_()
    assert torch.equal(output.values(), expected)


def test_a_batch_may_be_overwritten_before_its_output_is_read() -> None:
    case = Case([Table("t", ["a"], usual_plan("row_wise", 8, 2, 2), pooling="MAX")])
    workers.run(overwrite_before_reading, case, world_size=2)


@pytest.mark.parametrize("variable", [False, True], ids=["one size", "a size per feature"])
def test_max_of_tables_that_move(variable: bool) -> None:
    """Between plans under which whole rows are pooled, and plans under which rows travel; and back."""
    before, after = (
        ("table_wise", "row_wise", "grid_shard"),
        ("grid_shard", "column_wise", "row_wise"),
    )
    tables = [
        Table(f"t{i}", [f"f{i}", "shared"], usual_plan(kind, 8, 4, 2, i), pooling=pooling)
        for i, (kind, pooling) in enumerate(zip(before, ("MAX", "MAX", "SUM"), strict=True))
    ]
    there = {f"t{i}": usual_plan(kind, 8, 4, 2, i + 1) for i, kind in enumerate(after)}
    moves = {1: there, 2: {table.name: table.plan for table in tables}}
    case = Case(tables, exact=False, steps=3, variable=variable)
    workers.run(check_trains_as_unsharded, case, batches, moves, world_size=4, local_size=2)


def refusal_of_eight_bits(kind: str) -> str:
    case = Case([Table("t", ["a"], usual_plan(kind, 8, 2, 2), pooling="MAX")], qcomm="INT8")
    try:
        shard(case, collection_of(case))
    except ValueError as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize("kind", SPREAD_ROWS)
def test_rows_are_not_sent_in_eight_bits(kind: str) -> None:
    for fault in workers.run(refusal_of_eight_bits, kind, world_size=2):
        assert "expected communication of FP32, FP16 or BF16" in fault


@pytest.mark.parametrize("ranks", [1, 2])
def test_max_of_few_ranks(ranks: int) -> None:
    check_trains(
        Case(
            [
                Table(kind, [kind, "shared"], usual_plan(kind, 8, ranks, ranks), 8, "MAX")
                for kind in ("table_wise", "row_wise", "table_row_wise")
            ]
        ),
        world_size=ranks,
        local_size=ranks,
    )
