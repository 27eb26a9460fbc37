"""RowSource: the rows of one table, to be read in parts. A saved table is read without a model.

`LiveRows` (live_rows.py) is the table of a model.

Legend: M rows of a part, D columns.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    Entry,
    MergedTable,
    open_table,
    read_chain,
)


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


class SavedRows(RowSource):
    """A table of a checkpoint, or of a directory of `Checkpoints` at a step.

    `path` is the directory of a checkpoint, or of `Checkpoints`: then `step` is that of an entry, None: the
    newest. `table` is the name of the table, or its key in the checkpoint; None: the only table.

    Raises:
        ValueError: if there is no such table or step, or a save is missing, torn or damaged.
    """

    def __init__(
        self, path: str | os.PathLike[str], table: str | None, step: int | None, call: str
    ) -> None:
        entry: Entry | None = None
        chain = read_chain(path)
        if chain.entries:
            entry = chain.entries[-1] if step is None else chain.at(step)
            if step is None and chain.highest > entry.sequence:
                warnings.warn(
                    f"{call}: expected whole saves in {path}, got newer ones that are not: "
                    f"{'; '.join(chain.skipped)}. Step {entry.step} is read.",
                    stacklevel=4,
                )
            line = chain.line_of(entry)
            if line is None:
                raise ValueError(
                    f"{call}: expected the full save and all deltas before {entry.path}, got a line that is "
                    "not whole. Export another step, whose full save is there."
                )
            folders = [one.tables for one in line]
        elif chain.skipped or step is not None:
            why = f"; skipped {', '.join(chain.skipped)}" * bool(chain.skipped)
            raise ValueError(
                f"{call}: expected a directory of Checkpoints with a whole entry, got {path} without "
                f"one{why}. Give a step of a directory of Checkpoints only."
            )
        else:
            folders = [Path(path)]
        saves = [open_table(folder, table, f"{call}({folder})") for folder in folders]
        if saves[0].is_delta:
            raise ValueError(
                f"{call}: expected a full checkpoint, got {folders[0]}, a delta, which has changes only. "
                "Give the directory of Checkpoints that it is in."
            )
        self.where = f"{call}(table='{saves[-1].name}', {folders[-1]})"
        self._merged = MergedTable(self.where, saves, entry)
        last = self._merged.last
        self.facts = TableFacts(
            last.name,
            last.embedding_dim,
            last.dtype,
            int(last.config["seed"]),
            None if entry is None else entry.step,
        )

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors by row."""
        return self._merged.names

    def columns_of(self, name: str) -> int:
        """Returns the number of columns of a tensor by row."""
        return self._merged.columns_of(name)

    def parts(
        self, names: Sequence[str], part_bytes: int, ids: range | None
    ) -> Iterator[dict[str, Tensor]]:
        """Yields the rows, with "ids"; see `MergedTable.parts`."""
        return self._merged.parts(names, part_bytes, ids)

    def waiting(self, part_rows: int) -> Iterator[Tensor]:
        """Yields the waiting ids, [M, 3] int64."""
        return self._merged.waiting(part_rows)

    def clock(self) -> Tensor:
        """Returns steps and the time that begins at each, [2, K] int64."""
        last = self._merged.last
        if "clock" not in last.names:
            return torch.empty(2, 0, dtype=torch.int64, device="cpu")
        return last.read("clock")
