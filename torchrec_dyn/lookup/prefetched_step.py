"""PrefetchedStep: a training step that is taken before the forward of its batch, when a pipeline prefetches.

A step of tables with a life needs numbers that the host reads, and a GPU's host waits where it reads. Taken
ahead, on a stream of its own, the step waits while the GPU trains the batch before. The forward of the batch
gets the rows of the step and takes no step itself. The forward is open from the step on, so
these rows are not reused, whatever other steps, erasures and growth of tables come in between.

Legend: T tables, N ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchrec_dyn.lookup.batch import TakenStep
from torchrec_dyn.lookup.table_lists import TableLists
from torchrec_dyn.storage import OpenForward, keep_in_use


@dataclass(frozen=True)
class PrefetchedStep:
    """A training step taken ahead of the forward of its batch.

    Attributes:
        generations: [T], generation of each table at the step.
        open_forward: the forward of the step, open since then.
    """

    taken: TakenStep
    generations: list[int]
    open_forward: OpenForward

    def keep_in_use(self) -> None:
        """Keeps the memory of the rows, which another stream has allocated, for the current stream."""
        keep_in_use(self.taken.learning, self.taken.rows)

    def is_of(self, lists: TableLists) -> bool:
        """Returns False if a table was loaded or converted since the step: its rows are other rows now."""
        return self.generations == lists.generations

    def now(self, lists: TableLists, ids: Tensor, table_offsets: Tensor) -> TakenStep:
        """Returns the step for a forward that begins now. Rows of tables frozen since then are not updated.

        ids [N] int64, the batch of the step; table_offsets [T + 1] int64, where the ids of each table begin.

        Raises:
            ValueError: the step was taken for a batch of another size.
        """
        rows, learning = self.taken.rows, self.taken.learning
        if rows.numel() != ids.numel():
            raise ValueError(
                f"lookup: expected the batch that was prefetched, of {rows.numel()} ids, got "
                f"{ids.numel()} ids. Use one context for one batch."
            )
        assert learning is not None
        return self.taken._replace(learning=lists.rows_to_update(learning, table_offsets))
