"""A rank reads its own slice of a saved table, whatever the plan that saved it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import DIM, LAST_IDS, Setup, load, new, run_on, save, tables_of
from checkpoint_small import COUNTED, case, sharded, step
from oracle import unmixed
from sharded_cases import Case, Table, shard_by_hand
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

import torchrec_dyn as dyn
from torchrec_dyn import ops
from torchrec_dyn.ranks import ids_per_rank, owners
from torchrec_dyn.state_dict.load_planner import LoadPlanner
from torchrec_dyn.state_dict.places import ranges_of_part
from torchrec_dyn.state_dict.row_index import (
    CellCounts,
    RowIndex,
    index_tensor,
    indexed,
    saved_index,
)
from torchrec_dyn.storage import canonical_order

ROWS = 100_000
SAVED = Setup(3, ("row_wise",), tables=1, rows=2 * ROWS)
MORE = 3 * math.isqrt(ROWS)  # rows that a rank reads too many at either end


class CountingPlanner(LoadPlanner):
    """Counts the numbers of each saved tensor that are read here, and the reads."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}
        self.reads: Counter[str] = Counter()

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        memory = super().resolve_tensor(read_item)
        name = read_item.dest_index.fqn.rpartition(".")[2]
        self.numbers[name] = self.numbers.get(name, 0) + memory.numel()
        self.reads[name] += 1
        return memory


def fill_and_save(setup: Setup, path: str) -> None:
    model, rank = new(setup), dist.get_rank()
    ids = torch.arange(ROWS)[rank :: setup.world]
    rows = ids[:, None] + torch.arange(DIM) / 16
    dyn.assign_rows(model.module.collection, "plain", ids, rows)
    save(model, path)


def load_and_count(setup: Setup, path: str) -> tuple[dict[str, int], int]:
    planner = CountingPlanner()
    collection = load(new(setup), path, planner).module.collection
    ids = collection.table("plain").ids()[::97]
    rows, found = collection.table("plain").lookup(ids)
    columns = [range(first, first + n) for first, n in collection.table("plain").columns]
    which = torch.tensor([one for some in columns for one in some], dtype=torch.int64)
    assert bool(found.all()) and torch.equal(rows, (ids[:, None] + which / 16).float())
    return planner.numbers, collection.table("plain").num_rows


def test_a_rank_reads_the_rows_that_it_keeps_and_few_others(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    run_on(SAVED, fill_and_save, path)
    of_ranks = run_on(Setup(4, ("row_wise",), tables=1, rows=2 * ROWS), load_and_count, path)
    assert sum(kept for _, kept in of_ranks) == ROWS
    for numbers, kept in of_ranks:
        assert kept <= numbers["ids"] <= kept + 2 * MORE
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
    model, planner = counted(dist.get_world_size()), CountingPlanner()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path, planner=planner)
    model.load_state_dict(state)
    ids = model.module.collection._shards.table("t").shards[0].life.waiting.export()[0]
    step(model, [])
    return planner.numbers["waiting"] // 3, len(ids), int(ids.sum())


def test_a_rank_reads_the_waiting_ids_that_it_keeps_and_few_others(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    workers.run(wait_and_save, path, world_size=3)
    of_ranks = workers.run(load_waiting, path, world_size=4)
    assert sum(kept for _, kept, _ in of_ranks) == len(WAITING)
    assert sum(total for *_, total in of_ranks) == sum(WAITING)
    for read, kept, _ in of_ranks:
        assert kept <= read <= 1.3 * kept


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_the_ranges_of_a_part_hold_all_its_rows_and_few_others(ranks: int) -> None:
    """The ids after the last range belong to any part, and have the last places."""
    share, some = ids_per_rank(ranks), torch.arange(-500, 500) * (2**64 // 1000)
    bounds = [part * share - 1 + i for part in range(1, ranks + 1) for i in range(2)]
    after = range(share * ranks, 2**64)  # as many as ranks at most
    signed = [mixed - 2**64 if mixed >= 2**63 else mixed for mixed in (*bounds, *after)]
    uneven = torch.arange(300) * 2**50  # so that places drift
    mixed = torch.cat([some, uneven, torch.tensor(signed)]).unique()
    ids = unmixed(mixed)
    ids = ids[canonical_order(ids)]
    cells = (ops.mix64(ids) >> 59 & 31).bincount(minlength=32)
    begins = (0, *cells.cumsum(0).tolist())
    drift = max(abs(begins[cell] - (cell * len(ids) >> 5)) for cell in range(33))
    of_parts = owners(ids, ranks)
    for index in (RowIndex(5, len(ids), begins=begins), RowIndex(5, len(ids), drift)):
        for part in range(ranks):
            ranges = ranges_of_part(index, len(ids), part, ranks)
            read = {place for begin, end in ranges for place in range(begin, end)}
            mine = set((of_parts == part).nonzero().flatten().tolist())
            assert mine <= read <= set(range(len(ids)))
            assert len(read) <= len(mine) + 2 * (int(cells.max()) + 2 * drift) + ranks


def saved_as(*sizes: tuple[int, ...]) -> dict[str, TensorStorageMetadata]:
    """The metadata of "cells" with chunks of these sizes, one after the other."""
    begins = [0, *accumulate(size[0] for size in sizes)]
    chunks = [
        ChunkStorageMetadata(torch.Size([begin, *[0] * (len(size) - 1)]), torch.Size(size))
        for begin, size in zip(begins, sizes, strict=False)
    ]
    whole = torch.Size([begins[-1], *sizes[0][1:]])
    return {"cells": TensorStorageMetadata(TensorProperties(torch.uint8), whole, chunks[::-1])}


def test_cells_of_earlier_versions_are_used_only_if_they_count_the_rows() -> None:
    def saved(*cells: int) -> dict[str, TensorStorageMetadata]:
        return saved_as(*((rows + 1, 0) for rows in cells))

    found = saved_index(saved(3, 1, 0, 2), 6)
    assert found == RowIndex(2, 6, begins=(0, 3, 4, 4, 6))
    assert found is not None and found.between(1, 2) == (3, 4)
    assert saved_index(saved(3, 1, 0, 2), 6, of_waiting=True) is None
    assert saved_index(saved(3, 1, 0, 2), 7) is None  # of other rows
    assert saved_index(saved(3, 1, 2), 6) is None  # not 2^k cells
    assert saved_index({}, 6) is None


def test_an_index_is_used_only_if_it_counts_the_rows() -> None:
    def saved(*numbers: int) -> dict[str, TensorStorageMetadata]:
        return saved_as(*((number + 1, 1, 0) for number in numbers))

    assert saved_index(saved(1000, 3, 50, 7, 12), 1000) == RowIndex(12, 1000, 3)
    assert saved_index(saved(1000, 3, 50, 7, 12), 50, of_waiting=True) == RowIndex(12, 50, 7)
    assert saved_index(saved(1000, 3, 50, 7, 12), 1001) is None  # of other rows
    assert saved_index(saved(1000, 3, 50, 7, 99), 1000) is None  # damaged
    assert saved_index(saved(1000), 1000) is None  # of an unsharded table: one chunk
    # Earlier versions take a number of chunks that is no power of two as no index.
    assert len(saved(1000, 3, 50, 7, 12)["cells"].chunks) == 5


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_index_has_the_rows_and_their_largest_drift(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    counts = torch.randint(0, 9, (4096,), generator=generator)
    counts[:700] = 0
    bounds = [0, 1000, 2500, 4096] if ranks == 3 else [0, 4096]
    parts = []
    for first, last in pairwise(bounds):
        held = counts[first:last]
        begin = first + int(held.nonzero()[0])
        parts.append(CellCounts(begin, counts[begin:last].int().numpy().tobytes()))
    total, places = int(counts.sum()), [0, *counts.cumsum(0).tolist()]
    drift = max(abs(place - (cell * total >> 12)) for cell, place in enumerate(places))
    assert indexed([*parts[::-1], CellCounts(0, b"")]) == (total, drift)
    chunks = index_tensor(parts, [], True, None).parts
    assert [part.size[0] - 1 for part in chunks] == [total, drift, 0, 0, 12]
    assert not index_tensor(parts, [], False, None).parts


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
