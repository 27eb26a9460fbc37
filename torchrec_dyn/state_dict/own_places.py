"""Finds exactly the places of a rank's rows in a saved table, by a few of its ids.

Ids are saved in canonical order, so the ids of a range of mixed ids are between two places. A search reads
single ids of a file until few are left, then these at once. Mixed ids are spread evenly, so it begins near
its end. If the ids are damaged, the places are wrong; then the content sums over all ranks are wrong too, and
the load is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isqrt

from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import ChunkedTensor
from torchrec_dyn.ranks import Table, ids_per_rank, owners
from torchrec_dyn.state_dict.load_session import TableEntry
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.storage import signed, unsigned

ReadIds = Callable[[int, int], Tensor]  # returns the ids at the places [first, last), int64
_Found = Mapping[str, tuple[TableEntry, Mapping[str, TensorStorageMetadata]]]

_READ_AT_ONCE = 1 << 14  # ids
_TOP_BIT = 1 << 63


def own_places(files: FileSystemReader, found: _Found) -> dict[str, tuple[Places, Places | None]]:
    """Returns the places of this rank's rows and of its waiting ids, if any are saved, by the table's key.

    `found` are entries with their saved tensors by name, by the keys of their tables. Tables without saved
    ids, and tables whose rows are on one rank, are left out. Optimizer state has the places of its rows.
    """
    of_tables: dict[str, tuple[Places, Places | None]] = {}
    for key, (entry, saved) in found.items():
        table, ids = entry.table, saved.get("ids")
        part, ranks = table.part, table.layout.row_ranks
        if ids is not None and ranks > 1 and part is not None:
            rows = ChunkedTensor(f"'{key}.ids' in {files.path}", files, f"{key}.ids", ids)
            waiting = None
            if "waiting" in saved:
                name, of_waiting = f"{key}.waiting", saved["waiting"]
                counters = ChunkedTensor(f"'{name}' in {files.path}", files, name, of_waiting)
                waiting = places_of_part(_ids_of(counters), of_waiting.size[0], part, ranks)
            of_tables[key] = places_of_part(rows.rows, ids.size[0], part, ranks), waiting
    keys = {_name_of(found[key][0].table): key for key in of_tables}
    for key, (entry, _) in found.items():
        of_rows = None if key in of_tables else keys.get(_name_of(entry.table))
        if of_rows is not None and entry.table.has_shards_of(found[of_rows][0].table):
            of_tables[key] = of_tables[of_rows]
    return of_tables


def _name_of(table: Table) -> tuple[int, str]:
    return id(table.lock), table.name  # tables of two collections may have the same name


def _ids_of(counters: ChunkedTensor) -> ReadIds:
    return lambda first, last: counters.rows(first, last)[:, 0].contiguous()


def places_of_part(read: ReadIds, total: int, part: int, ranks: int) -> Places:
    """Returns the places of the ids of a part, and no others.

    `read` is a function that reads saved ids, of which there are `total`; `part` is the number of the rank
    among the `ranks` that share the rows.
    """
    if ranks == 1:
        return Places([(0, total)])
    block = ids_per_rank(ranks)
    end = _first_from((part + 1) * block, total, read)
    # The ids after the last range, at most one a rank, are of any part.
    after = end if part == ranks - 1 else _first_from(ranks * block, total, read)
    own = owners(read(after, total), ranks) == part
    last = [(after + i, after + i + 1) for i in own.nonzero().flatten().tolist()]
    return Places([(_first_from(part * block, total, read), end), *last])


def _first_from(bound: int, total: int, read: ReadIds) -> int:
    """Returns the first place from which on mixed ids are at least `bound`, unsigned."""
    low, high = 0, total if bound else 0
    expected, reach = bound * total >> 64, 4 * isqrt(total)
    near: Iterator[int] = iter((expected - reach, expected + reach))
    while high - low > _READ_AT_ONCE:
        middle = next(near, (low + high) // 2)
        if not low <= middle < high:
            continue
        if unsigned(int(ops.mix64(read(middle, middle + 1)))) < bound:
            low = middle + 1
        else:
            high = middle
    if low == high:
        return low
    # Unsigned words compare as signed ones whose top bits are flipped.
    mixed = ops.mix64(read(low, high)) ^ signed(_TOP_BIT)
    return low + int((mixed < signed(bound ^ _TOP_BIT)).sum())
