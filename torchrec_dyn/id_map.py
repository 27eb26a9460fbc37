"""IdMap: id -> row, over one tensor of slots (csrc/id_map.h tells the layout and the rules).

Legend: C slots, M ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops

# A slot is an id and a row, 8 bytes each.
SLOT_BYTES = 16
# Slots in use before the map grows. Linear probing looks at (1 + 1/(1 - load)) / 2 = 2.5 slots for a
# known id at this load and 8.5 for an unknown one (Knuth, TAOCP vol. 3, section 6.4).
MAX_LOAD = 0.75
_FIRST_CAPACITY = 64
# Small maps double; large ones grow by half, which bounds the bytes a row to SLOT_BYTES * 1.5 / MAX_LOAD.
_LARGE_CAPACITY = 1 << 17


def most_slots(ids: int) -> int:
    """Bounds the slots of a map that grew to `ids` ids, however they came: planners pay for these.

    Args:
        ids: slots in use.
    """
    needed = int(ids / MAX_LOAD) + 1
    return max(_FIRST_CAPACITY, 2 * min(needed, _LARGE_CAPACITY), needed * 3 // 2)


def canonical_order(ids: Tensor) -> Tensor:
    """Returns the permutation that sorts ids by their mixed id, unsigned.

    Args:
        ids: [M] int64.
    """
    # Flipping the sign bit turns the unsigned order into the signed one.
    return torch.argsort(ops.mix64(ids) ^ torch.iinfo(torch.int64).min)


class IdMap:
    """Gives every id of a table its row.

    Attributes:
        slots: [C, 2] int64: id, row; an empty slot has row -1.
        num_ids: slots in use.
    """

    def __init__(self) -> None:
        self.slots: Tensor = torch.empty(0, 2, dtype=torch.int64)
        self.num_ids: int = 0

    @property
    def capacity(self) -> int:
        """Slots of the map."""
        return self.slots.shape[0]

    def reserve(self, additional: int) -> None:
        """Grows the map so that `additional` more ids fit. Peak memory: the old and the new slots."""
        needed = int((self.num_ids + additional) / MAX_LOAD) + 1
        if needed <= self.capacity:
            return
        factor = 2.0 if self.capacity < _LARGE_CAPACITY else 1.5
        self.slots = ops.rehash(
            self.slots, max(_FIRST_CAPACITY, int(self.capacity * factor), needed)
        )

    def lookup(self, ids: Tensor) -> Tensor:
        """Finds rows; -1 where the id is absent.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64.
        """
        return ops.lookup(ids, torch.tensor([0, ids.numel()]), [self.slots])[0]

    def erase(self, ids: Tensor) -> Tensor:
        """Takes ids out of the map.

        Args:
            ids: [M] int64.

        Returns:
            The rows they held, without those of absent ids.
        """
        rows = ops.erase(ids, self.slots)
        rows = rows[rows >= 0]
        self.num_ids -= rows.numel()
        return rows

    def contents(self) -> tuple[Tensor, Tensor]:
        """Lists what the map holds in canonical order.

        Returns:
            ids: [M] int64.
            rows: [M] int64.
        """
        used = self.slots[self.slots[:, 1] >= 0]
        ids, rows = used[:, 0].contiguous(), used[:, 1].contiguous()
        order = canonical_order(ids)
        return ids[order], rows[order]

    @property
    def bytes(self) -> int:
        """Bytes of the slots."""
        return self.capacity * SLOT_BYTES

    def stats(self) -> dict[str, int | float]:
        """Returns slots, load (ids / slots) and the mean and longest probe of a known id."""
        lengths = ops.probe_lengths(self.slots)
        lengths = lengths[lengths > 0]
        return {
            "slots": self.capacity,
            "load": self.num_ids / self.capacity if self.capacity else 0.0,
            "probe_length_mean": float(lengths.double().mean()) if lengths.numel() else 0.0,
            "probe_length_max": int(lengths.max()) if lengths.numel() else 0,
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
