"""Compilers around unsharded collections: torch.compile agrees with eager, exporters get an error."""

import pytest
import torch
from compiled_training import (
    CALLS_IN_A_STEP,
    SGD,
    check_as_without_a_compiler,
    compare_calls,
    configs,
    inputs,
    model_of,
    train,
)
from shards import deep_but
from torchrec import EmbeddingConfig

import torchrec_dyn as dyn
from torchrec_dyn.lookup import TableGroup


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", ["pooled", "policies", "sequence"])
@pytest.mark.parametrize("compiled", ["model", "tables"])
def test_as_without_a_compiler(kind: str, compiled: str) -> None:
    check_as_without_a_compiler(kind, compiled, "aot_eager")


def test_a_compiled_dense_part() -> None:
    check_as_without_a_compiler("pooled", "dense", "eager")


def test_a_compiled_training_step() -> None:
    """The step also calls backward: the backward of the tables is a graph break too."""
    check_as_without_a_compiler("policies", "step", "eager")


def test_backward_in_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd calls backward inside the compiled step; the compiler is switched off there."""
    write, compilers = TableGroup._write, []

    def noted(*args: object) -> None:
        compilers.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        write(*args)

    monkeypatch.setattr(TableGroup, "_write", noted)
    model, features = model_of("pooled"), next(inputs("pooled"))
    torch.compile(lambda: model(features).sum().backward(), backend="eager")()
    assert compilers == [None]


# Every day without its compiler, which takes 14 seconds: its decompositions and its partition of a graph.
INDUCTOR = [("dense", "aot_eager_decomp_partition"), ("model", "inductor")]


@pytest.mark.parametrize(("compiled", "backend"), deep_but(INDUCTOR[:1], INDUCTOR))
def test_inductor(compiled: str, backend: str) -> None:
    check_as_without_a_compiler("pooled", compiled, backend)


def test_hooks_and_subclasses() -> None:
    """A hook makes torch.compile enter the call of a module; the forward in it is still a graph break."""

    class Own(dyn.DynamicEmbeddingCollection):
        """A user's subclass."""

        def forward(self, features):
            return super().forward(features)

    steps = []
    outputs = []
    for compiled in ("nothing", "model"):
        torch.compiler.reset()
        model = model_of("sequence")
        model.tables = Own(configs(EmbeddingConfig), fused_params=SGD)
        model.tables.register_forward_hook(lambda *args: steps.append(1))
        outputs.append(train(model, inputs("sequence"), compiled, "eager"))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    assert len(steps) == 2 * len(outputs[0])


def test_the_fused_optimizer_in_a_compiled_step() -> None:
    collection = model_of("pooled").tables
    optimizer = collection.fused_optimizer
    group = optimizer.param_groups[0]

    def step(features, rate):
        optimizer.zero_grad()
        collection(features).values().sum().backward()
        rate.mul_(0.5)
        optimizer.step()

    group["lr"] = torch.tensor(0.5)
    compiled = torch.compile(step, backend="eager")
    for features in list(inputs("pooled"))[:3]:
        compiled(features, group["lr"])
    rates = {g.tables.learning_rate for g in collection.unsharded_lookup._groups}
    assert rates == {0.0625}


@pytest.mark.everyday(4)
@pytest.mark.parametrize("call", CALLS_IN_A_STEP)
def test_calls_in_a_compiled_step(call: str) -> None:
    """Reads, clipping, edits and saves of a step, beside forward and backward, are outside of graphs, too."""
    compare_calls(call, lambda model: model)


def test_fullgraph_is_an_error() -> None:
    model, features = model_of("pooled"), next(inputs("pooled"))
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(
        RuntimeError,
        match=r"DynamicEmbeddingBagCollection.forward: expected a graph break, got fullgraph=True .* "
        r"Compile with fullgraph=False, .* torchrec_dyn.serving",
    ):
        whole(features)
    assert model.tables.table("t0").num_rows == 0


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
@pytest.mark.parametrize("strict", [False, True])
def test_export_is_an_error(kind: str, strict: bool) -> None:
    model, features = model_of(kind), next(inputs(kind))
    with pytest.raises(
        (ValueError, RuntimeError), match=r"got .*torch.export.*torchrec_dyn.serving"
    ):
        torch.export.export(model, (features,), strict=strict)
    assert model.tables.table("t0").num_rows == 0


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_script_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"expected a call, got torch.jit.script: .*_dyn.serving"):
        torch.jit.script(model_of(kind))
