"""Dynamic tables and compilers: torch.compile runs tables outside of its graphs; exporters get an error.

A training forward counts a step, creates rows and opens a forward. torch.compile would trace this as code
without such effects, so what it reaches from a model, a backward or an optimizer is a graph break.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar, cast

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_SERVE = "Export the model with the collections of torchrec_dyn.serving in place of these"


def not_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes a function, with all that it calls, run outside of the graphs of torch.compile."""
    reason = (
        f"{function.__qualname__}: expected a graph break, got fullgraph=True or torch.export. Compile with "
        f"fullgraph=False, or compile only the dense part with fullgraph=True. {_SERVE}."
    )
    disabled = torch.compiler.disable(function, reason=reason)
    return cast(Callable[_Arguments, _Result], disabled)


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
