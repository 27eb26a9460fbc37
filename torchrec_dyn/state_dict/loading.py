"""The entry of one sharded table in the model's state dict: what it is loaded from.

Letters: R rows of the whole table, D its columns.

The entry of one sharded table in the optimizer's state dict: what it is loaded from.

Letters: R rows of the whole table, D its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    DAMAGED,
    MODEL_TENSORS,
    OPTIMIZER_TENSORS,
    SavedTensor,
    add_sums,
    check_config,
    check_config_is_whole,
    check_optimizer,
    compare_sums,
    content_sum,
    from_bytes,
    numbers_of,
    sum_of_small,
)
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.state_dict.load_session import TableEntry
from torchrec_dyn.state_dict.pieces import ShardPieces, blocks_of, check_same_shards
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.state_dict.saving import ModelSource, OptimizerSource
from torchrec_dyn.state_dict.staged_rows import StagedRows, put_block
from torchrec_dyn.storage import RowStore
from torchrec_dyn.table import DynamicTable, NamedState, named_states

_SMALL = ("clock", "config", "checksum")


class ModelEntry(TableEntry):
    """Rows, ids, scores, counters and clock of one table.

    Args:
        pieces: what this rank holds.

    Attributes:
        source: what the same tensors save.
        present: names of the tensors that were saved, whether the table can use them or not.
    """

    missing = (
        "this table, got one without. "
        "Leave it out of the state dict, or give LoadPlanner(allow_partial_load=True)."
    )
    staged: list[StagedRows] | None

    def __init__(self, pieces: ShardPieces) -> None:
        super().__init__(pieces)
        self.source = ModelSource(pieces, self)
        self.present: set[str] = set()

    def is_of(self, pieces: ShardPieces) -> bool:
        """Whether this is what was read for the rows of these very shards, and is not used yet."""
        return self.pieces.has_shards_of(pieces) and self.staged is not None

    def begin(self, saved: Mapping[str, TensorStorageMetadata]) -> None:
        """Gets ready to receive what a checkpoint has of the table."""
        super().begin(saved)
        self.present = set(saved)
        total = saved["ids"].size[0] if "ids" in saved else 0
        dtype = saved["weight"].properties.dtype if "weight" in saved else torch.float32
        self.stage(self.pieces.places(saved, total), dtype)

    def stage(self, places: Places, dtype: torch.dtype) -> None:
        """Makes empty stores beside those of the shards.

        Args:
            places: the rows that come.
            dtype: of the saved rows.
        """
        pieces, self.places = self.pieces, places
        self.staged = [
            StagedRows(
                pieces.name,
                pieces.where,
                places,
                (shard.first_column, shard.columns),
                dtype,
                shard.weights.shift,
                shard.row_limit,
                pieces.owns if pieces.layout.rows_are_spread else None,
                _most_waiting(shard),
            )
            for shard in pieces.shards
        ]

    def wanted(self, name: str) -> list[ChunkStorageMetadata]:
        """Returns the blocks of a saved tensor that this rank reads."""
        saved = self.saved[name]
        everything = Places([(0, saved.size[0])])
        if name in _SMALL:
            return list(blocks_of(saved, everything, None))
        if not self.staged or name not in self.names:
            return []
        if name == "waiting":  # few, and not counted by cells: every rank picks its own
            return list(blocks_of(saved, everything, None))
        if name != "weight":
            return list(blocks_of(saved, self.places, None))
        return [
            block
            for shard in self.pieces.shards
            for block in blocks_of(
                saved, self.places, (shard.first_column, shard.first_column + shard.columns)
            )
        ]

    @property
    def names(self) -> list[str]:
        """The tensors by row that the table can use."""
        life = ["last_seen", "count"] if self.pieces.has_life else []
        return ["ids", "weight", *life, *(["waiting"] if self.pieces.counts else [])]

    def receive(self, name: str, offset: tuple[int, ...], block: Tensor) -> None:
        """Takes a block that was read."""
        if name in _SMALL:
            self.small[name] = block
        for staged in self.staged or ():
            if name not in _SMALL:
                staged.receive(name, offset[0], offset[1] if len(offset) > 1 else 0, block)

    def last_step(self) -> int:
        """Returns the last training step that the rows of this rank know of."""
        return max((staged.last_step() for staged in self.staged or ()), default=0)

    def check(self, others: Sequence[TableEntry] = ()) -> dict[str, int]:
        """Checks what has come, as far as this rank can, and sums it."""
        pieces = self.pieces
        check_config_is_whole(pieces.where, pieces.name, self.small, MODEL_TENSORS)
        if "config" in self.small:
            saved = from_bytes(pieces.where, self.small["config"])
            check_config(pieces.where, saved, pieces.config)
        summed = []
        for shard, staged in zip(pieces.shards, self.staged or (), strict=True):
            staged.check_complete()
            summed.append(staged.summed(shard.first_column == 0))
        if pieces.rank == 0:
            small = [name for name in ("clock", "config") if name in self.small]
            summed.append(
                {name: sum_of_small(pieces.name, name, self.small[name]) for name in small}
            )
        return add_sums(*summed)

    def compare(self, summed: Mapping[str, int]) -> None:
        """Raises ValueError if the sums of all ranks are not those that were saved."""
        if "checksum" in self.small:
            read = {*self.names, "config", *(["clock"] if self.pieces.has_life else [])}
            names = [name for name in MODEL_TENSORS if name in read or name not in self.present]
            words = self.small["checksum"]
            compare_sums(self.pieces.where, words, MODEL_TENSORS, names, summed)


def _most_waiting(shard: DynamicTable) -> int | None:
    life = shard.life
    return life.waiting.limit if life is not None and life.waiting is not None else None


SMALL = ("step", "config", "checksum")


class OptimizerEntry(TableEntry):
    """Optimizer state and step of one table.

    Args:
        pieces: what this rank holds.
        optimizer: how the rows learn.

    Attributes:
        source: what the same tensors save.
        total: rows of the whole table that came.
        has_all_cuts: whether row-wise state came with the numbers of all column shards, not just its own.
    """

    missing = (
        "its optimizer state, got one without. "
        "Load the model's state dict only, or give LoadPlanner(allow_partial_load=True)."
    )
    staged: list[dict[str, RowStore]] | None

    def __init__(self, pieces: ShardPieces, optimizer: RowOptimizer) -> None:
        super().__init__(pieces)
        self.optimizer = optimizer
        self.source = OptimizerSource(pieces, optimizer, self)
        self.total = 0
        self.has_all_cuts = True

    def begin(self, saved: Mapping[str, TensorStorageMetadata]) -> None:
        """Gets ready to receive what a checkpoint has of the optimizer state."""
        super().begin(saved)
        by_row = [saved[name] for name in self.optimizer.state_names if name in saved]
        total = by_row[0].size[0] if by_row else 0
        widths = {name: saved[name].size[1] for name in self.optimizer.state_names if name in saved}
        self.stage(self.pieces.places(saved, total), total, widths)

    def stage(self, places: Places, total: int, widths: Mapping[str, int]) -> None:
        """Makes empty stores beside those of the shards.

        Args:
            places: the rows that come.
            total: rows of the whole table.
            widths: of the saved tensors: of row-wise state the column cuts.
        """
        self.places, self.total = places, total
        self.staged = []
        for shard in self.pieces.shards:
            stores = {}
            for one in named_states(shard):
                width = shard.columns
                if one.is_rowwise:
                    width = widths.get(one.name, 1) if self.has_all_cuts else 1
                store = RowStore(width, one.store.shift, torch.float32, one.store.device)
                store.reserve(places.count)
                stores[one.name] = store
            self.staged.append(stores)

    def wanted(self, name: str) -> list[ChunkStorageMetadata]:
        """Returns the blocks of a saved tensor that this rank reads."""
        saved = self.saved[name]
        if name in SMALL:
            whole = Places([(0, saved.size[0] if saved.size else 1)])
            return list(blocks_of(saved, whole, None)) if saved.size else list(saved.chunks)
        found = []
        for shard in self.pieces.shards:
            for one in named_states(shard):
                if one.name == name:
                    end = shard.first_column + shard.columns
                    columns = None if one.is_rowwise else (shard.first_column, end)
                    found += list(blocks_of(saved, self.places, columns))
        # Of row-wise state every shard wants all cuts: read once, given to each.
        return list({(tuple(one.offsets), tuple(one.sizes)): one for one in found}.values())

    def origin(self, shard: DynamicTable, one: NamedState) -> int:
        """Returns the first column of the saved tensor that a staged store has."""
        if not one.is_rowwise:
            return shard.first_column
        return 0 if self.has_all_cuts else self.pieces.cuts.index(shard.first_column)

    def receive(self, name: str, offset: tuple[int, ...], block: Tensor) -> None:
        """Takes a block that was read."""
        if name in SMALL:
            self.small[name] = block
            return
        for shard, stores in zip(self.pieces.shards, self.staged or (), strict=True):
            for one in named_states(shard):
                if one.name != name:
                    continue
                origin = self.origin(shard, one)
                put_block(stores[name], origin, self.places, offset[0], offset[1], block)

    def fill(self, saved: Mapping[str, Any]) -> None:
        """Takes plain tensors of the whole table, or copies of what this rank saved.

        Args:
            saved: by name.
        """
        names = [name for name in self.optimizer.state_names if name in saved]
        for name in SMALL:
            if name in saved:
                self.small[name] = numbers_of(saved[name])
        size = saved[names[0]].shape if names else (0,)
        widths = {name: saved[name].shape[1] for name in names}
        first = _blocks(saved[names[0]]) if names else []
        ranges = [(offset[0], offset[0] + len(block)) for offset, block in first]
        self.has_all_cuts = not isinstance(saved["config"], SavedTensor)
        if not self.has_all_cuts:
            config = from_bytes(self.pieces.where, self.small["config"])
            if config.get("cuts", self.pieces.cuts) != self.pieces.cuts:
                raise ValueError(
                    f"{self.pieces.where}: expected optimizer state cut at columns {self.pieces.cuts}, "
                    f"got a copy of one cut at {config['cuts']}. Save and load it with "
                    "torch.distributed.checkpoint."
                )
        self.stage(Places(ranges), size[0], widths)
        for name in names:
            for offset, block in _blocks(saved[name]):
                self.receive(name, offset, block)

    def check(self, others: Sequence[TableEntry] = ()) -> dict[str, int] | None:
        """Checks what has come by the ids that came with it, and sums it."""
        pieces = self.pieces
        self.check_config()
        model = next(
            (one for one in others if isinstance(one, ModelEntry) and one.is_of(pieces)), None
        )
        if model is None:
            return None
        if self.optimizer.state_names and model.places.ranges != self.places.ranges:
            raise ValueError(
                f"{pieces.where}: expected optimizer state of {model.places.count} rows here, got that of "
                f"{self.places.count}. {DAMAGED}"
            )
        most = max(1, CHUNK_BYTES // (4 * pieces.cuts[-1]))
        return self.sums_of([staged.canonical().stretches(most) for staged in model.staged or ()])

    def check_is_for(self, pieces: ShardPieces) -> None:
        """Raises ValueError unless what came is for these shards, and their rows came in before it."""
        check_same_shards(self.pieces, pieces)
        others = () if self.session is None else self.session.entries
        if any(isinstance(one, ModelEntry) and one.is_of(pieces) for one in others):
            raise ValueError(
                f"{pieces.where}: expected its rows before their optimizer state, got them after it. "
                "Load the state dict of the module before that of its optimizer."
            )

    def check_config(self) -> None:
        """Raises ValueError if it is of another optimizer, or damaged."""
        name, where = self.pieces.name, self.pieces.where
        check_config_is_whole(where, name, self.small, OPTIMIZER_TENSORS)
        if "config" in self.small:
            saved = from_bytes(self.pieces.where, self.small["config"])
            check_optimizer(self.pieces.where, saved, self.source.config)

    def sums_of(self, of_shards: Sequence[Iterable[tuple[Tensor, Tensor]]]) -> dict[str, int]:
        """Sums what belongs to this rank.

        Args:
            of_shards: of each shard its ids and their rows in the staged stores, in stretches.
        """
        pieces, sums = self.pieces, []
        for shard, stores, stretches in zip(
            pieces.shards, self.staged or (), of_shards, strict=True
        ):
            # Where row-wise state came with all cuts, one rank, and one shard of it, is to sum them.
            sums_cuts = shard is pieces.shards[0] and pieces.has_first_column
            sums_cuts = sums_cuts or not self.has_all_cuts
            states = [one for one in named_states(shard) if sums_cuts or not one.is_rowwise]
            for ids, rows in stretches:
                for one in states:
                    first = self.origin(shard, one)
                    values = stores[one.name].read(rows)
                    sums.append({one.name: content_sum(pieces.name, one.name, ids, values, first)})
        if pieces.rank == 0:
            small = [name for name in ("step", "config") if name in self.small]
            sums.append({name: sum_of_small(pieces.name, name, self.small[name]) for name in small})
        return add_sums(*sums)

    def compare(self, summed: Mapping[str, int]) -> None:
        """Raises ValueError if the sums of all ranks are not those that were saved."""
        if "checksum" in self.small:
            words, names = self.small["checksum"], OPTIMIZER_TENSORS
            compare_sums(self.pieces.where, words, names, names, summed)


def _blocks(value: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    return value.local() if isinstance(value, SavedTensor) else [((0, 0), value)]
