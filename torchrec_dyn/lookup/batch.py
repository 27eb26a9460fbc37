"""Batch: the ids of one forward; Found: their rows before the step; TakenStep: after it.

PrefetchedStep is a TakenStep of a batch whose forward has not begun.

Legend: T tables, F features (in table order), B bags of a feature, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.lookup.feature_uses import Uses
from torchrec_dyn.lookup.gradient_reduction import Senders
from torchrec_dyn.lookup.table_lists import TableLists, of_ids
from torchrec_dyn.storage import OpenForward, keep_in_use
from torchrec_dyn.table import NewIds, Numbers

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass
class Batch:
    """The ids of one forward, made once where they arrive.

    Attributes:
        ids: [N] int64, feature-major.
        lengths, offsets: of the bags, [F * B] and [F * B + 1], int32 or int64; at least one of them. If both
            are given they must agree. As soon as the ids are found, offsets are given, as int64.
        weights: [N] floating point weights of the ids in their bags, or None.
        training: True to count the step, to give rows to unseen ids, and to update rows in backward. If
            False, and for a frozen table, nothing changes, and an unseen id reads as the table's `unseen`
            configures.
        batch_sizes: [F][ranks] bags of each feature and rank, for variable batches.
        senders: senders of the batch, if a table's gradients are not the mean over the ranks.
        times: [N] int64, at least 1, number of occurrences that each id of a table with a life stands for;
            None for 1 each.
        scores: [N] floating point, what each id adds to its score in tables with `LowestScore`; None without
            such tables, and in evaluation.
        where: begins the errors of lengths and offsets; None: the tables.
        uses: of the ids, as soon as they are known; None if each does all, and in evaluation.
        first_bags: [F + 1] int64 on the CPU, the first bag of each feature, and the number of bags; as soon
            as the layout is known.
        numbers: [F + 3T + 3] int64 on the CPU, those of `ops.find_and_pool`, as soon as the ids are found.
    """

    ids: Tensor
    lengths: Tensor | None = None
    offsets: Tensor | None = None
    weights: Tensor | None = None
    training: bool = True
    batch_sizes: Sequence[Sequence[int]] | None = None
    senders: Senders | None = None
    times: Tensor | None = None
    scores: Tensor | None = None
    where: str | None = None
    uses: Uses | None = None
    first_bags: Tensor = _NONE
    numbers: Tensor = _NONE

    @property
    def _tables(self) -> int:
        """Number of tables, known as soon as the ids are found."""
        return (self.numbers.numel() - self.first_bags.numel()) // 3

    @property
    def begins(self) -> Tensor:
        """Where the ids of each feature begin, [F + 1] int64 on the CPU."""
        return self.numbers[: self.first_bags.numel()]

    @cached_property
    def table_offsets(self) -> Tensor:
        """Where the ids of each table begin, [T + 1] int64 on the CPU."""
        first = self.first_bags.numel()
        return self.numbers[first : first + self._tables + 1]

    @property
    def table_starts(self) -> Numbers:
        """As `table_offsets`, for the host."""
        first = self.first_bags.numel()
        return self.numbers.numpy()[first : first + self._tables + 1]

    @property
    def absent(self) -> Numbers:
        """Number of absent ids of each table, repeats counted, [T]."""
        first = self.first_bags.numel() + self._tables + 1
        return self.numbers.numpy()[first : first + self._tables]

    @property
    def new_ends(self) -> list[int]:
        """Where the new ids of each table begin, and the end, [T + 1]."""
        return self.numbers[-self._tables - 1 :].tolist()

    def keep_in_use(self) -> None:
        """Keeps the memory of a batch on a GPU for the current stream: its owner may drop it early."""
        keep_in_use(self.ids, self.lengths, self.offsets, self.weights, self.times, self.scores)


class Found(NamedTuple):
    """The rows of a batch before its step.

    Attributes:
        out: its output, in shape, with zeros for absent ids; None if nothing was pooled. In training on a CPU
            it is not initialised if ids are absent.
        rows: [N] int64, -1 for an absent id.
        absent: [T], number of absent ids of each table, repeats counted.
        new: the distinct absent ids of tables that are not frozen; None if there are none, or nobody asked.
    """

    out: Tensor | None
    rows: Tensor
    absent: Numbers
    new: NewIds | None


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
        missing: True if some of `rows` may be -1, and are not yet pooled as their tables configure.
        new_index: [N] int64, -1 for an id that had a row before the step; None if all had.
        learning: [N] int64, the rows that the backward updates, -1 for an id without an update: the same
            tensor as `rows` if no table is frozen and every feature trains. [0] in evaluation.
        streams: [T, 3] int64 on the CPU, for `ops.update_rows_`; [0] in evaluation.
        noted: `tokens_of` the logs, after the step recorded the rows as changed; None without a record.
    """

    rows: Tensor
    missing: bool
    new_index: Tensor | None = None
    learning: Tensor = _NONE
    streams: Tensor = _NONE
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
        bags: `numbers` and `offsets` of the batch.
        generations: [T], generation of each table at the step.
        open_forward: the forward of the step, open since then.
    """

    taken: TakenStep
    bags: tuple[Tensor, Tensor | None]
    generations: list[int]
    open_forward: OpenForward

    def keep_in_use(self) -> None:
        """Keeps the memory of the rows, which another stream has allocated, for the current stream."""
        keep_in_use(self.taken.learning, self.taken.rows, self.bags[1])

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
        kept = of_ids(is_kept, table_offsets, taken.rows)
        joined = TakenStep(
            torch.where(kept, taken.rows, again.rows),
            taken.missing or again.missing,
            learning=torch.where(kept, taken.learning, again.learning),
            streams=torch.where(is_kept.unsqueeze(1), taken.streams, again.streams),
        )
        return replace(self, taken=joined)

    def now(self, lists: TableLists, table_offsets: Tensor) -> TakenStep:
        """Returns the step for a forward that begins now. Rows of tables frozen since then are not updated.

        table_offsets [T + 1] int64: where the ids of each table begin.
        """
        learning = lists.rows_to_update(self.taken.learning, table_offsets)
        return self.taken._replace(learning=learning)
