"""TableShard: the rows and columns of one table that are on this rank: a shard, or the whole unsharded table.

Its arrays are those of `TableArrays`. lookup/table_group.py lists the steps of a training forward.

Legend: R rows in use, M ids, D columns here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.life import LIFE, RowLife, time_fault
from torchrec_dyn.storage import (
    CLOCKS,
    ChangeLog,
    OpenForwards,
    Version,
    changes,
    commit,
    locked,
    note_changed,
    turn_of,
)
from torchrec_dyn.table.arrays import TableArrays
from torchrec_dyn.table.checks import (
    check_ids,
    check_rows,
    check_state,
    checked_device,
)
from torchrec_dyn.table.contents import (
    from_saved_bytes,
    given_rows,
    is_spawning,
    read_state,
    state_for_copy,
    state_shapes,
    to_saved_bytes,
)
from torchrec_dyn.table.counters import SharedCounters
from torchrec_dyn.table.insertion import (
    find_rows,
    insert_unseen,
    new_ids_of,
    prepare_unseen,
    removal_of,
)
from torchrec_dyn.table.prepared_tables import PreparedTables
from torchrec_dyn.table.row_writes import beside, copy_rows, replace, write_state
from torchrec_dyn.table.sampling import check_draw, draw_places, ids_at


class TableShard(TableArrays):
    """A table whose rows are made when ids are first seen. Its attributes are those of `TableArrays`."""

    @property
    @locked
    def num_rows(self) -> int:
        """Number of ids with a row."""
        return self.id_map.num_ids

    @property
    def num_waiting(self) -> int:
        """Number of ids that wait for admission."""
        return 0 if self.waiting is None else len(self.waiting)

    @locked
    def version(self, keeps_erased: bool = False) -> Version:
        """Starts and returns a version. Changes of the table are recorded from now on.

        If `keeps_erased`, the ids that the user erases are recorded, too, also those without a row.
        """
        log = self.change_log
        if log is None:
            log = ChangeLog(self.row_limit, self.device)
            log.reserve(self.row_numbers.high_water_mark)
            self.changes = log
        return log.version(self.id_map, self.row_numbers.withheld(), keeps_erased)

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """Returns the rows, [M] int64, of ids [M] int64, repeats allowed; an absent id gets a fresh row."""
        offsets = torch.tensor([0, ids.numel()], device="cpu")
        rows = find_rows(self.id_map, ids)
        insert_unseen({0: self}, PreparedTables([self]), rows, new_ids_of(ids, rows, offsets))
        return rows

    @locked
    def ids(self) -> Tensor:
        """Returns the ids with a row in canonical order (by mixed id, unsigned), [R] int64."""
        return self.id_map.contents()[0]

    @locked
    def sample_ids(self, n: int, seed: int) -> Tensor:
        """Draws ids with a row. As `torchrec_dyn.sample_ids`, of the rows on this rank."""
        check_draw(f"{self.where}.sample_ids", n, seed, self.num_rows)
        return ids_at(self, draw_places(self.num_rows, n, seed))

    @locked
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id and changes nothing.

        As `torchrec_dyn.lookup_rows`, for this table's rows and columns on this rank.
        """
        rows = self.id_map.lookup(self._ids_here(ids, "lookup"))
        return self.weights.read(rows), rows >= 0

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id; an absent id gets a row with fresh optimizer state.

        As `torchrec_dyn.assign_rows`, for this table's columns on this rank.
        """
        with turn_of(self):
            write = self.prepare_assign(ids, rows)
            with commit(self):
                write()

    @locked
    @changes
    def prepare_assign(self, ids: Tensor, rows: Tensor) -> Callable[[], None]:
        """Prepares `assign`; the commit that it returns is valid until the table changes."""
        ids = self._ids_here(ids, "assign")
        check_rows(f"{self.where}.assign", rows, (ids.numel(), self.columns))
        rows = rows.detach().to(self.device, self.dtype).contiguous()
        offsets = torch.tensor([0, ids.numel()], device="cpu")
        places = find_rows(self.id_map, ids)
        new = new_ids_of(ids, places, offsets)
        additions = prepare_unseen({0: self}, PreparedTables([self]), places, new)

        def write() -> None:
            self.count_edit()
            additions.commit()
            note_changed([self.change_log], ids, places, offsets)
            self.weights.write(places, rows)

        return write

    def erase(self, ids: Tensor) -> int:
        """Removes ids and the counters of waiting ids. Returns the number of ids that had a row.

        As `torchrec_dyn.erase_rows`, for this table's rows on this rank.
        """
        with turn_of(self):
            count, remove = self.prepare_erase(ids)
            with commit(self):
                remove()
        return count

    @locked
    @changes
    def prepare_erase(self, ids: Tensor) -> tuple[int, Callable[[], None]]:
        """Prepares `erase`: returns its result, and its commit, which is valid until the table changes."""
        ids = torch.unique(self._ids_here(ids, "erase"))
        log, waiting = self.change_log, self.waiting
        with_row, rows = self.id_map.find(ids)
        removal = removal_of(self, with_row, rows, "erased")
        drop = None if waiting is None else waiting.removal(ids)

        def remove() -> None:
            self.count_edit()
            if log is not None:
                log.note_erased(ids)
            if drop is not None:
                drop.commit()
            removal.commit()

        return rows.numel(), remove

    def remove(self, ids: Tensor, rows: Tensor, cause: str) -> int:
        """Removes ids and frees their rows: of all ids or of none. Returns the number of ids.

        ids [M] int64, rows [M] int64 and `cause` as of `Removals`.
        """
        removal_of(self, ids, rows, cause).commit()
        return rows.numel()

    @locked
    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns the last occurrence of ids. As `torchrec_dyn.read_last_seen`, for the rows on this rank."""
        life = self.life_for("last_seen")
        return life.last_seen(self.id_map.lookup(self._ids_here(ids, "last_seen")))

    @locked
    def count(self, ids: Tensor) -> Tensor:
        """Returns the counts of ids. As `torchrec_dyn.read_counts`, for the rows on this rank."""
        ids = self._ids_here(ids, "count")
        return self.life_for("count").counts(ids, self.id_map.lookup(ids), self.step)

    def _ids_here(self, ids: Tensor, method: str) -> Tensor:
        """Returns checked ids of any device on the device of the table."""
        return check_ids(f"{self.where}.{method}", ids).to(self.device)

    def life_for(self, method: str) -> RowLife:
        """Returns the life that a method reads; raises ValueError without a policy."""
        if self.life is None:
            raise ValueError(
                f"{self.where}.{method}: expected a table with an admission or eviction policy, got a table "
                "without policies, which keeps neither last_seen nor count. "
                "Set DynamicTableConfig(eviction=...)."
            )
        return self.life

    @property
    def time(self) -> int | None:
        """The time of the clock, None before the first `set_time`."""
        return None if self.life is None else self.life.clock.now

    def set_time(self, time: int) -> None:
        """Sets the clock of policies that count in time. As `set_clocks`, of one table."""
        set_clocks([self], time)

    @locked
    def stats(self) -> dict[str, int | float]:
        """Returns the statistics of the table.

        Present contents: rows, limit, slots, load (rows / slots), bytes (slots, rows in use with their
        optimizer state and scores, counters, and the change log), step, waiting (ids with a counter),
        withheld (rows kept for an open forward), probe_length_mean and probe_length_max (in slots; measured
        on a sample in a large map).

        Counts since the table was made. Occurrences in training: ids_seen, hits (had a row), unseen (had no
        row), refused (got no row). Ids: inserted, evicted_expired, evicted_full, erased, counters_dropped,
        counters_expired. Others: late_grads (gradients of rows whose id was removed), nonfinite (updates that
        `on_nonfinite` refused), rows_loaded and rows_written_back (of a table in host memory: rows copied to
        the GPU and back), forwards (training forwards; unlike `step`, a saved number is not loaded or carried
        over).
        """
        self.note_cached()
        life, counters = self.life, self.own.total_counters()
        stores = [*self.stores, life.scores.store] if life is not None else self.stores
        waiting = self.waiting
        row_bytes = sum(store.row_bytes for store in stores)
        return {
            "rows": self.id_map.num_ids,
            "limit": self.row_limit,
            "bytes": self.id_map.bytes
            + self.row_numbers.high_water_mark * row_bytes
            + (0 if waiting is None else waiting.bytes)
            + (0 if self.changes is None else self.changes.bytes),
            "step": self.step,
            "waiting": self.num_waiting,
            "withheld": self.row_numbers.withheld().numel(),
            **self.id_map.stats(),
            **counters,
            "unseen": counters["ids_seen"] - counters["hits"],
            "nonfinite": 0 if self.nonfinite is None else int(self.nonfinite),
        }

    @locked
    def export_state(self) -> dict[str, Tensor]:
        """Returns a copy of the contents in canonical order (contents.py)."""
        return read_state(self)

    @locked
    @changes
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the contents; more rows than the limit are allowed. All checks run before any change.

        state: as `export_state` returns it, in any order of ids. Only "ids" and "weight" are required;
        other missing parts get the values of a new table.
        """
        check_state(f"{self.where}.load_state", state, self.columns, state_shapes(self))
        rows = beside(self)
        rows._fill(state)
        self._replace(rows)

    @locked
    @changes
    def convert(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """Changes the dtype or device of the rows; ids and optimizer state stay."""
        dtype = dtype or self.dtype
        device = checked_device(self.where, dtype, device or self.device)
        if dtype != self.dtype or device != self.device:
            rows = beside(self, dtype, device)
            copy_rows(self, rows)
            self._replace(rows)

    def _fill(self, state: Mapping[str, Tensor]) -> None:
        """Fills an empty table with a saved form; missing parts get the values of a new table."""
        step = int(state["step"]) if "step" in state else 0
        life = {name: values for name, values in state.items() if name in LIFE}
        chunks = given_rows(state, sum(store.row_bytes for store in self.stores))
        write_state(self, chunks, state["ids"].numel(), step, life)

    def _replace(self, rows: TableShard) -> None:
        change = replace(self, rows)
        with commit(self, replaces=True):
            change()

    def __getstate__(self) -> dict[str, Any]:
        with turn_of(self, also_torn=True):
            return self._state_to_copy()

    def _state_to_copy(self) -> dict[str, Any]:
        # Blocks are much larger than the rows in use, so a copy holds the contents instead.
        self.note_cached()
        left_out = ("id_map", "row_numbers", "weights", "states", "life", "forwards", "changes")
        fields = {name: value for name, value in self.__dict__.items() if name not in left_out}
        fields["own"] = self.own.moved_to(SharedCounters(1), 0)  # copied under the lock
        if self.nonfinite is not None:
            fields["nonfinite"] = int(self.nonfinite)
        state = state_for_copy(self)
        if not is_spawning():
            return {"fields": fields, "dtype": self.dtype, "state": state}
        fields["own"] = fields["own"]._replace(shared=None)  # its tensors are new in every copy
        return {"fields": fields, "dtype": self.dtype, "state": to_saved_bytes(state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["fields"])
        # New shared counters, on the CPU: `torch.load(map_location=)` may have moved the copied one.
        self.own = self.own._replace(shared=SharedCounters(1))
        self.forwards = OpenForwards()  # a copy has no graphs
        self.changes = None  # and no versions
        if self.nonfinite is not None:
            self.nonfinite = torch.tensor([self.nonfinite], device="cpu")
        contents = state["state"]
        if isinstance(contents, bytes):
            contents = from_saved_bytes(contents)
        # The device of the tensors, which `torch.load(map_location=)` may have moved.
        self.reset(state["dtype"], contents["ids"].device)
        self._fill(contents)


def set_clocks(tables: Sequence[TableShard], time: int) -> None:
    """Sets the clocks of tables of one lock, for all later steps; the time never goes back.

    Raises:
        ValueError: `time` is not valid for the clock of a table; nothing has changed then.
    """
    if tables:
        _set_clocks(tables[0], tables, time)


@locked
@changes
def _set_clocks(_: TableShard, tables: Sequence[TableShard], time: int) -> None:
    for table in tables:
        if fault := time_fault(time, table.time):
            raise ValueError(f"{table.where}.set_time: {fault}")
    CLOCKS.renew()
    with commit(*tables):
        for table in tables:
            if table.life is not None and table.life.is_timed:
                table.life.set_time(time, table.next_step)
