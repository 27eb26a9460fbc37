"""The entry of one sharded table in the model's state dict: what it is loaded from.

Letters: R rows of the whole table, D its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from torchrec_dyn.checkpoint_format import (
    MODEL_TENSORS,
    add_sums,
    check_config,
    check_config_is_whole,
    compare_sums,
    from_bytes,
    sum_of_small,
)
from torchrec_dyn.state_dict.load_session import TableEntry
from torchrec_dyn.state_dict.pieces import ShardPieces, blocks_of
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.state_dict.shard_model_source import ModelSource
from torchrec_dyn.state_dict.staged_rows import StagedRows
from torchrec_dyn.table import DynamicTable

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
