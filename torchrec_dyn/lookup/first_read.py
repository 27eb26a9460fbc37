"""FirstRead: what a batch on a GPU does until the host has read its first numbers. On the CPU there is none.

A host that reads a number waits for the GPU, and a GPU with nothing queued waits for the host. So the host
reads together, in one wait, what a lookup needs first: the counts of the batch (`UnreadCounts`), the numbers
of absent ids, and the expired ids. The counts are checked before the lookup changes anything.

And the batch is pooled directly after its rows are found (`EarlyOutput`), with zeros for absent ids: the GPU
pools while the host reads. In a step of known ids this is the output. Else the bags of new ids are pooled
again when their rows are written: whole bags, so the terms of a sum keep their order.

A new id has no row after the removal of the expired ids. So an id whose expired row was found is new,
although it may get the same row again. The other ids of a batch keep their rows during its step.

Legend: T tables, F features, N ids, W words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.lookup.bag_layout import Bags
from torchrec_dyn.lookup.table_lists import TableBlocks, TableLists, TrainedTables
from torchrec_dyn.storage import HostRead, gather_reads, read
from torchrec_dyn.table import Expired, expired_of, read_absent


class UnreadCounts:
    """The number of ids of each feature, which the host reads when it first needs it.

    Args:
        words: [W] int64 on the GPU: where the ids of each feature begin, [F], the end of the last feature,
            and further numbers for `check`.
        features: F.
        check: raises ValueError if the batch is not valid. It gets the counts [F] and the further numbers.
    """

    def __init__(
        self,
        words: Tensor,
        features: int,
        check: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self.words = words
        self._features = features
        self._check = check
        self._counts: list[int] | None = None

    @property
    def are_read(self) -> bool:
        """True if the host knows the counts, and they are checked."""
        return self._counts is not None

    @property
    def begins(self) -> Tensor:
        """Where the ids of each feature begin, and the end of the last feature, [F + 1] int64."""
        return self.words[: self._features + 1]

    def get(self) -> list[int]:
        """Returns the counts, [F]; reads them unless the host knows them.

        Raises:
            ValueError: the batch is not valid.
        """
        return self._counts if self._counts is not None else read(self.host_read())

    def host_read(self) -> HostRead[list[int]]:
        """`get` as a host read, for counts that the host does not know."""
        numbers = yield [self.words]
        begins = numbers[: self._features + 1]
        counts = [end - begin for begin, end in pairwise(begins)]
        self._check(counts, numbers[self._features + 1 :])
        self._counts = counts
        return counts


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


class FirstRead(NamedTuple):
    """The first numbers of a batch, before a step has changed anything.

    Attributes:
        rows: [N] int64, -1 for an absent id. Rows of expired ids may be among them.
        absent: [T] int64 on the CPU, number of absent ids of each table, repeats counted.
        expired: the expired ids of the tables that are `due`, by number of the table.
        beside: the result of what was read beside these.
        early: the output of the batch, None if it was not pooled yet.
    """

    rows: Tensor
    absent: Tensor
    expired: dict[int, Expired]
    beside: Any
    early: EarlyOutput | None


def read_first(
    lists: TableLists,
    ids: Tensor,
    table_offsets: Tensor,
    trained: TrainedTables | None,
    beside: HostRead[Any],
    early: EarlyOutput | None = None,
) -> FirstRead:
    """Finds the rows of a batch on a GPU, and the expired ids, and reads numbers of the batch with them.

    ids [N] int64 in table order; table_offsets [T + 1] int64, on the CPU or on the device of `ids`: then they
    are not checked. `trained` is None in evaluation. `beside` reads numbers of the batch; it may raise an
    error: nothing has changed then. `early` is pooled before the host waits.

    Raises:
        RuntimeError: an earlier op had invalid arguments (csrc/device_errors.h).
    """
    rows, absent = ops.lookup(ids, table_offsets, *lists.maps.arrays())
    due = {} if trained is None else {number: trained.tables[number] for number in trained.due()}
    of_due: list[HostRead[Any]] = [expired_of(table) for table in due.values()]
    meanwhile = None if early is None else partial(early.pool, rows)
    absent, result, *expired = read(
        gather_reads([read_absent(absent, ids), beside, *of_due]), meanwhile
    )
    return FirstRead(rows, absent, dict(zip(due, expired, strict=True)), result, early)
