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

import torch
from torch import Tensor

from torchrec_dyn.life import NO_STEP, RowLife
from torchrec_dyn.lookup.gradient_reduction import Reduction
from torchrec_dyn.storage import (
    CLOCKS,
    TABLES,
    ChangeLog,
    RowNumbers,
)
from torchrec_dyn.table import (
    Counted,
    PreparedTables,
    SharedCounters,
    TableShard,
    on_shared_counters,
)

_NO_LIMIT = torch.iinfo(torch.int64).max


class ExpirySchedule:
    """When tables must be asked for expired rows or counters again (`RowLife.next_look`)."""

    def __init__(self, lives: Mapping[int, RowLife]) -> None:
        # The step of the shared counters, and the horizon if rows expire by time.
        self._looks = {t: 0 for t, life in lives.items() if life.ages}
        self._timed = {t: 0 for t in self._looks if lives[t].expires_by_time}
        self._next_look = 0 if self._looks else NO_STEP
        self._clocks: object = None

    def due(self, tables: Mapping[int, TableShard], step: int) -> list[int]:
        """Returns the numbers of the tables of which rows, or counters, may expire in a step."""
        is_set = bool(self._timed) and self._clocks is not CLOCKS.now
        if step < self._next_look and not is_set:
            return []
        due = {t for t, look in self._looks.items() if look <= step}
        for t in self._timed.keys() - due if is_set else ():
            life = tables[t].life
            if life is not None and not life.passes(tables[t].next_step, self._timed[t]):
                due.add(t)
        if is_set and not due:
            self._clocks = CLOCKS.now
        return sorted(due)

    def note_looked(self, tables: Mapping[int, TableShard], due: Sequence[int]) -> None:
        """Notes that the expired rows of the tables that were `due` are removed in the present step."""
        for t in due:
            life = tables[t].life
            assert life is not None
            step, horizon = life.next_look(tables[t].step)
            self._looks[t] = step - tables[t].own.step
            if t in self._timed:
                self._timed[t] = horizon
        self._next_look, self._clocks = min(self._looks.values(), default=NO_STEP), CLOCKS.now


class TrainedTables:
    """The tables of a group that a training step changes: those that are not frozen.

    Attributes:
        tables: by number in the group.
        shared: the numbers that a step changes.
        prepared: all tables of the group.
        first_steps: [T] int64, the step of each table before the forwards of the shared counters; 0 for a
            frozen table.
        most_steps: the largest of `first_steps` among tables with a life.
        with_life: numbers of the tables with a life.
        decaying: numbers of the tables whose counts decay.
        units: the weight of one unit of a count, by number of the tables that count weights.
        row_limits: [T] int64, the limit of each table that evicts when it is full, for other tables 2^63 - 1.
        least_limit: the least of `row_limits`.
        has_changes: True if a table records its changes.
        watched: numbers of tables whose policies may act in a step although all ids have rows, beside those
            of `due`: at first all tables with a life, later the tables that the last step changed.
    """

    def __init__(
        self, tables: Mapping[int, TableShard], count: int, prepared: PreparedTables
    ) -> None:
        self.tables = tables
        self.shared = _share_counters([*tables.values()])
        self.prepared = prepared
        lives = {t: table.life for t, table in tables.items() if table.life is not None}
        steps, limits = [0] * count, [_NO_LIMIT] * count
        for t, table in tables.items():
            steps[t] = table.own.step
            if t in lives and lives[t].replaces:
                limits[t] = table.row_limit
        self.first_steps = torch.tensor(steps, device="cpu")
        self.row_limits, self.least_limit = torch.tensor(limits, device="cpu"), min(limits)
        self.most_steps = max((steps[t] for t in lives), default=0)
        self.with_life = list(lives)
        self.decaying = [t for t, life in lives.items() if life.decays]
        self.units = {t: life.unit for t, life in lives.items() if life.unit is not None}
        self.has_changes = _each([*tables.values()], "changes") != [None] * len(tables)
        self.watched = set(self.with_life)
        self._expiry = ExpirySchedule(lives)
        self._is_trained: Tensor | None = None  # [T] bool if a table is frozen
        if len(tables) < count:
            self._is_trained = torch.zeros(count, dtype=torch.bool, device="cpu")
            self._is_trained[list(tables)] = True

    def has_life(self, number: int) -> bool:
        """Returns True if a trained table has a life."""
        return self.tables[number].life is not None

    def due(self) -> list[int]:
        """Returns the numbers of the tables of which rows, or counters, may expire in the next forward."""
        step = self.shared.counted.steps + (self.shared.earlier is None)
        return self._expiry.due(self.tables, step)

    def note_looked(self, due: Sequence[int]) -> None:
        """Notes that the expired rows of the tables that were `due` are removed in the present step."""
        if due:
            self._expiry.note_looked(self.tables, due)

    def counted_after(self, occurrences: Tensor, absent: Tensor | None) -> Counted:
        """Returns the numbers of the shared counters after one more forward.

        occurrences [T + 1] int64: the first occurrence of each table, and the end of the last; absent [T]
        int64: occurrences without a row, None if there were none. Frozen tables do not count theirs.
        """
        if self._is_trained is not None:
            sizes = occurrences.diff()[self._is_trained]
            occurrences = torch.cat([occurrences[:1], sizes.cumsum(0)])
            absent = None if absent is None else absent[self._is_trained]
        before = self.shared.counted
        return Counted(
            before.steps + (self.shared.earlier is None),
            before.forwards + 1,
            before.ids + occurrences,
            before.absent if absent is None else before.absent + absent,
        )

    def num_absent(self, absent: Tensor) -> tuple[int, int]:
        """Returns the numbers of absent ids of trained and of frozen tables; absent [T] int64, of each."""
        of_all = sum(absent.tolist())
        if self._is_trained is None or not of_all:
            return of_all, 0
        of_trained = int(absent[self._is_trained].sum())
        return of_trained, of_all - of_trained

    def logs(self) -> list[ChangeLog | None]:
        """Returns the log of changes of each table, [T]; None without a log, and for a frozen table."""
        logs: list[ChangeLog | None] = [None] * len(self.row_limits)
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
