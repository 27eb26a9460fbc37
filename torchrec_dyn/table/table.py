"""DynamicTable: one table, or one column shard of it, on this rank.

It joins an id map (id -> row), the stores of the weights and of each optimizer state (row -> numbers), the
numbering of rows and, with a policy, their life. lookup/table_group.py lists the steps of a training forward.

Legend: R rows in use, M ids, D columns here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Initializer, default_initializer, for_dimension, table_key
from torchrec_dyn.life import RowLife, time_fault
from torchrec_dyn.optimizers import STATE_DTYPE, RowOptimizer
from torchrec_dyn.storage import (
    TABLES,
    ChangeLog,
    IdMap,
    InitialRows,
    MapList,
    OutstandingForwards,
    RowNumbers,
    RowStore,
    TableLock,
    block_shift,
    locked,
    read,
)
from torchrec_dyn.table.changes import note_all_changed, note_changed
from torchrec_dyn.table.checks import (
    check_ids,
    check_optimizer_state,
    check_room,
    check_rows,
    check_shape,
    check_state,
    checked_device,
)
from torchrec_dyn.table.contents import (
    given_state,
    loaded_states,
    named_states,
    read_state,
    replace_contents,
    replaced_whole,
    state_for_copy,
    stored_state,
    write_state,
)
from torchrec_dyn.table.freed_rows import Removal
from torchrec_dyn.table.insertion import find_rows, insert_unseen
from torchrec_dyn.table.stats import COUNTED, stats_of
from torchrec_dyn.table.tally import OwnNumbers, Tally

_NOTHING = object()


class DynamicTable:
    """A table whose rows are made when ids are first seen.

    Attributes:
        name: the table's name, which also decides its initial rows.
        num_embeddings: limit on the rows of the whole table.
        embedding_dim: width of a whole row.
        first_column: number of the first column held here.
        columns: number of columns held here.
        row_limit: limit on the rows held here.
        optimizer: the update rule of the rows.
        is_frozen: True if training reads the table as evaluation does; read at every forward.
        id_map: id -> row.
        life: scores, counters and clock; None without a policy.
        changes: log of changed rows; None if no moment was held at the last change.
        generation: number of replacements of the contents; a forward from before a replacement cannot run
            its backward.
        own: numbers of the table that change with training, without those of its tally.
        initializer: initializer of fresh rows.
        lock: lock of the collection, shared by its tables. The methods that users call hold it.
    """

    def __init__(
        self,
        *,
        name: str,
        num_embeddings: int,
        embedding_dim: int,
        optimizer: RowOptimizer,
        config: DynamicTableConfig,
        first_column: int = 0,
        columns: int | None = None,
        row_limit: int | None = None,
        dtype: torch.dtype = torch.float32,
        initializer: Initializer | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lock = TableLock()
        self.name = name
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.first_column = first_column
        self.columns = embedding_dim if columns is None else columns
        self.row_limit = num_embeddings if row_limit is None else row_limit
        self.optimizer = optimizer
        self.config = config
        self.is_frozen = False
        self.generation = 0
        self.own = OwnNumbers(Tally(1), 0, 0, 0, dict.fromkeys(COUNTED, 0))
        self.changes: ChangeLog | None = None
        check_shape(self)
        device = checked_device(self.where, dtype, device)
        given = config.initializer or initializer or default_initializer(num_embeddings)
        self.start_as(for_dimension(given, embedding_dim))
        self.rounding_key = table_key(config.seed, name, "rounding")
        self.forwards = OutstandingForwards()
        self.reset(dtype, device)

    def __setattr__(self, name: str, value: Any) -> None:
        # What groups of tables have listed is valid as long as no attribute changes. `own` is not listed.
        is_listed = name != "own" and self.__dict__.get(name, _NOTHING) is not value
        if is_listed:
            TABLES.renew()
        object.__setattr__(self, name, value)
        if is_listed:
            TABLES.renew()  # `is_frozen` is set without the lock: a thread may have listed it in between

    @property
    def step(self) -> int:
        """Number of training forwards so far, without forwards of the frozen table."""
        own = self.own  # read once: without the lock, a table may move to another tally in between
        return own.step + own.tally.counted.steps

    @step.setter
    def step(self, step: int) -> None:
        TABLES.renew()
        self.own = self.own._replace(step=step - self.own.tally.counted.steps)

    @property
    def edits(self) -> int:
        """Number of calls that wrote rows, or added or removed ids."""
        own = self.own
        return own.edits + own.tally.edits

    def count_edit(self) -> None:
        """Counts an edit outside of training."""
        TABLES.renew()  # the next step looks at the table's policies
        self.own = self.own._replace(edits=self.own.edits + 1)

    @property
    def counters(self) -> dict[str, int]:
        """The counters of `stats`, without the forwards of the table's tally."""
        return self.own.counters

    def start_as(self, initializer: Initializer) -> None:
        """Sets the initializer of fresh rows."""
        rows = InitialRows(initializer, self.config.seed, self.name, self.first_column)
        self.initializer, self.initial_rows = initializer, rows

    def reset(self, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the table empty. The new contents are new objects; the old objects do not change."""
        shift = block_shift(self.row_limit, self.columns * dtype.itemsize, device.type)
        self.id_map = IdMap(self.row_limit, device)
        self.row_numbers = RowNumbers(self.forwards, device)
        self.weights = RowStore(self.columns, shift, dtype, device)
        self.states = tuple(
            RowStore(columns, shift, STATE_DTYPE, device)
            for columns in self.optimizer.state_columns(self.columns)
        )
        life = (self.config, self.name, self.row_limit, shift, device)
        self.life = RowLife(*life) if self.config.has_life else None
        self.generation += 1

    @property
    def where(self) -> str:
        """Name of the table in messages."""
        return f"DynamicTable({self.name!r})"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.weights.device

    @property
    @locked
    def num_rows(self) -> int:
        """Number of ids with a row."""
        return self.id_map.num_ids

    @property
    def num_waiting(self) -> int:
        """Number of ids that wait for admission."""
        waiting = None if self.life is None else self.life.waiting
        return 0 if waiting is None else len(waiting)

    @property
    def stores(self) -> tuple[RowStore, ...]:
        """The weights and every optimizer state."""
        return (self.weights, *self.states)

    def check_room(self, additional: int) -> None:
        """Raises RuntimeError if `additional` more rows exceed the limit and no policy replaces rows."""
        if self.life is None or not self.life.replaces:
            check_room(self, additional)

    def reserve(self, additional: int, removed: int = 0) -> None:
        """Makes room for `additional` more rows, and for their ids after `removed` ids are removed."""
        self.id_map.reserve(max(0, additional - removed))
        rows = self.row_numbers.highest_after(additional)
        if self.life is not None:
            self.life.scores.reserve(rows)
        if self.changes is not None:
            self.changes.reserve(rows)
        for store in self.stores:
            store.reserve(rows)

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """Returns the rows of ids, [M] int64; an absent id gets a fresh row.

        Args:
            ids: [M] int64, repeats allowed.
        """
        offsets = torch.tensor([0, ids.numel()], device="cpu")
        rows, _ = find_rows(MapList([self.id_map]), ids, offsets)
        insert_unseen([self], ids, rows, offsets)
        return rows

    @locked
    def ids(self) -> Tensor:
        """Returns the ids with a row in canonical order (by mixed id, unsigned), [R] int64."""
        return self.id_map.contents()[0]

    @locked
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id and changes nothing.

        As `torchrec_dyn.lookup_rows`, for this table's rows and columns on this rank.
        """
        rows = self.id_map.lookup(self._ids_here(ids, "lookup"))
        return self.weights.read(rows), rows >= 0

    @locked
    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id; an absent id gets a row with fresh optimizer state.

        As `torchrec_dyn.assign_rows`, for this table's columns on this rank.
        """
        ids = self._ids_here(ids, "assign")
        check_rows(self, rows, ids.numel(), "assign")
        self.count_edit()
        found = self.find_or_insert(ids)
        note_changed([self], found, torch.tensor([0, ids.numel()], device="cpu"))
        self.weights.write(found, rows.detach().to(self.device))

    @locked
    def erase(self, ids: Tensor) -> int:
        """Removes ids and the counters of waiting ids. Returns the number of ids that had a row.

        As `torchrec_dyn.erase_rows`, for this table's rows on this rank.
        """
        ids = torch.unique(self._ids_here(ids, "erase"))
        self.count_edit()
        if self.life is not None and self.life.waiting is not None:
            self.life.waiting.forget(ids)
        return self.remove(*self.id_map.find(ids), "erased")

    @locked
    def replace_states(self, states: tuple[RowStore, ...]) -> None:
        """Replaces the optimizer state of all rows; open forwards can no longer run their backward."""
        note_all_changed(self)
        self.states, self.generation = states, self.generation + 1

    def remove(self, ids: Tensor, rows: Tensor, cause: str) -> int:
        """Removes ids and frees their rows: of all ids or of none. Returns the number of ids.

        Args:
            ids: [M] int64, distinct.
            rows: [M] int64, the rows of these ids.
            cause: name of the counter of `stats` that counts these ids.
        """
        read(Removal.prepare(self, ids, rows, cause)).commit()
        return rows.numel()

    @locked
    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns the last occurrence of ids. As `torchrec_dyn.read_last_seen`, for the rows on this rank."""
        life = self._life_for("last_seen")
        return life.last_seen(self.id_map.lookup(self._ids_here(ids, "last_seen")))

    @locked
    def count(self, ids: Tensor) -> Tensor:
        """Returns the counts of ids. As `torchrec_dyn.read_counts`, for the rows on this rank."""
        ids = self._ids_here(ids, "count")
        return self._life_for("count").counts(ids, self.id_map.lookup(ids))

    def _ids_here(self, ids: Tensor, method: str) -> Tensor:
        """Returns checked ids of any device on the device of the table."""
        return check_ids(f"{self.where}.{method}", ids).to(self.device)

    def _life_for(self, method: str) -> RowLife:
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

    @locked
    def set_time(self, time: int) -> None:
        """Sets the clock of `ExpireAfter(time=...)` for all later steps; the time never goes back."""
        if fault := time_fault(time, self.time):
            raise ValueError(f"{self.where}.set_time: {fault}")
        if self.life is not None and self.life.is_timed:
            self.life.clock.set(time, self.step + 1)

    @locked
    def stats(self) -> dict[str, int | float]:
        """Returns the statistics of the table (stats.py)."""
        return stats_of(self)

    @locked
    def export_state(self) -> dict[str, Tensor]:
        """Returns a copy of the contents in canonical order (contents.py)."""
        return read_state(self)

    @locked
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the contents; more rows than the limit are allowed. All checks run before any change.

        Args:
            state: as `export_state` returns it, in any order of ids. Only "ids" and "weight" are
                required; other missing parts get the values of a new table.
        """
        check_state(f"{self.where}.load_state", state, self.columns, named_states(self))
        replace_contents(self, given_state(state), self.dtype, self.device)

    @locked
    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Replaces optimizer state and step of the present rows; if this fails, nothing has changed.

        Args:
            state: the optimizer states by name, in the canonical order of the ids, and "step".
        """
        where, states = f"{self.where}.load_optimizer_state", named_states(self)
        check_optimizer_state(where, state, self.id_map.num_ids, states)
        stores = loaded_states(self, state)
        with replaced_whole(self):
            self.replace_states(stores)
            self.step = max(0 if self.life is None else self.step, int(state["step"]))
            if self.life is not None:
                self.life = self.life.caught_up(self.step, self.row_numbers.high)

    @locked
    def convert(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """Changes the dtype or device of the rows; ids and optimizer state stay."""
        dtype = dtype or self.dtype
        device = checked_device(self.where, dtype, device or self.device)
        if dtype != self.dtype or device != self.device:
            replace_contents(self, stored_state(self), dtype, device)

    @locked
    def __getstate__(self) -> dict[str, Any]:
        # Blocks are much larger than the rows in use, so a copy holds the contents instead.
        left_out = ("id_map", "row_numbers", "weights", "states", "life", "forwards", "changes")
        fields = {name: value for name, value in self.__dict__.items() if name not in left_out}
        fields["own"] = self.own.moved_to(Tally(1), 0)  # copied under the lock
        state = state_for_copy(self)
        return {"fields": fields, "dtype": self.dtype, "state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["fields"])
        # A new tally, on the CPU: `torch.load(map_location=)` may have moved the copied one.
        self.own = self.own._replace(tally=Tally(1))
        self.forwards = OutstandingForwards()  # a copy has no graphs
        self.changes = None  # and no moments
        contents = state["state"]
        # The device of the tensors, which `torch.load(map_location=)` may have moved.
        self.reset(state["dtype"], contents["ids"].device)
        write_state(self, given_state(contents))
