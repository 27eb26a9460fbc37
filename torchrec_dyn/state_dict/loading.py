"""ModelEntry, OptimizerEntry: the load of one sharded table from the model's or optimizer's state dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    DAMAGED,
    MODEL_TENSORS,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    SavedTensor,
    add_sums,
    check_config,
    check_optimizer,
    content_sum,
    is_canonical,
    optimizer_config,
    rows_summed,
    saved_initializer,
)
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.awaited_loads import note_taken
from torchrec_dyn.state_dict.load_session import TableEntry
from torchrec_dyn.state_dict.places import Places, chunks_to_read, places_of_table
from torchrec_dyn.state_dict.staged_rows import StagedRows, commit_rows, put_block
from torchrec_dyn.storage import (
    RowStore,
    canonical_order,
    commit,
    to_host,
    turn_of,
)
from torchrec_dyn.table import ROW_DTYPES, TableShard, check_state, named_states, stamp_of


class ModelEntry(TableEntry):
    """The load of rows, ids, scores, counters and clock of one table."""

    order = MODEL_TENSORS
    small_names = ("clock", "config", "checksum")
    missing = (
        "this table, got one without. "
        "Leave it out of the state dict, or give LoadPlanner(allow_partial_load=True)."
    )
    staged: list[StagedRows] | None

    @property
    def names(self) -> list[str]:
        """Names of the tensors by row that the table can use."""
        life = ["last_seen", "count"] if self.table.options.has_life else []
        return ["ids", "weight", *life, *(["waiting"] if self.table.options.counts_waiting else [])]

    def check_is_for(self, table: Table) -> None:
        """Raises ValueError unless the rows were read for these shards."""
        self.table.check_model(table)

    def is_of(self, table: Table) -> bool:
        """Returns True if the entry holds rows of these shards that are not committed yet."""
        return self.table.has_shards_of(table) and self.staged is not None

    def _stage_saved(self, places: Places | None) -> None:
        saved = self.saved
        self.total = saved["ids"].size[0] if "ids" in saved else 0
        dtype = saved["weight"].properties.dtype if "weight" in saved else torch.float32
        self.stage(places or places_of_table(self.table, self.total), dtype)

    def stage(self, places: Places, dtype: torch.dtype) -> None:
        """Makes empty stores beside the stores of the shards."""
        table, self.places = self.table, places
        self.staged = [
            StagedRows(
                table.name,
                table.where,
                places,
                shard.first_column,
                shard.weights.empty(dtype=dtype),
                shard.row_limit,
                table.owns if table.layout.row_ranks > 1 else None,
                _most_waiting(shard),
            )
            for shard in table.shards
        ]

    def _wanted_rows(self, name: str) -> list[ChunkStorageMetadata]:
        saved = self.saved[name]
        if not self.staged or name not in self.names:
            return []
        if name == "weight":
            return list(chunks_to_read(saved, self.places, self.table.column_ranges))
        places = self.places
        if name == "waiting":
            places = self.waiting_places or places_of_table(self.table, saved.size[0])
        return list(chunks_to_read(saved, places, None))

    def stores(self, name: str) -> list[tuple[RowStore, int]]:
        """Returns the staged stores of a tensor, and the column of the tensor at which each begins."""
        staged = self.staged if name == "weight" else None
        return [(one.weights, one.first_column) for one in staged or ()]

    def _receive_rows(self, name: str, offset: tuple[int, ...], block: Tensor) -> None:
        for staged in self.staged or ():
            staged.receive(name, offset[0], offset[1] if len(offset) > 1 else 0, block)

    def _fill_rows(self, by_row: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        if not isinstance(saved["weight"], SavedTensor):
            self._fill_from_whole(by_row, "checksum" in saved)
            return
        # Copies of this rank's saved tensors: they need the same plan on the same number of ranks.
        self.stage(Places(row_ranges_of(saved["ids"])), saved["weight"].dtype)
        for name, tensor in by_row.items():
            for offset, block in tensor.local():
                self.receive(name, offset, block)

    def _fill_from_whole(self, by_row: Mapping[str, Tensor], is_summed: bool) -> None:
        """Stages this rank's rows of plain tensors, which hold the rows of all ranks in any order."""
        table = self.table
        weight = by_row["weight"].detach()
        _check_shapes(table, weight, by_row["ids"])
        given = {name: to_host(one) for name, one in by_row.items() if name != "weight"}
        ids = given["ids"].contiguous()
        for name in BY_ROW:  # the load planner makes empty tensors if the checkpoint lacks them
            if name in given and not len(given[name]):
                del given[name]
        if not is_summed:  # not as a table has saved it
            state = {"weight": weight, **given, **self.small}
            state |= {"waiting": given["waiting"].t()} if "waiting" in given else {}
            check_state(table.where, state, table.embedding_dim, {})
        given["weight"] = weight if weight.dtype in ROW_DTYPES else weight.float()
        order = None if is_canonical(ids) else canonical_order(ids)
        if table.layout.rows_are_spread or not table.shards:
            order = torch.arange(len(ids), device="cpu") if order is None else order
            order = order[table.owns(ids[order])]
        count = len(ids) if order is None else order.numel()
        self.stage(Places([(0, count)]), given["weight"].dtype)
        if "waiting" in given:
            self.receive("waiting", (0, 0), given.pop("waiting"))
        for name, rows in given.items():
            step = max(1, CHUNK_BYTES // max(1, rows[:1].nbytes))
            for start in range(0, count, step):
                some = slice(start, start + step)
                chosen = some if order is None else order[some].to(rows.device)
                self.receive(name, (start, 0), rows[chosen])

    def last_step(self) -> int:
        """Returns the last training step recorded in the rows of this rank; 0 if no step is recorded."""
        return max((staged.last_step() for staged in self.staged or ()), default=0)

    def _check_fits(self, config: dict[str, Any]) -> None:
        check_config(self.table.where, config, self.table.config)

    def check(self, others: Sequence[TableEntry] = ()) -> dict[str, int]:
        """Checks this rank's part of the load, and returns its content sums."""
        self.check_config()
        summed = []
        for shard, staged in zip(self.table.shards, self.staged or (), strict=True):
            staged.check_complete()
            if self.sums_as_read is not None and self.has_sums:
                summed.append(add_sums(self.sums_as_read.sums, staged.sums))
            else:
                summed.append(staged.summed(shard.first_column == 0))
        return add_sums(*summed, self.small_sums())

    @property
    def has_sums(self) -> bool:
        """True if all rows were summed while they were read, and all belong here."""
        names = [name for name in self.names if name in self.saved and name != "waiting"]
        return not any(one.others for one in self.staged or ()) and self._are_summed(names)

    def initializer(self) -> Initializer | None:
        """Returns the saved initializer; None if no config was read.

        Raises:
            ValueError: if this version lacks the initializer.
        """
        config = self.saved_config
        return saved_initializer(self.table.where, config) if config else None

    def commit(self) -> None:
        """Replaces the contents of the shards by the verified load, and optimizer state by zeros."""
        initializer, clock = self.initializer(), self.small.get("clock")
        with turn_of(self.table, also_torn=True):
            with commit(self.table, replaces=True):
                for shard, staged in zip(self.table.shards, self.staged or (), strict=True):
                    commit_rows(shard, staged, clock, initializer, self.step)
                for entry in self.session.entries if self.session is not None else ():
                    if isinstance(entry, OptimizerEntry) and entry.table.has_shards_of(self.table):
                        entry.note_rows(self)
                self.staged = self.session = None
                note_taken(self.table.lock, self.table.name)
            self.renew()  # if the same state dict is loaded again, its tensors are the table's own


def _check_shapes(table: Table, weight: Tensor, ids: Tensor) -> None:
    """Raises ValueError if saved rows and ids do not match a table, or each other."""
    columns = table.embedding_dim
    if weight.dim() != 2 or weight.shape[1] != columns:
        raise ValueError(
            f"{table.where}: expected saved rows [R, {columns}], got {list(weight.shape)}."
        )
    if ids.dtype != torch.int64 or ids.shape != weight.shape[:1]:
        raise ValueError(
            f"{table.where}: expected {len(weight)} saved ids of dtype int64, "
            f"got {list(ids.shape)} {ids.dtype}."
        )


def _most_waiting(shard: TableShard) -> int | None:
    life = shard.life
    return life.waiting.limit if life is not None and life.waiting is not None else None


class OptimizerEntry(TableEntry):
    """The load of optimizer state and step of one table."""

    order = OPTIMIZER_TENSORS
    small_names = ("step", "optimizer_config", OPTIMIZER_CHECKSUM)
    config, checksum = "optimizer_config", OPTIMIZER_CHECKSUM
    missing = (
        "its optimizer state, got one without. "
        "Load the model's state dict only, or give LoadPlanner(allow_partial_load=True)."
    )
    staged: list[dict[str, RowStore]] | None
    _model: ModelEntry | None = None  # the load of the rows by whose ids the state was summed
    _sums: dict[str, int]  # content sums of this rank's part by these ids
    _stamps: list[tuple[int, ...]] | None = None  # stamps of the shards when they had these rows

    def note_rows(self, model: ModelEntry) -> None:
        """Notes that the shards have the rows of a load now, if the state was summed by its ids."""
        shards, rows = self.table.shards, model.places.count
        # The state is in the order of the rows as read: rows copied into smaller stores have other numbers.
        is_same = self._model is model and all(
            one.row_numbers.high_water_mark == rows for one in shards
        )
        if self.is_verified and is_same:
            self._model, self._stamps = None, [stamp_of(one) for one in shards]

    def known_sums(self) -> dict[str, int] | None:
        """Returns this rank's content sums if the shards still have the rows of these sums, else None."""
        is_known = self._stamps == [stamp_of(one) for one in self.table.shards]
        return self._sums if is_known else None

    @property
    def names(self) -> Sequence[str]:
        """Names of the optimizer states."""
        return self.table.optimizer.state_names

    def _stage_saved(self, places: Places | None) -> None:
        saved = self.saved
        sizes = {name: saved[name].size for name in self.names if name in saved}
        total = next(iter(sizes.values()))[0] if sizes else 0
        widths = {name: size[1] for name, size in sizes.items()}
        self.stage(places or places_of_table(self.table, total), total, widths)

    def stage(self, places: Places, total: int, widths: Mapping[str, int]) -> None:
        """Makes empty stores beside the stores of the shards."""
        self.places, self.total = places, total
        self.staged, self._model, self._stamps = [], None, None
        for shard in self.table.shards:
            stores = {}
            for one in named_states(shard):
                width = shard.columns
                if one.is_rowwise:
                    width = widths.get(one.name, 1) if self.has_all_cuts else 1
                store = one.store.empty(width, torch.float32)
                store.reserve(places.count)
                stores[one.name] = store
            self.staged.append(stores)

    def _wanted_rows(self, name: str) -> list[ChunkStorageMetadata]:
        if name not in self.names or not self.table.shards:
            return []
        # Every shard needs the row-wise state of all cuts: it is read once and put into each shard's store.
        columns = None if self.table.optimizer.is_rowwise(name) else self.table.column_ranges
        return list(chunks_to_read(self.saved[name], self.places, columns))

    def _origin(self, shard: TableShard, is_rowwise: bool) -> int:
        """Returns the column of the saved tensor at which a staged store begins."""
        if not is_rowwise:
            return shard.first_column
        return 0 if self.has_all_cuts else self.table.cuts.index(shard.first_column)

    def stores(self, name: str) -> list[tuple[RowStore, int]]:
        """Returns the staged stores of a tensor, and the column of the tensor at which each begins."""
        if name not in self.names:
            return []
        is_rowwise = self.table.optimizer.is_rowwise(name)
        by_shard = zip(self.table.shards, self.staged or (), strict=True)
        return [(stores[name], self._origin(shard, is_rowwise)) for shard, stores in by_shard]

    def _receive_rows(self, name: str, offset: tuple[int, ...], block: Tensor) -> None:
        for store, origin in self.stores(name):
            put_block(store, origin, self.places, offset[0], offset[1], block)

    def _fill_rows(self, by_row: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        table = self.table
        self.has_all_cuts = not isinstance(saved["optimizer_config"], SavedTensor)
        if not self.has_all_cuts:
            cuts = self.saved_config.get("cuts", table.cuts)
            if cuts != table.cuts:
                raise ValueError(
                    f"{table.where}: expected optimizer state cut at columns {table.cuts}, "
                    f"got a copy of state cut at {cuts}. Save and load it with "
                    "torch.distributed.checkpoint."
                )
        first = next(iter(by_row.values()), torch.empty(0, device="cpu"))
        widths = {name: tensor.shape[1] for name, tensor in by_row.items()}
        self.stage(Places(row_ranges_of(first)), len(first), widths)
        for name, tensor in by_row.items():
            is_shell = isinstance(tensor, SavedTensor)
            for offset, block in tensor.local() if is_shell else [((0, 0), tensor)]:
                self.receive(name, offset, block)

    def check(self, others: Sequence[TableEntry] = ()) -> dict[str, int] | None:
        """Checks this rank's part by the ids of the same load, and returns its content sums."""
        table = self.table
        self.check_config()
        model = self._model_of(others, table)
        if model is None:
            return None
        if self.names and model.places.ranges != self.places.ranges:
            raise ValueError(
                f"{table.where}: expected optimizer state of {model.places.count} rows here, got that of "
                f"{self.places.count}. {DAMAGED}"
            )
        self._model = model
        if model.has_sums and self._are_summed([one for one in self.names if one in self.saved]):
            assert self.sums_as_read is not None
            self._sums = add_sums(self.sums_as_read.sums, self.small_sums())
            return self._sums
        most = rows_summed(4 * table.cuts[-1], table.device)
        by_row = [one.by_row(most) for one in model.staged or ()]
        self._sums = self.sums_of(by_row)
        return self._sums

    def _model_of(self, others: Sequence[TableEntry], table: Table) -> ModelEntry | None:
        """Returns the load of the same shards' rows if it is not committed yet, else None."""
        models = (one for one in others if isinstance(one, ModelEntry) and one.is_of(table))
        return next(models, None)

    def check_is_for(self, table: Table) -> None:
        """Raises ValueError unless the state was read for these shards and their rows are committed."""
        self.table.check_model(table)
        if self.session is not None and self._model_of(self.session.entries, table) is not None:
            raise ValueError(
                f"{table.where}: expected rows loaded before their optimizer state, got rows that are not "
                "loaded yet. Load the state dict of the module before the state dict of its optimizer."
            )

    def _check_fits(self, config: dict[str, Any]) -> None:
        own = optimizer_config(self.table.optimizer, self.table.cuts)
        check_optimizer(self.table.where, config, own)

    def sums_of(self, of_shards: Sequence[Iterable[tuple[Tensor, Tensor]]]) -> dict[str, int]:
        """Returns the content sums of this rank's part.

        of_shards: for each shard, stretches of its ids and their rows in the staged stores, ascending.
        """
        table, sums = self.table, self.small_sums()
        for shard, stores, stretches in zip(
            table.shards, self.staged or (), of_shards, strict=True
        ):
            # If row-wise state was read with all cuts, only the first shard of the table sums it.
            sums_cuts = shard is table.shards[0] and table.has_first_column
            sums_cuts = sums_cuts or not self.has_all_cuts
            states = [one for one in named_states(shard) if sums_cuts or not one.is_rowwise]
            for ids, rows in stretches:
                for one in states:
                    first = self._origin(shard, one.is_rowwise)
                    values = stores[one.name].read_ascending(rows)
                    summed = content_sum(table.name, one.name, ids, values, first)
                    sums = add_sums(sums, {one.name: summed})
        return sums

    def last_step(self) -> int:
        """Returns 0: only the rows' scores record training steps."""
        return 0


def row_ranges_of(value: Tensor) -> list[tuple[int, int]]:
    """Returns the ranges of rows of a saved tensor that this rank has.

    value: a SavedTensor, or a plain tensor, which has all rows.
    """
    if not isinstance(value, SavedTensor):
        return [(0, len(value))]
    return [(part.offset[0], part.offset[0] + part.size[0]) for part in value.parts]
