"""DynamicTable: one table, or one column shard of it, on this rank.

It joins an id map (id -> row), a store of weights and of each optimizer state (row -> numbers), the
numbering of rows and their life, if a policy is set. What happens in a step is in lookup/table_group.py.

Legend: R rows in use, M ids asked for, D columns here.

TableScores: what a table tells of its scores, and its clock.

Legend: M ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Initializer, default_initializer, for_dimension, table_key
from torchrec_dyn.life import RowLife, has_life, time_fault
from torchrec_dyn.optimizers import STATE_DTYPE, RowOptimizer
from torchrec_dyn.storage import (
    ChangeLog,
    IdMap,
    InitialRows,
    OutstandingForwards,
    RowNumbers,
    RowStore,
    block_shift,
)
from torchrec_dyn.table.changes import note_all_changed, note_came, note_changed, note_left
from torchrec_dyn.table.checks import check_ids, check_room, check_rows, check_shape, check_state
from torchrec_dyn.table.contents import (
    named_states,
    read_state,
    replace_contents,
    state_for_copy,
    write_state,
)
from torchrec_dyn.table.insertion import find_rows, insert_unseen
from torchrec_dyn.table.stats import COUNTED, stats_of


class TableScores:
    """The part of a DynamicTable that asks its life.

    Attributes:
        life: scores, counters and clock; None without a policy.
        step: training forwards so far.
        id_map: id -> row.
    """

    life: RowLife | None
    step: int
    id_map: IdMap

    @property
    def where(self) -> str:
        """The table, for messages."""
        raise NotImplementedError

    def last_seen(self, ids: Tensor) -> Tensor:
        """Tells when ids were last seen in training: a step, or a time under `ExpireAfter(time=...)`.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64; -1 for an id without a row.
        """
        where = f"{self.where}.last_seen"
        return has_life(where, self.life).last_seen(self.id_map.lookup(check_ids(where, ids)))

    def count(self, ids: Tensor) -> Tensor:
        """Tells how often ids were seen in training since they were made or began to wait.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64; 0 for an id that has no row and does not wait.
        """
        where = f"{self.where}.count"
        ids = check_ids(where, ids)
        return has_life(where, self.life).counts(ids, self.id_map.lookup(ids))

    @property
    def time(self) -> int | None:
        """What the clock shows, None before it was set."""
        return None if self.life is None else self.life.clock.now

    def set_time(self, time: int) -> None:
        """Sets the clock of `ExpireAfter(time=...)` for the steps to come; it never goes back."""
        if fault := time_fault(time, self.time):
            raise ValueError(f"{self.where}.set_time: {fault}")
        if self.life is not None and self.life.is_timed:
            self.life.clock.set(time, self.step + 1)


class DynamicTable(TableScores):
    """A table whose rows are made when ids are first seen.

    Attributes:
        name: the table's name, part of what decides its initial rows.
        num_embeddings: limit on the rows of the whole table.
        embedding_dim: width of a whole row.
        first_column: number of the first column held here.
        columns: columns held here.
        row_limit: limit on the rows held here.
        optimizer: how rows learn.
        step: training forwards so far, while it was not frozen.
        is_frozen: whether training reads it as evaluation does; asked for at every forward.
        life: scores, counters and clock; None without a policy.
        changes: which rows changed; None while nobody asks.
        generation: counts replacements of the whole contents; a forward of an older one has no backward.
        edits: counts what wrote to rows or let ids come or go.
        initializer: of fresh rows.
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
        self.name = name
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.first_column = first_column
        self.columns = embedding_dim if columns is None else columns
        self.row_limit = num_embeddings if row_limit is None else row_limit
        self.optimizer = optimizer
        self.config = config
        self.is_frozen = False
        self.step = self.generation = self.edits = 0
        self.counters = dict.fromkeys(COUNTED, 0)
        self.changes: ChangeLog | None = None
        check_shape(self, dtype, torch.device(device))
        given = config.initializer or initializer or default_initializer(num_embeddings)
        self.start_as(for_dimension(given, embedding_dim))
        self.rounding_key = table_key(config.seed, name, "rounding")
        self.forwards = OutstandingForwards()
        self.reset(dtype, torch.device(device))

    def start_as(self, initializer: Initializer) -> None:
        """Makes this the initializer of fresh rows."""
        self.initializer = initializer
        self.initial_rows = InitialRows(initializer, self.config.seed, self.name, self.first_column)

    def reset(self, dtype: torch.dtype, device: torch.device) -> None:
        """Empties it."""
        shift = block_shift(self.row_limit, self.columns * dtype.itemsize)
        self.id_map = IdMap(self.row_limit)
        self.row_numbers = RowNumbers(self.forwards)
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
        """The table, for messages."""
        return f"DynamicTable({self.name!r})"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.weights.device

    @property
    def num_rows(self) -> int:
        """Ids that have a row."""
        return self.id_map.num_ids

    @property
    def stores(self) -> tuple[RowStore, ...]:
        """The weights and every optimizer state."""
        return (self.weights, *self.states)

    def check_room(self, additional: int) -> None:
        """Raises RuntimeError if `additional` more rows exceed the limit; one that replaces may."""
        if self.life is None or not self.life.replaces:
            check_room(self, additional)

    def reserve(self, additional: int, leaving: int = 0) -> None:
        """Makes room for `additional` more ids and rows; of ids so many less as `leaving`."""
        self.id_map.reserve(max(0, additional - leaving))
        rows = self.row_numbers.highest_after(additional)
        if self.life is not None:
            self.life.scores.reserve(rows)
        if self.changes is not None:
            self.changes.reserve(rows)
        for store in self.stores:
            store.reserve(rows)

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """Gives every id a row.

        Args:
            ids: [M] int64, repeats allowed.

        Returns:
            [M] int64 rows.
        """
        offsets = torch.tensor([0, ids.numel()])
        rows, _ = find_rows([self], ids, offsets)
        insert_unseen([self], ids, rows, offsets)
        return rows

    def adopt(self, new_ids: Tensor, counts: Tensor | None = None) -> Tensor:
        """Takes and initialises rows, [M] int64; the caller writes them into the map.

        Args:
            new_ids: [M] int64, distinct and absent; room was reserved.
            counts: [M] int64, how often they were seen, None outside training.
        """
        self.edits += 1
        rows = self.row_numbers.take(new_ids.numel())
        self.initial_rows.write(new_ids, rows, self.weights)
        for state in self.states:
            state.zero(rows)
        if self.life is not None:
            self.life.born(new_ids, rows, self.step, counts)
        note_came(self, rows)
        self.id_map.num_ids += new_ids.numel()
        self.counters["inserted"] += new_ids.numel()
        return rows

    def ids(self) -> Tensor:
        """Returns the ids that have a row in canonical order (by mixed id, unsigned), [R] int64."""
        return self.id_map.contents()[0]

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id and changes nothing.

        Args:
            ids: [M] int64.

        Returns:
            rows: [M, D] in the table's dtype, zeros for an id without a row.
            found: [M] bool.
        """
        rows = self.id_map.lookup(check_ids(f"{self.where}.lookup", ids))
        return self.weights.read(rows), rows >= 0

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id; an absent id is inserted with fresh optimizer state.

        Args:
            ids: [M] int64; of a repeated id the last row stays.
            rows: [M, D] floating point, converted to the table's dtype.
        """
        ids = check_ids(f"{self.where}.assign", ids)
        check_rows(self, rows, ids.numel(), "assign")
        self.edits += 1
        found = self.find_or_insert(ids)
        self.weights.write(found, rows.detach())
        note_changed([self], found, torch.tensor([0, ids.numel()]))

    def erase(self, ids: Tensor) -> int:
        """Lets ids go; their rows are reused once no open forward can hold them.

        Args:
            ids: [M] int64; absent ones are ignored. Ids that wait for admission start anew.

        Returns:
            How many had a row.
        """
        ids = check_ids(f"{self.where}.erase", ids)
        self.edits += 1
        if self.life is not None and self.life.waiting is not None:
            self.life.waiting.forget(ids)
        ids, rows = self.id_map.erase(ids)
        self.free(ids, rows, "erased")
        return rows.numel()

    def take_states(self, states: tuple[RowStore, ...]) -> None:
        """Replaces the optimizer state of all rows; open forwards cannot run their backward."""
        self.states = states
        self.generation += 1
        note_all_changed(self)

    def free(self, ids: Tensor, rows: Tensor, cause: str) -> None:
        """Takes back rows whose ids have left the map.

        Args:
            ids: [M] int64, distinct.
            rows: [M] int64, which they held.
            cause: the counter of `stats` that tells why.
        """
        note_left(self, ids, rows)
        if self.life is not None:
            self.life.scores.forget(rows)
        self.row_numbers.give_back(rows)
        self.counters[cause] += rows.numel()

    def stats(self) -> dict[str, int | float]:
        """Returns what the table holds and what happened to it (table/stats.py)."""
        return stats_of(self)

    def export_state(self) -> dict[str, Tensor]:
        """Returns a copy of the contents in canonical order (table/contents.py)."""
        return read_state(self)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the contents; whatever the limit, no row is dropped. Checks before any change.

        Args:
            state: as `export_state` gives it, in any order of ids; all but ids and weight may be
                missing (then fresh).
        """
        check_state(f"{self.where}.load_state", state, self.columns, named_states(self))
        replace_contents(self, state, self.dtype, self.device)

    def convert(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """Changes the rows' dtype or device; ids and optimizer state stay."""
        dtype, device = dtype or self.dtype, torch.device(device or self.device)
        if dtype == self.dtype and device == self.device:
            return
        check_shape(self, dtype, device)
        replace_contents(self, read_state(self), dtype, device)

    def __getstate__(self) -> dict[str, Any]:
        # Blocks are reserved far beyond the rows in use: a copy carries the contents.
        left_out = ("id_map", "row_numbers", "weights", "states", "life", "forwards", "changes")
        fields = {name: value for name, value in self.__dict__.items() if name not in left_out}
        state = state_for_copy(self)
        return {"fields": fields, "dtype": self.dtype, "device": self.device, "state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["fields"])
        self.counters = dict(self.counters)
        self.forwards = OutstandingForwards()  # graphs are no part of a copy
        self.changes = None  # nor moments
        self.reset(state["dtype"], state["device"])
        write_state(self, state["state"])
