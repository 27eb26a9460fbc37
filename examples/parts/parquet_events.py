"""Reads events from a Parquet file with the columns of MovieLens: user, item, timestamp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from parts.histories import Events
from parts.parquet_file import check_no_nulls, open_parquet

COLUMNS = {  # what it is: names that it may have, the first is ours
    "user": ("user_id", "userId"),
    "item": ("item_id", "movie_id", "movieId"),
    "time": ("timestamp",),
}
WHAT_IT_HAS = (
    "columns of integers `user_id`, `item_id` or `movie_id`, and `timestamp`, as MovieLens has; no nulls; "
    "rows in any order; other columns are not read"
)


def read_events(path: Path) -> Events:
    """Reads all events, and sorts them by time; those of the same time stay in the order of the file.

    Raises:
        ValueError: if the file is no Parquet file or its columns are not as `WHAT_IT_HAS` says. The
            message names the column.
    """
    import pyarrow

    file, there = open_parquet(path)
    columns = []
    for names in COLUMNS.values():
        name = next((name for name in names if name in there), None)
        if name is None:
            raise ValueError(f"{path}: expected {WHAT_IT_HAS}; got the columns {', '.join(there)}.")
        is_time = names is COLUMNS["time"] and pyarrow.types.is_timestamp(there[name])
        if not pyarrow.types.is_integer(there[name]) and not is_time:
            raise ValueError(
                f"{path}, column {name}: expected integers, got {there[name]}. Hash strings with "
                "torchrec_dyn.hash_strings first."
            )
        column = file.read([name]).column(0)
        check_no_nulls(path, name, column)
        columns.append(column.to_numpy().astype(np.int64, copy=False))
    users, items, times = columns
    order = np.argsort(times, kind="stable")
    return Events(users[order], items[order], times[order])
