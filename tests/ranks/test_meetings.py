"""How often ranks meet in each public call, counted; and an error of one rank as it prepares a change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import collection_of, shard
from torch.utils._python_dispatch import TorchDispatchMode

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints, apply_delta, export_delta, mark
from torchrec_dyn.ranks import agreement
from torchrec_dyn.table import TableShard

# The most meetings of ranks in a call. docs/design.md has the same table.
MEETINGS = {
    "lookup_rows": 1,
    "read_ids": 1,
    "sample_ids": 1,
    "read_counts": 1,
    "read_stats": 1,
    "set_time": 1,
    "freeze": 1,
    "assign_rows": 2,
    "erase_rows": 2,
    "Replicas.sync": 7,
    "state_dict": 1,
    "load_state_dict": 2,
    "reshard": 7,
    "export_delta": 2,
    "apply_delta": 2,
    "Checkpoints.save": 2,
    "Checkpoints.restore": 2,
    "Checkpoints.async_save": 3,
}


def model_of(kind: str = "row_wise") -> Any:
    life = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    table = Table("t", ["f"], usual_plan(kind, 8, 2, 2, rows=16), rows=16, config=life)
    case = Case([table], fused_params=FUSED_PARAMS)
    model = shard(case, collection_of(case))
    model.module.collection.table("t").assign(ids_here(), torch.rand(6, 8))
    return model


def ids_here() -> torch.Tensor:
    return torch.arange(6) + 6 * dist.get_rank()


def calls_of(folder: Path) -> dict[str, Callable[[], object]]:
    """Returns the public calls, in an order in which they can run."""
    model, other = model_of(), model_of()
    collection, ids = model.module.collection, ids_here()
    state, marker, saves = copy.deepcopy(dict(model.state_dict())), mark(model), Checkpoints(folder)
    replicas = dyn.Replicas(other.module)

    def reshard() -> None:
        plan = {"t": usual_plan("table_wise", 8, 2, 2, rows=16)}
        (sharder,) = other.sharders
        sharder.reshard(other.module.collection, plan, other._env, other.device)

    return {
        "lookup_rows": partial(dyn.lookup_rows, collection, "t", ids),
        "read_ids": partial(dyn.read_ids, collection, "t"),
        "sample_ids": partial(dyn.sample_ids, collection, "t", 3, 0),
        "read_counts": partial(dyn.read_counts, collection, "t", ids),
        "read_stats": partial(dyn.read_stats, collection, "t"),
        "set_time": partial(collection.set_time, 1),
        "freeze": collection.table("t").freeze,
        "assign_rows": partial(dyn.assign_rows, collection, "t", ids, torch.ones(6, 8)),
        "erase_rows": partial(dyn.erase_rows, collection, "t", ids[:1]),
        "Replicas.sync": replicas.sync,
        "state_dict": model.state_dict,
        "load_state_dict": lambda: other.load_state_dict(state),
        "export_delta": lambda: export_delta(model, folder / "delta", marker),
        "apply_delta": lambda: apply_delta(other, folder / "delta"),
        "reshard": reshard,
        "Checkpoints.save": lambda: saves.save(model, model.fused_optimizer, step=1),
        "Checkpoints.restore": lambda: saves.restore(model, model.fused_optimizer),
        "Checkpoints.async_save": lambda: saves.async_save(
            model, model.fused_optimizer, step=2
        ).result(),
    }


def count_meetings(folder: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    gather = agreement._gather
    for name, call in calls_of(folder).items():
        with mock.patch.object(agreement, "_gather", side_effect=gather) as meetings:
            call()
        counts[name] = meetings.call_count
    return counts


def test_meetings_of_public_calls(tmp_path: Path) -> None:
    first, other = workers.run(count_meetings, tmp_path, world_size=2)
    assert first == other
    assert {name: count for name, count in first.items() if count > MEETINGS[name]} == {}


class NoMemory(TorchDispatchMode):
    """Fails one op, that behind `number` others."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("no memory")
        return op(*args, **(kwargs or {}))


def fail_to_prepare(verb: str, kind: str) -> int:
    """Runs an edit again and again, each time with another op that fails as rank 1 prepares."""
    table = model_of(kind).module.collection.table("t")
    ids, rows = ids_here() + 3, torch.ones(6, 8)  # some have a row
    arguments = (ids, rows) if verb == "assign" else (ids,)
    prepare, failed, texts = getattr(TableShard, f"prepare_{verb}"), 0, [""]
    before = (*table.lookup_rows(table.read_ids()), table.read_ids())
    while True:

        def failing(shard: TableShard, *given: torch.Tensor, number: int = failed) -> object:
            with NoMemory(number) if dist.get_rank() == 1 else nullcontext():
                return prepare(shard, *given)

        with mock.patch.object(TableShard, f"prepare_{verb}", failing):
            try:
                getattr(table, verb)(*arguments)
            except torch.OutOfMemoryError as error:
                texts = [str(error)]
            else:
                break
        assert texts == [f"{table.where}.{verb}(rank=1): no memory"]
        after = (*table.lookup_rows(table.read_ids()), table.read_ids())
        assert all(map(torch.equal, before, after))
        failed += 1
    assert table.lookup_rows(ids)[1].all() == (verb == "assign")
    return failed


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
@pytest.mark.parametrize("verb", ["assign", "erase"])
def test_a_rank_without_memory_for_an_edit_is_an_error_of_all(verb: str, kind: str) -> None:
    first, other = workers.run(fail_to_prepare, verb, kind, world_size=2)
    assert first == other > 3
