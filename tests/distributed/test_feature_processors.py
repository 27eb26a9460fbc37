"""TorchRec's feature processors around dynamic tables: every plan trains as the unsharded module does."""

import copy

import pytest
import torch
import workers
from processed_training import (
    one_table,
    processed,
    shard_processed,
    train_beside_static,
    train_processed,
)
from sharded_cases import Case, Table, usual_plan
from sharded_training import batches, collection_of

from torchrec_dyn import DynamicTableConfig

WHOLE_ROWS = ["table_wise", "column_wise", "table_column_wise"]
SPREAD_ROWS = ["row_wise", "table_row_wise", "grid_shard"]


def tables_of(
    kinds: list[str], world: int, local: int, pooling: str = "SUM", scale: int = 1
) -> list[Table]:
    """Tables of other widths, of several features; one shares a feature."""
    dims, features = (8, 4, 12), (["a"], ["b", "c"], ["a", "d"])
    return [
        Table(
            f"t{i}",
            features[i],
            usual_plan(kind, dims[i] * scale, world, local, i),
            dims[i] * scale,
            pooling=pooling,
        )
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("form", ["collection", "dict"])
@pytest.mark.parametrize("kind", WHOLE_ROWS + SPREAD_ROWS)
def test_plan_trains_as_unsharded(kind: str, form: str) -> None:
    case = Case(tables_of([kind] * 3, 2, 2), weighted=True, exact=False)
    assert sum(workers.run(train_processed, case, form, world_size=2)) > 0


@pytest.mark.parametrize("kind", WHOLE_ROWS + SPREAD_ROWS)
def test_four_ranks_on_two_nodes_and_uneven_batches(kind: str) -> None:
    case = Case(tables_of([kind] * 3, 4, 2), weighted=True, exact=False, batch_sizes=[3, 1, 6, 4])
    workers.run(train_processed, case, "collection", False, world_size=4, local_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "grid_shard"])
def test_a_batch_size_per_feature(kind: str) -> None:
    case = Case(tables_of([kind] * 3, 4, 2), weighted=True, exact=False, variable=True)
    workers.run(train_processed, case, "collection", False, world_size=4, local_size=2)


def test_several_types_in_one_collection() -> None:
    case = Case(
        tables_of(["row_wise", "table_wise", "column_wise"], 2, 2), weighted=True, exact=False
    )
    workers.run(train_processed, case, "collection", world_size=2)
    workers.run(train_processed, case, "dict", world_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_rows_that_learn_by_the_sum_over_ranks(kind: str) -> None:
    tables = tables_of([kind] * 3, 2, 2)
    for table in tables:
        table.config = DynamicTableConfig(gradient="sum")
    case = Case(tables, weighted=True, exact=False)
    workers.run(train_processed, case, "collection", True, True, world_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "grid_shard"])
def test_mean_divides_by_the_number_of_ids(kind: str) -> None:
    case = Case(tables_of([kind] * 3, 4, 2, "MEAN"), weighted=True, exact=False)
    workers.run(train_processed, case, "collection", world_size=4, local_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
@pytest.mark.parametrize("form", ["collection", "dict"])
def test_as_static_tables_of_torchrec(kind: str, form: str) -> None:
    case = Case(tables_of([kind] * 3, 2, 2, scale=2), weighted=True)
    workers.run(train_beside_static, case, form, world_size=2)


def positions_of_each_plan(form: str) -> None:
    """Processors that rows spread over ranks made read positions, then whole rows, then no ranks."""
    spread, whole = one_table("row_wise"), one_table("table_wise")
    module = processed(spread, collection_of(spread), form)
    collection = module.split()[1]
    collection.table("t").assign(torch.arange(100, 140), torch.rand(40, 8))
    untouched = copy.deepcopy(module).eval()
    batch = batches(spread, 0)[0][torch.distributed.get_rank()]
    expected = untouched(batch)["a"]
    plans = [shard_processed(one, module).eval() for one in (spread, whole)]
    for number in (0, 1, 0):
        assert torch.allclose(plans[number](batch)["a"], expected), number
    module.eval()
    assert torch.equal(module(batch)["a"], expected)


@pytest.mark.parametrize("form", ["collection", "dict"])
def test_what_one_plan_told_the_processors_is_not_believed_under_another(form: str) -> None:
    workers.run(positions_of_each_plan, form, world_size=2)


@pytest.mark.parametrize(
    ("before", "after", "moving"),
    [
        *(("table_wise", "row_wise", 2), ("row_wise", "column_wise", 2)),
        *(("grid_shard", "table_row_wise", 2), ("row_wise", "table_wise", 3)),
    ],
)
def test_tables_move_while_training(before: str, after: str, moving: int) -> None:
    """Positions begin or cease to travel, the processors and their gradients stay."""
    case = Case(tables_of([before] * 3, 4, 2), weighted=True, exact=False)
    moves = {table.name: table.plan for table in tables_of([after] * 3, 4, 2)[:moving]}
    workers.run(train_processed, case, "collection", True, False, moves, world_size=4, local_size=2)
