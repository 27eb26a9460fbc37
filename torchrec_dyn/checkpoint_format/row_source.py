"""RowSource: the rows of one table, to be read in parts.

`MergedTable` (merged_table.py) is a saved table, `LiveRows` (live_rows.py) the table of a model.

Legend: M rows of a part, D columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class TableFacts(NamedTuple):
    """Facts of the table of a source.

    Attributes:
        name: name of the table.
        embedding_dim: D.
        dtype: dtype of its rows.
        seed: seed of its initial rows.
        step: the step of the entry of `Checkpoints` that is read; None: of a table without entries.
    """

    name: str
    embedding_dim: int
    dtype: torch.dtype
    seed: int
    step: int | None = None


class RowSource(ABC):
    """The rows of one table.

    Attributes:
        where: the call and the table, for messages.
        facts: facts of the table.
        group: the ranks, each of which has its share of the rows; None: all rows are here.
        share: number of this rank's share, and the number of shares; None: this rank has none.
    """

    where: str
    facts: TableFacts
    group: dist.ProcessGroup | None = None
    share: tuple[int, int] | None = (0, 1)

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """Names of the tensors by row."""

    @abstractmethod
    def columns_of(self, name: str) -> int:
        """Returns the number of columns of a tensor by row."""

    @abstractmethod
    def parts(
        self, names: Sequence[str], part_bytes: int, ids: range | None
    ) -> Iterator[dict[str, Tensor]]:
        """Yields this rank's rows, with "ids". Collective: all ranks get equally many parts, also empty ones.

        A part has at most `part_bytes`. `ids` is a range of ids with step 1; None: all ids.
        """

    @abstractmethod
    def waiting(self, part_rows: int) -> Iterator[Tensor]:
        """Yields this rank's waiting ids, [M, 3] int64: id, last_seen, count. Collective."""

    @abstractmethod
    def clock(self) -> Tensor:
        """Returns steps and the time that begins at each, [2, K] int64."""
