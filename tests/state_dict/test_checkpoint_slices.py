"""A rank reads its own slice of a saved table, whatever the plan that saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_cases import DIM, Setup, load, new, run_on, save

import torchrec_dyn as dyn
from torchrec_dyn.state_dict.load_planner import LoadPlanner

ROWS = 100_000
SAVED = Setup(3, ("row_wise",), tables=1, rows=2 * ROWS)
CELL = ROWS // 16  # rows are counted in 16 cells: a slice is known to a cell at either end


class CountingPlanner(LoadPlanner):
    """Counts the numbers of each saved tensor that are read here."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        memory = super().resolve_tensor(read_item)
        name = read_item.dest_index.fqn.rpartition(".")[2]
        self.numbers[name] = self.numbers.get(name, 0) + memory.numel()
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
        assert kept <= numbers["ids"] <= kept + 2 * CELL * 1.1
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
