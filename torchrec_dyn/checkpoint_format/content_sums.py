"""Content sums: the numbers by which a saved table is checked before any of it is used.

The sum of a tensor of rows does not depend on how rows and columns are split. So every rank sums its own
part, and the total is the sum of the whole table, under any plan. One wrong number always changes the sum.

Legend: M rows, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.initializers import table_key
from torchrec_dyn.optimizers import STATE_NAMES
from torchrec_dyn.storage import CROSSING_BYTES, signed, unsigned

# The tensors of a table in the order of their sums, in the model's and in the optimizer's state dict. An
# optimizer has no sums behind the last of its states that stands behind "config".
MODEL_TENSORS = ("ids", "weight", "last_seen", "count", "waiting", "clock", "config")
_LATER_STATES = STATE_NAMES[2:]
OPTIMIZER_TENSORS = (*STATE_NAMES[:2], "step", "config", *_LATER_STATES)
# The shapes that an optimizer's "checksum" may have.
OPTIMIZER_WORDS = tuple((4 + states,) for states in range(len(_LATER_STATES) + 1))
# All tensor names of a table in the model's state dict; the last two tensors are not summed.
MODEL_NAMES = (*MODEL_TENSORS, "checksum", "cells")
# Bytes of rows that are copied and summed at a time: they stay in the caches, in memory that is reused.
# The host waits for each sum of a GPU, so a GPU sums as many rows as cross to the host at a time.
_SUMMED_BYTES = {"cpu": 4 << 20}
# The end of every message about damage.
DAMAGED = "The checkpoint is damaged; use an earlier checkpoint."


def rows_summed(row_bytes: int, device: torch.device) -> int:
    """Returns the number of rows that are copied and summed at a time."""
    return max(1, _SUMMED_BYTES.get(device.type, CROSSING_BYTES) // row_bytes)


def content_sum(table: str, name: str, ids: Tensor, values: Tensor, first_column: int = 0) -> int:
    """Returns the content sum of rows of one tensor, in [0, 2^64) (formula: csrc/storage/content_sum.h).

    values [M, D] or [M] are the rows of ids [M] int64; their first column is `first_column` of the whole
    tensor.
    """
    columns = values.reshape(ids.numel(), -1) if ids.numel() else values.new_empty(0, 1)
    key = table_key(0, table, f"sum {name}")
    # A state dict may have been loaded onto another device than its table.
    ids = ids.to(values.device)
    return unsigned(int(ops.content_sum(ids, columns.contiguous(), first_column, key)))


def sum_of_small(table: str, name: str, saved: Tensor) -> int:
    """Returns the content sum of a tensor that is not by row.

    saved: the tensor: "clock" [2, K], "step" [], "config" [n] or "waiting" [Q, 3].
    """
    rows = saved.t() if name == "clock" else saved if saved.dim() == 2 else saved.reshape(-1, 1)
    rows = rows.to(torch.int64)
    if name == "waiting":
        return content_sum(table, name, rows[:, 0].contiguous(), rows)
    return content_sum(table, name, torch.arange(len(rows), device=rows.device), rows)


def add_sums(*sums: Mapping[str, int]) -> dict[str, int]:
    """Returns the sums of parts added up, tensor by tensor, modulo 2^64."""
    names = dict.fromkeys(name for of_part in sums for name in of_part)
    return {name: unsigned(sum(of_part.get(name, 0) for of_part in sums)) for name in names}


def as_words(sums: Mapping[str, int], order: tuple[str, ...]) -> Tensor:
    """Returns sums by tensor as the saved "checksum", [W] int64, 0 for a tensor without a sum.

    `order` is MODEL_TENSORS or OPTIMIZER_TENSORS; [W] is of OPTIMIZER_WORDS or [7].
    """
    names = [*order]
    while names[-1] in _LATER_STATES and names[-1] not in sums:
        names.pop()
    return torch.tensor([signed(sums.get(name, 0)) for name in names], device="cpu")


def from_words(words: Tensor, order: tuple[str, ...]) -> dict[str, int]:
    """Returns the content sums in a saved "checksum", by tensor.

    words: [W] int64, as `as_words` returns them; `order` is MODEL_TENSORS or OPTIMIZER_TENSORS.
    """
    saved = words.tolist()
    if order == OPTIMIZER_TENSORS and words.shape in OPTIMIZER_WORDS:
        saved += [0] * (len(order) - len(saved))
    return {name: unsigned(word) for name, word in zip(order, saved, strict=True)}


def compare_sums(
    where: str,
    words: Tensor,
    order: tuple[str, ...],
    names: Iterable[str],
    summed: Mapping[str, int],
) -> None:
    """Raises ValueError if the content sum of a tensor differs from the saved sum.

    words: [W] int64, the saved "checksum" in an `order`, MODEL_TENSORS or OPTIMIZER_TENSORS. `names` are
    compared; a tensor that is not in `summed` counts as 0.
    """
    saved = from_words(words, order)
    for name in names:
        if saved[name] != summed.get(name, 0):
            raise ValueError(
                f"{where}: expected {name} with content sum {saved[name]:016x}, got "
                f"{summed.get(name, 0):016x}. {DAMAGED}"
            )
