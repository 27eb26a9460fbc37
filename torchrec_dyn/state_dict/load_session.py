"""LoadSession: all that was read in one load is verified, over all ranks, before any of it is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from torchrec_dyn.checkpoint_format import DAMAGED, add_sums
from torchrec_dyn.ranks import gather_results
from torchrec_dyn.state_dict.pieces import ShardPieces
from torchrec_dyn.state_dict.places import Places


class TableEntry(ABC):
    """Takes what a checkpoint has of one table, in a model's or an optimizer's state dict, beside the table.

    Args:
        pieces: what this rank holds of the table.

    Attributes:
        small: the tensors that have come and are not by row.
        staged: of each shard what has come by row, None before anything is loaded.
        places: whose rows these are.
        session: with which they were read.
        is_verified: whether their sums were right.
        is_left_out: whether a partial load found nothing for it.
        step: the last training step that the rows of any rank know of.
    """

    # What a message says of a checkpoint without it, and what to do.
    missing: ClassVar[str]

    def __init__(self, pieces: ShardPieces) -> None:
        self.pieces = pieces
        self.small: dict[str, Tensor] = {}
        self.staged: list[Any] | None = None
        self.places = Places([])
        self.session: LoadSession | None = None
        self.is_verified = self.is_left_out = False
        self.step = 0
        self.saved: Mapping[str, TensorStorageMetadata] = {}

    def begin(self, saved: Mapping[str, TensorStorageMetadata]) -> None:
        """Gets ready to receive what a checkpoint has of it.

        Args:
            saved: its tensors in DCP's metadata, by name.

        Raises:
            ValueError: if it has nothing of it, or no checksum.
        """
        if "config" not in saved:
            raise ValueError(f"{self.pieces.where}: expected a checkpoint with {self.missing}")
        if "checksum" not in saved:
            raise ValueError(
                f"{self.pieces.where}: expected a checkpoint with a checksum of this table, got one without. "
                f"{DAMAGED}"
            )
        self.saved, self.small = saved, {}
        self.is_verified = self.is_left_out = False

    def leave_out(self) -> None:
        """Takes note that a partial load found nothing for it."""
        self.staged, self.session, self.is_left_out = None, None, True

    @abstractmethod
    def wanted(self, name: str) -> list[ChunkStorageMetadata]:
        """Returns the blocks of a saved tensor that this rank reads."""

    @abstractmethod
    def receive(self, name: str, offset: tuple[int, ...], block: Tensor) -> None:
        """Takes a block that was read.

        Args:
            name: of the tensor.
            offset: of the block in it.
            block: the numbers.
        """

    @abstractmethod
    def check(self, others: Sequence[TableEntry] = ()) -> dict[str, int] | None:
        """Checks what has come, as far as this rank can, and sums it.

        Args:
            others: what was read with it.

        Returns:
            The sums of what belongs to this rank; None if that must wait until the table's ids are there.

        Raises:
            ValueError: if it is damaged, or of another table or optimizer.
        """

    @abstractmethod
    def compare(self, summed: Mapping[str, int]) -> None:
        """Raises ValueError if the sums of all ranks are not those that were saved."""

    def last_step(self) -> int:
        """Returns the last training step that the rows of this rank know of: scores know of steps."""
        return 0


class LoadSession:
    """The tables that were read together.

    Args:
        entries: in one order on all ranks.

    Attributes:
        entries: the same.
    """

    def __init__(self, entries: Sequence[TableEntry]) -> None:
        self.entries = list(entries)
        self._is_verified = False
        for entry in entries:
            entry.session = self

    def verify(self, where: str) -> None:
        """Verifies all tables, once. Collective.

        Args:
            where: who asks, for messages.

        Raises:
            ValueError: on every rank, if a table is damaged or does not fit the model.
        """
        if not self.entries or self._is_verified:
            return
        told = gather_results(
            self.entries[0].pieces.group,
            where,
            lambda: [(one.check(self.entries), one.last_step()) for one in self.entries],
        )
        for entry, of_ranks in zip(self.entries, zip(*told, strict=True), strict=True):
            sums = [one for one, _ in of_ranks if one is not None]
            if len(sums) == len(of_ranks):
                entry.compare(add_sums(*sums))
                entry.is_verified = True
            entry.step = max(step for _, step in of_ranks)
        self._is_verified = True
