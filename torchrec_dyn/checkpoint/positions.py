"""Positions: where the last trained batch ends in its source, of which a pipeline has read more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torchrec_dyn.name_lists import listed


class Positions:
    """An iterable of batches that keeps the position after the last trained batch.

    Pipelines and the workers of a loader take batches before they are trained, so the position of a source is
    ahead of training. This object records the position after each batch that it yields. Call `step` when the
    oldest of these batches has been trained::

        positions = Positions(loader)
        batches = iter(positions)
        while ...:
            pipeline.progress(batches)
            positions.step()

    It has `state_dict` and `load_state_dict`, for `extra` of `Checkpoints`. After a load the next iteration
    begins with the first batch that was not trained.

    Args:
        source: an iterable that yields the same batches each time. If it has `state_dict` and
            `load_state_dict`, like torchdata's StatefulDataLoader, these save and restore its position;
            otherwise the batches before the position are read again and dropped.
        is_global: True if the n-th batches of all ranks together are the same on any number of ranks: each
            rank takes its part of a global batch. Only then can the position be restored on another number of
            ranks. False: each rank has its own source.

    Attributes:
        batches: number of trained batches of this pass through the source.
        is_global: as given.
    """

    def __init__(self, source: Iterable[Any], *, is_global: bool = False) -> None:
        self._source, self.is_global = source, is_global
        self._is_stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self.batches = 0
        # Of the source, behind the last trained batch; None: the begin of a pass.
        self._position: Any = None
        # Positions behind the batches that are handed out and not trained.
        self._ahead: deque[Any] = deque()
        self._is_loaded = False

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches behind a position that was loaded, else all batches."""
        if not self._is_loaded:
            self.batches, self._position = 0, None
        self._is_loaded = False
        self._ahead.clear()
        skipped = 0 if self._is_stateful else self.batches
        for batch in islice(self._source, skipped, None):
            self._ahead.append(self._state_of_source())
            yield batch

    def _state_of_source(self) -> Any:
        return self._source.state_dict() if self._is_stateful else None  # type: ignore[attr-defined]

    def step(self) -> None:
        """Records that the oldest yielded batch is trained.

        Raises:
            RuntimeError: if all yielded batches are trained already.
        """
        if not self._ahead:
            raise RuntimeError(
                "Positions.step: expected one call for each trained batch, got one without a batch. "
                "Call it after the step of a batch that came from this object."
            )
        self._position = self._ahead.popleft()
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last trained batch."""
        return {
            "batches": self.batches,
            "source": self._position,
            "is_global": self.is_global,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the position; the next iteration begins there.

        Raises:
            ValueError: if the state is of another kind of object.
        """
        if not {"batches", "source"} <= state.keys():
            raise ValueError(
                "Positions.load_state_dict: expected a state of Positions, with batches and source, got one "
                f"with {listed(sorted(map(str, state)))}. Load what Positions.state_dict returned."
            )
        self.batches, self._position = int(state["batches"]), state["source"]
        self._is_loaded = True
        self._ahead.clear()
        if self._is_stateful and self._position is not None:
            self._source.load_state_dict(self._position)  # type: ignore[attr-defined]
