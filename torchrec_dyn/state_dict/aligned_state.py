"""Optimizer state without its rows: matched to the present rows of the shards.

A state dict of an optimizer has no ids. If its rows were not read with it, its numbers belong to the ids of
the table, or the load is refused.

Legend: M rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.state_dict.places import Places, Runs
from torchrec_dyn.state_dict.staged_rows import StagedRows
from torchrec_dyn.storage import CanonicalRows
from torchrec_dyn.table import TableShard, with_same_contents


def present_rows(
    rows: CanonicalRows, runs: Runs, places: Places, columns: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the ids of a shard, their rows in the shard, and their staged rows, [M] int64 each.

    `runs` is the position of the shard's rows in the whole table, `places` those of the staged rows.
    """
    most = max(1, knobs.CHUNK_BYTES // (4 * columns))
    for run in runs.mine:
        for begin in range(0, run.rows, most):
            end = min(run.rows, begin + most)
            ids, own = rows.read(run.here + begin, run.here + end)
            ranges = places.within(run.place + begin, run.place + end)
            staged = [
                torch.arange(row, row + high - low, device=own.device) for low, high, row in ranges
            ]
            yield ids, own, torch.cat(staged)


def with_state(
    shard: TableShard,
    staged: StagedRows,
    present: Iterator[tuple[Tensor, Tensor, Tensor]],
    step: int | None,
    cuts: list[int],
) -> TableShard:
    """Returns a shard beside a shard, with its rows and the staged state; `step` is that of the state."""
    high = shard.row_numbers.high_water_mark
    loaded, result = staged.states(staged.places.count, cuts), with_same_contents(shard)
    states = [store.empty() for store in shard.states]
    for store in states:
        store.reserve(high)
    for _, own, rows in present:
        for store, state in zip(states, loaded, strict=True):
            store.write(own, state.read(rows))
    step = shard.step if step is None else step
    result.states, result.step = tuple(states), max(shard.step if shard.life else 0, step)
    if shard.life is not None:
        result.life = shard.life.caught_up(result.step, high)
    return result
