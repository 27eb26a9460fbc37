"""Max pooling: of rows that were looked up one by one, where the bag lives.

Equal values, NaN and empty bags have torch's rule, since torch's op takes the maximum; the gradient goes to
the first of equal values in the bag. It is the same op unsharded and under every plan.

Legend: F features, B bags of a feature, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.lookup.batch import Batch

_MAX = 2  # torch.embedding_bag's number of this mode


def largest_of_batch(rows: Tensor, batch: Batch) -> Tensor:
    """Returns the output of a batch, as that of bags that are summed, from its rows [N, columns]."""
    assert batch.offsets is not None
    sizes = batch.first_bags.diff().tolist()
    by_feature = largest_rows(rows, batch.offsets).split(sizes)
    return pooled_output(by_feature, batch.batch_sizes)


def pooled_output(
    by_feature: Sequence[Tensor], batch_sizes: Sequence[Sequence[int]] | None
) -> Tensor:
    """Returns the outputs of features, [bags, columns] each, as one: side by side, [B, sum of columns].

    With batch_sizes [F][ranks] in one dimension: rank by rank, and feature by feature.
    """
    if batch_sizes is None:
        return torch.cat([*by_feature], dim=1)
    pairs = zip(by_feature, batch_sizes, strict=True)
    by_rank = zip(*(output.split([*sizes]) for output, sizes in pairs), strict=True)
    return torch.cat([part.flatten() for parts in by_rank for part in parts])


def largest_rows(rows: Tensor, offsets: Tensor, places: Tensor | None = None) -> Tensor:
    """Returns the largest value of each column in each bag, [B, columns]; zeros for an empty bag.

    rows [N, columns]; offsets [B + 1] int64; places [N] int64, the row of each id, bag after bag, each row
    once; None: the rows are in this order.
    """
    if places is None:
        places = torch.arange(len(rows), device=rows.device)
    largest: Tensor = _Largest.apply(rows, offsets, places)
    return largest


def largest_of_bags(rows: Tensor, places: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest values and the rows that have them, [B, columns] each; bags as offsets [B + 1]."""
    largest, _, _, where = torch.embedding_bag(
        rows, places, offsets, mode=_MAX, include_last_offset=True
    )
    return largest, where


class _Largest(torch.autograd.Function):
    """The forward of torch.nn.EmbeddingBag; torch's backward refuses to be deterministic on CUDA."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, places: Tensor) -> Tensor:
        largest, where = largest_of_bags(rows, places, offsets)
        nowhere = (offsets.diff() == 0).unsqueeze(1)  # torch says 0 for an empty bag
        ctx.save_for_backward(where.masked_fill(nowhere, len(rows)))
        ctx.rows = len(rows)
        return largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        # No place but the last, of empty bags, is written twice: a row is in one bag.
        grads = grad.new_zeros(ctx.rows + 1, grad.shape[1]).scatter_(0, places, grad)
        return grads[:-1], None, None
