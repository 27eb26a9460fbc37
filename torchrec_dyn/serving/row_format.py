"""The format of served rows, which is the format of FBGEMM's inference tables.

    float32, float16    the numbers, rounded to nearest
    int8                scale and bias (float16), then one byte a column: value = scale * byte + bias
    int4                scale and bias (float16), then half a byte a column, the first in the low half

int8: the bias is the least number of the row, rounded down to float16. The scale is a 255th of the range from
the bias to the largest number, rounded up. So every number is inside the range of the bytes, and its error is
at most scale / 2. Of numbers from a to b the scale is at most (1 + 2^-10) (b - a + r) / 255 + 2^-24, where
r = 2^-10 |a| + 2^-24 is the rounding of the bias.

int4: the numbers are those of FBGEMM's FloatToFusedNBitRowwiseQuantizedSBHalf, whose rows have scale and bias
at the end; its kernels for inference expect them at the begin. The bias is the least number a, and the scale
a 15th of the range from it to the largest number b, each rounded to nearest in float16. So the error is at
most half a step, (b - a) / 30, and what the two roundings add: r(a) + 15 r((b - a) / 15), where
r(x) = max(2^-11 |x|, 2^-25).

Legend: M rows, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_dyn.serving.nbit import INT4, SCALE_AND_BIAS_BYTES, quantize_int4

ROW_DTYPES = (torch.float32, torch.float16, torch.int8, INT4)
_STEPS = 255
_INT4_COLUMNS = 4
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class RowFormat:
    """A format of served rows, named by the dtype of the encoded numbers: one of `ROW_DTYPES`."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in ROW_DTYPES:
            raise ValueError(
                f"serving: expected rows of float32, float16, int8 or int4, got {self.dtype}. "
                "Pass rows=torch.float32, torch.float16, torch.int8 or torch.int4."
            )

    def row_bytes(self, columns: int) -> int:
        """Returns the number of bytes of a row."""
        extra = SCALE_AND_BIAS_BYTES if self.is_nbit else 0
        if self.dtype == INT4:
            return -(-columns // 2) + extra
        return columns * self.dtype.itemsize + extra

    @property
    def is_nbit(self) -> bool:
        """True for int8 and int4: numbers of a few bits, with a scale and a bias a row."""
        return self.dtype in (torch.int8, INT4)

    def spare_bytes(self, columns: int) -> int:
        """Returns the number of bytes behind the last row that a lookup may read.

        Without AVX-512 FBGEMM's kernel reads 4 bytes behind a row if D is no multiple of 8.
        """
        return 64 if self.is_nbit and columns % 8 else 0

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of stored rows as a tensor: rows of int8 and int4 are bytes, with scale and bias."""
        return torch.uint8 if self.is_nbit else self.dtype

    def stored_columns(self, columns: int) -> int:
        """Returns the number of columns of stored rows as a tensor of `stored_dtype`."""
        return self.row_bytes(columns) // self.stored_dtype.itemsize

    def is_exact_for(self, dtype: torch.dtype) -> bool:
        """Returns True if rows of a dtype are encoded and decoded without rounding."""
        return self.dtype == dtype or self.dtype == torch.float32

    def encode(self, rows: Tensor, where: str) -> Tensor:
        """Returns encoded rows, [M, row_bytes] uint8.

        rows: [M, D] floating point.

        Raises:
            ValueError: if a number is too large for the format, or is NaN and the format is int8 or int4; or
                if the format is int4 and D is no multiple of 4.
        """
        if self.dtype == INT4:
            return _encode_int4(rows.float(), where)
        if self.dtype == torch.int8:
            return _encode_int8(rows.float(), where)
        written = _widened(rows) if self.dtype == torch.float32 else rows.to(self.dtype)
        written = written.contiguous()
        # A wider format rounds nothing. An infinite number is rare: most rows are read once.
        is_exact = self.is_exact_for(rows.dtype)
        if not is_exact and bool(written.isinf().any()) and bool(_became_infinite(rows, written)):
            raise _too_large(where, "float16", rows)
        return written.view(torch.uint8).view(len(rows), self.row_bytes(rows.shape[1]))

    def decode(self, written: Tensor) -> Tensor:
        """Returns decoded rows, [M, D] float32, of written [M, row_bytes] uint8."""
        if not self.is_nbit:
            return written.contiguous().view(self.dtype).float()
        head, steps = written.tensor_split([SCALE_AND_BIAS_BYTES], dim=1)
        scale, bias = head.contiguous().view(torch.float16).float().split(1, dim=1)
        if self.dtype == INT4:
            steps = torch.stack([steps & 15, steps >> 4], dim=2).flatten(1)
        return steps.float() * scale + bias

    def as_trained(self, written: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns rows [M, D] of a dtype that the format `is_exact_for`, bit for bit as they were encoded.

        written: [M, row_bytes] uint8; `dtype` is that of training.
        """
        numbers = written.contiguous().view(self.dtype)
        return numbers if dtype == self.dtype else _narrowed(numbers, dtype)


# torch's casts give NaNs other bits, and few numbers others than many. Content sums are of the bits.
def _widened(rows: Tensor) -> Tensor:
    """Casts to float32; `_narrowed` gives the bits back."""
    if rows.dtype != torch.float16:
        return rows.float()
    bits = rows.view(torch.int16).int()
    nans = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return torch.where(rows.isnan(), nans.view(torch.float32), rows.float())


def _narrowed(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts float32 to the dtype, float16 or bfloat16, from which `_widened` has cast it."""
    bits = numbers.view(torch.int32)
    if dtype == torch.bfloat16:
        return (bits >> 16).to(torch.int16).view(dtype)
    nans = bits >> 16 & 0x8000 | 0x7C00 | bits >> 13 & 0x3FF
    rows = numbers.to(dtype).view(torch.int16)
    return torch.where(numbers.isnan(), nans.to(torch.int16), rows).view(dtype)


def _became_infinite(rows: Tensor, written: Tensor) -> Tensor:
    return (written.isinf() & rows.isfinite()).any()


def _encode_int8(rows: Tensor, where: str) -> Tensor:
    if rows.numel() == 0:
        return torch.empty(
            len(rows), rows.shape[1] + SCALE_AND_BIAS_BYTES, dtype=torch.uint8, device="cpu"
        )
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    bias = _to_half(low, up=False)
    scale = _to_half((high - bias.float()) / _STEPS, up=True)
    if not bool(((low.abs() <= _LARGEST) & scale.isfinite() & high.isfinite()).all()):
        raise _too_large(where, "int8", rows)
    steps = (rows - bias.float()).div_(torch.where(scale == 0, 1.0, scale.float()))
    steps = steps.round_().clamp_(0, _STEPS).to(torch.uint8)
    return torch.cat([scale.view(torch.uint8), bias.view(torch.uint8), steps], dim=1)


def _encode_int4(rows: Tensor, where: str) -> Tensor:
    if rows.shape[1] % _INT4_COLUMNS:
        raise ValueError(
            f"{where}: expected a multiple of {_INT4_COLUMNS} columns for rows of int4, as FBGEMM does, got "
            f"{rows.shape[1]}. Serve them with rows=torch.int8."
        )
    if rows.numel() == 0:
        return torch.empty(
            len(rows), RowFormat(INT4).row_bytes(rows.shape[1]), dtype=torch.uint8, device="cpu"
        )
    low, high = torch.aminmax(rows, dim=1)
    # A range that float16 cannot hold in 15 steps is refused below; FBGEMM would write an infinite scale.
    if not bool(
        ((low.abs() <= _LARGEST) & ((high - low) <= 15 * _LARGEST) & high.isfinite()).all()
    ):
        raise _too_large(where, "int4", rows)
    return quantize_int4(rows)


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
