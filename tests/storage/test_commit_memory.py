"""A commit takes no memory for tensors: all is taken while its call prepares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupt_cases import LIVES, batch_of, collection_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import apply_delta, export_delta, mark
from torchrec_dyn.storage import change, commit

# Calls that change tables of a collection "t0", "t1". Add others here.
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "new ids": lambda model, saved: model(batch_of(range(5, 70), range(5, 70))),
    "evictions": lambda model, saved: [
        model(batch_of(ids, ids)) for ids in (range(5, 70), range(60, 90), range(80, 100), [1, 2])
    ],
    "assign": lambda model, saved: model.table("t0").assign(torch.arange(7), torch.ones(7, 4)),
    "erase": lambda model, saved: model.table("t0").erase(torch.arange(3)),
    "set_time": lambda model, saved: model.set_time(7),
    "load": lambda model, saved: model.load_state_dict(saved),
    "load optimizer": lambda model, saved: optimizer_of(model).load_state_dict(
        optimizer_of(model).state_dict()
    ),
}


def optimizer_of(model: Any) -> Any:
    return model.fused_optimizer


class Allocations(TorchDispatchMode):
    """Notes the ops whose results have memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        given = {None, *map(memory_of, tree_leaves((args, kwargs)))}
        self.ops += [str(op) for value in tree_leaves(results) if memory_of(value) not in given]
        return results


def memory_of(value: Any) -> int | None:
    """Returns the address of a tensor's memory; None if it has none, or for another value."""
    if not isinstance(value, torch.Tensor) or value.is_meta or not value.untyped_storage().nbytes():
        return None
    return value.untyped_storage().data_ptr()


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """The allocations within commits."""
    mode, begin, end, depth = Allocations(), commit.__enter__, commit.__exit__, [0]

    def watch() -> None:
        mode.__enter__()
        depth[0] += 1

    def enter(self: commit) -> None:
        begin(self)
        if not isinstance(self, change):
            watch()

    def enter_commit(self: change) -> None:
        begin_commit(self)
        watch()

    def leave(self: commit, *error: Any) -> None:
        mode.__exit__(*error)
        end(self, *error)

    begin_commit = change.commit
    monkeypatch.setattr(commit, "__enter__", enter)
    monkeypatch.setattr(change, "commit", enter_commit)
    monkeypatch.setattr(commit, "__exit__", leave)
    yield mode
    assert depth[0], "the call has a commit"


def model_of(options: dyn.DynamicTableConfig) -> Any:
    model = collection_of(options, options)
    for _ in range(2):
        model(batch_of([1, 2, 5], [4, 5])).values().sum().backward()
    return model


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("call", CALLS)
def test_a_commit_allocates_nothing(call: str, life: str, allocations: Allocations) -> None:
    model = model_of(LIVES[life][0])
    {table.version(keeps_erased=True) for table in model.local_tables().values()}
    allocations.ops.clear()
    CALLS[call](model, copy.deepcopy(model.state_dict()))
    assert not allocations.ops


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("life", LIVES)
def test_the_commit_of_a_delta_allocates_nothing(
    life: str, allocations: Allocations, tmp_path: Path
) -> None:
    model = model_of(LIVES[life][0])
    replica, marker = copy.deepcopy(model), mark(model)
    versions = [table.version() for table in replica.local_tables().values()]
    model.table("t0").assign(torch.tensor([5, 99]), torch.ones(2, 4))  # a row, and a new one
    model.table("t0").erase(torch.tensor([1, 2]))
    export_delta(model, tmp_path / "delta", marker)
    allocations.ops.clear()
    apply_delta(replica, tmp_path / "delta")
    assert replica.table("t0").ids().equal(model.table("t0").ids()) and len(versions) == 2
    # Left out: the result of the record of a new row.
    assert not set(allocations.ops) - {"torchrec_dyn.mark_new_.default"}
