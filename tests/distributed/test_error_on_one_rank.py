"""An error of one rank in the middle of a step: the other ranks wait no longer than their group's time-out.

The group of a model is one of its own, so the workers go on after it has broken.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_training import Holder, collection_of, sharder_of
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from torchrec_dyn.lookup.table_group import TableGroup
from torchrec_dyn.sharding.dists import OwnerInputDist

BAD = 1  # the rank with the error
TIME_OUT = timedelta(seconds=0.3)
TIMED_OUT = r"Timed out waiting 300ms|Application timeout|Connection (closed|reset) by peer"


@contextmanager
def error_in(owner: type, name: str) -> Iterator[None]:
    """Raises an error where a method of ours is called, on one rank."""
    if dist.get_rank() == BAD:
        with mock.patch.object(owner, name, side_effect=MemoryError("no memory here")):
            yield
    else:
        yield


STAGES: dict[str, Callable[[], Any]] = {
    "input dist": lambda: error_in(OwnerInputDist, "forward"),
    "lookup": lambda: error_in(TableGroup, "_look_up"),
    "update": lambda: error_in(TableGroup, "_write"),
}


def sharded(group: dist.ProcessGroup) -> Any:
    case = Case([Table("t", ["a"], usual_plan("row_wise", 8, 2, 2))])
    return DistributedModelParallel(
        Holder(collection_of(case)),
        env=ShardingEnv.from_process_group(group),
        plan=ShardingPlan({"collection": {"t": case.tables[0].plan}}),
        sharders=[sharder_of(case)],
    )


def step(model: Any, first: int) -> None:
    ids = torch.arange(first, first + 20)
    model(KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([20]))).values().sum().backward()


def break_in(stage: str) -> tuple[int, int]:
    """Trains until one rank has an error; returns the rows here before and after."""
    group = dist.new_group()
    model = sharded(group)
    table = model.module.collection.table("t")
    step(model, 0)
    before = table.num_rows
    if dist.get_rank() == BAD:
        with pytest.raises(MemoryError, match="no memory here"), STAGES[stage]():
            step(model, 100)
    else:
        if stage == "update":  # the other rank has sent all that a step needs
            step(model, 100)
        # Only now: the steps before may take longer on a busy machine.
        dist.distributed_c10d._set_pg_timeout(TIME_OUT, group)
        with pytest.raises(RuntimeError, match=TIMED_OUT):
            step(model, 200)
    dist.barrier()  # of all workers: the rank with the error stays in the group
    state = table.shards[0].export_state()
    assert len(state["ids"]) == table.num_rows and torch.isfinite(state["weight"]).all()
    return before, table.num_rows


@pytest.mark.parametrize("stage", STAGES)
def test_the_other_ranks_have_an_error_within_the_time_out(stage: str) -> None:
    by_rank = workers.run(break_in, stage, world_size=2, timeout=30)
    (good, good_after), (bad, bad_after) = by_rank
    assert good + bad == 20
    if stage == "update":
        assert good_after > good and bad_after > bad  # both forwards were whole
    else:
        assert bad_after == bad
