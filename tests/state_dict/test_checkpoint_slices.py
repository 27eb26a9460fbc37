"""A rank reads the columns of its own shards, each saved chunk once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import workers
from checkpoint_cases import load, save, tables_of
from checkpoint_small import sharded, step
from sharded_cases import Case, Table, shard_by_hand

from torchrec_dyn.state_dict.load_planner import LoadPlanner


class CountingPlanner(LoadPlanner):
    """Counts the reads of each saved tensor here."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.reads[read_item.dest_index.fqn.rpartition(".")[2]] += 1
        return super().resolve_tensor(read_item)


# Many column shards on a rank. DCP loads a whole chunk for each read, so a chunk is read once for all shards.

SHARDS, WIDTH = 24, 4
EVERY_COLUMN = range(0, SHARDS * WIDTH, WIDTH)
WHOLE = ("table_wise", [([0], 0, SHARDS * WIDTH)])
MANY_COLUMNS = ("grid_shard", [([0, 1], first, WIDTH) for first in EVERY_COLUMN])
# Rank 0 holds columns 0 to 3, 8 to 15 and the rest from 20 on; rank 1 holds the others.
TWO_GAPS = (
    "column_wise",
    [([int(first in (WIDTH, 4 * WIDTH))], first, WIDTH) for first in EVERY_COLUMN],
)


def model_of(plan: Any) -> Any:
    """A model of one table, trained on the same ids under every plan."""
    table = Table("t", ["f_t"], shard_by_hand(*plan, rows=100), SHARDS * WIDTH, rows=100)
    model = sharded(Case([table]))
    step(model, [1, 2, 3, 40 + dist.get_rank()])
    return model


def train_and_save(plan: Any, path: str) -> None:
    save(model_of(plan), path)


def load_and_compare(plan: Any, path: str) -> Counter[str]:
    """Loads into a model that was trained further; returns the reads."""
    trained, model, planner = model_of(plan), model_of(plan), CountingPlanner()
    step(model, [1, 2, 3, 50])
    load(model, path, planner)
    for one, other in zip(*(tables_of(of) for of in (model, trained)), strict=True):
        got, expected = one.export_state(), other.export_state()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
    return planner.reads


def test_a_chunk_is_read_once_for_all_column_shards(tmp_path: Path) -> None:
    for plan, path in ((WHOLE, "whole"), (MANY_COLUMNS, "many")):
        workers.run(train_and_save, plan, str(tmp_path / path), world_size=2)
    for plan, path, chunks in (
        (MANY_COLUMNS, "whole", [1, 1]),
        (TWO_GAPS, "whole", [3, 2]),
        (MANY_COLUMNS, "many", [2 * SHARDS, 2 * SHARDS]),
        (WHOLE, "many", [2 * SHARDS, 0]),
    ):
        reads = workers.run(load_and_compare, plan, str(tmp_path / path), world_size=2)
        assert [one["weight"] for one in reads] == chunks, (plan[0], path)
        assert [one["momentum1"] for one in reads] == chunks, (plan[0], path)
