"""Synthetic events, user and item, whose next item can be learned. Items come and go.

The items that live at a time form a ring of groups. A user goes around the ring in steps of one or of two
groups; only two items of the history tell which. One event in five is of any group. In a group, some items
are more popular than others. After `lifetime` windows a new item takes the place of an old one, which never
occurs again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from parts.click_stream import mix64
from parts.histories import Events

STEPS = (1, 2)  # of a user around the ring
FOLLOWS = 0.8  # share of events that follow the user's step
ZIPF_EXPONENT = 0.7  # of the items of a group


@dataclass(frozen=True)
class ItemStream:
    """The stream of one seed.

    Attributes:
        seed: seed of users, items and events.
        users: number of users.
        window: number of events of a window.
        groups: number of groups of items on the ring.
        places: number of items of a group that live at a time.
        lifetime: number of windows after which a place gets a new item.
    """

    seed: int
    users: int
    window: int
    groups: int
    places: int
    lifetime: int

    def events(self, windows: int) -> Events:
        """Returns the events of the first windows; more windows have the same events at their beginning."""
        steps = np.random.Generator(np.random.Philox(key=[self.seed, 2**63])).choice(
            STEPS, self.users
        )
        group = np.zeros(self.users, dtype=np.int64)  # of each user's last event
        parts = [self._window(number, group, steps) for number in range(windows)]
        users, items, best = (np.concatenate(column) for column in zip(*parts, strict=True))
        names = mix64(users.astype(np.uint64) ^ mix64(np.uint64(self.seed))).view(np.int64)
        return Events(names, items, np.arange(users.size), best)

    def _window(
        self, number: int, group: np.ndarray, steps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns users, items and best ranks, [window] each, and moves the users to their last groups."""
        random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        users = random.integers(0, self.users, self.window)
        follows = random.random(self.window) < FOLLOWS
        anywhere = random.integers(0, self.groups, self.window)
        popularity = np.arange(1.0, self.places + 1.0) ** -ZIPF_EXPONENT
        places = random.choice(self.places, self.window, p=popularity / popularity.sum())
        groups, best = np.empty_like(users), np.full(self.window, np.inf)
        for event, user in enumerate(users):
            expected = (group[user] + steps[user]) % self.groups
            groups[event] = expected if follows[event] else anywhere[event]
            if groups[event] == expected:
                best[event] = places[event] + 1
            group[user] = groups[event]
        return users, self._living_items(groups * self.places + places, number), best

    def _living_items(self, places: np.ndarray, number: int) -> np.ndarray:
        """Returns the ids that hold these places in a window. Each place has its own phase."""
        holder = mix64(places.astype(np.uint64) + mix64(np.uint64(self.seed + 1)))
        lifetime = np.uint64(self.lifetime)
        generation = (np.uint64(number) + holder % lifetime) // lifetime
        return mix64(holder ^ mix64(generation)).view(np.int64)
