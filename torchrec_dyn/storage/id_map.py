"""IdMap: id -> row, in one tensor of slots, or two while the map grows (rules: csrc/storage/id_map.h).

Legend: C slots, M ids.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.storage.host_reads import host_numbers, keep_in_use

# A slot is an id and a row, 8 bytes each.
SLOT_BYTES = 16
# Slots of a cache line; a map is made of whole lines (csrc/slot_hash.h).
_LINE_SLOTS = 4
# The highest load, ids / slots: at this load about one id in thirteen lies past its home line (measured).
MAX_LOAD = 0.625
_FIRST_CAPACITY = 64
# Small maps double at MAX_LOAD, at once. Large maps grow by a quarter, which bounds the bytes per row to
# SLOT_BYTES * 1.25 / MAX_LOAD. They grow bit by bit: growth begins at _START_LOAD and ends before MAX_LOAD.
# On a GPU they grow at once, at MAX_LOAD: one call copies all slots. Both arrays are in memory meanwhile.
_LARGE_GROWTH = 1.25
_START_LOAD = 9 / 16
# Statistics of a larger map sample at least this many slots: few enough to take no noticeable time.
_PROBED = 1 << 18
# Growth moves whole runs of slots, so it may move up to a run of slots more than needed.
_RUN = 64
# A huge page of outgoing slots is given back to the system when all of it has moved.
_PAGE_SLOTS = (2 << 20) // SLOT_BYTES


def most_slots(ids: int, device_type: str = "cpu") -> int:
    """Returns the most slots in memory of a map of up to `ids` ids, however they come, also in growth."""
    needed = int(ids / MAX_LOAD) + 1
    if device_type != "cpu":
        # A map grows if it has fewer slots than needed: to 2 or 1.25 times as many, or to those needed.
        small = min(needed, knobs.LARGE_MAP_SLOTS)
        most = max(3 * small, small + needed, needed + int(needed * _LARGE_GROWTH))
        return max(_FIRST_CAPACITY, most + _LINE_SLOTS)
    return max(
        _FIRST_CAPACITY,
        2 * min(needed, knobs.LARGE_MAP_SLOTS),
        # Growth may move the last 8 runs early: 8 (MAX_LOAD - _START_LOAD) / MAX_LOAD * 1.25 = 1 run of slots
        # ahead. Also, a capacity is rounded up to whole lines.
        int(needed * _LARGE_GROWTH) + _RUN + _LINE_SLOTS,
    )


def new_key() -> int:
    """Returns a new secret key of a map, not 0."""
    return secrets.randbits(62) + 1


def canonical_keys(ids: Tensor) -> Tensor:
    """Returns keys of ids [M] int64, [M] int64, whose order is the canonical order: by mixed id, unsigned."""
    # Flipping the sign bit turns the unsigned order into the signed order.
    return ops.mix64(ids) ^ torch.iinfo(torch.int64).min


def canonical_order(ids: Tensor) -> Tensor:
    """Returns the permutation that sorts ids [M] int64 into the canonical order."""
    return torch.argsort(canonical_keys(ids))


class IdMap:
    """The map from every id of a table to its row, for `num_ids` ids.

    Attributes:
        slots: [C, 2] int64: id, row + 1; an empty slot has 0 in place of row + 1.
        outgoing: [C', 2] int64, on the CPU while the map grows, the smaller array from which slots move.
        moved: number of outgoing slots that have moved; -1 if `outgoing` is None.
        key: secret key of the hash that gives ids their slots (csrc/slot_hash.h): who chooses the ids cannot
            choose ids that share slots. A copy of a table draws another key.
    """

    def __init__(self, limit: int | None = None, device: torch.device | None = None) -> None:
        self._limit = limit
        self.slots: Tensor = torch.empty(0, 2, dtype=torch.int64, device=device)
        self.outgoing: Tensor | None = None
        self.moved: int = -1
        self.num_ids: int = 0
        self.key: int = new_key()

    @property
    def capacity(self) -> int:
        """Slots of the map; while it grows, slots of the larger array."""
        return self.slots.shape[0]

    @property
    def held(self) -> int:
        """Slots whose memory is in use.

        While the map grows: the outgoing slots that have not moved, and the filled share of the new ones.
        """
        if self.outgoing is None:
            return self.capacity
        leaving = self.outgoing.shape[0]
        return leaving - self.moved + -(-self.capacity * self.moved // leaving)

    def reserve(self, additional: int) -> None:
        """Makes room for `additional` more ids. As `reserve_maps`."""
        reserve_maps([(self, additional)])

    def capacity_for(self, additional: int) -> int | None:
        """Returns the slots of the larger array that `additional` more ids need; None if there is room."""
        ids = self.num_ids + additional
        if ids <= self._most_ids():
            return None
        factor = 2.0 if self.capacity < knobs.LARGE_MAP_SLOTS else _LARGE_GROWTH
        capacity = max(_FIRST_CAPACITY, int(self.capacity * factor), self._fewest_slots(ids))
        if self._limit is not None and ids <= self._limit:
            enough = max(self._fewest_slots(self._limit), self.capacity + _LINE_SLOTS)
            capacity = min(capacity, enough)
        return -(-capacity // _LINE_SLOTS) * _LINE_SLOTS

    def begin_growth(self, capacity: int) -> None:
        """Begins to move the slots to an array of `capacity` slots."""
        # No slots are outgoing here: growth ends at MAX_LOAD of the old array, and the new array is larger.
        grown = ops.new_slots(self.slots, capacity)
        SLOTS.renew()
        self.outgoing, self.slots, self.moved = self.slots, grown, 0

    @property
    def grows_in_steps(self) -> bool:
        """True if the slots are moved bit by bit to a larger array."""
        return self._grows_in_steps(self.capacity)

    def _grows_in_steps(self, capacity: int) -> bool:
        """Returns True if an array of `capacity` slots of this map is moved bit by bit."""
        return self.slots.is_cpu and capacity >= knobs.LARGE_MAP_SLOTS

    def _fewest_slots(self, ids: int) -> int:
        """Returns the least capacity at which a map of `ids` ids does not have to grow yet."""
        needed = int(ids / MAX_LOAD) + 1
        return int(ids / _START_LOAD) + 1 if self._grows_in_steps(needed) else needed

    def _most_ids(self) -> float:
        """Returns the most ids of the map before it must begin to grow."""
        most = self.capacity * (_START_LOAD if self.grows_in_steps else MAX_LOAD)
        if self._limit is not None and most < self._limit <= self.capacity * MAX_LOAD:
            return self._limit
        return most

    def move_on(self, additional: int) -> None:
        """Moves the share of outgoing slots that `additional` more ids require: all of them at MAX_LOAD."""
        if self.outgoing is None:
            return
        ids, leaving = self.num_ids + additional, self.outgoing.shape[0]
        until = math.ceil((ids - leaving * _START_LOAD) / (MAX_LOAD - _START_LOAD))
        if until > leaving - 8 * _RUN:  # a few slots are not worth two arrays
            until = leaving
        elif until - self.moved >= _PAGE_SLOTS // 2:  # a large batch leaves no page half moved
            until = until // _PAGE_SLOTS * _PAGE_SLOTS
        if until <= self.moved:
            return
        try:
            self._set_moved(
                int(ops.move_slots(self.outgoing, self.slots, self.moved, until, self.key))
            )
        except BaseException:
            # Slots may have moved, up to an unknown place. To move all slots is right from any place.
            if self.outgoing is not None:
                ops.move_slots(self.outgoing, self.slots, self.moved, leaving, self.key)
                self._set_moved(leaving)
            raise

    def _set_moved(self, moved: int) -> None:
        assert self.outgoing is not None
        SLOTS.renew()
        is_last = moved == self.outgoing.shape[0]
        self.outgoing, self.moved = (None, -1) if is_last else (self.outgoing, moved)

    def arrays(self) -> tuple[list[Tensor], Tensor]:
        """Returns this map in the form that the ops take, as `arrays_of`."""
        return arrays_of([self])

    def lookup(self, ids: Tensor) -> Tensor:
        """Returns the row of each of ids [M] int64; -1 for an absent id."""
        return ops.lookup(ids, host_numbers([0, ids.numel()]), *self.arrays())[0]

    def insert(self, ids: Tensor, rows: Tensor) -> None:
        """Adds ids [M] int64, distinct and absent, with rows [M] int64; room is reserved."""
        most = knobs.IDS_INSERTED_TOGETHER if ids.is_cpu else max(1, ids.numel())
        for part, its_rows in zip(ids.split(most), rows.split(most), strict=True):
            if part.numel():
                ops.insert(part, its_rows, host_numbers([0, part.numel()]), *self.arrays())
            self.num_ids += part.numel()

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the present ids among ids [M] int64, and their rows."""
        rows = self.lookup(ids)
        places = (rows >= 0).nonzero().flatten()
        return ids[places], rows[places]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all ids and rows of each array of slots, in the order of the slots."""
        yield from map(ops.used_slots, self.arrays()[0])

    def parts(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As `pieces`, of about `most` slots at a time."""
        lines = max(1, most // _LINE_SLOTS)
        for slots in self.arrays()[0]:
            yield from map(ops.used_slots, slots.split(lines * _LINE_SLOTS))

    def contents(self) -> tuple[Tensor, Tensor]:
        """Returns all ids and rows in canonical order, [M] int64 each."""
        ops.raise_errors(self.slots)
        ids, rows = (torch.cat(parts) for parts in zip(*self.pieces(), strict=True))
        order = canonical_order(ids)
        return ids[order], rows[order]

    @property
    def bytes(self) -> int:
        """Bytes of the slots held."""
        return self.held * SLOT_BYTES

    def stats(self) -> dict[str, int | float]:
        """Returns slots, load, and the mean and the longest probe length, which large maps sample."""
        ids, total, longest = zip(
            *(
                ops.probe_lengths(array, max(1, len(array) // _PROBED), self.key).tolist()
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
        """Raises RuntimeError if an id cannot be found, two ids share a row or the count is wrong."""
        ids, rows = self.contents()
        if ids.numel() != self.num_ids:
            raise RuntimeError(
                f"torchrec_dyn bug: IdMap counts {self.num_ids} ids and holds {ids.numel()}."
            )
        if torch.unique(rows).numel() != rows.numel():
            raise RuntimeError("torchrec_dyn bug: a row is held by two ids of one IdMap.")
        if not torch.equal(self.lookup(ids), rows):
            raise RuntimeError("torchrec_dyn bug: an id of an IdMap cannot be reached from home.")


def reserve_maps(wanted: Sequence[tuple[IdMap, int]]) -> None:
    """Makes room for more ids in maps: each with their number. May move slots, at most 16 for each id."""
    at_once: list[tuple[IdMap, int]] = []
    for id_map, additional in wanted:
        id_map.move_on(additional)
        capacity = id_map.capacity_for(additional)
        if capacity is None:
            continue
        if id_map.grows_in_steps:
            id_map.begin_growth(capacity)
            id_map.move_on(additional)
        else:
            at_once.append((id_map, capacity))
    if not at_once:
        return
    maps, capacities = [id_map for id_map, _ in at_once], [capacity for _, capacity in at_once]
    former = [id_map.slots for id_map in maps]
    grown = ops.grown_slots(former, capacities, [id_map.key for id_map in maps])
    keep_in_use(*former)  # another stream may have allocated them
    SLOTS.renew()
    for id_map, slots in zip(maps, grown, strict=True):
        id_map.slots = slots


def arrays_of(maps: Sequence[IdMap]) -> tuple[list[Tensor], Tensor]:
    """Returns T maps as the ops take them: the slots of each map, then those that leave maps that grow.

    And [T, 2] int64: outgoing slots moved, -1 for a map that does not grow, and the keys.
    """
    slots = [id_map.slots for id_map in maps]
    slots += [id_map.outgoing for id_map in maps if id_map.outgoing is not None]
    return slots, host_numbers([(id_map.moved, id_map.key) for id_map in maps]).view(-1, 2)


class Token:
    """An object that is replaced before the arrays of some table change; compared by identity.

    Ops take the arrays of all tables of a group. To list the arrays of a thousand tables, or to ask each
    table whether it has changed, takes as long as an op; so a group compares one token, shared by the
    process.
    """

    def __init__(self) -> None:
        self.now = object()

    def renew(self) -> None:
        """Replaces the token. Call it before the change: an interrupt may come between the two."""
        self.now = object()


SLOTS = Token()  # renewed before an id map gets other slots, or moves slots
BLOCKS = Token()  # renewed before a store gets other blocks
TABLES = Token()  # renewed before a table gets other contents or settings
CLOCKS = Token()  # renewed before the clock of a table is set
