"""LoadSession: verifies all tables of one load, over all ranks, before any table changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    SavedTensor,
    add_sums,
    check_config_is_whole,
    compare_sums,
    from_bytes,
    from_words,
    numbers_of,
    sum_of_small,
)
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.state_dict.row_sums import SumsAsRead
from torchrec_dyn.state_dict.saving import TableSource
from torchrec_dyn.state_dict.staged_rows import place_of_block
from torchrec_dyn.storage import CanonicalRows, RowStore, TableLock, to_host


class TableEntry(ABC):
    """The load of one table, of a model's or an optimizer's state dict, kept beside the table.

    Attributes:
        canonical: the rows of each shard as this entry saves them; none if the entry only loads. Not their
            source: it refers to the entry, and a cycle would keep the rows of a deleted model.
        saved: DCP's metadata of the saved tensors, by name.
        unread: names of saved tensors that the load does not read, so that their sums are not compared.
        small: the tensors that are not by row, as read, by name.
        words: the rows of the saved checksum that this rank has read.
        staged: the rows of each shard as read; None before a load and after it.
        places: places of the rows that this rank reads.
        waiting_places: places of the waiting ids that this rank reads; None: those of the saved index.
        total: number of rows of the whole table as saved.
        has_all_cuts: True if row-wise optimizer state is read with the numbers of all column shards, False
            if each shard reads only its own number.
        session: session of the load.
        is_verified: True if the sums over all ranks were right.
        is_left_out: True if a partial load found no tensors of the table.
        step: the last training step recorded in the rows of any rank.
        is_of_state_dict: True if the entry belongs to a state dict, which is to be loaded after it was read.
        sums_as_read: the content sums of the rows, added up while they are read; None: they are not.
    """

    order: ClassVar[tuple[str, ...]]  # tensor names in the order of their sums in the checksum
    small_names: ClassVar[tuple[str, ...]]
    config, checksum = "config", "checksum"  # names of these tensors
    missing: ClassVar[str]  # end of the message for a checkpoint without the table

    def __init__(self, table: Table) -> None:
        self.table = table
        self.canonical: Sequence[CanonicalRows] = ()
        self.saved: Mapping[str, TensorStorageMetadata] = {}
        self.unread: set[str] = set()
        self.small: dict[str, Tensor] = {}
        self.words: list[list[int]] = []
        self.staged: list[Any] | None = None
        self.places = Places([])
        self.waiting_places: Places | None = None
        self.total = 0
        self.has_all_cuts = True
        self.session: LoadSession | None = None
        self.is_verified = self.is_left_out = False
        self.step = 0
        self.is_of_state_dict = False
        self.sums_as_read: SumsAsRead | None = None

    @property
    def lock(self) -> TableLock:
        """The lock of the shards."""
        return self.table.lock

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return self.table.device

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """Names of the tensors by row that the table can use."""

    def renew(self) -> TableSource:
        """Returns a source of the table as it is now, and sets `canonical` to its rows."""
        source = TableSource(self.table, self)
        self.canonical, self.is_of_state_dict = source.canonical, True
        return source

    def is_own(self, table: Table) -> bool:
        """Returns True if the entry is of a state dict of these shards into which nothing was loaded.

        Raises:
            RuntimeError: if the shards have changed since the state dict was made.
        """
        if self.staged is not None or not self.table.has_shards_of(table):
            return False
        for rows in () if self.is_left_out else self.canonical:
            rows.check_unchanged()
        return True

    def begin(
        self,
        saved: Mapping[str, TensorStorageMetadata],
        places: Places | None = None,
        waiting: Places | None = None,
    ) -> None:
        """Begins a load: makes empty stores for the rows that this rank reads.

        `saved` is DCP's metadata of the saved tensors, by name. `places` are those of the rows to read,
        `waiting` those of the waiting ids; None: they are found by the saved index.

        Raises:
            ValueError: if the table or its checksum is missing.
        """
        if self.config not in saved:
            raise ValueError(f"{self.table.where}: expected a checkpoint with {self.missing}")
        if self.checksum not in saved:
            raise ValueError(
                f"{self.table.where}: expected a checkpoint with a checksum of this table, got no checksum. "
                f"{DAMAGED}"
            )
        self.saved, self.small, self.unread = saved, {}, set(saved) - self._read
        self.words = []
        self.is_verified = self.is_left_out = False
        self.waiting_places, self.sums_as_read = waiting, None
        self._stage_saved(places)

    @abstractmethod
    def _stage_saved(self, places: Places | None) -> None:
        """Makes empty stores for the rows of `saved` that this rank reads."""

    def fill(self, saved: Mapping[str, Any]) -> None:
        """Stages this rank's rows of plain tensors of the whole table, or copies of its saved tensors.

        Raises:
            ValueError: if the tensors do not match each other or the table.
        """
        self.unread, self.sums_as_read = set(saved) - self._read, None
        if self.table.group is None:  # a load of an unsharded table may lack parts
            self.unread |= set(self.order) - set(saved)
        self.words = self._words_in(saved[self.checksum]) if self.checksum in saved else []
        for name in self.small_names:
            if name in saved and name != self.checksum:
                self.small[name] = to_host(numbers_of(saved[name]))
        self._fill_rows({name: saved[name] for name in self.names if name in saved}, saved)

    def _words_in(self, checksum: Tensor) -> list[list[int]]:
        """Returns this rank's rows of a checksum: a copy has one, a plain tensor has those of all ranks."""
        if isinstance(checksum, SavedTensor):
            return [row for _, block in checksum.local() for row in block.tolist()]
        rows: list[list[int]] = checksum[self.table.rank :: self._ranks].tolist()
        return rows

    @property
    def _ranks(self) -> int:
        return 1 if self.table.group is None else self.table.group.size()

    @abstractmethod
    def _fill_rows(self, by_row: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Stages this rank's rows; `by_row` has the tensors of `saved` that are by row and read."""

    @property
    def _read(self) -> set[str]:
        """Names of the tensors that the table can use."""
        return {*self.names, *self.small_names}

    @abstractmethod
    def check_is_for(self, table: Table) -> None:
        """Raises ValueError unless the staged rows were read for these shards and can be loaded now."""

    def leave_out(self) -> None:
        """Records that a partial load found no tensors of the table."""
        self.staged, self.session, self.is_left_out = None, None, True

    def wanted(self, name: str) -> list[ChunkStorageMetadata]:
        """Returns the blocks of a saved tensor that this rank reads."""
        if name == self.checksum:  # each rank reads the rows of some of the ranks that saved
            return list(self.saved[name].chunks)[self.table.rank :: self._ranks]
        if name in self.small_names:
            return [chunk for chunk in self.saved[name].chunks if chunk.sizes.numel()]
        return self._wanted_rows(name)

    @abstractmethod
    def _wanted_rows(self, name: str) -> list[ChunkStorageMetadata]:
        """Returns the blocks of a saved tensor by row that this rank reads."""

    @abstractmethod
    def stores(self, name: str) -> list[tuple[RowStore, int]]:
        """Returns the staged stores of a tensor, and the column of the tensor at which each begins."""

    def target(
        self, name: str, offset: Sequence[int], size: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Returns a tensor to read a block into: if possible its place in a staged store.

        `offset` is the place of the block in the tensor, `size` its size, one number per dimension; `dtype`
        is that of the saved numbers.
        """
        for store, origin in self.stores(name):
            place = place_of_block(store, origin, self.places, offset, size)
            if place is not None and store.dtype == dtype:
                return place
        return torch.empty(size, dtype=dtype, device="cpu")

    def receive(self, name: str, offset: tuple[int, ...], block: Tensor) -> None:
        """Stages a block that was read.

        block: its numbers; `offset` is its place in the tensor, one number per dimension.
        """
        if name == self.checksum:
            self.words += block.tolist()
        elif name in self.small_names:
            self.small[name] = block
        else:
            self._receive_rows(name, offset, block)

    @abstractmethod
    def _receive_rows(self, name: str, offset: tuple[int, ...], block: Tensor) -> None:
        """Stages a block of a tensor by row."""

    @property
    def saved_config(self) -> dict[str, Any]:
        """The config as read; {} if no config was read."""
        if self.config not in self.small:
            return {}
        return from_bytes(self.table.where, self.small[self.config])

    def check_config(self) -> None:
        """Raises ValueError if the config is damaged, or of another table or optimizer."""
        table = self.table
        if self.words:
            saved = from_words(torch.tensor(self.words, device="cpu"))
            check_config_is_whole(table.where, table.name, self.small, saved)
        if saved_config := self.saved_config:
            self._check_fits(saved_config)

    @abstractmethod
    def _check_fits(self, config: dict[str, Any]) -> None:
        """Raises ValueError if a saved config is of another table or optimizer."""

    @abstractmethod
    def check(self, others: Sequence[TableEntry] = ()) -> dict[str, int] | None:
        """Checks this rank's part of the load, and returns its content sums.

        Returns:
            The content sums of the tensors and rows of this rank; None if the ids of the rows are not known
            yet.

        Raises:
            ValueError: if the part is damaged, or of another table or optimizer.
        """

    def _are_summed(self, names: Iterable[str]) -> bool:
        """Returns True if all read rows of these tensors were summed while they were read."""
        summed = self.sums_as_read
        return summed is not None and all(
            summed.numbers.get(name, 0) == self.places.count * prod(self.saved[name].size[1:])
            for name in names
        )

    def small_sums(self) -> dict[str, int]:
        """Returns the content sums of the tensors that are not by row: every rank reads them, rank 0 sums."""
        if self.table.rank:
            return {}
        summed = [name for name in self.small_names if name != self.checksum and name in self.small]
        return {name: sum_of_small(self.table.name, name, self.small[name]) for name in summed}

    def compare(self, words: Sequence[list[list[int]]], summed: Mapping[str, int]) -> None:
        """Raises ValueError if the sums over all ranks differ from the saved ones; `words` are by rank."""
        rows = [row for of_rank in words for row in of_rank]
        if rows:
            names = [name for name in self.order if name not in self.unread]
            saved = from_words(torch.tensor(rows, device="cpu"))
            compare_sums(self.table.where, saved, names, summed)

    @abstractmethod
    def last_step(self) -> int:
        """Returns the last training step recorded in the rows of this rank; 0 if no step is recorded."""


class LoadSession:
    """The tables that are read in one load.

    Attributes:
        entries: of the tables, in the same order on all ranks.
    """

    def __init__(self, entries: Sequence[TableEntry]) -> None:
        self.entries = list(entries)
        self._is_verified = False
        for entry in entries:
            entry.session = self

    def drop(self, lock: TableLock) -> None:
        """Drops what was read for the tables of a collection, which has this lock."""
        for entry in self.entries:
            if entry.lock is lock:
                entry.staged = entry.session = None
        self.entries = [entry for entry in self.entries if entry.lock is not lock]

    def verify(self, where: str) -> None:
        """Verifies all tables, once. Collective.

        Raises:
            ValueError: on every rank, if a table is damaged or does not match the model.
        """
        if not self.entries or self._is_verified:
            return
        group = self.entries[0].table.group
        checked = gather_results(
            group,
            where,
            lambda: [
                (entry.check(self.entries), entry.words, entry.last_step())
                for entry in self.entries
            ],
        )

        def compare() -> None:
            for entry, by_rank in zip(self.entries, zip(*checked, strict=True), strict=True):
                sums = [summed for summed, _, _ in by_rank if summed is not None]
                if len(sums) == len(by_rank):
                    entry.compare([words for _, words, _ in by_rank], add_sums(*sums))
                    entry.is_verified = True
                entry.step = max(step for *_, step in by_rank)

        run_together(group, where, compare)
        self._is_verified = True
