"""TableLists: what a step needs of all tables of a group, listed again when a table has changed.

A step of a thousand tables must not ask each of them. All that a step without unseen ids reads or changes is
here, in the form that the ops take. A forward takes the lists once, at its start: a table may be frozen by
another thread meanwhile, and its backward uses the same lists. Only maps and blocks are listed again within a
step, after they have grown.

A frozen table is looked up with the others. It is not among the trained tables, so nothing of it changes.

Legend: T tables, N ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_dyn.lookup.gradient_reduction import Reduction
from torchrec_dyn.lookup.living_tables import LivingTables
from torchrec_dyn.storage import (
    TABLES,
    ChangeLog,
    RowNumbers,
    host_numbers,
)
from torchrec_dyn.table import (
    EXPECTING,
    Counted,
    Numbers,
    PreparedTables,
    SharedCounters,
    TableShard,
    on_shared_counters,
)


class TrainedTables:
    """The tables of a group that a training step changes: those that are not frozen.

    Attributes:
        tables: by number in the group.
        shared: the numbers that a step changes.
        prepared: all tables of the group.
        first_steps: [T] int64, the step of each table before the forwards of the shared counters; 0 for a
            frozen table.
        living: those with a life.
        has_changes: True if a table records its changes.
    """

    def __init__(
        self, tables: Mapping[int, TableShard], count: int, prepared: PreparedTables
    ) -> None:
        self.tables = tables
        self.shared = _share_counters([*tables.values()])
        self.prepared = prepared
        self.living = LivingTables(tables, count)
        steps = {t: table.own.step for t, table in tables.items()}
        self.first_steps = host_numbers([steps.get(t, 0) for t in range(count)])
        self.has_changes = _each([*tables.values()], "changes") != [None] * len(tables)
        self._is_trained: npt.NDArray[np.bool_] | None = None  # [T] if a table is frozen
        if len(tables) < count:
            self._is_trained = np.isin(np.arange(count), list(tables))

    @property
    def next_step(self) -> int:
        """The step of the next forward, counted by the shared counters."""
        return self.shared.counted.steps + (self.shared.earlier is None)

    @property
    def expects_new(self) -> bool:
        """True if one of the last batches had new ids: then a GPU lists them before its host waits."""
        counted = self.shared.counted
        return counted.forwards - counted.last_new < EXPECTING

    def counted_after(self, occurrences: Numbers, absent: Numbers | None) -> Counted:
        """Returns the numbers of the shared counters after one more forward.

        occurrences [T + 1]: the first occurrence of each table, and the end of the last; absent [T]:
        occurrences without a row, None if there were none. Frozen tables do not count theirs.
        """
        if self._is_trained is not None:
            sizes = np.diff(occurrences)[self._is_trained]
            occurrences = np.concatenate([occurrences[:1], sizes.cumsum()])
            absent = None if absent is None else absent[self._is_trained]
        before = self.shared.counted
        return Counted(
            before.steps + (self.shared.earlier is None),
            before.forwards + 1,
            before.ids + occurrences,
            before.absent if absent is None else before.absent + absent,
            before.last_new if absent is None else before.forwards + 1,
        )

    def misses_frozen(self, absent: Numbers) -> bool:
        """Returns True if some ids of a frozen table are absent; absent [T], number of them."""
        return self._is_trained is not None and bool(absent[~self._is_trained].any())

    def logs(self) -> list[ChangeLog | None]:
        """Returns the log of changes of each table, [T]; None without a log, and for a frozen table."""
        logs: list[ChangeLog | None] = [None] * len(self.first_steps)
        for t, table in self.tables.items():
            logs[t] = table.change_log
        return logs


@dataclass(frozen=True)
class TableLists:
    """All tables of a group.

    Attributes:
        token: the token of tables before the listing.
        generations, row_numbers: [T], of each table.
        streams: [T, 3] int64 for `ops.update_rows_`, before the forwards of the shared counters.
        stepping: [T, 3] int64, what each forward of the shared counters adds to `streams`; None if updates
            do not depend on the step.
        is_frozen: [T] bool; None if no table is frozen.
        trained: the tables that are not frozen; None if all are frozen.
        shows_initial: True if unseen ids of a table read as initial rows.
        has_changes: True if a table records its changes.
        rounds: True if rows are below float32, so that their updates are rounded.
        hyper: the hyper-parameters of `ops.update_rows_` behind the learning rate.
        unsent: the reduction of a batch that no dist has sent.
        prepared: the tables as ops take them.
    """

    token: object
    generations: list[int]
    row_numbers: list[RowNumbers]
    streams: Tensor
    stepping: Tensor | None
    is_frozen: Tensor | None
    trained: TrainedTables | None
    shows_initial: bool
    has_changes: bool
    rounds: bool
    hyper: list[float]
    unsent: Reduction
    prepared: PreparedTables

    def rows_to_update(self, rows: Tensor, table_offsets: Tensor) -> Tensor:
        """Returns rows [N] int64 of a batch, with -1 in place of those of frozen tables.

        table_offsets [T + 1] int64, where the ids of each table begin. The same tensor if no table is frozen.
        """
        if self.is_frozen is None:
            return rows
        return rows.masked_fill(of_ids(self.is_frozen, table_offsets, rows), -1)


def of_ids(flags: Tensor, table_offsets: Tensor, rows: Tensor) -> Tensor:
    """Returns the flag of the table of each id, [N] bool on the device of rows [N].

    flags [T] bool and table_offsets [T + 1] int64, where the ids of each table begin, are on the CPU.
    """
    of_tables, sizes = (
        numbers.to(rows.device, non_blocking=True) for numbers in (flags, table_offsets.diff())
    )
    return of_tables.repeat_interleave(sizes, output_size=rows.numel())


def _share_counters(tables: Sequence[TableShard]) -> SharedCounters:
    """Puts tables on counters that exactly they share, and returns these."""
    of_tables = on_shared_counters([table.own for table in tables])
    for table, own in zip(tables, of_tables, strict=True):
        table.own = own
    return of_tables[0].shared


def list_tables(tables: Sequence[TableShard], is_held: Sequence[bool] = ()) -> TableLists:
    """Lists the tables of a group, under their lock; tables of which `is_held` is True as frozen ones."""
    token = TABLES.now
    # Read once: another thread may freeze a table.
    is_frozen = torch.tensor(_each(tables, "is_frozen"), device="cpu")
    if is_held:
        is_frozen |= torch.tensor(is_held, device="cpu")
    learning = {t: tables[t] for t in (~is_frozen).nonzero().flatten().tolist()}
    prepared = PreparedTables(tables, is_frozen.nonzero().flatten().tolist())
    trained = TrainedTables(learning, len(tables), prepared) if learning else None
    columns = ("rounding_key", "first_column", "step")
    streams = torch.tensor([_each(tables, name) for name in columns], device="cpu").T.contiguous()
    if trained is not None:
        streams[list(learning), 2] -= trained.shared.counted.steps
    rounds, stepping = tables[0].dtype != torch.float32, None
    if rounds or tables[0].optimizer.counts_steps:
        stepping = torch.zeros_like(streams)
        stepping[:, 2] = ~is_frozen
    return TableLists(
        token=token,
        generations=_each(tables, "generation"),
        row_numbers=_each(tables, "row_numbers"),
        streams=streams,
        stepping=stepping,
        is_frozen=is_frozen if bool(is_frozen.any()) else None,
        trained=trained,
        shows_initial=any(table.config.unseen == "initial" for table in tables),
        has_changes=_each(tables, "changes") != [None] * len(tables),
        rounds=rounds,
        hyper=tables[0].optimizer.hyper(0.0)[1:],
        unsent=Reduction([1.0] * len(tables), None),
        prepared=prepared,
    )


def _each(tables: Sequence[TableShard], name: str) -> list[Any]:
    """Returns an attribute of each table."""
    return [getattr(table, name) for table in tables]
