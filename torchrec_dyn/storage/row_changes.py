"""Rows that come and go: removals and additions of ids with their rows, of several tables at once.

A change is prepared, which changes nothing, and then committed. Tables are given by their numbers in a group,
whose handle is that of `ops.prepare_tables`.

Legend: T tables of the group, M ids.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

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


Fills = tuple[Tensor | None, Tensor | None, Tensor | None]


class Chosen(NamedTuple):
    """Ids of several tables: ids and rows [M] int64 in the order of the tables, and the number of each.

    Attributes:
        after: calls for the commit that has removed them.
    """

    ids: Tensor
    rows: Tensor
    sizes: Mapping[int, int]
    after: tuple[Callable[[], None], ...] = ()


class Added(NamedTuple):
    """New ids that get rows.

    Attributes:
        ids: [M] int64 in the order of the tables; they are distinct and absent.
        sizes: number of the ids of each table.
        last_seen: of each table that has scores.
        counts: [M] int64, with which their rows begin; None for 0.
        fills: rows, new_index and places of `ops.add_rows_`, if a batch has the ids.
    """

    ids: Tensor
    sizes: Mapping[int, int]
    last_seen: Mapping[int, int]
    counts: Tensor | None = None
    fills: Fills | None = None


class RowChange:
    """A prepared change of `count` tables: some ids lose their rows, and then others get fresh ones.

    Attributes:
        removed: the ids that lose their rows, which are distinct and have these rows.
        new_rows: [M] int64, the rows of the new ids after the commit.
        sizes: number of the new ids of each table that gets some.
        lost: rows of the removed ids, by table.
        handle: of the tables as the commit finds them, which may have more room than at the preparation.
        removes, adds: arguments of `ops.remove_rows_` and `ops.add_rows_`, without the tables; of adds also
            without `initial_places`.
        initial_places: [M] int64, where initial rows are written, if not to the rows.
    """

    def __init__(
        self,
        tables: Mapping[int, NumberedRows],
        count: int,
        handle: Tensor,
        removed: Chosen | None = None,
        added: Added | None = None,
    ) -> None:
        """Prepares a change; at least one of `removed` and `added` is given."""
        removed, added = _both(removed, added)
        self.removed = removed = removed._replace(sizes=_counted(removed.sizes))
        self.sizes = _counted(added.sizes)
        self.new_rows = torch.empty_like(added.ids) if self.sizes else added.ids
        self._tables, self.handle = tables, handle
        self.lost = parts_of(removed.rows, removed.sizes)
        self._taken = {
            t: tables[t].row_numbers.prepare(self.sizes.get(t, 0), self.lost.get(t))
            for t in sorted({*self.lost, *self.sizes})
        }
        self.removes = removed.ids, removed.rows, _ends(removed.sizes, count)
        reused = {t: taken.num_reused for t, taken in self._taken.items()}
        first_rows = [self._taken[t].first if t in self._taken else 0 for t in range(count)]
        self.adds = (
            self.new_rows, added.ids, _ends(added.sizes, count), first_rows, self._reused_rows(),
            _ends(reused, count), [added.last_seen.get(t, 0) for t in range(count)], added.counts,
            *(added.fills or (None, None, None)),
        )  # fmt: skip
        self.initial_places: Tensor | None = None

    def numbers(self) -> Tensor:
        """Returns the rows that the new ids will get, [M] int64, before the commit writes `new_rows`."""
        parts: list[Tensor] = []
        for t, size in self.sizes.items():
            taken, device = self._taken[t], self.new_rows.device
            fresh = size - taken.num_reused
            parts += [*taken.reused, torch.arange(taken.first, taken.first + fresh, device=device)]
        return joined(parts, self.new_rows)

    def _reused_rows(self) -> Tensor:
        """Returns the rows to reuse, table after table."""
        parts = [part for taken in self._taken.values() for part in taken.reused]
        lost = [*self.lost.values()]
        if len(parts) == len(lost) and all(map(operator.is_, parts, lost)):
            return self.removed.rows  # which are these parts
        return joined(parts, self.removed.rows)

    def commit(self) -> None:
        """Removes the ids and frees their rows; writes the new rows and gives them to their ids."""
        self.write()
        self.note()

    def write(self) -> None:
        """Runs the ops of a commit."""
        if self.lost:
            ops.remove_rows_(*self.removes, self.handle)
        if self.sizes:
            ops.add_rows_(*self.adds, self.initial_places, self.handle)

    def note(self) -> None:
        """Notes what ops have written, in the commit."""
        for t, taken in self._taken.items():
            table = self._tables[t]
            table.row_numbers.commit(taken)
            lost = self.removed.sizes.get(t, 0)
            table.id_map.num_ids += self.sizes.get(t, 0) - lost
        for call in self.removed.after:
            call()

    def undo(self) -> Callable[[], None]:
        """Returns a call that undoes a commit that comes next, or a part of it; nothing is added."""
        (ids, rows, _), sizes = self.removes, self.removed.sizes
        offsets = offsets_of(sizes, len(self.removes[2]) - 1)
        scores = ops.read_scores(rows, offsets, self.handle)
        renumber = [self._tables[t].row_numbers.undo() for t in self.lost]
        maps = {t: self._tables[t].id_map for t in self.lost}
        counts = {t: id_map.num_ids for t, id_map in maps.items()}

        def restore() -> None:
            ids_of = parts_of(ids, sizes)
            for t, id_map in maps.items():
                missing = (id_map.lookup(ids_of[t]) < 0).nonzero().flatten()
                id_map.insert(ids_of[t][missing], self.lost[t][missing])
                id_map.num_ids = counts[t]
            ops.write_scores_(rows, offsets, *scores, self.handle)
            for put_back in renumber:
                put_back()

        return restore


def _both(removed: Chosen | None, added: Added | None) -> tuple[Chosen, Added]:
    """Returns both parts of a change, of which one may be None: of no ids."""
    if removed is None:
        assert added is not None
        nothing = added.ids[:0]
        return Chosen(nothing, nothing, {}), added
    return removed, Added(removed.ids[:0], {}, {}) if added is None else added


def _counted(sizes: Mapping[int, int]) -> dict[int, int]:
    return {t: size for t, size in sorted(sizes.items()) if size}


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
