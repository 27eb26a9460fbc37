"""Counters that every step changes, shared by the tables that step together, and those of one table.

A step adds to the counters of all tables at once, in a time that hardly depends on the number of tables. A
table adds its own counters (`TableCounters`) to those in its line of the shared counters.

Legend: T tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchrec_dyn.storage import TABLES

# Counters of a table. They start at 0.
COUNTED = (
    *("ids_seen", "hits", "refused", "inserted", "evicted_expired", "evicted_full", "erased"),
    *("late_grads", "counters_dropped", "counters_expired", "forwards"),
    *("rows_loaded", "rows_written_back"),
)


Numbers: TypeAlias = npt.NDArray[np.int64]
# In so many forwards after one with new ids, and at first, a GPU lists new ids before its host waits.
EXPECTING = 16


class Counted(NamedTuple):
    """Training forwards of tables that share counters.

    Attributes:
        steps: number of steps.
        forwards: number of forwards; a step of deferred updates may have several.
        ids: [T + 1]; the occurrences of table t are ids[t + 1] - ids[t].
        absent: [T], occurrences of ids that had no row at the lookup.
        last_new: the last forward with new ids; 0 before.
    """

    steps: int
    forwards: int
    ids: Numbers
    absent: Numbers
    last_new: int


class SharedCounters:
    """Counters of T tables that step together.

    Attributes:
        counted: the forwards. Replaced as a whole, so that an interrupt finds all of a step or nothing.
        edits: number of updates.
        earlier: [tables of the group] int64, ids of each table in the earlier forwards of the present step,
            to which the next forward belongs since updates are deferred to its end; None if that forward
            begins a step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        zeros = np.zeros(size + 1, dtype=np.int64)
        self.counted = Counted(0, 0, zeros, zeros[1:], 0)
        self.edits = 0
        self.earlier: Tensor | None = None


class TableCounters(NamedTuple):
    """The counters of one table without its shared counters. Replaced as a whole.

    Attributes:
        shared: the shared counters of the table.
        line: the table's line there.
        step: step of the table before the forwards of the shared counters.
        edits: edits of the table beside the backwards of the shared counters.
        counters: counters of `stats`, without the forwards of the shared counters; changed in place.
    """

    shared: SharedCounters
    line: int
    step: int
    edits: int
    counters: dict[str, int]

    def total_counters(self) -> dict[str, int]:
        """Returns the counters with the forwards of the shared counters."""
        counted, line, counters = self.shared.counted, self.line, self.counters
        if not counted.forwards:
            return dict(counters)
        begin, end = counted.ids[line : line + 2].tolist()
        return {
            **counters,
            "forwards": counters["forwards"] + counted.forwards,
            "ids_seen": counters["ids_seen"] + end - begin,
            "hits": counters["hits"] + end - begin - int(counted.absent[line]),
        }

    def moved_to(self, shared: SharedCounters, line: int) -> TableCounters:
        """Returns the counters for a line of other shared counters, which have counted nothing yet."""
        steps, edits = self.step + self.shared.counted.steps, self.edits + self.shared.edits
        return TableCounters(shared, line, steps, edits, self.total_counters())


def on_shared_counters(numbers: Sequence[TableCounters]) -> Sequence[TableCounters]:
    """Returns the counters of tables on counters that exactly these tables share, in this order.

    Tables that share counters with others leave them. Counters that are on such ones already are returned as
    they are.
    """
    shared = numbers[0].shared
    if shared.size == len(numbers) and all(
        of_table.shared is shared and of_table.line == line for line, of_table in enumerate(numbers)
    ):
        return numbers
    TABLES.renew()  # groups that count on the former shared counters must not do so any more
    shared = SharedCounters(len(numbers))
    return [of_table.moved_to(shared, line) for line, of_table in enumerate(numbers)]
