"""Checks of the tensors of a saved table: their shapes, and the order of their ids.

Legend: R rows, D columns, N removed ids, Q waiting ids, K times, S ranks, M ids.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchrec_dyn.checkpoint_format.chunked_tensor import ChunkedTensor
from torchrec_dyn.checkpoint_format.content_sums import (
    CHECKSUM_WORDS,
    MODEL_CHECKSUM,
    OPTIMIZER_CHECKSUM,
    SUMMED,
)
from torchrec_dyn.optimizers import STATE_NAMES
from torchrec_dyn.storage import canonical_keys

ROW_TENSORS = ("ids", "weight", "last_seen", "count", *STATE_NAMES)
SMALL_TENSORS = ("waiting", "clock", "config", "step", "optimizer_config")
# Ids: their mixed ids stay in the caches, in memory that is reused.
_CHECKED_TOGETHER = 1 << 15
SHAPES = {
    "ids": "[R] int64",
    "weight": "[R, D]",
    "last_seen": "[R] int64",
    "count": "[R] int64",
    "waiting": "[Q, 3] int64",
    "clock": "[2, K] int64",
    "config": "[n] uint8",
    MODEL_CHECKSUM: f"[S, {CHECKSUM_WORDS}] int64",
    **dict.fromkeys(STATE_NAMES, "[R, columns] float32"),
    "step": "[] int64",
    "optimizer_config": "[n] uint8",
    OPTIMIZER_CHECKSUM: f"[S, {CHECKSUM_WORDS}] int64",
    "removed": "[N] int64",
    "base": f"[{len(SUMMED)}] int64",
    "result": f"[{len(SUMMED)}] int64",
}


def fits(tensor: ChunkedTensor, rule: str, sizes: Mapping[str, int]) -> bool:
    """Returns True if a tensor has the shape and dtype of a rule of `SHAPES`.

    `sizes` are by word of the rule; other words match any size.
    """
    shape, _, dtype = rule[1:].partition("]")
    words = [word.strip() for word in shape.split(",") if word]
    return (
        len(words) == len(tensor.shape)
        and all(
            size == sizes.get(word, int(word) if word.isdigit() else size)
            for word, size in zip(words, tensor.shape, strict=True)
        )
        and dtype.strip() in ("", str(tensor.dtype).removeprefix("torch."))
    )


def is_canonical(ids: Tensor) -> bool:
    """Returns True if ids [M] int64 are distinct and in canonical order."""
    for begin in range(0, ids.numel(), _CHECKED_TOGETHER):
        keys = canonical_keys(ids[begin : begin + _CHECKED_TOGETHER + 1])
        if not (keys[1:] > keys[:-1]).all():
            return False
    return True
