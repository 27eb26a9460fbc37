"""Column shards are stitched in column order, however a plan lists them."""

import pytest
import workers
from sharded_cases import Case, Table, shard_by_hand
from sharded_training import train_beside

from torchrec_dyn.sharding.output_order import outputs_by_column

# Pieces as (rank, first column, width) of 16 columns.
EVEN = {
    "repeated rank": [(0, 0, 4), (1, 4, 4), (0, 8, 4), (1, 12, 4)],
    "repeated rank, other order": [(1, 0, 4), (0, 4, 4), (0, 8, 4), (1, 12, 4)],
    "out of column order": [(0, 12, 4), (1, 0, 4), (0, 4, 4), (1, 8, 4)],
    "descending": [(1, 12, 4), (1, 8, 4), (0, 4, 4), (0, 0, 4)],
    "one rank": [(1, 8, 4), (1, 0, 4), (1, 12, 4), (1, 4, 4)],
}
UNEVEN = {
    "12 and 4": [(0, 0, 12), (1, 12, 4)],
    "4, 4 and 8": [(0, 0, 4), (1, 4, 4), (0, 8, 8)],
    "out of order": [(1, 10, 6), (0, 0, 2), (0, 9, 1), (1, 2, 7)],
}


def plan_of(kind: str, shards: list[tuple[int, int, int]]) -> object:
    return shard_by_hand(kind, [([rank], first, width) for rank, first, width in shards])


def test_outputs_by_column_gives_the_order_of_the_design() -> None:
    # Shard ranks [0, 1, 0] arrive as outputs of ranks [0, 0, 1].
    assert outputs_by_column(["f", "f", "f"], [0, 8, 4]) == {"f": [0, 2, 1]}


def test_outputs_by_column_keeps_features_apart() -> None:
    names = ["f", "g", "g", "f", "h"]
    assert outputs_by_column(names, [4, 8, 0, 0, 0]) == {"f": [3, 0], "g": [2, 1], "h": [4]}


@pytest.mark.parametrize("name", [*EVEN, *UNEVEN])
@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise"])
def test_pooled_columns(kind: str, name: str) -> None:
    shards = {**EVEN, **UNEVEN}[name]
    tables = [
        Table("t0", ["a", "b"], plan_of(kind, shards), 16),
        Table("t1", ["b", "c"], plan_of(kind, EVEN["repeated rank"]), 16),
    ]
    workers.run(train_beside, Case(tables), world_size=2)


@pytest.mark.parametrize("name", EVEN)
def test_sequence_columns(name: str) -> None:
    # TorchRec 1.8.0 is silently wrong where shards are out of column order.
    tables = [
        Table("t0", ["a", "b"], plan_of("column_wise", EVEN[name]), 16),
        Table("t1", ["b", "c"], plan_of("column_wise", EVEN["out of column order"]), 16),
    ]
    workers.run(train_beside, Case(tables, pooled=False), world_size=2)


@pytest.mark.parametrize("name", EVEN)
def test_sequence_columns_on_three_ranks(name: str) -> None:
    shards = [((rank * 2 + first // 8) % 3, first, width) for rank, first, width in EVEN[name]]
    tables = [Table("t0", ["a", "b"], plan_of("column_wise", shards), 16)]
    workers.run(train_beside, Case(tables, pooled=False), world_size=3)


@pytest.mark.parametrize("widths", [[12, 4], [2, 6, 8], [8, 8]])
@pytest.mark.parametrize("turned", [False, True])
def test_grid_columns(widths: list[int], turned: bool) -> None:
    firsts = [sum(widths[:i]) for i in range(len(widths))]
    pieces = [
        ([0, 1] if i % 2 else [2, 3], first, width)
        for i, (first, width) in enumerate(zip(firsts, widths, strict=True))
    ]
    tables = [
        Table(
            "t0", ["a", "b"], shard_by_hand("grid_shard", pieces[::-1] if turned else pieces), 16
        ),
        Table("t1", ["b"], shard_by_hand("grid_shard", pieces), 16),
    ]
    workers.run(train_beside, Case(tables, exact=False), world_size=4, local_size=2)
