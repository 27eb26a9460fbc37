"""The numbers that `DynamicTable.stats` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrec_dyn.table.table import DynamicTable

# Counters of a table. They start at 0.
COUNTED = (
    *("ids_seen", "hits", "refused", "inserted", "evicted_expired", "evicted_full", "erased"),
    *("late_grads", "counters_dropped", "counters_expired", "forwards"),
)


def stats_of(table: DynamicTable) -> dict[str, int | float]:
    """Returns the statistics of a table.

    Present contents: rows, limit, slots, load (rows / slots), bytes (slots, rows in use with their
    optimizer state and scores, counters, and the change log), step, waiting (ids with a counter),
    withheld (rows kept for an open forward), probe_length_mean and probe_length_max (in slots; measured
    on a sample in a large map).

    Counts since the table was made. Occurrences in training: ids_seen, hits (had a row), unseen (had no
    row), refused (got no row). Ids: inserted, evicted_expired, evicted_full, erased, counters_dropped,
    counters_expired. Others: late_grads (gradients of rows whose id was removed), forwards (training
    forwards; unlike `step`, a saved number is not loaded or carried over).
    """
    life, counters = table.life, table.own.total_counters()
    stores = [*table.stores, life.scores.store] if life is not None else table.stores
    waiting = None if life is None else life.waiting
    row_bytes = sum(store.row_bytes for store in stores)
    return {
        "rows": table.id_map.num_ids,
        "limit": table.row_limit,
        "bytes": table.id_map.bytes
        + table.row_numbers.high * row_bytes
        + (0 if waiting is None else waiting.bytes)
        + (0 if table.changes is None else table.changes.bytes),
        "step": table.step,
        "waiting": table.num_waiting,
        "withheld": table.row_numbers.withheld().numel(),
        **table.id_map.stats(),
        **counters,
        "unseen": counters["ids_seen"] - counters["hits"],
    }
