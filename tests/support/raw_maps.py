"""Id maps as the ops take them: arrays of slots, filled and read by direct op calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from table_cases import ids_of
from torch import Tensor

from torchrec_dyn import ops

CPU = torch.ops.torchrec_dyn
WHOLE = ids_of(-1)  # `moved` of a single map that is not growing, with key 0


def slots_of(capacity: int, place: int = 0) -> Tensor:
    """Returns slots that are filled with one number; 0 is an empty map."""
    return torch.full((capacity, 2), place)


def put(slots: Tensor, ids: Sequence[int], first_row: int = 0) -> None:
    """Inserts the ids with the rows `first_row`, `first_row + 1`, and so on."""
    rows = torch.arange(first_row, first_row + len(ids))
    ops.insert(ids_of(*ids), rows, ids_of(0, len(ids)), [slots], WHOLE)


def look(slots: Tensor, ids: Sequence[int]) -> list[int]:
    """Returns the rows of the ids, -1 for an absent id."""
    rows, absent = ops.lookup(ids_of(*ids), ids_of(0, len(ids)), [slots], WHOLE)
    assert absent.tolist() == [rows.tolist().count(-1)]
    return rows.tolist()


def a_map(
    ids: Sequence[int] | Tensor,
    rows: Sequence[int] | Tensor,
    is_growing: bool = False,
    room: float = 1.7,
    key: int = 0,
) -> tuple[list[Tensor], Tensor]:
    """Returns (slots, moved [1, 2]) of a map that holds the ids; half of a growing map's slots are moved.

    The CPU makes it for every device: a GPU moves all slots at once, so a map made there never grows.
    """
    slots = [CPU.new_slots(torch.empty(0, 2, dtype=torch.int64), int(room * len(ids)) // 4 * 4 + 8)]
    whole = torch.tensor([[-1, key]])
    CPU.insert(torch.as_tensor(ids), torch.as_tensor(rows), ids_of(0, len(ids)), slots, whole)
    if not is_growing:
        return slots, whole
    grown = CPU.new_slots(slots[0], len(slots[0]) + 4)
    moved = CPU.move_slots(slots[0], grown, 0, len(slots[0]) // 2, key).item()
    if moved == len(slots[0]):  # one run to the end
        return [grown], whole
    return [grown, *slots], torch.tensor([[moved, key]])
