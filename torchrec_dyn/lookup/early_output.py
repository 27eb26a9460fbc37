"""EarlyOutput: the output of a batch on a GPU, pooled before the host knows which of its ids have rows.

A host that reads a number waits for the GPU, and a GPU with nothing queued waits for the host. So a batch is
pooled directly after its rows are found, with zeros for absent ids, and the host reads the counts of the find
while the GPU pools. In a step of known ids this is the output. Else the bags of new ids are pooled again when
their rows are written: whole bags, so the terms of a sum keep their order.

A new id has no row after the removal of the expired ids. So an id whose expired row was found is new,
although it may get the same row again. The other ids of a batch keep their rows during its step.

Legend: N ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.lookup.bag_layout import Bags
from torchrec_dyn.lookup.table_blocks import TableBlocks


@dataclass
class EarlyOutput:
    """The output of one batch.

    Attributes:
        bags: the bags of the batch; `table_offsets` is not read.
        weights: [N] float32, weights of the ids, or None.
        is_mean: True to divide each bag by its length.
        dtype: dtype of the output.
        blocks: the rows of the tables before the step.
        is_counted: False if the offsets of the bags are checked with the counts that the host reads.
        new_index: [N] int64, -1 for an id that is not new; None if no id is new.
    """

    bags: Bags
    weights: Tensor | None
    is_mean: bool
    dtype: torch.dtype
    blocks: TableBlocks
    is_counted: bool
    new_index: Tensor | None = None
    _output: Tensor | None = None

    def pool(self, rows: Tensor) -> None:
        """Pools the batch: rows [N] int64, -1 for an absent id. They may change after the call."""
        given, bags = self._given(rows, self.blocks), self.bags
        if self.is_counted:
            self._output = ops.gather_pool(*given, bags.elements, self.dtype)
            return
        # As gather_pool, but it reports no wrong offsets: the caller raises their error.
        output = torch.empty(bags.elements, dtype=self.dtype, device=rows.device)
        ops.pool_into_(output, None, *given)
        self._output = output

    def finish(self, rows: Tensor, blocks: TableBlocks) -> Tensor | None:
        """Returns the output, with the rows of the new ids; None if nothing was pooled.

        rows [N] int64, the rows to read, and `blocks` are those after the step.
        """
        if self._output is not None and self.new_index is not None:
            ops.pool_into_(self._output, self.new_index, *self._given(rows, blocks))
        return self._output

    def _given(
        self, rows: Tensor, blocks: TableBlocks
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor], Tensor, Tensor, bool]:
        bags = self.bags
        return (
            rows, bags.offsets, self.weights, blocks.weights, blocks.layout, bags.segments,
            self.is_mean,
        )  # fmt: skip
