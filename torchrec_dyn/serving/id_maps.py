"""The id map of one served table, a part of a mapped file.

The same open addressing as in training (csrc/storage/id_map.h), fuller since it hardly grows: 23 bytes an id.
Sorted ids would take 8, and a binary search 12 to 15 times as long (1M and 10M ids, 5,120 a call, one thread:
22 and 33 ns an id against 258 and 507; interpolation by torch's own ops is slower than that).

Legend: C slots, M ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchrec_dyn import ops

SLOT_BYTES = 16
_LINE_SLOTS = 4
# A map is made with the first load; deltas fill it up to the second, then a larger one is made.
_LOAD, _MOST_LOAD = 0.7, 0.8
_PIECE = 1 << 18
_AT_REST = torch.tensor([-1])


def slots_for(ids: int) -> int:
    """Returns the slots of a new map for `ids` ids: whole lines."""
    return -(-int(ids / _LOAD) // _LINE_SLOTS) * _LINE_SLOTS + (_LINE_SLOTS if ids else 0)


def has_room(slots: int, ids: int) -> bool:
    """True if a map of so many slots may hold so many ids."""
    return ids <= slots * _MOST_LOAD


class ServedMap:
    """Finds, inserts and removes ids.

    Args:
        slots: [C, 2] int64, written in place.
    """

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots

    def find(self, ids: Tensor) -> Tensor:
        """Returns rows [M], -1 where the id is absent.

        Args:
            ids: [M] int64.
        """
        return ops.lookup(ids, torch.tensor([0, len(ids)]), [self.slots], _AT_REST)[0]

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """Inserts distinct absent ids.

        Args:
            ids: [M] int64.
            rows: [M] int64.
        """
        ops.insert(ids, rows, torch.tensor([0, len(ids)]), [self.slots], _AT_REST)

    def take(self, ids: Tensor) -> Tensor:
        """Removes ids and returns the rows [M] that they held, -1 where absent.

        Args:
            ids: [M] int64.
        """
        return ops.erase(ids, [self.slots], _AT_REST)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields ids, rows and slots [M] int64 of the whole map, some slots at a time."""
        for first in range(0, len(self.slots), _PIECE):
            piece = self.slots[first : first + _PIECE]
            taken = piece[:, 1].nonzero().view(-1)
            found = piece[taken]
            yield found[:, 0].contiguous(), found[:, 1] - 1, taken + first

    def renumber(self, slots: Tensor, rows: Tensor) -> None:
        """Writes other rows for the ids in some slots.

        Args:
            slots: [M] int64, of `pieces`.
            rows: [M] int64.
        """
        self.slots[slots, 1] = rows + 1
