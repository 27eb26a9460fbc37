"""The id map of one served table, a part of a mapped file.

It has the open addressing of training (csrc/storage/id_map.h), with a higher load since it rarely grows: 23
bytes an id. Sorted ids would take 8 bytes an id, but a binary search takes 12 to 15 times as long: 258 and
507 ns an id against 22 and 33 ns (1M and 10M ids, 5,120 ids a call, one thread). Interpolation by torch's own
ops is slower than the binary search.

Legend: C slots, M ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.serving.files import DamagedTables
from torchrec_dyn.serving.manifest import Manifest, ServedTable

SLOT_BYTES = 16
_LINE_SLOTS = 4
# A new map has the first load. Deltas fill it up to the second load; then a larger map is made.
_LOAD, _MOST_LOAD = 0.7, 0.8


def slots_for(ids: int) -> int:
    """Returns the number of slots of a new map for `ids` ids, in whole lines."""
    return -(-int(ids / _LOAD) // _LINE_SLOTS) * _LINE_SLOTS + (_LINE_SLOTS if ids else 0)


def has_room(slots: int, ids: int) -> bool:
    """Returns True if a map of `slots` slots may hold `ids` ids."""
    return ids <= slots * _MOST_LOAD


class ServedMap:
    """The map from the ids of one served table to their rows: slots [C, 2] int64, written in place.

    A slot has an id and its row + 1; 0 means that the slot is empty. `key` is the key of the hash that gives
    ids their slots (csrc/slot_hash.h).
    """

    def __init__(self, slots: Tensor, key: int) -> None:
        self.slots = slots
        self.key = key
        self._at_rest = torch.tensor([[-1, key]], device="cpu")

    def find(self, ids: Tensor) -> Tensor:
        """Returns rows [M] int64 of ids [M] int64, -1 where absent."""
        return ops.lookup(
            ids, torch.tensor([0, len(ids)], device="cpu"), [self.slots], self._at_rest
        )[0]

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """Inserts distinct absent ids [M] int64 with their rows [M] int64."""
        ops.insert(
            ids, rows, torch.tensor([0, len(ids)], device="cpu"), [self.slots], self._at_rest
        )

    def take(self, ids: Tensor) -> Tensor:
        """Removes ids [M] int64 and returns their former rows, [M] int64, -1 where the id is absent."""
        return ops.erase(ids, [self.slots], self._at_rest)

    def pieces(self, row_bytes: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields the ids, their rows and their slots, [M] int64 each, for one range of slots at a time.

        The more bytes the caller reads of each row, `row_bytes`, the fewer ids at a time.
        """
        size = max(1, knobs.MAP_PIECE_BYTES // (SLOT_BYTES + row_bytes))
        for first in range(0, len(self.slots), size):
            piece = self.slots[first : first + size]
            slots = piece[:, 1].nonzero().view(-1)
            pairs = piece[slots]
            yield pairs[:, 0].contiguous(), pairs[:, 1] - 1, slots + first

    def renumber(self, slots: Tensor, rows: Tensor) -> None:
        """Replaces the rows of ids, in slots [M] int64 as `pieces` yields them, by rows [M] int64."""
        self.slots[slots, 1] = rows + 1


def maps_of(slots: Tensor, tables: Mapping[str, ServedTable]) -> dict[str, ServedMap]:
    """Returns the id map of each table, which has a range of the file of all maps, slots [bytes] uint8."""
    pairs = slots.view(torch.int64).view(-1, 2)
    return {
        name: ServedMap(pairs.narrow(0, table.first_slot, table.capacity), table.key)
        for name, table in tables.items()
    }


def checked_maps(path: Path, slots: Tensor, manifest: Manifest) -> dict[str, ServedMap]:
    """Returns the id maps in a file, slots [bytes] uint8; DamagedTables unless all their rows can be read."""
    maps = maps_of(slots, manifest.tables)
    for name, width in manifest.widths().items():
        numbers = maps[name].slots[:, 1]
        ids, expected = int(numbers.count_nonzero()), manifest.tables[name].num_rows
        low, high = map(int, numbers.aminmax()) if len(numbers) else (0, 0)
        rows = manifest.rows_bytes // width
        if ids != expected or low < 0 or high > rows:
            raise DamagedTables(
                f"{path}: expected a map of {expected} ids of table '{name}' to rows in [0, {rows}), got "
                f"{ids} ids and rows up to {high - 1}. It is damaged. Build it again."
            )
    return maps
