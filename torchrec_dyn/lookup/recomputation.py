"""Recomputation: activation checkpointing runs a forward twice. The second run repeats the first.

torch.utils.checkpoint drops the tensors that a function saves for its backward, and runs the function again
when backward needs them. A lookup that runs again must not count a step, admit ids or see rows that were
updated in between. So the first run keeps its `Forward` with a copy of its output, in the order of the calls,
and the second run takes it from there.

Both runs are recognised by what torch does around them, never by a resemblance of batches: a forward within a
backward may as well be an original one, from a hook or a pipeline (docs/decisions/0035). torch has two kinds:

- Not re-entrant. The first run has saved-tensor hooks of a frame. The second is called by the `unpack_hook`
  of that frame. Its graph gets no gradient: the gradients of the rows reach the first run.
- Re-entrant. The first run is within `CheckpointFunction.forward`, without a graph. The second is called by
  `CheckpointFunction.backward`, and its graph gets the gradients.

Selective checkpointing keeps results of some ops of the first run for the second: the n-th call of an op
counts as the same in both. A lookup that runs again calls other ops, so lookups are outside of it.

A frame, or the `ctx` of CheckpointFunction, lives as long as the graph, and holds what was kept.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch.utils import _python_dispatch, checkpoint

from torchrec_dyn.lookup.lookup_function import Forward
from torchrec_dyn.storage import run_to_end

_KEPT = "_torchrec_dyn_lookups"  # attribute of a frame and of a ctx
_MODULE = checkpoint.__name__


def code_of(function: Callable[..., Any]) -> CodeType:
    """Returns the code of a function, without the decorators around it."""
    return inspect.unwrap(function).__code__


def _inner_code(function: Callable[..., Any], name: str) -> CodeType:
    """Returns the code of a function that is defined inside another."""
    inside = code_of(function).co_consts
    return next(one for one in inside if isinstance(one, CodeType) and one.co_name == name)


_FIRST_RUN = code_of(checkpoint.CheckpointFunction.forward)
_BACKWARD = code_of(checkpoint.CheckpointFunction.backward)
_UNPACK = _inner_code(checkpoint._checkpoint_hook.__init__, "unpack_hook")
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


@dataclass
class _Kept:
    """The lookups of one table group within one checkpointed function, in the order of their calls.

    Attributes:
        used: number of forwards that each recomputation has taken so far.
    """

    forwards: list[Forward] = field(default_factory=list)
    used: dict[object, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Recomputation:
    """A recomputation that calls a lookup.

    Attributes:
        owner: frame or ctx of the checkpointed function.
        run: what distinguishes this recomputation of the function from others.
        has_gradients: True if the gradients of the rows reach the graph of this run (re-entrant).
    """

    owner: Any
    run: object
    has_gradients: bool

    def next_of(self, group: Any, ids: Tensor, where: str) -> Forward:
        """Returns the forward to repeat; call it under the lock of the group.

        ids: [N] int64, the ids of this run.

        Raises:
            RuntimeError: the first run made no such lookup.
        """
        kept = _kept_by(self.owner, group)
        number = kept.used.get(self.run, 0)
        if number >= len(kept.forwards):
            raise _differs(where, f"{len(kept.forwards)} lookups", "one more")
        forward = kept.forwards[number]
        assert forward.ids is not None
        # A GPU's ids are not compared: the host would wait.
        count = ids.numel()
        if count != forward.ids.numel():
            raise _differs(where, f"{forward.ids.numel()} ids", str(count))
        if ids.is_cpu and not torch.equal(ids, forward.ids):
            raise _differs(where, "the same ids", "others")
        kept.used[self.run] = number + 1
        return forward


def _differs(where: str, expected: str, got: str) -> RuntimeError:
    return RuntimeError(
        f"{where}: expected {expected} in a recomputation (activation checkpointing), as in the first run of "
        f"the checkpointed function, got {got}. Make the function call the same lookups each time it runs."
    )


@dataclass(frozen=True)
class CheckpointedCalls:
    """The checkpointed functions that call a lookup.

    Attributes:
        first_runs: frames and ctxs of the functions that run for the first time, of those within
            `recomputation` only.
        recomputation: the innermost recomputation; None if there is none.
    """

    first_runs: tuple[Any, ...]
    recomputation: Recomputation | None

    def keep(self, group: Any, forward: Forward) -> None:
        """Keeps a forward for the recomputations; call it under the lock of the group."""
        for owner in self.first_runs:
            _kept_by(owner, group).forwards.append(forward)


def _kept_by(owner: Any, group: Any) -> _Kept:
    by_group: dict[Any, _Kept] = owner.__dict__.setdefault(_KEPT, {})
    return by_group.setdefault(group, _Kept())


def again(forward: Forward, recomputation: Recomputation) -> Forward:
    """Returns the forward of a recomputation, which returns the output of the first run."""
    if recomputation.has_gradients:
        return forward
    return replace(forward, open_forward=None, is_done=False, repeated=forward)


def outside_of_selection() -> AbstractContextManager[Any]:
    """Returns a context in which selective checkpointing sees no ops; nor do dispatch modes beside it."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    if any(isinstance(mode, _SELECTIVE) for mode in modes):
        return _python_dispatch._disable_current_modes()
    return nullcontext()


def checkpointed_calls() -> CheckpointedCalls | None:
    """Returns the checkpointed functions that run on this thread, around the caller; None if none does."""
    has_hooks = _autograd._top_saved_tensors_default_hooks(True) is not None
    if not has_hooks and not _may_be_reentrant():
        return None
    first_runs = _frames_with_hooks() if has_hooks else []
    frame: FrameType | None = sys._getframe(1)
    recomputation: Recomputation | None = None
    while frame is not None and recomputation is None:
        code = frame.f_code
        if code is _FIRST_RUN:
            first_runs.append(frame.f_locals["ctx"])
        elif code is _BACKWARD or code is _UNPACK:
            recomputation = _recomputation_in(frame)
        frame = frame.f_back
    if not first_runs and recomputation is None:
        return None
    return CheckpointedCalls(tuple(first_runs), recomputation)


def runs_again_if_saved() -> bool:
    """Returns True in the first run of a function that runs again only where tensors of it were saved."""
    return bool(_frames_with_hooks())


def _may_be_reentrant() -> bool:
    """Returns False if no run of a re-entrant function is around; its time does not depend on the stack.

    An autograd function switches forward-mode gradients off, too; `no_grad` does not.
    """
    if torch._C._current_graph_task_id() != -1:
        return True
    return not torch.is_grad_enabled() and not torch._C._is_fwd_grad_enabled()


def _recomputation_in(frame: FrameType) -> Recomputation | None:
    """Returns the recomputation that a call of `_BACKWARD` or `_UNPACK` runs now; None if it runs none."""
    inside = frame.f_locals
    if frame.f_code is _UNPACK:
        return Recomputation(inside["frame"], inside["gid"], False)
    # With `outputs` the function has run again, and its graph runs backward: hooks may call lookups there.
    if "outputs" in inside:
        return None
    first = next((one for one in inside["detached_inputs"] if isinstance(one, Tensor)), None)
    return Recomputation(inside["ctx"], None if first is None else weakref.ref(first), True)


def _frames_with_hooks() -> list[Any]:
    """Returns the frames of functions that run for the first time, up to a recomputation.

    torch shows the innermost hooks only, so hooks are taken off and put back.
    """
    frames: list[Any] = []
    if not _autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return frames
    taken: list[tuple[Any, Any]] = []

    def put_back(_: bool) -> None:
        top = _autograd._top_saved_tensors_default_hooks(True)
        if taken and top is not None and top[0] is taken[-1][0]:
            taken.pop()  # after an interrupt: they are not off yet, or back already
        while taken:
            _autograd._push_saved_tensors_default_hooks(*taken[-1])
            taken.pop()

    try:
        while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            pack = hooks[0]
            kind = _kind_of(pack)
            if kind == "_recomputation_hook":
                break
            if kind == "_checkpoint_hook":
                frames.append(inspect.getclosurevars(inspect.unwrap(pack)).nonlocals["frame"])
            taken.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
    finally:
        run_to_end(put_back)
    return frames


def _kind_of(pack_hook: Any) -> str:
    """Returns the class of torch's checkpointing that has made a pack hook; "" for other pack hooks."""
    if getattr(pack_hook, "__module__", None) != _MODULE:
        return ""
    kind, _, rest = str(getattr(pack_hook, "__qualname__", "")).partition(".")
    return kind if rest.endswith("pack_hook") else ""
