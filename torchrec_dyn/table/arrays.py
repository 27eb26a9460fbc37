"""TableArrays: what one table, or one column shard of it, holds on this rank.

An id map (id -> row), the stores of the weights and of each optimizer state (row -> numbers), the numbering
of rows and, with a policy, their life. `insertion` and `contents` change these arrays; `shard` has the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig, HostMemory, MappedFiles
from torchrec_dyn.initializers import Initializer, default_initializer, for_dimension, table_key
from torchrec_dyn.life import NO_STEP, AdmissionCounters, RowLife, SearchedRows
from torchrec_dyn.optimizers import STATE_DTYPE, RowOptimizer
from torchrec_dyn.policies import making_room
from torchrec_dyn.storage import (
    TABLES,
    ChangeLog,
    IdMap,
    InitialRows,
    OpenForwards,
    RowCache,
    RowNumbers,
    RowStore,
    TableLock,
    block_shift,
    lasting,
    most_block_bytes,
    reserve_maps,
)
from torchrec_dyn.table.checks import check_storage, checked_device
from torchrec_dyn.table.counters import COUNTED, SharedCounters, TableCounters


class Room(NamedTuple):
    """The room to make in a table.

    Attributes:
        ids: more ids with rows.
        removed: ids that are removed before.
        counters: more counters of waiting ids.
    """

    ids: int
    removed: int = 0
    counters: int = 0


def reserve_tables(rooms: Sequence[tuple[TableArrays, Room]]) -> None:
    """Makes room in tables, whose maps grow in one call."""
    maps = [(table.id_map, max(0, room.ids - room.removed)) for table, room in rooms]
    for table, room in rooms:
        if room.counters and table.waiting is not None:
            maps.append((table.waiting.id_map, room.counters))
    reserve_maps(maps)
    for table, room in rooms:
        table.reserve_rows(room.ids, room.counters)


class TableArrays:
    """The arrays of a table and its settings. `TableShard` adds the calls of users, and no field.

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
        changes: log of changed rows; None if no version was held at the last change.
        nonfinite: [1] int64 on the device, number of updates that were not written since they were not
            finite; None if the table writes them.
        generation: number of replacements of the contents; a forward from before a replacement cannot run
            its backward.
        own: numbers of the table that change with training, without its shared counters.
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
        self.own = TableCounters(SharedCounters(1), 0, 0, 0, dict.fromkeys(COUNTED, 0))
        self.changes: ChangeLog | None = None
        self.nonfinite: Tensor | None = None
        if config.on_nonfinite != "write":
            self.nonfinite = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._check_shape()
        device = checked_device(self.where, dtype, device)
        given = config.initializer or initializer or default_initializer(num_embeddings)
        self.start_as(for_dimension(given, embedding_dim))
        self.rounding_key = table_key(config.seed, name, "rounding")
        self.forwards = OpenForwards()
        self.reset(dtype, device)

    def __setattr__(self, name: str, value: Any) -> None:
        # What groups of tables have listed is valid as long as no attribute changes. `own` is not listed, nor
        # is what the table has not yet had.
        is_listed = name != "own" and self.__dict__.get(name, value) is not value
        if is_listed:
            TABLES.renew()
        object.__setattr__(self, name, value)
        if is_listed:
            TABLES.renew()  # `is_frozen` is set without the lock: a thread may have listed it in between

    @property
    def step(self) -> int:
        """Number of training steps so far, without those of the frozen table."""
        own = self.own  # read once: without the lock, a table may move to other counters in between
        return own.step + own.shared.counted.steps

    @step.setter
    def step(self, step: int) -> None:
        TABLES.renew()
        self.own = self.own._replace(step=step - self.own.shared.counted.steps)

    def leave_open_step(self, step: int) -> None:
        """Sets the number of steps of a table that has no part in the open step of its group."""
        # On counters of its own: on the shared ones `next_step` would be the open step.
        self.own = self.own.moved_to(SharedCounters(1), 0)
        self.step = step

    @property
    def next_step(self) -> int:
        """The step of the next training forward: the present one as long as deferred updates keep it open."""
        own = self.own
        return own.step + own.shared.counted.steps + (own.shared.earlier is None)

    def first_seen(self, is_trained: bool) -> int:
        """The `last_seen` of rows that ids get now, in the next training forward or outside of training."""
        step = self.next_step if is_trained else self.step
        return step if self.life is None else self.life.first_seen(step)

    @property
    def edits(self) -> int:
        """Number of calls that wrote rows, or added or removed ids."""
        own = self.own
        return own.edits + own.shared.edits

    def count_edit(self) -> None:
        """Counts an edit outside of training."""
        TABLES.renew()  # the next step looks at the table's policies
        self.own = self.own._replace(edits=self.own.edits + 1)

    @property
    def counters(self) -> dict[str, int]:
        """The counters of `stats`, without the forwards of the table's shared counters."""
        return self.own.counters

    def note_cached(self) -> None:
        """Adds what the cache of a table in host memory has counted to `counters`, before it is dropped."""
        if self.weights.cache is not None:
            for name, count in self.weights.cache.take_counts().items():
                self.counters[name] += count

    def start_as(self, initializer: Initializer) -> None:
        """Sets the initializer of fresh rows."""
        states = self.optimizer.initial_states
        rows = InitialRows(initializer, self.config.seed, self.name, self.first_column, states)
        self.initializer, self.initial_rows = initializer, rows

    def change_optimizer(self, optimizer: RowOptimizer) -> None:
        """Sets other hyper-parameters of the update rule. No earlier forward can run its backward then."""
        self.generation += 1
        self.optimizer = optimizer
        self.start_as(self.initializer)

    @lasting
    def reset(self, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the table empty. The new contents are new objects; the old objects do not change."""
        check_storage(self.where, self.config.storage, device)
        if self.changes is not None:
            self.changes.forget_sums()
        storage = self.config.storage
        files = storage.directory if isinstance(storage, MappedFiles) else None
        gpu_rows = 0
        if isinstance(storage, HostMemory) and device.type != "cpu":
            gpu_rows = min(storage.gpu_rows, self.row_limit)
        row_bytes = self.columns * dtype.itemsize
        shift = block_shift(self.row_limit, row_bytes, device.type, most_block_bytes(files))
        life = (self.config, self.name, self.row_limit, shift, device)
        if gpu_rows:
            shift = block_shift(self.row_limit, row_bytes)
        self.id_map = IdMap(self.row_limit, device)
        self.row_numbers = RowNumbers(self.forwards, device)
        self.weights = RowStore(self.columns, shift, dtype, device, files, gpu_rows > 0)
        self.states = tuple(
            RowStore(columns, shift, STATE_DTYPE, device, files, gpu_rows > 0)
            for columns in self.optimizer.state_columns(self.columns)
        )
        if gpu_rows:
            cache = RowCache(gpu_rows, self.row_limit, device)
            # The ops know no states of a rule in Python: these stay in the host's memory.
            for store in self.stores if self.optimizer.own is None else (self.weights,):
                store.join(cache)
        self.life = RowLife(*life) if self.config.has_life else None
        if self.nonfinite is not None:
            self.nonfinite = self.nonfinite.to(device, copy=True)
        self.generation += 1

    @property
    def where(self) -> str:
        """Name in messages, in the words of users: a dynamic table."""
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
    def waiting(self) -> AdmissionCounters | None:
        """The counters of the ids that wait for admission; None if no policy counts them."""
        return None if self.life is None else self.life.waiting

    @property
    def searched(self) -> SearchedRows:
        """The rows as searches for the lowest take them."""
        return SearchedRows(self.id_map, self.weights, self.row_numbers.high_water_mark)

    @property
    def stores(self) -> tuple[RowStore, ...]:
        """The weights and every optimizer state."""
        return (self.weights, *self.states)

    def reserve(self, additional: int) -> None:
        """Makes room for `additional` more ids and their rows."""
        reserve_tables([(self, Room(additional))])

    def reserve_rows(self, additional: int, counters: int) -> None:
        """Makes room for `additional` more rows, and `counters` more counters, in all but the maps."""
        rows = self.row_numbers.highest_after(additional)
        cache = self.weights.cache
        frames = 0 if cache is None else cache.reserve(rows)
        for store in self.stores:
            store.reserve(rows, frames)
        if cache is not None:
            cache.use(frames)
        if self.changes is not None:
            self.changes.reserve(rows)
        if self.life is not None:
            self.life.reserve(rows, counters)

    # The log of changes: made with the first version; after the last version was dropped, the next change
    # drops it.

    @property
    def change_log(self) -> ChangeLog | None:
        """The log of changes. If no version is held, drops the log and returns None."""
        if self.changes is not None and not self.changes.is_in_use:
            self.changes = None
        return self.changes

    def note_replaced(self, id_map: IdMap) -> None:
        """Records that the contents of a former id map were replaced. If this fails nothing is recorded."""
        log = self.change_log
        if log is not None:
            high = self.row_numbers.high_water_mark
            vars(log).update(log.replaced(*id_map.contents(), high, self.device))

    # Limits.

    def _check_shape(self) -> None:
        for field in ("num_embeddings", "embedding_dim", "columns", "row_limit"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{self.where}.{field}: expected at least 1, got {getattr(self, field)}."
                )
        if self.first_column < 0 or self.first_column + self.columns > self.embedding_dim:
            raise ValueError(
                f"{self.where}: expected columns inside [0, {self.embedding_dim}), got "
                f"[{self.first_column}, {self.first_column + self.columns})."
            )

    def check_room(self, additional: int) -> None:
        """Raises RuntimeError if `additional` more rows exceed the limit and no policy replaces rows."""
        if self.life is not None and self.life.replaces:
            return
        rows = self.id_map.num_ids
        if additional and rows + additional > self.row_limit:
            raise RuntimeError(
                f"{self._where_here}: expected at most {self.row_limit} rows here "
                f"(num_embeddings={self.num_embeddings}), got {rows} and {additional} new "
                "ids. Raise num_embeddings, or evict rows: "
                f"DynamicTableConfig({making_room(self.config.eviction)})."
            )

    def check_need(self, need: int) -> None:
        """Raises RuntimeError if the rows of one batch alone exceed the limit, though a policy replaces rows.

        `need`: distinct ids of the batch that have a row or were admitted.
        """
        if need > self.row_limit:
            raise RuntimeError(
                f"{self._where_here}: expected a batch that needs at most "
                f"{self.row_limit} rows here (num_embeddings={self.num_embeddings}), got {need} "
                "distinct ids. Raise num_embeddings, or make the batch smaller."
            )

    def check_step(self, step: int) -> None:
        """Raises RuntimeError if a step number does not fit into a score (after 4 * 10^9 steps)."""
        if step >= NO_STEP:
            raise RuntimeError(
                f"{self.where}: expected a training step below {NO_STEP}, got {step}. "
                "Load the table's state without its scores and its step."
            )

    @property
    def _where_here(self) -> str:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return f"{self.where} on rank {rank}"
