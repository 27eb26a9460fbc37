"""The counts of a whole table, from those of its shards."""

from __future__ import annotations

from collections.abc import Sequence

Stats = dict[str, int | float]
OF_EVERY_SHARD = ("step", "forwards")  # each counts all of them


def whole_stats(row_shards: Sequence[Stats], all_bytes: int | float) -> Stats:
    """Joins the counts of a table's shards.

    Column shards hold the same ids and see the same stream, so those of the first columns stand
    for all. What is not named here is a count, and summed.

    Args:
        row_shards: stats of the shards of the first columns.
        all_bytes: the bytes of all shards.
    """
    whole: Stats = {name: sum(one[name] for one in row_shards) for name in row_shards[0]}
    for name in OF_EVERY_SHARD:
        whole[name] = max(one[name] for one in row_shards)
    whole["bytes"] = all_bytes
    whole["load"] = whole["rows"] / whole["slots"] if whole["slots"] else 0.0
    probed = sum(one["probe_length_mean"] * one["rows"] for one in row_shards)
    whole["probe_length_mean"] = probed / whole["rows"] if whole["rows"] else 0.0
    whole["probe_length_max"] = max(one["probe_length_max"] for one in row_shards)
    return whole
