"""A training step without memory for any op before its commit changes nothing, and can be repeated."""

from typing import Any

import pytest
import torch
from garbage import keep_what_exists
from interrupt_cases import LIVES, Training, check_whole, contents, is_same
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_dyn.storage import change, commit


class NoMemoryAt(TorchDispatchMode):
    """Raises at op number `at` of those outside of commits; `is_reached` tells whether there was one."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left, self.commits = at, 0

    @property
    def is_reached(self) -> bool:
        return self.left <= 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= not self.commits
        if not self.left and not self.commits:
            self.left -= 1
            raise MemoryError
        return op(*args, **(kwargs or {}))


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a call with `NoMemoryAt` an op, and returns this."""
    mode = NoMemoryAt(0)
    begin, end, begin_commit = commit.__enter__, commit.__exit__, change.commit

    def enter(self: commit) -> None:
        begin(self)
        mode.commits += not isinstance(self, change)

    def enter_commit(self: change) -> None:
        begin_commit(self)
        mode.commits += 1

    def leave(self: commit, *error: Any) -> None:
        mode.commits -= not isinstance(self, change) or self._undo is None
        end(self, *error)

    monkeypatch.setattr(commit, "__enter__", enter)
    monkeypatch.setattr(change, "commit", enter_commit)
    monkeypatch.setattr(commit, "__exit__", leave)

    def run(call: Any, at: int) -> NoMemoryAt:
        nonlocal mode
        mode = NoMemoryAt(at)
        with mode:
            call()
        return mode

    return run


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.deep, id="deep")])
def test_a_step_without_memory_changes_nothing(
    life: str, every: int, without_memory: Any, threads: Any
) -> None:
    threads(1)
    keep_what_exists()  # each check collects garbage
    training, step = Training(LIVES[life]), 7

    def ready() -> Any:
        model = training.after(step)
        if training.is_timed:
            model.set_time(step)
        return model

    twin = ready()
    before = contents(twin)
    output = training.forward(twin, step).detach()
    after, at, runs = contents(twin), 1, 0
    while True:
        model = ready()
        try:
            mode = without_memory(lambda model=model: training.forward(model, step), at)
        except MemoryError:
            runs += 1
        else:
            assert not mode.is_reached
            break
        check_whole(model)
        now = contents(model)
        if all(is_same(one, after[name]) for name, one in now.items()):
            break  # the step is over: the output was without memory
        assert all(is_same(one, before[name]) for name, one in now.items()), at
        assert torch.equal(training.forward(model, step).detach(), output)
        assert all(is_same(now, after[name]) for name, now in contents(model).items()), at
        at += every
    assert runs > 1
