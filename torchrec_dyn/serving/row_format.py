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

Rows of int8 and int4 are pooled by FBGEMM's inference kernel, from one file with the rows of all tables. The
kernel takes one byte offset for each table. Here all offsets are 0: a row number counts rows of the table's
own width from the begin of the file.

Legend: M rows, N ids, F features, B bags of a feature, D columns of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import fbgemm_gpu  # noqa: F401  (registers the ops)
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from torch import Tensor, nn

from torchrec_dyn.checkpoint_format import content_sum

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
SCALE_AND_BIAS_BYTES = 4
_TYPES = {torch.int8: SparseType.INT8, INT4: SparseType.INT4}
_lookup = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
_quantize = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf
ROW_DTYPES = (torch.float32, torch.float16, torch.int8, INT4)
_STEPS = 255
_INT4_COLUMNS = 4
_HOST = EmbeddingLocation.HOST.value
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

    def encode(self, rows: Tensor, where: str) -> Tensor:
        """Returns rows [M, D] encoded, [M, row_bytes] uint8; ValueError if a number does not fit."""
        count, columns = rows.shape
        if self.dtype == INT4 and columns % _INT4_COLUMNS:
            raise ValueError(
                f"{where}: expected a multiple of {_INT4_COLUMNS} columns for rows of int4, as FBGEMM does, "
                f"got {columns}. Serve them with rows=torch.int8."
            )
        if self.is_nbit and count:
            encode = _encode_int4 if self.dtype == INT4 else _encode_int8
            return encode(rows.float(), where)
        written = _widened(rows) if self.dtype == torch.float32 else rows.to(self.stored_dtype)
        # An infinite number is rare: most rows are read once.
        may_round = self.dtype == torch.float16 and bool(written.isinf().any())
        if may_round and bool((written.isinf() & rows.isfinite()).any()):
            raise _too_large(where, "float16", rows)
        return written.contiguous().view(torch.uint8).view(count, self.row_bytes(columns))


def rows_of_width(rows: Tensor, width: int) -> Tensor:
    """Returns the whole rows in a rows file of a table's own width: [bytes] uint8 as [M, width]."""
    return rows[: len(rows) // width * width].view(-1, width)


def sum_of_rows(table: str, ids: Tensor, written: Tensor) -> int:
    """Returns the content sum of the encoded rows, written [M, row_bytes] uint8, of ids [M] int64."""
    words = nn.functional.pad(written, (0, -written.shape[1] % 4)).contiguous().view(torch.float32)
    return content_sum(table, "served rows", ids, words)


def _widened(rows: Tensor) -> Tensor:
    """Casts to float32, bit for bit the same for many numbers as for few: torch's casts change NaNs."""
    if rows.dtype != torch.float16:
        return rows.float()
    bits = rows.view(torch.int16).int()
    nans = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return torch.where(rows.isnan(), nans.view(torch.float32), rows.float())


def _encode_int8(rows: Tensor, where: str) -> Tensor:
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    bias = _to_half(low, up=False)
    scale = _to_half((high - bias.float()) / _STEPS, up=True)
    if not bool(((low.abs() <= _LARGEST) & scale.isfinite() & high.isfinite()).all()):
        raise _too_large(where, "int8", rows)
    steps = (rows - bias.float()).div_(torch.where(scale == 0, 1.0, scale.float()))
    steps = steps.round_().clamp_(0, _STEPS).to(torch.uint8)
    return torch.cat([scale.view(torch.uint8), bias.view(torch.uint8), steps], dim=1)


def _encode_int4(rows: Tensor, where: str) -> Tensor:
    low, high = torch.aminmax(rows, dim=1)
    # A range that float16 cannot hold in 15 steps is refused below; FBGEMM would write an infinite scale.
    if not bool(
        ((low.abs() <= _LARGEST) & ((high - low) <= 15 * _LARGEST) & high.isfinite()).all()
    ):
        raise _too_large(where, "int4", rows)
    # FBGEMM writes scale and bias at the end of a row, and its kernel for inference reads them at the begin.
    return _quantize(rows.contiguous(), 4).roll(SCALE_AND_BIAS_BYTES, 1)


def _to_half(numbers: Tensor, up: bool) -> Tensor:
    """Rounds float32 to float16, up or down."""
    nearest = numbers.half()
    is_past = nearest.float() < numbers if up else nearest.float() > numbers
    end = nearest.new_tensor(torch.inf if up else -torch.inf)
    return torch.where(is_past, nearest.nextafter(end), nearest)


def _too_large(where: str, dtype: str, rows: Tensor) -> ValueError:
    return ValueError(
        f"{where}: expected rows of numbers that {dtype} can hold (float16's largest is 65504), got rows "
        f"up to {rows.float().abs().max():g}. Serve it with rows=torch.float32."
    )


class NBitPooling(nn.Module):
    """The pooling of int8 or int4 rows by FBGEMM's kernel; `columns` are the D of the F features."""

    def __init__(self, columns: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        kind, features = _TYPES[dtype].as_int(), len(columns)
        self._columns, self._is_int4 = columns, dtype == INT4
        self._ends = torch.tensor(
            list(accumulate(columns, initial=0)), dtype=torch.int32, device="cpu"
        )
        self._types = torch.full((features,), kind, dtype=torch.uint8, device="cpu")
        self._places = torch.full_like(self._types, _HOST, dtype=torch.int32)
        self._begins = torch.zeros_like(self._types, dtype=torch.int64)

    def forward(
        self, written: Tensor, rows: Tensor, offsets: Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """Returns rows summed by bag, [B, sum of D] float32; without offsets the rows, [N, D] of one width.

        Shapes: written [bytes] uint8, rows of all tables; rows [N] int64, -1 for zeros; offsets [F * B + 1]
        int64; weights [N] float32.
        """
        features, total, mode = len(self._columns), sum(self._columns), PoolingMode.SUM
        most = max(self._columns)
        if offsets is None:
            # As one feature: for further features the kernel computes the begin of the output in 32 bits,
            # which may overflow. All tables begin at byte 0, so row numbers suffice.
            features, total, mode = 1, most, PoolingMode.NONE
            offsets = torch.arange(2, device="cpu") * rows.shape[0]
        return _lookup(
            dev_weights=written,
            uvm_weights=self._types[:0],
            weights_placements=self._places[:features],
            weights_offsets=self._begins[:features],
            weights_tys=self._types[:features],
            D_offsets=self._ends[: features + 1],
            total_D=total,
            max_int2_D=0,
            max_int4_D=most if self._is_int4 else 0,
            max_int8_D=0 if self._is_int4 else most,
            max_float16_D=0,
            max_float32_D=0,
            indices=rows,
            offsets=offsets,
            pooling_mode=mode.value,
            indice_weights=weights,
            output_dtype=SparseType.FP32.as_int(),
            row_alignment=1,
        )
