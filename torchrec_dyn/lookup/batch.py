"""Batch: what a caller says of the ids of one forward; TakenStep: what the step has made of them.

PrefetchedStep is a TakenStep of a batch whose forward has not begun.

Legend: T tables, F features (in table order), B bags of a feature, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.lookup.bag_layout import Bags
from torchrec_dyn.lookup.feature_uses import Uses
from torchrec_dyn.lookup.first_read import UnreadCounts
from torchrec_dyn.lookup.gradient_reduction import Senders
from torchrec_dyn.lookup.table_lists import TableLists, of_ids
from torchrec_dyn.storage import OpenForward, keep_in_use

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass
class Batch:
    """The ids of one forward, made once where they arrive. The fields are told in `TableGroup.__call__`.

    Attributes:
        bags: the description for the ops, as soon as it is known.
        uses: of the ids, as soon as they are known; None if each does all, and in evaluation.
        table_offsets: [T + 1] int64 on the CPU, where the ids of each table begin, as soon as it is known.
    """

    ids: Tensor
    offsets: Tensor = _NONE
    weights: Tensor | None = None
    training: bool = True
    batch_sizes: Sequence[Sequence[int]] | None = None
    counts: Sequence[int] | UnreadCounts | None = None
    senders: Senders | None = None
    times: Tensor | None = None
    scores: Tensor | None = None
    bags: Bags | None = None
    uses: Uses | None = None
    table_offsets: Tensor = _NONE


def no_scores(where: str) -> ValueError:
    """Returns the error of a training batch without the weights that LowestScore adds up."""
    return ValueError(
        f"{where}: expected weights of the ids, which LowestScore adds up, got none. "
        "Pass weights in the KeyedJaggedTensor."
    )


def wrong_scores(where: str, number: int) -> ValueError:
    """Returns the error of a training batch with weights that LowestScore cannot add up."""
    return ValueError(
        f"{where}: expected finite weights from 0 on for LowestScore, got {number} others."
    )


class TakenStep(NamedTuple):
    """The rows of a batch after its step, or without one in evaluation.

    Attributes:
        rows: [N] int64, the rows that the forward reads, -1 for an id without a row.
        missing: at least the number of -1 in `rows`. With `times`, an id of a trained table counts `times`
            times; of tables that took their step again, those of the first step count, too.
        new_index: [N] int64, -1 for an id that had a row before the step; None if all had.
        learning: [N] int64, the rows that the backward updates, -1 for an id without an update: the same
            tensor as `rows` if no table is frozen and every feature trains. None in evaluation.
        streams: [T, 3] int64 on the CPU, for `ops.update_rows_`; None in evaluation.
        noted: `tokens_of` the logs, after the step recorded the rows as changed; None without a record.
    """

    rows: Tensor
    missing: int
    new_index: Tensor | None = None
    learning: Tensor | None = None
    streams: Tensor | None = None
    noted: list[object] | None = None


@dataclass(frozen=True)
class PrefetchedStep:
    """A training step that is taken before the forward of its batch, when a pipeline prefetches.

    A step of tables with a life needs numbers that the host reads, and a GPU's host waits where it reads.
    Taken ahead, on a stream of its own, the step waits while the GPU trains the batch before. The forward of
    the batch gets the rows of the step and takes no step itself. The forward is open from the step on, so
    these rows are not reused, whatever other steps, erasures and growth of tables come in between.

    What holds for a table depends on that table alone, since other ranks may have other tables beside its
    shards. A table that was frozen at the step is not updated by the batch, also if no table was trained
    then. A table that was loaded or converted since takes its step again, and no other table does.

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
        return all(self.tables_as_then(lists))

    def tables_as_then(self, lists: TableLists) -> list[bool]:
        """Returns True for each table that was not loaded or converted since the step, [T]."""
        pairs = zip(self.generations, lists.generations, strict=True)
        return [then == now for then, now in pairs]

    def check_size(self, ids: Tensor) -> None:
        """Raises ValueError if the step was taken for a batch of another size than ids [N]."""
        if self.taken.rows.numel() != ids.numel():
            raise ValueError(
                f"lookup: expected the batch that was prefetched, of {self.taken.rows.numel()} ids, got "
                f"{ids.numel()} ids. Use one context for one batch."
            )

    def joined(
        self, again: TakenStep, as_then: Sequence[bool], table_offsets: Tensor
    ) -> PrefetchedStep:
        """Returns this step with the step that was taken `again` for the tables that are not `as_then`.

        table_offsets [T + 1] int64: where the ids of each table begin.
        """
        taken, is_kept = self.taken, torch.tensor(as_then, device="cpu")
        assert taken.learning is not None and again.learning is not None
        assert taken.streams is not None and again.streams is not None
        kept = of_ids(is_kept, table_offsets, taken.rows)
        joined = TakenStep(
            torch.where(kept, taken.rows, again.rows),
            taken.missing + again.missing,  # a GPU's host would wait for the number
            learning=torch.where(kept, taken.learning, again.learning),
            streams=torch.where(is_kept.unsqueeze(1), taken.streams, again.streams),
        )
        return replace(self, taken=joined)

    def now(self, lists: TableLists, ids: Tensor, table_offsets: Tensor) -> TakenStep:
        """Returns the step for a forward that begins now. Rows of tables frozen since then are not updated.

        ids [N] int64, the batch of the step; table_offsets [T + 1] int64, where the ids of each table begin.

        Raises:
            ValueError: the step was taken for a batch of another size.
        """
        self.check_size(ids)
        assert self.taken.learning is not None
        learning = lists.rows_to_update(self.taken.learning, table_offsets)
        return self.taken._replace(learning=learning)
