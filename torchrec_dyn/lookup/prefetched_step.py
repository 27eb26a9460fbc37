"""PrefetchedStep: a training step that is taken before the forward of its batch, when a pipeline prefetches.

A step of tables with a life needs numbers that the host reads, and a GPU's host waits where it reads. Taken
ahead, on a stream of its own, the step waits while the GPU trains the batch before. The forward of the batch
gets the rows of the step and takes no step itself. The forward is open from the step on, so
these rows are not reused, whatever other steps, erasures and growth of tables come in between.

Legend: T tables, N ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.lookup.batch_rows import BatchRows, part_of
from torchrec_dyn.lookup.table_lists import TableLists
from torchrec_dyn.storage import OpenForward, keep_in_use


class TakenStep(NamedTuple):
    """The result of one step of a group.

    Attributes:
        rows: rows of the batch.
        streams: [T, 3] int64 on the CPU, for `ops.update_rows_`; None in evaluation.
        noted: `tokens_of` the logs, after the step recorded the rows as changed; None without a record.
    """

    rows: BatchRows
    streams: Tensor | None = None
    noted: list[object] | None = None


@dataclass(frozen=True)
class PrefetchedStep:
    """A training step taken ahead of the forward of its batch.

    Attributes:
        is_trained: [T] bool, False for a table that was frozen at the step.
        generations: [T], generation of each table at the step.
        open_forward: the forward of the step, open since then.
    """

    taken: TakenStep
    is_trained: Tensor
    generations: list[int]
    open_forward: OpenForward

    def keep_in_use(self) -> None:
        """Keeps the memory of the rows, which another stream has allocated, for the current stream."""
        keep_in_use(self.taken.rows.learning, self.taken.rows.read)

    def is_of(self, lists: TableLists) -> bool:
        """Returns False if a table was loaded or converted since the step: its rows are other rows now."""
        return self.generations == lists.generations

    def now(self, lists: TableLists, ids: Tensor, table_offsets: Tensor) -> TakenStep:
        """Returns the step for a forward that begins now. Rows of tables frozen since then are not updated.

        ids [N] int64, the batch of the step; table_offsets [T + 1] int64, where the ids of each table begin.

        Raises:
            ValueError: the step was taken for a batch of another size.
        """
        rows = self.taken.rows
        if rows.learning.numel() != ids.numel():
            raise ValueError(
                f"lookup: expected the batch that was prefetched, of {rows.learning.numel()} ids, got "
                f"{ids.numel()} ids. Use one context for one batch."
            )
        if torch.equal(lists.is_trained, self.is_trained):
            return self.taken
        is_updated, *_ = part_of(lists.is_trained, ids, table_offsets)
        learning = rows.learning.masked_fill(~is_updated, -1)
        return self.taken._replace(rows=rows._replace(learning=learning))
