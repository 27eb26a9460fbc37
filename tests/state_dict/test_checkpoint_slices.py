"""A rank reads its own slice of a saved table, whatever the plan that saved it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import DIM, LAST_IDS, Setup, load, new, run_on, save, tables_of
from checkpoint_small import COUNTED, case, sharded, step
from sharded_cases import Case, Table, shard_by_hand

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import ChunkedTensor
from torchrec_dyn.state_dict.load_planner import LoadPlanner

ROWS = 100_000
SEARCHED = 16  # ids that are read to find a place are not counted
SAVED = Setup(3, ("row_wise",), tables=1, rows=2 * ROWS)


class CountingPlanner(LoadPlanner):
    """Counts the numbers of each saved tensor that are read here, and the reads of DCP."""

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path=path)
        self.numbers: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def finish_plan(self, new_plan: Any) -> Any:
        rows = ChunkedTensor.rows

        def counted(saved: Any, first: int, last: int, columns: Any = None) -> torch.Tensor:
            read = rows(saved, first, last, columns)
            if last - first > SEARCHED:
                self.numbers[saved.key.rpartition(".")[2]] += read.numel()
            return read

        with (
            mock.patch.object(ChunkedTensor, "rows", counted),
            mock.patch.object(knobs, "IDS_READ_TOGETHER", SEARCHED),
        ):
            return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.reads[read_item.dest_index.fqn.rpartition(".")[2]] += 1
        return super().resolve_tensor(read_item)


def fill_and_save(setup: Setup, path: str) -> None:
    model, rank = new(setup), dist.get_rank()
    ids = torch.arange(ROWS)[rank :: setup.world]
    rows = ids[:, None] + torch.arange(DIM) / 16
    dyn.assign_rows(model.module.collection, "plain", ids, rows)
    save(model, path)


def load_and_count(setup: Setup, path: str) -> tuple[dict[str, int], int]:
    planner = CountingPlanner(path)
    collection = load(new(setup), path, planner).module.collection
    ids = collection.table("plain").ids()[::97]
    rows, found = collection.table("plain").lookup(ids)
    columns = [range(first, first + n) for first, n in collection.table("plain").columns]
    which = torch.tensor([one for some in columns for one in some], dtype=torch.int64)
    assert bool(found.all()) and torch.equal(rows, (ids[:, None] + which / 16).float())
    return planner.numbers, collection.table("plain").num_rows


def test_a_rank_reads_the_rows_that_it_keeps(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    run_on(SAVED, fill_and_save, path)
    of_ranks = run_on(Setup(4, ("row_wise",), tables=1, rows=2 * ROWS), load_and_count, path)
    assert sum(kept for _, kept in of_ranks) == ROWS
    for numbers, kept in of_ranks:
        assert numbers["ids"] == kept
        assert numbers["weight"] == numbers["momentum1"] == numbers["ids"] * DIM

    # Rows stay whole on the two ranks of a column-wise table: each reads its columns of all.
    for numbers, kept in run_on(
        Setup(2, ("column_wise",), tables=1, rows=2 * ROWS), load_and_count, path
    ):
        assert kept == numbers["ids"] == ROWS
        assert numbers["weight"] == numbers["momentum1"] == ROWS * DIM // 2

    # And a rank that holds none of a table reads none.
    (there, _), (elsewhere, none) = run_on(
        Setup(2, ("table_wise",), tables=1, rows=2 * ROWS), load_and_count, path
    )
    assert there["weight"] == ROWS * DIM and none == 0
    assert not {"ids", "weight", "momentum1"} & elsewhere.keys()


WAITING = [*range(20_000), *LAST_IDS]


def counted(world: int) -> Any:
    return sharded(case(world, "row_wise", config=COUNTED, rows=100_000))


def wait_and_save(path: str) -> None:
    model, rank = counted(dist.get_world_size()), dist.get_rank()
    step(model, WAITING[rank :: dist.get_world_size()])
    dcp.save(model.state_dict(), checkpoint_id=path)


def load_waiting(path: str) -> tuple[int, int, int]:
    """Returns the numbers of waiting ids that were read and kept here, and the sum of their counts."""
    model, planner = counted(dist.get_world_size()), CountingPlanner(path)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path, planner=planner)
    model.load_state_dict(state)
    ids = model.module.collection._shards.table("t").shards[0].life.waiting.export()[0]
    step(model, [])
    return planner.numbers["waiting"] // 3, len(ids), int(ids.sum())


def test_a_rank_reads_the_waiting_ids_that_it_keeps(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    workers.run(wait_and_save, path, world_size=3)
    of_ranks = workers.run(load_waiting, path, world_size=4)
    assert sum(kept for _, kept, _ in of_ranks) == len(WAITING)
    assert sum(total for *_, total in of_ranks) == sum(WAITING)
    for read, kept, _ in of_ranks:
        assert 0 <= kept - read <= len(LAST_IDS)  # these are read one by one


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
