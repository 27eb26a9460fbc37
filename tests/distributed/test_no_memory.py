"""A rank without memory for its part of a collective call: every rank raises, and no rank waits."""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import collection_of, shard
from torch.utils._python_dispatch import TorchDispatchMode

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import export_rows, import_rows

LIFE = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())


class NoMemory(TorchDispatchMode):
    """Fails one op of this process, except ops of torch.distributed, which no rank can replace.

    Args:
        number: ops before the one that fails.
    """

    def __init__(self, number):
        super().__init__()
        self.left = number

    @property
    def has_failed(self):
        return self.left < 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace != "c10d" and not op.is_view and not in_collective():
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError("no memory")
        return op(*args, **(kwargs or {}))


def in_collective():
    """Returns True if torch.distributed itself calls the op: its next caller is not ours."""
    frame = sys._getframe()
    while frame is not None:
        if "/torchrec_dyn/" in frame.f_code.co_filename:
            return False
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def fail_in_turn(call):
    """Runs a call again and again, each time with another op that fails on rank 1; returns their number.

    Rank 1 fails alone. The ranks meet after each call: a rank that waits in the call is an error there.
    """
    number, has_failed = 0, True
    while has_failed:
        with NoMemory(number if dist.get_rank() else sys.maxsize) as memory:
            try:
                call()
                raised = ""
            except RuntimeError as error:
                raised = str(error)
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, (memory.has_failed, raised))
        has_failed = of_ranks[1][0]
        for _, text in of_ranks:
            assert ("(rank=1): no memory" in text) == has_failed, (number, of_ranks)
        number += 1
    return number - 1


def fail_calls(kind, folder):
    table = Table("t", ["a"], usual_plan(kind, 8, 2, 2, rows=16), rows=16, config=LIFE)
    case = Case([table], fused_params=FUSED_PARAMS)
    collection = shard(case, collection_of(case)).module.collection
    handle, whole, rank = collection.table("t"), collection.table("t").whole, dist.get_rank()
    ids, rows = torch.arange(6) + 6 * rank, torch.rand(6, 8)
    handle.assign(ids, rows)
    before = whole.lookup(ids), whole.ids()
    calls = {
        "lookup": partial(whole.lookup, ids),
        "last_seen": partial(whole.last_seen, ids),
        "count": partial(whole.count, ids),
        "ids": whole.ids,
        "num_rows": lambda: whole.num_rows,
        "stats": whole.stats,
        "freeze": handle.freeze,
        "unfreeze": handle.unfreeze,
        "assign": partial(handle.assign, ids, rows),
        "export_rows": partial(export_rows, collection, "t", f"{folder}/rows"),
        "import_rows": partial(import_rows, collection, "t", f"{folder}/rows"),
    }
    failed = {name: fail_in_turn(call) for name, call in calls.items()}
    for got, expected in zip(
        (*whole.lookup(ids), whole.ids()), (*before[0], before[1]), strict=True
    ):
        assert torch.equal(got, expected)
    failed["erase"] = fail_in_turn(partial(handle.erase, ids))
    assert whole.num_rows == 0
    return failed


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_calls_by_id(kind, tmp_path):
    _, failed = workers.run(fail_calls, kind, str(tmp_path), world_size=2)
    names = ("lookup", "last_seen", "count", "assign", "ids", "export_rows", "import_rows", "erase")
    assert min(failed[name] for name in names) > 5
