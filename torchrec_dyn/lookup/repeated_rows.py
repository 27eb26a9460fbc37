"""Repeats rows, and sums the gradients of the repeats in order, with the same bits on every device.

Legend: U rows, N places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrec_dyn import ops


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
