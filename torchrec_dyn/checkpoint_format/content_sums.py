"""Content sums: what a saved table is checked by before any of it is used.

The sum of a tensor of rows does not depend on how rows and columns are split, so every rank sums what it
holds and the total is that of the whole table, whatever the plan. One wrong number always changes it.

Legend: M rows, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.initializers import table_key
from torchrec_dyn.optimizers import STATE_NAMES
from torchrec_dyn.storage import signed, unsigned

# The tensors of a table in the order of their sums, in the model's and in the optimizer's state dict.
MODEL_TENSORS = ("ids", "weight", "last_seen", "count", "waiting", "clock", "config")
OPTIMIZER_TENSORS = (*STATE_NAMES, "step", "config")
# All names that the model's state dict has of a table; the last two are not summed.
MODEL_NAMES = (*MODEL_TENSORS, "checksum", "cells")
# The end of every message that says so.
DAMAGED = "The checkpoint is damaged; use the one before."


def content_sum(table: str, name: str, ids: Tensor, values: Tensor, first_column: int = 0) -> int:
    """Sums rows of one tensor of a table (csrc/storage/content_sum.h: the formula).

    Args:
        table: its name.
        name: of the tensor.
        ids: [M] int64.
        values: [M, D] or [M].
        first_column: number of the first column.

    Returns:
        A number in [0, 2^64).
    """
    columns = values.reshape(ids.numel(), -1) if ids.numel() else values.new_empty(0, 1)
    key = table_key(0, table, f"sum {name}")
    return unsigned(int(ops.content_sum(ids, columns.contiguous(), first_column, key)))


def sum_of_small(table: str, name: str, saved: Tensor) -> int:
    """Sums a tensor that is not one row an id: "clock" [2, K], "step" [], "config" [n], "waiting" [Q, 3].

    Args:
        table: its name.
        name: of the tensor.
        saved: the tensor.
    """
    rows = saved.t() if name == "clock" else saved if saved.dim() == 2 else saved.reshape(-1, 1)
    rows = rows.to(torch.int64)
    ids = rows[:, 0].contiguous() if name == "waiting" else torch.arange(len(rows))
    return content_sum(table, name, ids, rows)


def add_sums(*sums: Mapping[str, int]) -> dict[str, int]:
    """Adds the sums of parts, tensor by tensor, modulo 2^64."""
    names = dict.fromkeys(name for of_part in sums for name in of_part)
    return {name: unsigned(sum(of_part.get(name, 0) for of_part in sums)) for name in names}


def as_words(sums: Mapping[str, int], order: tuple[str, ...]) -> Tensor:
    """Writes sums as the saved "checksum", 0 for a tensor without a sum.

    Args:
        sums: by tensor.
        order: MODEL_TENSORS or OPTIMIZER_TENSORS.

    Returns:
        [len(order)] int64.
    """
    return torch.tensor([signed(sums.get(name, 0)) for name in order])


def from_words(words: Tensor, order: tuple[str, ...]) -> dict[str, int]:
    """Reads what `as_words` wrote.

    Args:
        words: [len(order)] int64.
        order: MODEL_TENSORS or OPTIMIZER_TENSORS.
    """
    return {name: unsigned(word) for name, word in zip(order, words.tolist(), strict=True)}


def compare_sums(
    where: str,
    words: Tensor,
    order: tuple[str, ...],
    names: Iterable[str],
    summed: Mapping[str, int],
) -> None:
    """Raises ValueError if tensors are not those that were saved.

    Args:
        where: the table, for messages.
        words: the saved "checksum".
        order: MODEL_TENSORS or OPTIMIZER_TENSORS.
        names: of the tensors to compare.
        summed: the content sums of what was read, 0 for a tensor that is missing.
    """
    saved = from_words(words, order)
    for name in names:
        if saved[name] != summed.get(name, 0):
            raise ValueError(
                f"{where}: expected {name} with content sum {saved[name]:016x}, got "
                f"{summed.get(name, 0):016x}. {DAMAGED}"
            )


def check_config_is_whole(
    where: str, table: str, saved: Mapping[str, Tensor], order: tuple[str, ...]
) -> None:
    """Raises ValueError if the config of a table is damaged; to be called before the config is read.

    Args:
        where: the table, for messages.
        table: its name.
        saved: tensors by name.
        order: MODEL_TENSORS or OPTIMIZER_TENSORS.
    """
    if {"config", "checksum"} <= saved.keys():
        summed = {"config": sum_of_small(table, "config", saved["config"])}
        compare_sums(where, saved["checksum"], order, summed, summed)
