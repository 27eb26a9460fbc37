"""A table of which the group holds several copies, as under 2D parallelism: each keeps to itself."""

from dataclasses import replace

import torch
import torch.distributed as dist
import workers
from table_cases import make_table

from torchrec_dyn.checkpoint_format import table_config
from torchrec_dyn.ranks import Table, TableLayout
from torchrec_dyn.ranks.layout import Piece


def whole_of(copy: int, rows_are_spread: bool) -> Table:
    """Ranks 0 and 2 hold one copy, ranks 1 and 3 the other; rows or columns are cut in two."""
    rank, ranks = dist.get_rank(), (copy, copy + 2)
    if rows_are_spread:
        pieces = [Piece(0, 4, ranks)]
    else:
        pieces = [Piece(0, 1, ranks[1:]), Piece(1, 3, ranks[:1])]
    shards = [
        make_table(first_column=piece.first_column, columns=piece.columns)
        for piece in pieces
        if rank in piece.ranks
    ]
    shard = shards[0]
    whole = Table.of_one(shard, "here", table_config("t", 4, 5, shard.dtype, shard.initializer))
    layout = TableLayout(tuple(pieces), rows_are_spread)
    return replace(whole, layout=layout, shards=shards, rank=rank, group=dist.group.WORLD)


def edit_copies(rows_are_spread: bool) -> tuple[list[int], int, int | float, int]:
    rank = dist.get_rank()
    whole = whole_of(rank % 2, rows_are_spread)
    ids = torch.arange(10) + 10 * rank
    rows = torch.arange(40.0).view(10, 4) + 1000 * rank
    whole.assign(ids, rows)
    asked = torch.arange(40)
    got, found = whole.lookup(asked)
    assert torch.equal(found, asked // 10 % 2 == rank % 2)
    assert torch.equal(
        got[found], torch.cat([rows % 1000 + 1000 * r for r in (rank % 2, rank % 2 + 2)])
    )
    answer = sorted(whole.ids().tolist()), whole.num_rows, whole.stats()["inserted"]
    return (*answer, whole.erase(ids[:3]))


def check_copies(rows_are_spread: bool) -> None:
    by_rank = workers.run(edit_copies, rows_are_spread, world_size=4, local_size=2)
    even = [*range(10), *range(20, 30)]
    for rank, (ids, rows, inserted, erased) in enumerate(by_rank):
        assert ids == [one + 10 * (rank % 2) for one in even]
        assert rows == inserted == 20
        assert erased == 12  # of all copies


def test_copies_cut_by_rows() -> None:
    check_copies(True)


def test_copies_cut_by_columns() -> None:
    check_copies(False)
