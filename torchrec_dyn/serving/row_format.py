"""The format of served rows, which is the format of FBGEMM's inference tables.

    float32, float16    the numbers, rounded to nearest
    int8                scale and bias (float16), then one byte a column: value = scale * byte + bias

The bias is the least number of the row, rounded down to float16. The scale is a 255th of the range from the
bias to the largest number, rounded up. So every number is inside the range of the bytes, and its error is at
most scale / 2: half a 255th of the row's range, and up to a thousandth more for each of the two roundings.

Legend: M rows, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_DTYPES = (torch.float32, torch.float16, torch.int8)
_SCALE_AND_BIAS_BYTES = 4
_STEPS = 255
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class RowFormat:
    """A format of served rows, named by the dtype of the encoded numbers: float32, float16 or int8."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in ROW_DTYPES:
            raise ValueError(
                f"serving: expected rows of float32, float16 or int8, got {self.dtype}. "
                "Pass rows=torch.float32, torch.float16 or torch.int8."
            )

    def row_bytes(self, columns: int) -> int:
        """Returns the number of bytes of a row."""
        extra = _SCALE_AND_BIAS_BYTES if self.dtype == torch.int8 else 0
        return columns * self.dtype.itemsize + extra

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of stored rows as a tensor: rows of int8 are bytes, with scale and bias."""
        return torch.uint8 if self.dtype == torch.int8 else self.dtype

    def stored_columns(self, columns: int) -> int:
        """Returns the number of columns of stored rows as a tensor of `stored_dtype`."""
        return self.row_bytes(columns) // self.stored_dtype.itemsize

    def is_exact_for(self, dtype: torch.dtype) -> bool:
        """Returns True if rows of a dtype are encoded and decoded without rounding."""
        return self.dtype == dtype or self.dtype == torch.float32

    def encode(self, rows: Tensor, where: str) -> Tensor:
        """Returns encoded rows, [M, row_bytes] uint8.

        Args:
            rows: [M, D] floating point.
            where: the table, for messages.

        Raises:
            ValueError: if a number is too large for the format, or is NaN and the format is int8.
        """
        if self.dtype == torch.int8:
            return _encode_int8(rows.float(), where)
        written = rows.to(self.dtype).contiguous()
        # A wider format rounds nothing. An infinite number is rare: most rows are read once.
        is_exact = self.is_exact_for(rows.dtype)
        if not is_exact and bool(written.isinf().any()) and bool(_became_infinite(rows, written)):
            raise _too_large(where, "float16", rows)
        return written.view(torch.uint8).view(len(rows), self.row_bytes(rows.shape[1]))

    def decode(self, written: Tensor) -> Tensor:
        """Returns decoded rows, [M, D] float32.

        Args:
            written: [M, row_bytes] uint8.
        """
        if self.dtype != torch.int8:
            return written.contiguous().view(self.dtype).float()
        head, steps = written.split([_SCALE_AND_BIAS_BYTES, written.shape[1] - 4], dim=1)
        scale, bias = head.contiguous().view(torch.float16).float().split(1, dim=1)
        return steps.float() * scale + bias


def _became_infinite(rows: Tensor, written: Tensor) -> Tensor:
    return (written.isinf() & rows.isfinite()).any()


def _encode_int8(rows: Tensor, where: str) -> Tensor:
    if rows.numel() == 0:
        return torch.empty(len(rows), rows.shape[1] + _SCALE_AND_BIAS_BYTES, dtype=torch.uint8)
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    bias = _to_half(low, up=False)
    scale = _to_half((high - bias.float()) / _STEPS, up=True)
    if not bool(((low.abs() <= _LARGEST) & scale.isfinite() & high.isfinite()).all()):
        raise _too_large(where, "int8", rows)
    steps = (rows - bias.float()).div_(torch.where(scale == 0, 1.0, scale.float()))
    steps = steps.round_().clamp_(0, _STEPS).to(torch.uint8)
    return torch.cat([scale.view(torch.uint8), bias.view(torch.uint8), steps], dim=1)


def _to_half(numbers: Tensor, up: bool) -> Tensor:
    """Rounds float32 to float16, up or down."""
    nearest = numbers.half()
    is_past = nearest.float() < numbers if up else nearest.float() > numbers
    # Integers in the order of the numbers: the next number is one more or one less.
    bits = nearest.view(torch.int16).int()
    order = torch.where(bits < 0, -(bits & 0x7FFF), bits) + is_past.int() * (1 if up else -1)
    bits = torch.where(order < 0, -order | -0x8000, order)
    return bits.to(torch.int16).view(torch.float16)


def _too_large(where: str, dtype: str, rows: Tensor) -> ValueError:
    return ValueError(
        f"{where}: expected rows of numbers that {dtype} can hold (float16's largest is 65504), got rows "
        f"up to {rows.float().abs().max():g}. Serve it with rows=torch.float32."
    )
