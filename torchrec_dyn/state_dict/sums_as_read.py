"""SumsAsRead: content sums that are added up while rows are read, when they are in the caches.

Legend: M rows, C columns.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.checkpoint_format import content_sum
from torchrec_dyn.storage import unsigned


class SumsAsRead:
    """The content sums of the rows of one table that were read so far.

    Attributes:
        sums: sums by tensor.
        numbers: counts of summed numbers by tensor.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self.sums: dict[str, int] = {}
        self.numbers: dict[str, int] = {}

    def add(self, name: str, ids: Tensor, block: Tensor, column: int) -> None:
        """Adds rows of a tensor.

        Args:
            name: name of the tensor.
            ids: [M] int64.
            block: [M, C] or [M], the rows of the ids.
            column: column of the tensor at which the block begins.
        """
        summed = content_sum(self._table, name, ids, block, column)
        self.sums[name] = unsigned(self.sums.get(name, 0) + summed)
        self.numbers[name] = self.numbers.get(name, 0) + block.numel()
