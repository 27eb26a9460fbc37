"""IdMap: id -> row, over one tensor of slots, two while it grows (csrc/storage/id_map.h: layout and rules).

Legend: C slots, M ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_dyn import ops

# A slot is an id and a row, 8 bytes each.
SLOT_BYTES = 16
# Slots of a cache line; a map is made of whole lines (csrc/mix64.h).
_LINE_SLOTS = 4
# Slots in use at most: at this load one id in thirteen or so lies past its home line (measured).
MAX_LOAD = 0.625
_FIRST_CAPACITY = 64
# Small maps double at MAX_LOAD, in one go. Large ones grow by a quarter, which bounds the bytes a row to
# SLOT_BYTES * 1.25 / MAX_LOAD, and bit by bit: growth begins at START_LOAD and ends before MAX_LOAD.
_LARGE_CAPACITY = 1 << 16
_LARGE_GROWTH = 1.25
_START_LOAD = 9 / 16
# Slots that statistics look at, at least: asked for now and then they are to take no time that one can see.
_PROBED = 1 << 18
# Slots that growth may be ahead of this by, since it moves whole runs.
_RUN = 64


def most_slots(ids: int) -> int:
    """Bounds the slots that a map of `ids` ids holds, however they came: planners pay for these.

    It holds while the map grows too: see `IdMap.held`.

    Args:
        ids: slots in use.
    """
    needed = int(ids / MAX_LOAD) + 1
    return max(
        _FIRST_CAPACITY,
        2 * min(needed, _LARGE_CAPACITY),
        # Growth may end the last 8 runs early, which is 8 (MAX_LOAD - START_LOAD) / MAX_LOAD * 1.25 = 1 run
        # of slots ahead, and a capacity is whole lines.
        int(needed * _LARGE_GROWTH) + _RUN + _LINE_SLOTS,
    )


def _fewest_slots(ids: int) -> int:
    """Returns the capacity at which a map of `ids` ids need not grow at once."""
    needed = int(ids / MAX_LOAD) + 1
    return needed if needed < _LARGE_CAPACITY else int(ids / _START_LOAD) + 1


def canonical_order(ids: Tensor) -> Tensor:
    """Returns the permutation that sorts ids by their mixed id, unsigned.

    Args:
        ids: [M] int64.
    """
    # Flipping the sign bit turns the unsigned order into the signed one.
    return torch.argsort(ops.mix64(ids) ^ torch.iinfo(torch.int64).min)


class IdMap:
    """Gives every id of a table its row.

    Args:
        limit: ids that the table may have, None if nothing bounds them. The last growth stops at what the
            limit takes, and a full map is not kept growing for ever by ids that come and go below it.

    Attributes:
        slots: [C, 2] int64: id, row + 1; an empty slot has 0.
        outgoing: [C', 2] int64, the smaller slots from which a map that grows is moving; or None.
        moved: outgoing slots that have moved; -1 when there are none.
        num_ids: slots in use.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.slots: Tensor = torch.empty(0, 2, dtype=torch.int64)
        self.outgoing: Tensor | None = None
        self.moved: int = -1
        self.num_ids: int = 0

    @property
    def capacity(self) -> int:
        """Slots of the map, of the larger array while it grows."""
        return self.slots.shape[0]

    @property
    def held(self) -> int:
        """Slots whose memory is in use.

        While the map grows: of the outgoing slots those that have yet to move, and of the new ones
        the share that the others have moved to. So growth takes no more than the grown map.
        """
        if self.outgoing is None:
            return self.capacity
        leaving = self.outgoing.shape[0]
        return leaving - self.moved + -(-self.capacity * self.moved // leaving)

    def reserve(self, additional: int) -> None:
        """Makes room for `additional` more ids, which may move slots: 16 for each of them at most."""
        ids = self.num_ids + additional
        self._move_on(ids)
        if ids <= self._most_ids():
            return
        factor = 2.0 if self.capacity < _LARGE_CAPACITY else _LARGE_GROWTH
        capacity = max(_FIRST_CAPACITY, int(self.capacity * factor), _fewest_slots(ids))
        if self._limit is not None and ids <= self._limit:
            enough = max(_fewest_slots(self._limit), self.capacity + _LINE_SLOTS)
            capacity = min(capacity, enough)
        # Nothing is outgoing here: growth ends at MAX_LOAD of the old slots, and the new ones are larger.
        grown = ops.new_slots(self.slots, -(-capacity // _LINE_SLOTS) * _LINE_SLOTS)
        self.outgoing, self.slots, self.moved = self.slots, grown, 0
        self._move_on(ids)

    def _most_ids(self) -> float:
        """Returns how many ids the map takes before it must begin to grow."""
        large = self.capacity >= _LARGE_CAPACITY
        most = self.capacity * (_START_LOAD if large else MAX_LOAD)
        if self._limit is not None and most < self._limit <= self.capacity * MAX_LOAD:
            return self._limit
        return most

    def _move_on(self, ids: int) -> None:
        """Moves outgoing slots as far as a map of `ids` ids must be: all of them at MAX_LOAD."""
        if self.outgoing is None:
            return
        leaving = self.outgoing.shape[0]
        until = leaving
        if leaving >= _LARGE_CAPACITY:
            until = math.ceil((ids - leaving * _START_LOAD) / (MAX_LOAD - _START_LOAD))
            if until > leaving - 8 * _RUN:  # the last few are not worth two arrays
                until = leaving
        self.moved = int(ops.move_slots(self.outgoing, self.slots, self.moved, until))
        if self.moved == leaving:
            self.outgoing, self.moved = None, -1

    def arrays(self) -> tuple[list[Tensor], Tensor]:
        """Returns this map as the ops take maps: see `arrays_of`."""
        return arrays_of([self])

    def lookup(self, ids: Tensor) -> Tensor:
        """Finds rows; -1 where the id is absent.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64.
        """
        return ops.lookup(ids, torch.tensor([0, ids.numel()]), *self.arrays())[0]

    def insert(self, ids: Tensor, rows: Tensor) -> None:
        """Puts ids into the map.

        Args:
            ids: [M] int64, distinct and absent; room was reserved.
            rows: [M] int64.
        """
        ops.insert(ids, rows, torch.tensor([0, ids.numel()]), *self.arrays())
        self.num_ids += ids.numel()

    def erase(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Takes ids out of the map.

        Args:
            ids: [M] int64.

        Returns:
            ids: those that were there, each once.
            rows: which they held.
        """
        rows = ops.erase(ids, *self.arrays())
        was_there = rows >= 0
        ids, rows = ids[was_there], rows[was_there]
        self.num_ids -= rows.numel()
        return ids, rows

    def contents(self) -> tuple[Tensor, Tensor]:
        """Lists what the map holds in canonical order.

        Returns:
            ids: [M] int64.
            rows: [M] int64.
        """
        used = torch.cat([array[array[:, 1] != 0] for array in self.arrays()[0]])
        ids, rows = used[:, 0].contiguous(), used[:, 1] - 1
        order = canonical_order(ids)
        return ids[order], rows[order]

    @property
    def bytes(self) -> int:
        """Bytes of the slots held."""
        return self.held * SLOT_BYTES

    def stats(self) -> dict[str, int | float]:
        """Returns slots, load (ids / slots) and the mean and longest probe of a known id.

        Probes of a large map are those of a sample, some hundred thousand slots in runs: the longest of all
        may be longer.
        """
        ids, total, longest = zip(
            *(
                ops.probe_lengths(array, max(1, len(array) // _PROBED)).tolist()
                for array in self.arrays()[0]
            ),
            strict=True,
        )
        return {
            "slots": self.held,
            "load": self.num_ids / self.held if self.held else 0.0,
            "probe_length_mean": sum(total) / sum(ids) if sum(ids) else 0.0,
            "probe_length_max": max(longest),
        }

    def check_invariants(self) -> None:
        """Raises RuntimeError if an id is lost, a row is shared or the count is wrong."""
        ids, rows = self.contents()
        if ids.numel() != self.num_ids:
            raise RuntimeError(
                f"torchrec_dyn bug: IdMap counts {self.num_ids} ids and holds {ids.numel()}."
            )
        if torch.unique(rows).numel() != rows.numel():
            raise RuntimeError("torchrec_dyn bug: a row is held by two ids of one IdMap.")
        if not torch.equal(self.lookup(ids), rows):
            raise RuntimeError("torchrec_dyn bug: an id of an IdMap cannot be reached from home.")


def arrays_of(maps: Sequence[IdMap]) -> tuple[list[Tensor], Tensor]:
    """Lists maps as the ops take them.

    Args:
        maps: T maps.

    Returns:
        slots: of each map, then the outgoing ones of each that grows.
        moved: [T] int64, outgoing slots moved, -1 of a map that does not grow.
    """
    slots = [one.slots for one in maps]
    slots += [one.outgoing for one in maps if one.outgoing is not None]
    return slots, torch.tensor([one.moved for one in maps], dtype=torch.int64)
