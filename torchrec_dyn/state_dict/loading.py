"""TableLoad: the load of one table, rows and optimizer state together, kept beside the table.

A state dict of the model has the rows of a table, one of the optimizer its optimizer state. No name of a
tensor occurs in both, so both are parts of one load.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    MODEL_CHECKSUM,
    MODEL_TENSORS,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    ChunkedTensor,
    add_sums,
    check_config,
    check_config_is_whole,
    check_optimizer,
    compare_sums,
    from_bytes,
    from_words,
    optimizer_config,
    saved_initializer,
    sum_of_small,
)
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.places import Places, Run, Share, chunks_to_read, share_of
from torchrec_dyn.state_dict.saving import TableSource
from torchrec_dyn.state_dict.staged_rows import StagedRows, place_of_block, present_rows, with_state
from torchrec_dyn.storage import (
    CanonicalRows,
    RowStore,
    TableLock,
    commit,
    turn_of,
)
from torchrec_dyn.table import Commit, TableShard, replace

# By the checksum of a state dict: its config, the names of its tensors, and the end of the message for a
# checkpoint without it.
_CONFIGS = {MODEL_CHECKSUM: "config", OPTIMIZER_CHECKSUM: "optimizer_config"}
TENSORS = {MODEL_CHECKSUM: MODEL_TENSORS, OPTIMIZER_CHECKSUM: OPTIMIZER_TENSORS}
_MISSING = {
    MODEL_CHECKSUM: "this table, got one without. "
    "Leave it out of the state dict, or give LoadPlanner(allow_partial_load=True).",
    OPTIMIZER_CHECKSUM: "its optimizer state, got one without. "
    "Load the model's state dict only, or give LoadPlanner(allow_partial_load=True).",
}


class LoadTarget:
    """The tensors of one table in one state dict, of the model or of its optimizer, as a target of a load.

    Attributes:
        canonical: the rows of each shard as the tensors save them.
        load: what was read into the tensors; None before.
        is_left_out: True if a partial load has found no such tensors.
    """

    def __init__(self, table: Table, is_optimizer: bool) -> None:
        self.table = table
        self.is_optimizer = is_optimizer
        self.canonical: Sequence[CanonicalRows] = ()
        self.load: TableLoad | None = None
        self.is_left_out = False

    @property
    def staged(self) -> Sequence[StagedRows] | None:
        """What was read and is not loaded; None if there is nothing."""
        return None if self.load is None else self.load.staged

    def source(self) -> TableSource:
        """Returns what saves the tensors."""
        source = TableSource(self.table, self)
        self.canonical = source.canonical
        return source

    def is_own(self, table: Table) -> bool:
        """Returns True if the tensors are the contents of these shards: loaded already, or never read into.

        Raises RuntimeError if the shards have changed since.
        """
        if self.staged is not None or not self.table.has_shards_of(table):
            return False
        for rows in () if self.is_left_out else self.canonical:
            rows.check_unchanged()
        return True


# One rank's part of a load: the rows of each saved checksum that it has read, the content sums of its rows,
# and the last training step that they record; of optimizer state without rows, whose sums follow later, the
# share of the present rows.
CheckedPart = tuple[dict[str, list[list[int]]], dict[str, int], int, Share | None]


class TableLoad:
    """The load of one table.

    Attributes:
        targets: the state dicts into which it was read; none if they have plain tensors.
        has_rows: True if rows, ids, scores, counters and clock are loaded.
        has_state: True if optimizer state is loaded. Without rows it belongs to the present rows.
        keys: keys of its tensors in the state dicts that DCP loads, by name.
        saved: DCP's metadata of the saved tensors, by name.
        files: the saved tensors, by name, if the directory is known.
        unread: names of saved tensors that the load does not read, so that their sums are not compared.
        small: the tensors that are not by row, as read, by name.
        words: the rows of each saved checksum that this rank has read.
        staged: the rows of each shard as read; None before a load and after it.
        places: places of the rows that this rank reads.
        waiting_places: places of the waiting ids that this rank reads.
        total: number of rows of the whole table as saved.
        session: all loads that were read together: they are verified before any of their tables changes.
        is_verified: True if the sums over all ranks were right.
        step: the last training step recorded in the rows of any rank.
        sums_as_read: by tensor the content sum of the rows that were read, and how many numbers; None: the
            rows are not summed as they are read.
    """

    def __init__(self, table: Table, has_rows: bool = True, has_state: bool = False) -> None:
        self.table = table
        self.targets: list[LoadTarget] = []
        self.has_rows, self.has_state = has_rows, has_state
        self.keys: dict[str, str] = {}
        self.saved: Mapping[str, TensorStorageMetadata] = {}
        self.files: dict[str, ChunkedTensor] = {}
        self.unread: set[str] = set()
        self.small: dict[str, Tensor] = {}
        self.words: dict[str, list[list[int]]] = {}
        self.staged: list[StagedRows] | None = None
        self.places = self.waiting_places = Places([])
        self.total = self.step = 0
        self.session: list[TableLoad] | None = None
        self.is_verified = False
        self.sums_as_read: dict[str, tuple[int, int]] | None = None
        self._runs: list[Run] | None = None  # of optimizer state without rows
        self._commits: list[Commit] = []
        self._aligned_to: list[CanonicalRows] = []  # rows that must not change before the commit

    @property
    def lock(self) -> TableLock:
        """The lock of the shards."""
        return self.table.lock

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return self.table.device

    @property
    def row_names(self) -> list[str]:
        """Names of the tensors by row that the table can use."""
        names, options = [], self.table.options
        if self.has_rows:
            names += ["ids", "weight", *(BY_ROW if options.has_life else ())]
            names += ["waiting"] if options.counts_waiting else []
        return [*names, *(self.table.optimizer.state_names if self.has_state else ())]

    @property
    def small_names(self) -> tuple[str, ...]:
        """Names of the other tensors, without checksums."""
        with_rows = ("clock", "config") if self.has_rows else ()
        return (*with_rows, *(("step", "optimizer_config") if self.has_state else ()))

    @property
    def checksums(self) -> list[str]:
        """Names of the checksums."""
        with_state = [OPTIMIZER_CHECKSUM] if self.has_state else []
        return [*([MODEL_CHECKSUM] if self.has_rows else []), *with_state]

    @property
    def names(self) -> set[str]:
        """Names of all tensors that the table can use."""
        return {*self.row_names, *self.small_names, *self.checksums}

    # Reading.

    def choose_targets(self, present: Container[str]) -> bool:
        """Leaves out the state dicts of which no tensor is present; returns False if none is left."""
        for target in self.targets:
            names = TENSORS[OPTIMIZER_CHECKSUM if target.is_optimizer else MODEL_CHECKSUM]
            target.is_left_out = not any(name in present for name in names)
            target.load = None if target.is_left_out else self
        self.targets = [target for target in self.targets if not target.is_left_out]
        self.has_rows = any(not target.is_optimizer for target in self.targets)
        self.has_state = any(target.is_optimizer for target in self.targets)
        return bool(self.targets)

    def begin(
        self,
        saved: Mapping[str, TensorStorageMetadata],
        places: Places | None = None,
        waiting: Places | None = None,
    ) -> None:
        """Begins a load: makes empty stores for the rows at `places`, or at all.

        `saved` is DCP's metadata of the saved tensors, by name, and `waiting` are the places of waiting ids.
        Raises ValueError if a config or a checksum is missing, or the tensors have different rows.
        """
        rows = self._rows_in(saved)
        self.saved, self.small, self.words = saved, {}, {}
        self.unread = set(saved) - self.names
        self.is_verified, self.sums_as_read = False, None
        self.total = next(iter(rows.values()), 0)
        counters = saved["waiting"].size[0] if "waiting" in saved else 0
        is_here = self.table.part is not None
        self.waiting_places = waiting or Places([(0, counters)] if is_here else [])
        places = places or Places([(0, self.total)] if is_here else [])
        dtype = saved["weight"].properties.dtype if "weight" in saved else torch.float32
        states = self.table.optimizer.state_names
        widths = {name: saved[name].size[1] for name in states if name in rows}
        self.stage(places, dtype, widths)

    def _rows_in(self, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, int]:
        """Returns the number of rows of each saved tensor by row, which is the same."""
        where = self.table.where
        for checksum in self.checksums:
            if _CONFIGS[checksum] not in saved:
                raise ValueError(f"{where}: expected a checkpoint with {_MISSING[checksum]}")
            if checksum not in saved:
                raise ValueError(
                    f"{where}: expected a checkpoint with a checksum of this table, got none. {DAMAGED}"
                )
        names = [name for name in self.row_names if name in saved and name != "waiting"]
        rows = {name: saved[name].size[0] for name in names}
        if len({*rows.values()}) > 1:
            raise ValueError(
                f"{where}: expected tensors with the same number of rows, got {rows}. {DAMAGED}"
            )
        return rows

    def stage(
        self,
        places: Places,
        dtype: torch.dtype,
        widths: Mapping[str, int],
        has_all_cuts: bool = True,
    ) -> None:
        """Makes empty stores beside the stores of the shards; the arguments are those of `StagedRows`."""
        self.places = places
        self.staged = [
            StagedRows(self.table, shard, places, dtype, widths, has_all_cuts)
            for shard in self.table.shards
        ]

    def wanted(self, name: str) -> list[ChunkStorageMetadata]:
        """Returns the blocks of a saved tensor that this rank reads."""
        if name in self.checksums:  # each rank reads the rows of some of the ranks that saved
            ranks = 1 if self.table.group is None else self.table.group.size()
            return list(self.saved[name].chunks)[self.table.rank :: ranks]
        if name in self.small_names:
            return [chunk for chunk in self.saved[name].chunks if chunk.sizes.numel()]
        if not self.staged or name not in self.row_names:
            return []
        # Every shard needs the row-wise state of all cuts: it is read once and put into each shard's store.
        has_columns = name == "weight" or name in self.table.optimizer.state_names
        is_cut = has_columns and not self.table.optimizer.is_rowwise(name)
        ranges = [(first, first + columns) for first, columns in self.table.columns]
        places = self.waiting_places if name == "waiting" else self.places
        return list(chunks_to_read(self.saved[name], places, ranges if is_cut else None))

    def stores(self, name: str) -> list[tuple[RowStore, int]]:
        """Returns the staged stores of a tensor, and the column of the tensor at which each begins."""
        stores = (staged.store(name) for staged in self.staged or ())
        return [store for store in stores if store is not None]

    def block_to_fill(
        self, name: str, offset: Sequence[int], size: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Returns a tensor to read a block into: if possible its place in a staged store.

        `offset` is the place of the block in the tensor, `size` its size, one number per dimension.
        """
        for store, origin in self.stores(name):
            place = place_of_block(store, origin, self.places, offset, size)
            if place is not None and store.dtype == dtype:
                return place
        return torch.empty(size, dtype=dtype, device="cpu")

    def receive(self, name: str, offset: tuple[int, ...], block: Tensor) -> None:
        """Stages a block that was read; `offset` is its place in the tensor, one number per dimension."""
        if name in self.checksums:
            self.words.setdefault(name, []).extend(block.tolist())
            return
        if name in self.small_names:
            self.small[name] = block
            return
        for staged in self.staged or ():
            staged.receive(name, offset[0], offset[1] if len(offset) > 1 else 0, block)

    # Verifying.

    def _config(self, name: str) -> dict[str, Any]:
        return from_bytes(self.table.where, self.small[name]) if name in self.small else {}

    @property
    def cuts(self) -> list[int]:
        """The column cuts of row-wise state as saved."""
        return self._config("optimizer_config").get("cuts", self.table.cuts)

    def initializer(self) -> Initializer | None:
        """Returns the saved initializer; None if no config was read, ValueError if this version lacks it."""
        config = self._config("config")
        return saved_initializer(self.table.where, config) if config else None

    def check(self) -> CheckedPart:
        """Checks this rank's part of the load."""
        self._check_configs()
        staged = self.staged or ()
        for rows in staged:
            rows.check_complete(self.has_rows)
        if not self.has_rows:
            share = share_of(self._present[0], self.table) if self.table.shards else None
            return self.words, {}, 0, share
        sums = [rows.sums for rows in staged]
        if self._is_summed():
            sums += [{name: summed} for name, (summed, _) in (self.sums_as_read or {}).items()]
        else:
            sums = [rows.summed() for rows in staged]
        last = max((rows.last_step() for rows in staged), default=0)
        return self.words, add_sums(*sums, self._small_sums()), last, None

    def _check_configs(self) -> None:
        """Raises ValueError if the configs are damaged, or do not fit the table."""
        table, where = self.table, self.table.where
        for checksum in self.checksums:
            if words := self.words.get(checksum):
                small = {name: self.small[name] for name in self.small if name in TENSORS[checksum]}
                saved = from_words(torch.tensor(words, device="cpu"))
                check_config_is_whole(where, table.name, small, saved)
        if config := self._config("config"):
            check_config(where, config, table.config)
        if config := self._config("optimizer_config"):
            check_optimizer(where, config, optimizer_config(table.optimizer, table.cuts))

    def _is_summed(self) -> bool:
        """Returns True if all rows were summed while they were read, and all belong here."""
        sums = self.sums_as_read
        if sums is None or any(staged.others for staged in self.staged or ()):
            return False
        return all(
            sums.get(name, (0, 0))[1] == self.places.count * prod(self.saved[name].size[1:])
            for name in self.row_names
            if name in self.saved and name != "waiting"
        )

    def _small_sums(self) -> dict[str, int]:
        """Returns the content sums of the tensors that are not by row: every rank reads them, rank 0 sums."""
        if self.table.rank:
            return {}
        name = self.table.name
        return {
            small: sum_of_small(name, small, self.small[small])
            for small in self.small_names
            if small in self.small
        }

    def compare(
        self, words: Sequence[Mapping[str, list[list[int]]]], summed: Mapping[str, int]
    ) -> None:
        """Raises ValueError if the sums over all ranks differ from the saved ones; `words` are by rank."""
        where = self.table.where
        for checksum in self.checksums:
            rows = [row for rank_words in words for row in rank_words.get(checksum, [])]
            if not rows:
                continue
            saved = from_words(torch.tensor(rows, device="cpu"))
            names = [name for name in TENSORS[checksum] if name not in self.unread]
            if checksum == OPTIMIZER_CHECKSUM and self.table.optimizer.state_names:
                if not self.has_rows and saved["ids"] != summed.get("ids", 0):
                    raise ValueError(
                        f"{where}: expected optimizer state of the ids that the table has, got that of other "
                        "ids. Load it with the state dict of the module, or right after that."
                    )
                names.append("ids")
            compare_sums(where, saved, names, summed)

    # Optimizer state without its rows.

    @property
    def _present(self) -> list[CanonicalRows]:
        return [self.table.canonical(shard) for shard in self.table.shards]

    def sums_of_state(self, total: int, runs: list[Run]) -> dict[str, int]:
        """Returns this rank's content sums of optimizer state without rows, by the present ids.

        `runs` are this rank's rows in the whole table, of `total` rows. Raises ValueError if the state has
        another number of rows.
        """
        table = self.table
        if table.optimizer.state_names and self.total != total:
            raise ValueError(
                f"{table.where}: expected optimizer state of {total} rows, as the table has, got that "
                f"of {self.total}. Load it with the state dict of the module, or right after that."
            )
        self._runs = runs
        return add_sums(
            self._small_sums(),
            *(
                staged.summed((ids, places) for ids, _, places in self._stretches(rows))
                for rows, staged in zip(self._present, self.staged or (), strict=True)
            ),
        )

    def _stretches(self, rows: CanonicalRows) -> Any:
        if not self.table.optimizer.state_names or self._runs is None:
            return iter(())
        return present_rows(rows, self._runs, self.places, self.table.cuts[-1])

    # Committing.

    def finished(self) -> list[TableShard]:
        """Returns the complete shards beside those of this rank, to be written into these."""
        clock, initializer = self.small.get("clock"), self.initializer()
        step = int(self.small["step"]) if "step" in self.small else None
        if self.has_rows:
            return [
                staged.finish(clock, initializer, self.step, step, self.cuts)
                for staged in self.staged or ()
            ]
        self._aligned_to = self._present
        return [
            with_state(shard, staged, self._stretches(rows), step, self.cuts)
            for shard, staged, rows in zip(
                self.table.shards, self.staged or (), self._aligned_to, strict=True
            )
        ]

    def prepare(self) -> None:
        """Takes all memory that the commit needs. May be called again after it has failed."""
        with turn_of(self, also_torn=self.has_rows):
            self._commits = [*map(replace, self.table.shards, self.finished())]

    def commit(self) -> None:
        """Replaces the contents of the shards by what was prepared."""
        table, initializer = self.table, self.initializer()
        with turn_of(self, also_torn=self.has_rows):
            for rows in self._aligned_to:
                rows.check_unchanged()  # by another thread
            with commit(table, replaces=self.has_rows):
                for change in self._commits:
                    change()
                if initializer is not None:
                    table.initializers[table.name] = initializer
            self.staged = self.session = None
            self._commits, self._aligned_to = [], []
            for target in self.targets:  # loaded again, their tensors are the table's own
                target.canonical = self._present
            self.targets = []  # each refers to this load: tables of a deleted model go without the collector


def begin_session(loads: list[TableLoad]) -> None:
    """Notes that tables were read together."""
    for load in loads:
        load.session = loads


# By the lock of a collection: the loads that are awaited, by table.
_awaited: weakref.WeakKeyDictionary[TableLock, dict[str, weakref.ref[TableLoad]]]
_awaited = weakref.WeakKeyDictionary()


def note_begun(load: TableLoad) -> None:
    """Notes that the rows of a table are read next, on all ranks."""
    _awaited.setdefault(load.lock, {})[load.table.name] = weakref.ref(load)


def note_taken(lock: TableLock, name: str) -> None:
    """Notes that a table was loaded."""
    names = _awaited.get(lock)
    if names is not None:
        names.pop(name, None)
        if not names:
            _awaited.pop(lock, None)


def check_taken(lock: TableLock, where: str) -> None:
    """Raises ValueError if a load of a collection is awaited; before a forward, with its lock."""
    if not _awaited:
        return
    if names := _awaited.get(lock):
        raise ValueError(
            f"{where}: expected load_state_dict after dcp.load with LoadPlanner, got a forward while the "
            f"rows that were read for tables {listed(sorted(names))} are not in these. Call "
            "load_state_dict of the model with the loaded state dict, or drop these rows with "
            "torchrec_dyn.checkpoint.drop_load(model)."
        )


def drop_awaited(lock: TableLock) -> list[str]:
    """Drops the rows of awaited loads of a collection; returns the names of their tables."""
    names = _awaited.pop(lock, {})
    for reference in names.values():
        load = reference()
        for dropped in list((load and load.session) or ()):
            if dropped.lock is lock and dropped.session is not None:
                dropped.session.remove(dropped)
                dropped.staged = dropped.session = None
    return sorted(names)
