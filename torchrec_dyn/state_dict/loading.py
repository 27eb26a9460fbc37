"""TableLoad: the load of one table, rows and optimizer state together, kept beside the table.

A state dict of the model has the rows of a table, one of the optimizer its optimizer state. No name of a
tensor occurs in both, so both are parts of one load.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    MODEL_CHECKSUM,
    MODEL_TENSORS,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    SUMMED,
    ChunkedTensor,
    MergedTable,
    SavedTable,
    add_sums,
    check_config,
    check_config_is_whole,
    check_optimizer,
    compare_sums,
    from_bytes,
    from_words,
    optimizer_config,
    sum_of_small,
    warn_of_options,
    without_mark,
)
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.saving import Run, Share, TableSource
from torchrec_dyn.state_dict.staged_state import StagedState
from torchrec_dyn.state_dict.staged_table import StagedTable
from torchrec_dyn.storage import CanonicalRows, TableLock, to_host
from torchrec_dyn.table import Commit

# By the checksum of a state dict: its config, the names of its tensors, and the end of the message for a
# checkpoint without it.
_CONFIGS = {MODEL_CHECKSUM: "config", OPTIMIZER_CHECKSUM: "optimizer_config"}
_TENSORS = {MODEL_CHECKSUM: MODEL_TENSORS, OPTIMIZER_CHECKSUM: OPTIMIZER_TENSORS}
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
    def staged(self) -> object:
        """The rows that were read and are not loaded, or the fault of the load; None if there is nothing."""
        return None if self.load is None else self.load.staged or self.load.fault

    def source(self) -> TableSource:
        """Returns what saves the tensors."""
        source = TableSource(self.table, self)
        self.canonical = source.canonical
        return source

    def is_own(self, table: Table) -> bool:
        """Returns True if the tensors are the contents of these shards; RuntimeError if they were."""
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
        saved_name: name of the table when it was saved, on which its content sums depend.
        keys: keys of its tensors in the state dicts that DCP loads, by name.
        tensors: the saved tensors, by name, in files or in memory; none once they are staged.
        unread: names of saved tensors that the load does not read, so that their sums are not compared.
        staged: what was read; None before a load and after it.
        fault: why nothing is staged, for `check`.
        session: all loads that were read together: they are verified before any of their tables changes.
        is_verified: True if the sums over all ranks were right.
        step: the last training step recorded in the rows of any rank.
    """

    def __init__(self, table: Table, has_rows: bool = True, has_state: bool = False) -> None:
        self.table = table
        self.targets: list[LoadTarget] = []
        self.has_rows, self.has_state = has_rows, has_state
        self.saved_name = table.name
        self.keys: dict[str, str] = {}
        self.tensors: dict[str, ChunkedTensor] = {}
        self.unread: set[str] = set()
        self.staged: StagedTable | StagedState | None = None
        self.fault: ValueError | None = None
        self.session: list[TableLoad] | None = None
        self.is_verified = False
        self.step = 0
        self._small: dict[str, Tensor] = {}  # the tensors that are not by row, as read
        self._words: dict[
            str, list[list[int]]
        ] = {}  # the rows of each checksum that this rank has read
        self._take: Commit | None = None

    @property
    def lock(self) -> TableLock:
        """The lock of the shards."""
        return self.table.lock

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

    # Reading.

    def choose_targets(self, present: Container[str]) -> bool:
        """Leaves out the state dicts of which no tensor is present; returns False if none is left."""
        for target in self.targets:
            names = _TENSORS[OPTIMIZER_CHECKSUM if target.is_optimizer else MODEL_CHECKSUM]
            target.is_left_out = not any(name in present for name in names)
            target.load = None if target.is_left_out else self
        self.targets = [target for target in self.targets if not target.is_left_out]
        self.has_rows = any(not target.is_optimizer for target in self.targets)
        self.has_state = any(target.is_optimizer for target in self.targets)
        return bool(self.targets)

    def begin(self, tensors: dict[str, ChunkedTensor]) -> None:
        """Begins a load of the tensors that were saved; raises ValueError if they lack some."""
        where = self.table.where
        for checksum in self.checksums:
            if _CONFIGS[checksum] not in tensors:
                raise ValueError(f"{where}: expected a checkpoint with {_MISSING[checksum]}")
            if checksum not in tensors:
                raise ValueError(
                    f"{where}: expected a checkpoint with a checksum of this table, got none. {DAMAGED}"
                )
        names = [name for name in self.row_names if name in tensors and name != "waiting"]
        rows = {name: tensors[name].shape[0] for name in names}
        if len({*rows.values()}) > 1:
            raise ValueError(
                f"{where}: expected tensors with the same number of rows, got {rows}. {DAMAGED}"
            )
        known = {*self.row_names, *self.small_names, *self.checksums}
        self.unread = {*tensors, *SUMMED} - known
        # One rank reads the checksums.
        left_out = self.checksums if self.table.rank else []
        self.tensors = {name: tensors[name] for name in tensors if name not in left_out}
        self.fault = ValueError(
            f"{where}: expected tensors that dcp.load has read, got a load that failed. Call it again."
        )

    def wanted(self, name: str) -> list[ChunkStorageMetadata]:
        """Returns the parts of a saved tensor that this rank reads."""
        table, size = self.table, torch.Size(self.tensors[name].shape)
        is_cut = name == "weight" or name in table.optimizer.state_names
        by_row = name in self.row_names
        if not size.numel() or name in self.unread or (by_row and not table.shards):
            return []
        if not is_cut or table.optimizer.is_rowwise(name) or len(size) != 2:
            return [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
        return [
            ChunkStorageMetadata(torch.Size([0, first]), torch.Size([size[0], end - first]))
            for first, end in _joined(table.columns)
        ]

    def stage(self) -> None:
        """Reads this rank's rows beside those of the table; `check` raises the fault of wrong ones."""
        table, tensors, self.tensors = self.table, self.tensors, {}
        try:
            for name in tensors.keys() & {*self.small_names}:
                self._small[name] = self._without_mark(name, to_host(tensors[name].whole()))
            for name in (one for one in self.checksums if one in tensors):
                if words := tensors[name].whole().tolist():
                    self._words[name] = words
            self._check_configs()
            if self.has_rows:
                config, rule = self._config("config"), self._config("optimizer_config")
                saved = SavedTable(
                    table.where, table.key, {**table.config, **config}, rule or None, tensors, {}
                )
                self.staged = StagedTable(table, MergedTable([saved]))
            else:
                self.staged = StagedState(table, tensors, self.cuts, self.saved_name)
            self.fault = None
        except ValueError as fault:
            self.fault = fault

    def _without_mark(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor that is not by row as it was saved; notes the name that `rename_tables` marked."""
        if name not in _CONFIGS.values():
            return tensor
        tensor, saved_name = without_mark(tensor)
        self.saved_name = saved_name or self.saved_name
        return tensor

    # Verifying.

    def _config(self, name: str) -> dict[str, Any]:
        return from_bytes(self.table.where, self._small[name]) if name in self._small else {}

    @property
    def cuts(self) -> list[int]:
        """The column cuts of row-wise state as saved."""
        return self._config("optimizer_config").get("cuts", self.table.cuts)

    def _check_configs(self) -> None:
        """Raises ValueError if the configs are damaged, or do not fit the table."""
        table, where = self.table, self.table.where
        for checksum, words in self._words.items():
            small = {name: self._small[name] for name in self._small if name in _TENSORS[checksum]}
            saved = from_words(torch.tensor(words, device="cpu"))
            check_config_is_whole(where, self.saved_name, small, saved)
        if config := self._config("config"):
            check_config(where, config, {**table.config, "table": self.saved_name})
            if not table.rank:
                warn_of_options(where, config, table.config)
        if config := self._config("optimizer_config"):
            check_optimizer(where, config, optimizer_config(table.optimizer, table.cuts))

    def check(self) -> CheckedPart:
        """Checks this rank's part of the load."""
        if self.fault is not None:
            raise self.fault
        if isinstance(self.staged, StagedState):
            return self._words, {}, 0, self.staged.share()
        assert self.staged is not None
        sums = add_sums(self.staged.sums, self._small_sums())
        return self._words, sums, self.staged.last_step(), None

    def sums_of_state(self, total: int, runs: Sequence[Run]) -> dict[str, int]:
        """Returns this rank's content sums of optimizer state without rows, as `StagedState.sums_at`."""
        assert isinstance(self.staged, StagedState)
        return add_sums(self._small_sums(), self.staged.sums_at(total, runs))

    def _small_sums(self) -> dict[str, int]:
        """Returns the content sums of the tensors that are not by row: every rank reads them, rank 0 sums."""
        name = self.saved_name
        small = {} if self.table.rank else self._small
        return {one: sum_of_small(name, one, tensor) for one, tensor in small.items()}

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
            names = [name for name in _TENSORS[checksum] if name not in self.unread]
            if checksum == OPTIMIZER_CHECKSUM and self.table.optimizer.state_names:
                if not self.has_rows and saved["ids"] != summed.get("ids", 0):
                    raise ValueError(
                        f"{where}: expected optimizer state of the ids that the table has, got that of other "
                        "ids. Load it with the state dict of the module, or right after that."
                    )
                names.append("ids")
            compare_sums(where, saved, names, summed)

    # Committing.

    def prepare(self) -> None:
        """Takes all memory that the commit needs. May be called again after it has failed."""
        assert self.staged is not None
        self._take = self.staged.replacing(self.step)

    def commit(self) -> None:
        """Replaces the contents of the shards by what was prepared."""
        assert self._take is not None
        self._take()
        self._take = None
        self.drop()
        for target in self.targets:  # loaded again, their tensors are the table's own
            target.canonical = [self.table.canonical(shard) for shard in self.table.shards]
        self.targets = []  # each refers to this load: tables of a deleted model go without the collector

    def drop(self) -> None:
        """Drops what was read."""
        self.staged = self.fault = self.session = None
        self.tensors = {}


def _joined(columns: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the begins and ends of ranges of columns; neighbours are one: DCP loads a chunk for each."""
    joined: list[tuple[int, int]] = []
    for first, width in columns:
        end = first + width
        if joined and joined[-1][1] == first:
            first, _ = joined.pop()
        joined.append((first, end))
    return joined


def begin_session(loads: list[TableLoad]) -> None:
    """Notes that tables were read together."""
    for load in loads:
        load.session = loads


def note_begun(load: TableLoad) -> None:
    """Notes that the rows of a table are read next, on all ranks."""
    load.lock.awaited[load.table.name] = weakref.ref(load)


def note_taken(lock: TableLock, name: str) -> None:
    """Notes that a table was loaded."""
    lock.awaited.pop(name, None)


def check_taken(lock: TableLock, where: str) -> None:
    """Raises ValueError if a load of a collection is awaited; before a forward, with its lock."""
    if lock.awaited:
        raise ValueError(
            f"{where}: expected load_state_dict after dcp.load with LoadPlanner, got a forward while the "
            f"rows that were read for tables {listed(sorted(lock.awaited))} are not in these. Call "
            "load_state_dict of the model with the loaded state dict, or drop these rows with "
            "torchrec_dyn.checkpoint.drop_load(model)."
        )


def drop_awaited(lock: TableLock) -> list[str]:
    """Drops the rows of awaited loads of a collection; returns the names of their tables."""
    awaited, lock.awaited = lock.awaited, {}
    for reference in awaited.values():
        load = reference()
        for dropped in list((load and load.session) or ()):
            if dropped.lock is lock and dropped.session is not None:
                dropped.session.remove(dropped)
                dropped.drop()
    return sorted(awaited)
