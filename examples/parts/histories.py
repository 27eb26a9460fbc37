"""Events of users in windows of time, as samples of a next-item model.

In each window the last event of each user is left out of the training (leave-one-out): the model is asked for
it at the end of the window, and trains it in the user's next window. So no event is trained twice, and one
that was left out only after the model was asked for it.

Legend: E events, B samples of a batch, h items of a history, m next items of a sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

FEATURES = ["history", "candidate", "next"]  # uses that are equal stand side by side


@dataclass(frozen=True)
class Events:
    """Events in the order of time.

    Attributes:
        users: [E] int64.
        items: [E] int64.
        times: [E], in any unit.
        best: [E], the rank of the item for one who knows how the events are generated; None if nobody knows.
    """

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray
    best: np.ndarray | None = None


@dataclass(frozen=True)
class Sample:
    """A part of a user's events.

    Attributes:
        history: [h] items, the oldest first.
        following: [m] items, m <= h + 1: what followed each of the last m - 1 items and, before them, the
            item or the start that stands before these.
        event: number of the last event.
    """

    history: np.ndarray
    following: np.ndarray
    event: int


NOTHING = Sample(np.empty(0, np.int64), np.empty(0, np.int64), -1)  # where a rank has no sample


class Histories:
    """The samples of each window.

    Args:
        events: all events.
        window: number of events of a window; events after the last whole window are left out.
        length: most items of a history.
    """

    def __init__(self, events: Events, window: int, length: int) -> None:
        self._events, self._window, self._length = events, window, length
        order = np.argsort(events.users, kind="stable")  # by user, then by time
        _, starts = np.unique(events.users[order], return_index=True)
        self._events_of_users = np.split(order, starts[1:])
        self.windows = len(events.users) // window

    def items_until(self, window: int) -> int:
        """Returns the number of distinct items until the end of a window."""
        return len(np.unique(self._events.items[: (window + 1) * self._window]))

    def samples(self, window: int) -> tuple[list[Sample], list[Sample]]:
        """Returns the samples to train in a window, and those to be asked for at its end."""
        first, last = window * self._window, (window + 1) * self._window
        trained, left_out = [], []
        for events in self._events_of_users:
            begin, end = np.searchsorted(events, (first, last))
            if begin == end:
                continue
            items = self._events.items[events[:end]]
            most = self._length // 2 + 1  # next items of a sample, the others are their context
            for start in range(max(begin - 1, 0), end - 1, most):
                stop = min(start + most, end - 1)
                trained.append(self._sample(events, items, start, stop))
            if end > 1:  # without a history nothing can be known
                left_out.append(self._sample(events, items, end - 1, end))
        return trained, left_out

    def _sample(self, events: np.ndarray, items: np.ndarray, start: int, stop: int) -> Sample:
        """Returns a sample whose next items are a user's events [start, stop)."""
        history = items[max(stop - 1 - self._length, 0) : stop - 1]
        return Sample(history, items[start:stop], int(events[stop - 1]))


def in_batches(samples: list[Sample], batch_size: int, key: list[int] | None) -> list[list[Sample]]:
    """Returns batches of almost equal sizes, at most `batch_size`; shuffled if there is a key."""
    order = np.arange(len(samples))
    if key is not None:
        np.random.Generator(np.random.Philox(key=key)).shuffle(order)
    parts = np.array_split(order, max(1, -(-len(order) // batch_size)))
    return [[samples[place] for place in part] for part in parts]


def features_of(samples: Iterable[Sample], candidates: torch.Tensor) -> KeyedJaggedTensor:
    """Returns the ids of a rank's samples. All samples share the candidates, which the first bag has."""
    mine = list(samples) or [NOTHING]
    histories = [len(sample.history) for sample in mine]
    following = [len(sample.following) for sample in mine]
    shared = [candidates.numel()] + [0] * (len(mine) - 1)
    values = [
        torch.from_numpy(np.concatenate([sample.history for sample in mine])),
        candidates,
        torch.from_numpy(np.concatenate([sample.following for sample in mine])),
    ]
    lengths = torch.tensor([*histories, *shared, *following])
    return KeyedJaggedTensor(FEATURES, torch.cat(values), lengths=lengths)
