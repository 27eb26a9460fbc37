"""Compilers around the modules of layers/: torch.compile agrees with eager, exporters get an error."""

import pytest
import torch
from compiled_training import check_as_without_a_compiler, inputs, model_of

KINDS = ["rows", "sum", "max", "tile", "weighted", "blocks", "pairs"]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("kind", KINDS)
def test_as_without_a_compiler(kind: str) -> None:
    check_as_without_a_compiler(kind, "model", "eager")


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_break(kind: str) -> None:
    """Nothing in the module is traced: with fullgraph the first function that is met is its forward."""
    tables = model_of(kind).tables
    whole = torch.compile(tables, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=rf"{type(tables).__name__}.forward: expected a graph b"):
        whole(next(inputs(kind)))


@pytest.mark.parametrize("kind", ["rows", "sum"])
def test_trace_is_an_error(kind: str) -> None:
    """A traced program would read the tables of the trace for ever."""
    tables = model_of(kind).tables.eval()
    with pytest.raises(ValueError, match=r"got torch.export or torch.jit.trace: .*_dyn.serving"):
        torch.jit.trace(tables, next(inputs(kind)))


@pytest.mark.parametrize("kind", ["rows", "pairs"])
def test_script_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"expected a call, got torch.jit.script: .*_dyn.serving"):
        torch.jit.script(model_of(kind))
