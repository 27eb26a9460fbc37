"""Pools int8 and int4 rows by FBGEMM's inference kernel, from one file with the rows of all tables.

The kernel takes one byte offset for each table. Here all offsets are 0: a row number counts rows of the
table's own width from the begin of the file. For int8 the kernel takes 19 ns an id. Our own pooling takes 34
ns for float32 and 19 ns for float16, FBGEMM's pooling 48 and 19 ns (8 tables of 300,000 rows of 64 columns,
batch 512, one thread).

Legend: N ids, F features, B bags of a feature, D columns of a feature's table.
"""

from __future__ import annotations

from collections.abc import Sequence

import fbgemm_gpu  # noqa: F401  (registers the op)
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from torch import Tensor, nn

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
_TYPES = {torch.int8: SparseType.INT8, INT4: SparseType.INT4}
_lookup = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
_quantize = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf
SCALE_AND_BIAS_BYTES = 4


def quantize_int4(rows: Tensor) -> Tensor:
    """Returns rows [M, D] float32 as the kernel reads them: [M, D / 2 + 4] uint8, D a multiple of 4.

    FBGEMM writes scale and bias at the end of a row, and its kernel for inference reads them at the begin.
    """
    fused = _quantize(rows.contiguous(), 4)
    return fused.roll(SCALE_AND_BIAS_BYTES, 1)


class NBitPooling(nn.Module):
    """The pooling of int8 or int4 rows by FBGEMM's kernel; `columns` are the D of the F features."""

    _ends: Tensor
    _places: Tensor
    _types: Tensor
    _begins: Tensor
    _none: Tensor

    def __init__(self, columns: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        features = len(columns)
        self._total = sum(columns)
        self._most = max(columns)
        self._most_int4, self._most_int8 = (
            self._most if dtype == one else 0 for one in (INT4, torch.int8)
        )
        ends = torch.tensor([0, *columns], device="cpu").cumsum(0).int()
        host = torch.full(
            (features,), EmbeddingLocation.HOST.value, dtype=torch.int32, device="cpu"
        )
        types = torch.full((features,), _TYPES[dtype].as_int(), dtype=torch.uint8, device="cpu")
        self.register_buffer("_ends", ends, persistent=False)
        self.register_buffer("_places", host, persistent=False)
        self.register_buffer("_types", types, persistent=False)
        self.register_buffer(
            "_begins", torch.zeros(features, device="cpu").long(), persistent=False
        )
        self.register_buffer(
            "_none", torch.empty(0, dtype=torch.uint8, device="cpu"), persistent=False
        )

    def forward(
        self, written: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool
    ) -> Tensor:
        """Gathers rows and pools them by bag: [B, sum of D] float32.

        Args:
            written: [bytes] uint8, the rows of all tables.
            rows: [N] int64; row -1 counts as zeros.
            offsets: [F * B + 1] int64, ascending from 0 to N; the kernel does not check this.
            weights: [N] float32, contiguous, or None.
            mean: True to divide each bag by its length.
        """
        mode = PoolingMode.MEAN if mean else PoolingMode.SUM
        return self._call(len(self._places), written, rows, offsets, mode, weights)

    def gather(self, written: Tensor, rows: Tensor) -> Tensor:
        """Returns rows [N, D] float32 of tables of one width; all begin at byte 0, so row numbers suffice.

        written [bytes] uint8 has the rows of all tables; rows [N] int64, -1 for zeros.
        """
        # As one feature: for further features the kernel computes the begin of the output in 32 bits, which
        # may overflow.
        offsets = torch.arange(2, device="cpu") * rows.shape[0]
        return self._call(1, written, rows, offsets, PoolingMode.NONE, None)

    def _call(
        self,
        features: int,
        written: Tensor,
        rows: Tensor,
        offsets: Tensor,
        mode: PoolingMode,
        weights: Tensor | None,
    ) -> Tensor:
        return _lookup(
            dev_weights=written,
            uvm_weights=self._none,
            weights_placements=self._places[:features],
            weights_offsets=self._begins[:features],
            weights_tys=self._types[:features],
            D_offsets=self._ends[: features + 1],
            total_D=self._total if features > 1 else self._most,
            max_int2_D=0,
            max_int4_D=self._most_int4,
            max_int8_D=self._most_int8,
            max_float16_D=0,
            max_float32_D=0,
            indices=rows,
            offsets=offsets,
            pooling_mode=mode.value,
            indice_weights=weights,
            output_dtype=SparseType.FP32.as_int(),
            row_alignment=1,
        )
