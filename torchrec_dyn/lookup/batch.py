"""Batch: what a caller says of the ids of one forward; TakenStep: what the step has made of them.

Legend: T tables, F features (in table order), B bags of a feature, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.lookup.bag_layout import Bags
from torchrec_dyn.lookup.feature_uses import Uses
from torchrec_dyn.lookup.first_read import UnreadCounts
from torchrec_dyn.lookup.gradient_reduction import Senders

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass
class Batch:
    """The ids of one forward, made once where they arrive. The fields are told in `TableGroup.__call__`.

    Attributes:
        bags: the description for the ops, as soon as it is known.
        uses: of the ids, as soon as they are known; None if each does all, and in evaluation.
        table_offsets: [T + 1] int64 on the CPU, where the ids of each table begin, as soon as it is known.
    """

    ids: Tensor
    offsets: Tensor = _NONE
    weights: Tensor | None = None
    training: bool = True
    batch_sizes: Sequence[Sequence[int]] | None = None
    counts: Sequence[int] | UnreadCounts | None = None
    senders: Senders | None = None
    times: Tensor | None = None
    scores: Tensor | None = None
    bags: Bags | None = None
    uses: Uses | None = None
    table_offsets: Tensor = _NONE


class TakenStep(NamedTuple):
    """The rows of a batch after its step, or without one in evaluation.

    Attributes:
        rows: [N] int64, the rows that the forward reads, -1 for an id without a row.
        missing: number of -1 in `rows`; with `times`, an id of a trained table counts `times` times.
        new_index: [N] int64, -1 for an id that had a row before the step; None if all had.
        learning: [N] int64, the rows that the backward updates, -1 for an id without an update: the same
            tensor as `rows` if no table is frozen and every feature trains. None in evaluation.
        streams: [T, 3] int64 on the CPU, for `ops.update_rows_`; None in evaluation.
        noted: `tokens_of` the logs, after the step recorded the rows as changed; None without a record.
    """

    rows: Tensor
    missing: int
    new_index: Tensor | None = None
    learning: Tensor | None = None
    streams: Tensor | None = None
    noted: list[object] | None = None
