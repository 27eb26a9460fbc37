"""Reduction of the gradients that several ranks send for one row.

Let W be the number of ranks, and g_r the gradient that rank r sends for an id, summed over the id's
occurrences.

- "mean_over_ranks": the sum of g_r / W, as TorchRec's dists divide.
- "mean_over_senders": the sum of g_r / the number of ranks that sent the id in this batch.
- "sum": the sum of g_r.

Source: ReCIS' `grad_reduce_by` with the values "worker", "id" and "worker_sum".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.config import DynamicTableConfig


@dataclass(frozen=True)
class Senders:
    """The senders of a batch.

    Attributes:
        bags: [F][ranks] number of bags of each feature from each rank, in the order of the batch.
        divisor: the number by which the dists have divided gradients.
    """

    bags: Sequence[Sequence[int]]
    divisor: int


@dataclass(frozen=True)
class Reduction:
    """The arguments of `ops.update_rows_` that scale the gradient sums of a batch.

    Attributes:
        scales: [T], the factor of each table's sums.
        senders: [N] int32, the rank that sent each id; -1 for an id of a table that does not divide by the
            number of senders. None if no table divides by it.
    """

    scales: list[float]
    senders: Tensor | None


def asks_for_senders(configs: Sequence[DynamicTableConfig]) -> bool:
    """Returns True if a batch of these tables needs its `Senders`."""
    return any(config.gradient != "mean_over_ranks" for config in configs)


def reduction_of(
    configs: Sequence[DynamicTableConfig],
    offsets: Tensor,
    table_offsets: Tensor,
    senders: Senders,
) -> Reduction:
    """Returns the reduction of one batch that a dist has sent.

    offsets [bags + 1] int64, where each bag begins in the ids; table_offsets [T + 1] int64, where the ids of
    each table begin.
    """
    scales = [
        1.0 if config.gradient == "mean_over_ranks" else float(senders.divisor)
        for config in configs
    ]
    if all(config.gradient != "mean_over_senders" for config in configs):
        return Reduction(scales, None)
    ranks = _sender_of_each_id(offsets, senders.bags, int(table_offsets[-1]))
    for config, (begin, end) in zip(configs, pairwise(table_offsets.tolist()), strict=True):
        if config.gradient != "mean_over_senders":
            ranks[begin:end] = -1
    return Reduction(scales, ranks)


def _sender_of_each_id(offsets: Tensor, bags: Sequence[Sequence[int]], ids: int) -> Tensor:
    """Returns the rank that sent each of N `ids`, [N] int32 on the device of `offsets`.

    offsets [bags + 1] int64; bags [F][ranks] of each feature and rank.
    """
    ranks = torch.arange(len(bags[0]) if bags else 0, dtype=torch.int32, device="cpu")
    sizes = torch.tensor(bags, device="cpu").flatten().long()
    of_bags = ranks.repeat(len(bags)).repeat_interleave(sizes)
    of_bags = of_bags.to(offsets.device, non_blocking=True)
    return of_bags.repeat_interleave(offsets.diff(), output_size=ids)


def repeat_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Returns the row of each place, [N, columns]; gradients of a row are summed in the order of the places.

    rows [U, columns]; places [N] int64 or int32 in [0, U). Sums are float32. Not `index_select`: its backward
    adds in any order on CUDA, and in the dtype of the gradients. In half precision a sum of many gradients
    stops growing.
    """
    repeated: Tensor = _Repeat.apply(rows, places)
    return repeated


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.rows = rows.shape[0]
        ctx.save_for_backward(places)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return sums_by_place(grad.contiguous(), places, ctx.rows), None


def sums_by_place(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Sums rows by place in float32, in their order; returns [count, columns] in the dtype of `values`.

    values [N, columns] float32, float16 or bfloat16, contiguous; places [N] int64 or int32 in [0, count).
    """
    number, columns = values.shape
    if values.is_cpu or not number:
        sums = torch.zeros(count, columns, dtype=torch.float32, device=values.device)
        return sums.index_add_(0, places, values.float()).to(values.dtype)
    # `index_add_` of CUDA adds in any order. Here the values of a place are a bag, which is pooled in order.
    sorted_places, order = torch.sort(places, stable=True)
    bounds = torch.arange(count + 1, dtype=places.dtype, device=places.device)
    offsets = torch.searchsorted(sorted_places, bounds)
    layout = torch.tensor([[0, 1, (number - 1).bit_length(), columns]], device="cpu")
    segments = torch.tensor([[0, 0, count, 0, columns]], device="cpu")
    sums = ops.gather_pool(
        order, offsets, None, [values], layout, segments, False, count * columns, values.dtype
    )
    return sums.view(count, columns)
