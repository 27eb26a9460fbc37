"""Dynamic tables and compilers: torch.compile runs tables outside of its graphs; exporters get an error.

A training forward counts a step, creates rows and opens a forward. torch.compile would trace this as code
without such effects, so what it reaches from a model, a backward or an optimizer is a graph break.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import NoReturn, ParamSpec, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import trace_rules
from torch._dynamo.types import FrameAction, FrameExecStrategy

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_SERVE = "Export the model with the collections of torchrec_dyn.serving in place of these"
_NOT_COMPILED = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)  # a call, and its calls
trace_rules.add(__name__)  # a `forward` of this file is an error of fullgraph=True, like torch's


def not_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes a function, with all that it calls, run outside of the graphs of torch.compile.

    It is `torch.compiler.disable` without its wrapper, which makes three calls more.
    """
    marked = cast(FunctionType, function)
    set_code_exec_strategy(marked.__code__, _NOT_COMPILED)
    reason = (
        f"{function.__qualname__}: expected a graph break, got fullgraph=True or torch.export. Compile with "
        f"fullgraph=False, or compile only the dense part with fullgraph=True. {_SERVE}."
    )
    vars(marked).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return function


def forward_of_tables(forward: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes a forward a graph break; exporters and the transforms of torch.func get ValueError."""

    @functools.wraps(forward)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_exporting() or torch._C._is_tracing():
            _refuse(args[0], "torch.export or torch.jit.trace")
        if torch._C._are_functorch_transforms_active():
            raise ValueError(
                f"{type(args[0]).__name__}: expected a call outside of the transforms of torch.func, got one "
                "within grad, vmap, jvp or vjp. Look the rows up before, and give the output to the "
                "transformed function."
            )
        return forward(*args, **kwargs)

    return not_compiled(checked)


def refuse_script(module: object) -> NoReturn:
    """Raises ValueError; as `__prepare_scriptable__` torch.jit.script calls it for each module of a model."""
    _refuse(module, "torch.jit.script")


def _refuse(module: object, exporter: str) -> NoReturn:
    raise ValueError(
        f"{type(module).__name__}: expected a call, got {exporter}: a program cannot contain tables that "
        f"change. {_SERVE}."
    )
