"""A rank without memory for its part of a collective call: every rank raises, and no rank waits."""

import copy
import itertools
import sys
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from sharded_cases import FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import collection_of, shard
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._python_dispatch import TorchDispatchMode

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import (
    apply_delta,
    delta_apply,
    export_delta,
    export_rows,
    import_rows,
    mark,
)
from torchrec_dyn.table import merge

# Plan of the table, and the number of ops from one that fails to the next.
KINDS = pytest.mark.parametrize(
    "kind, stride",
    [
        ("row_wise", 23),
        pytest.param("row_wise", 1, marks=pytest.mark.deep),
        pytest.param("column_wise", 1, marks=pytest.mark.deep),
    ],
)
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


def fail_in_turn(call, stride):
    """Runs a call again and again, each time with another op that fails on rank 1; returns the last number.

    Rank 1 fails alone. The ranks meet after each call: a rank that waits in the call is an error there.
    """
    number, has_failed = 0, True
    while has_failed:
        memory = NoMemory(number)
        with memory if dist.get_rank() else nullcontext():
            try:
                call()
                raised = ""
            except (RuntimeError, CheckpointException) as error:
                raised = str(error)
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, (memory.has_failed, raised))
        has_failed = of_ranks[1][0]
        for _, text in of_ranks:
            shown = text.replace("(RANK 1)", "(rank=1)")  # as DCP writes it
            assert ("(rank=1)" in shown and "no memory" in shown) == has_failed, (number, of_ranks)
        number += stride
    return number - stride


def model_of(kind):
    """Returns a sharded model of one table that is nearly full."""
    table = Table("t", ["a"], usual_plan(kind, 8, 2, 2, rows=16), rows=16, config=LIFE)
    case = Case([table], fused_params=FUSED_PARAMS)
    model = shard(case, collection_of(case))
    model.module.collection.table("t").assign(ids_here(), torch.rand(6, 8))
    return model


def ids_here():
    return torch.arange(6) + 6 * dist.get_rank()


def fail_calls(kind, stride, folder):
    collection, ids, rows = model_of(kind).module.collection, ids_here(), torch.rand(6, 8)
    handle, whole = collection.table("t"), collection.table("t").whole
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
    failed = {name: fail_in_turn(call, stride) for name, call in calls.items()}
    for got, expected in zip(
        (*whole.lookup(ids), whole.ids()), (*before[0], before[1]), strict=True
    ):
        assert torch.equal(got, expected)
    failed["erase"] = fail_in_turn(partial(handle.erase, ids), stride)
    assert whole.num_rows == 0
    return failed


@KINDS
def test_calls_by_id(kind, stride, tmp_path):
    _, failed = workers.run(fail_calls, kind, stride, str(tmp_path), world_size=2)
    names = ("lookup", "last_seen", "count", "assign", "ids", "export_rows", "import_rows", "erase")
    assert min(failed[name] for name in names) > 5


def fail_saves(kind, stride, folder):
    model, other = model_of(kind), model_of(kind)
    folders = map(str, itertools.count())
    saved = [model.state_dict(), model.fused_optimizer.state_dict()]
    rows, optimizer = (copy.deepcopy(dict(one)) for one in saved)
    marker = mark(model)
    model.module.collection.table("t").assign(ids_here()[:2], torch.ones(2, 8))
    changed = {"t": usual_plan("table_wise", 8, 2, 2, rows=16)}

    def save():
        state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/{next(folders)}")

    def reshard():
        collection, (sharder,) = model.module.collection, model.sharders
        sharder.reshard(collection, changed, model._env, model.device)

    calls = {
        "state_dict": model.state_dict,
        "save": save,
        "load rows": lambda: other.load_state_dict(copy.copy(rows)),
        "load optimizer": lambda: other.fused_optimizer.load_state_dict(copy.copy(optimizer)),
        "mark": partial(mark, model),
        "export": lambda: export_delta(model, f"{folder}/{next(folders)}", marker),
        "reshard": reshard,
    }
    return {name: fail_in_turn(call, stride) for name, call in calls.items()}


@KINDS
def test_saves_and_moves(kind, stride, tmp_path):
    _, failed = workers.run(fail_saves, kind, stride, str(tmp_path), world_size=2)
    assert min(failed.values()) > 20


def fail_reads_of_a_delta(stride, folder):
    model, copy_of_model = model_of("row_wise"), model_of("row_wise")
    rows = torch.arange(48.0).view(6, 8)
    for one in (model, copy_of_model):
        one.module.collection.table("t").assign(ids_here(), rows)
    marker = mark(model)
    model.module.collection.table("t").assign(ids_here()[:2], torch.ones(2, 8))
    export_delta(model, folder, marker)
    with mock.patch.object(delta_apply, "merge", lambda *given: merge(*given) and (lambda: None)):
        return fail_in_turn(lambda: apply_delta(copy_of_model, folder), stride)


def test_reads_of_a_delta(tmp_path):
    # Other numbers fail in torch.load, which calls such a file damaged.
    _, failed = workers.run(fail_reads_of_a_delta, 46, str(tmp_path), world_size=2)
    assert failed > 100
