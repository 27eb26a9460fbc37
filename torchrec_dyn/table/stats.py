"""What a table holds and what happened to it, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchrec_dyn.life import RowLife
from torchrec_dyn.storage import ChangeLog, IdMap, RowNumbers, RowStore

# What tables count from when they are made.
COUNTED = (
    *("ids_seen", "hits", "refused", "inserted", "evicted_expired", "evicted_full", "erased"),
    *("late_grads", "counters_dropped", "forwards"),
)


class CountedTable(Protocol):
    """What the numbers are read from (table/table.py)."""

    step: int
    row_limit: int
    counters: dict[str, int]
    id_map: IdMap
    row_numbers: RowNumbers
    life: RowLife | None
    changes: ChangeLog | None

    @property
    def stores(self) -> Sequence[RowStore]:
        """The weights and every optimizer state."""
        ...


def stats_of(table: CountedTable) -> dict[str, int | float]:
    """Returns the numbers of a table.

    What it holds: rows, limit, slots, load (rows / slots), bytes (slots, and rows in use with their
    optimizer state and scores, counters, and what is noted for deltas), step, waiting (ids with a
    counter), withheld (rows that wait for a forward), probe_length_mean and probe_length_max (in slots;
    of a sample in a large map).

    Counts since it was made: of occurrences in training ids_seen, hits (had a row), unseen (had none),
    refused (got none); of ids inserted, evicted_expired, evicted_full, erased, counters_dropped;
    late_grads (to rows whose id had left); forwards (in training; `step` is also loaded and carried over).
    """
    life = table.life
    stores = [*table.stores, life.scores.store] if life is not None else table.stores
    row_bytes = sum(store.row_bytes for store in stores)
    return {
        "rows": table.id_map.num_ids,
        "limit": table.row_limit,
        "bytes": table.id_map.bytes
        + table.row_numbers.high * row_bytes
        + (0 if life is None else life.waiting_bytes)
        + (0 if table.changes is None else table.changes.bytes),
        "step": table.step,
        "waiting": 0 if life is None else life.num_waiting,
        "withheld": table.row_numbers.withheld().numel(),
        **table.id_map.stats(),
        **table.counters,
        "unseen": table.counters["ids_seen"] - table.counters["hits"],
    }
