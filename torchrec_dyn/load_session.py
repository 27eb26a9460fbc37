"""LoadSession: all that was read in one load is verified, over all ranks, before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torchrec_dyn.agreement import agree
from torchrec_dyn.content_sums import add_sums
from torchrec_dyn.shard_pieces import ShardPieces


class LoadedEntry(Protocol):
    """One table of a model's or of an optimizer's state dict, read and not yet used.

    Attributes:
        pieces: what this rank holds of the table.
        session: with which it was read.
        is_verified: whether its sums were right.
        is_left_out: whether a partial load found nothing for it.
        step: the last training step that the rows of any rank know of.
    """

    pieces: ShardPieces
    session: LoadSession | None
    is_verified: bool
    is_left_out: bool
    step: int

    def leave_out(self) -> None:
        """Takes note that a partial load found nothing for it."""

    def check(self, others: Sequence[LoadedEntry]) -> dict[str, int] | None:
        """Sums what belongs to this rank; None if that must wait until the table's ids are there."""

    def compare(self, summed: Mapping[str, int]) -> None:
        """Raises ValueError if the sums of all ranks are not those that were saved."""

    def last_step(self) -> int:
        """Returns the last training step that the rows of this rank know of."""


class LoadSession:
    """The tables that were read together.

    Args:
        entries: in one order on all ranks.

    Attributes:
        entries: the same.
    """

    def __init__(self, entries: Sequence[LoadedEntry]) -> None:
        self.entries = list(entries)
        self._is_verified = False
        for entry in entries:
            entry.session = self

    def verify(self, where: str, fault: Exception | None = None) -> None:
        """Verifies all tables, once. Collective.

        Args:
            where: who asks, for messages.
            fault: why this rank cannot go on anyway.

        Raises:
            ValueError: on every rank, if a table is damaged or does not fit the model.
        """
        if not self.entries or (self._is_verified and fault is None):
            return
        sums: list[dict[str, int] | None] = []
        steps: list[int] = []
        try:
            for entry in () if fault is not None else self.entries:
                sums.append(entry.check(self.entries))
                steps.append(entry.last_step())
        except Exception as one:
            fault = one
        told = agree(self.entries[0].pieces.group, where, fault, told=(sums, steps))
        for number, entry in enumerate(self.entries):
            parts = [sums[number] for sums, _ in told]
            if None not in parts:
                entry.compare(add_sums(*parts))
                entry.is_verified = True
            entry.step = max(steps[number] for _, steps in told)
        self._is_verified = True
