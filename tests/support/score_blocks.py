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


def prepared(blocks: list[Tensor], shift: int) -> Tensor:
    """Returns one table with these scores, without a map and rows, as the ops take it."""
    layout, nothing = ids_of(0, len(blocks), shift, 1), torch.empty(0, 2, dtype=torch.int64)
    no_rows = ids_of(0, 0, 0, 1).view(1, 4)
    return ops.prepare_tables(
        [], nothing, [], [], no_rows, 0, [], [], None, None, [], blocks, layout.view(1, 4)
    )


def read_rows(blocks: list[Tensor], shift: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns last_seen and counts of rows [M] of one table."""
    handle = prepared(blocks, shift)
    return ops.read_scores(rows, ids_of(0, len(rows)), handle)


def write_rows(
    blocks: list[Tensor], shift: int, rows: Tensor, seen: Tensor, counts: Tensor
) -> None:
    """Writes last_seen [M] and counts [M] of rows [M] of one table."""
    handle = prepared(blocks, shift)
    ops.write_scores_(rows, ids_of(0, len(rows)), seen, counts, handle)


def write(blocks: list[Tensor], shift: int, scores: dict[int, tuple[int, int]]) -> None:
    """Writes {row: (last_seen, count)}."""
    rows = ids_of(*scores)
    seen, counts = (
        ids_of(*(s for s, _ in scores.values())),
        ids_of(*(c for _, c in scores.values())),
    )
    write_rows(blocks, shift, rows, seen, counts)
