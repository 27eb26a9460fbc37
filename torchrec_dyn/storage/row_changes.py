"""Rows that come and go: removals and additions of ids with their rows, of several tables at once.

A change is prepared, which changes nothing, and then committed. Tables are given by their numbers in a group,
whose handle is that of `ops.prepare_tables`.

Legend: T tables of the group, M ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage.host_reads import host_numbers
from torchrec_dyn.storage.id_map import IdMap
from torchrec_dyn.storage.row_numbers import RowNumbers


class NumberedRows(Protocol):
    """What has ids with numbered rows: a table, or the counters of its waiting ids."""

    id_map: IdMap
    row_numbers: RowNumbers


def offsets_of(sizes: Mapping[int, int], count: int) -> Tensor:
    """Returns [T + 1] int64, where the ids of each of `count` tables begin; `sizes` is by number."""
    return host_numbers(_ends(sizes, count))


def _ends(sizes: Mapping[int, int], count: int) -> list[int]:
    return [*accumulate((sizes.get(t, 0) for t in range(count)), initial=0)]


class RowRemoval:
    """A prepared removal of ids of several tables.

    Attributes:
        ids, rows: [M] int64 in the order of the tables; the ids are distinct and have these rows.
        sizes: number of the ids of each table that loses some.
        rows_of: the rows that each of these loses.
    """

    def __init__(
        self,
        tables: Mapping[int, NumberedRows],
        ids: Tensor,
        rows: Tensor,
        sizes: Mapping[int, int],
        count: int,
        handle: Tensor,
    ) -> None:
        self.ids, self.rows = ids, rows
        self.sizes = {t: size for t, size in sorted(sizes.items()) if size}
        self._tables, self._handle = tables, handle
        self._offsets = offsets_of(self.sizes, count)
        self.rows_of = parts_of(rows, self.sizes)

    def commit(self) -> None:
        """Removes the ids and frees their rows, which are reused as soon as no open forward can hold them."""
        if not self.sizes:
            return
        ops.remove_rows_(self.ids, self.rows, self._offsets, self._handle)
        for t, size in self.sizes.items():
            table = self._tables[t]
            table.id_map.num_ids -= size
            table.row_numbers.free(self.rows_of[t])

    def undo(self) -> Callable[[], None]:
        """Returns a call that undoes a commit that comes next, or a part of it."""
        scores = ops.read_scores(self.rows, self._offsets, self._handle)
        renumber = [self._tables[t].row_numbers.undo() for t in self.sizes]
        maps = {t: self._tables[t].id_map for t in self.sizes}
        counts = {t: id_map.num_ids for t, id_map in maps.items()}

        def restore() -> None:
            ids_of = parts_of(self.ids, self.sizes)
            for t, id_map in maps.items():
                missing = (id_map.lookup(ids_of[t]) < 0).nonzero().flatten()
                id_map.insert(ids_of[t][missing], self.rows_of[t][missing])
                id_map.num_ids = counts[t]
            ops.write_scores_(self.rows, self._offsets, *scores, self._handle)
            for put_back in renumber:
                put_back()

        return restore


class RowAddition:
    """Prepared fresh rows of new ids of several tables.

    Attributes:
        ids: [M] int64 in the order of the tables; they are distinct and absent.
        rows: [M] int64, their rows after the commit.
        sizes: number of the ids of each table that gets some.
    """

    def __init__(
        self,
        tables: Mapping[int, NumberedRows],
        ids: Tensor,
        sizes: Mapping[int, int],
        last_seen: Mapping[int, int],
        counts: Tensor | None,
        count: int,
        handle: Tensor,
        fills: tuple[Tensor, Tensor, Tensor | None] | None = None,
    ) -> None:
        """Prepares rows. `fills`: rows, new_index and places of `ops.add_rows_`, if a batch has the ids."""
        self.ids, self.rows = ids, torch.empty_like(ids)
        self.sizes = {t: size for t, size in sorted(sizes.items()) if size}
        self._tables = tables
        self._taken = {t: tables[t].row_numbers.prepare(size) for t, size in self.sizes.items()}
        reused = {t: taken.num_reused for t, taken in self._taken.items()}
        parts = [part for taken in self._taken.values() for part in taken.reused]
        first_rows = [self._taken[t].first if t in self._taken else 0 for t in range(count)]
        self._arguments = (
            self.rows, ids, _ends(self.sizes, count), first_rows, joined(parts, ids), _ends(reused, count),
            [last_seen.get(t, 0) for t in range(count)], counts, *(fills or (None, None, None)), handle,
        )  # fmt: skip

    def commit(self) -> None:
        """Writes the rows and gives them to their ids."""
        if not self.sizes:
            return
        ops.add_rows_(*self._arguments)
        for t, taken in self._taken.items():
            self._tables[t].row_numbers.commit(taken)
            self._tables[t].id_map.num_ids += self.sizes[t]


def parts_of(numbers: Tensor, sizes: Mapping[int, int]) -> dict[int, Tensor]:
    """Returns numbers [M] of each table, `sizes` one after the other."""
    if not sizes:
        return {}
    if len(sizes) == 1:
        return dict.fromkeys(sizes, numbers)
    return dict(zip(sizes, numbers.split([*sizes.values()]), strict=True))


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Returns tensors [M] int64 one after the other; a single tensor is not copied."""
    if not parts:
        return like[:0]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
