"""Column shards are stitched in column order, however a plan lists them."""

from typing import Any

import pytest
import workers
from sharded_cases import Case, Table, shard_by_hand
from sharded_training import check_trains_as_unsharded
from torch.distributed._shard.metadata import ShardMetadata

from torchrec_dyn.sharding.dists import outputs_by_column

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


def shards_at(*columns: int) -> list[ShardMetadata]:
    return [ShardMetadata([0, column], [10, 4]) for column in columns]


def test_outputs_by_column_gives_the_order_of_the_design() -> None:
    # Shard ranks [0, 1, 0] arrive as outputs of ranks [0, 0, 1].
    assert outputs_by_column(["f", "f", "f"], shards_at(0, 8, 4)) == {"f": [0, 2, 1]}


def test_outputs_by_column_keeps_features_apart() -> None:
    names = ["f", "g", "g", "f", "h"]
    assert outputs_by_column(names, shards_at(4, 8, 0, 0, 0)) == {
        "f": [3, 0],
        "g": [2, 1],
        "h": [4],
    }


def check_trains(tables: list[Table], world: int = 2, **options: Any) -> None:
    local = 2 if world == 4 else world
    workers.run(
        check_trains_as_unsharded, Case(tables, **options), world_size=world, local_size=local
    )


@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise"])
def test_pooled_columns(kind: str) -> None:
    shards = {**EVEN, **UNEVEN}
    check_trains([Table(name, ["a", name], plan_of(kind, shards[name]), 16) for name in shards])


def test_sequence_columns() -> None:
    # TorchRec 1.8.0 is silently wrong where shards are out of column order.
    tables = [Table(n, ["a", n], plan_of("column_wise", EVEN[n]), 16) for n in EVEN]
    check_trains(tables, pooled=False)


def test_sequence_columns_on_three_ranks() -> None:
    tables = []
    for name, listed in EVEN.items():
        shards = [((rank * 2 + first // 8) % 3, first, width) for rank, first, width in listed]
        tables.append(Table(name, ["a", name], plan_of("column_wise", shards), 16))
    check_trains(tables, 3, pooled=False)


def test_grid_columns() -> None:
    tables = []
    for number, widths in enumerate(([12, 4], [2, 6, 8], [8, 8])):
        firsts = [sum(widths[:i]) for i in range(len(widths))]
        pieces = [
            ([0, 1] if i % 2 else [2, 3], first, width)
            for i, (first, width) in enumerate(zip(firsts, widths, strict=True))
        ]
        for turn, listed in enumerate((pieces, pieces[::-1])):
            plan = shard_by_hand("grid_shard", listed)
            tables.append(Table(f"t{number}{turn}", ["a", f"f{number}{turn}"], plan, 16))
    check_trains(tables, 4, exact=False)
