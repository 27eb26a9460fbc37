"""Blocks of scores as the ops take them."""

from __future__ import annotations

import torch
from table_cases import ids_of
from torch import Tensor

from torchrec_dyn import ops

FREE = 2**32 - 1  # last_seen in the score of a row without an id
MOST = 2**32 - 1  # the largest count


def blocks_of(rows: int, shift: int) -> list[Tensor]:
    """Returns blocks for at least `rows` rows, all of them free."""
    return [torch.full((1 << shift, 1), -(2**32)) for _ in range(-(-rows // (1 << shift)))]


def write(blocks: list[Tensor], shift: int, scores: dict[int, tuple[int, int]]) -> None:
    """Writes {row: (last_seen, count)}."""
    rows = ids_of(*scores)
    seen, counts = (
        ids_of(*(s for s, _ in scores.values())),
        ids_of(*(c for _, c in scores.values())),
    )
    ops.write_scores_(rows, seen, counts, blocks, shift)
