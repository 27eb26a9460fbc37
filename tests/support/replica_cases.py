"""Replicas of one table in one process: what `Merging` sends over ranks is handed over here."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrec_dyn.checkpoint_format import table_config
from torchrec_dyn.ranks import Table
from torchrec_dyn.replicas.merging import Merged, Merging
from torchrec_dyn.replicas.side import Side
from torchrec_dyn.table.shard import TableShard


def side_of(shard: TableShard) -> Side:
    """Returns an unsharded table as a side."""
    config = table_config(
        shard.name, shard.embedding_dim, shard.config.seed, shard.dtype, shard.initializer
    )
    return Side(Table.of_one(shard, f"table '{shard.name}'", config))


def merged_of(sides: Sequence[Side]) -> list[Merged]:
    """Returns what each side is to write, of the sides of one table, one of each replica."""
    mergings = [Merging([side], place, len(sides)) for place, side in enumerate(sides)]
    runs = [merging.run() for merging in mergings]
    arrived: list[list[list[Tensor]] | None] = [None for _ in sides]
    merged: list[Merged] = []
    while not merged:
        sent = []
        for run, given in zip(runs, arrived, strict=True):
            try:
                sent.append(run.send(given))  # type: ignore[arg-type]
            except StopIteration as end:
                merged += end.value
        assert len(sent) in (0, len(sides)), "replicas send equally often"
        arrived = [list(parts) for parts in zip(*sent, strict=True)]
    return merged


def sync(sides: Sequence[Side]) -> list[Merged]:
    """Merges the sides of one table, one of each replica, and returns what each of them has written."""
    merged = merged_of(sides)
    for write in [side.prepare(*contents) for side, contents in zip(sides, merged, strict=True)]:
        write()
    return merged
