"""Each line of docs/guide/torch_tools.md has a case that asserts what the tool does with a collection."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.func
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    parameters_to_vector,
    parametrize,
    prune,
)
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.fx import symbolic_trace
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
PAGE = Path(__file__).parents[2] / "docs/guide/torch_tools.md"
HEAD = torch.tensor([[0.5, -0.25, 1.0, 2.0]])


def features(*ids: int) -> KeyedJaggedTensor:
    values = torch.tensor(ids)
    return KeyedJaggedTensor(["f"], values, lengths=torch.ones_like(values))


class Model(nn.Module):
    """A table whose rows start as ones, or TorchRec's static table, and a dense layer."""

    def __init__(self, is_dynamic: bool = True) -> None:
        super().__init__()
        config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"], init_fn=None)
        self.ebc: Any
        if is_dynamic:
            ones = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0))
            self.ebc = dyn.DynamicEmbeddingBagCollection([config], dynamic=ones, fused_params=SGD)
        else:
            config.init_fn = nn.init.ones_
            self.ebc = EmbeddingBagCollection([config], device=torch.device("meta"))
        self.head = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(HEAD)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        return self.head(self.ebc(batch).values())

    @property
    def table(self) -> Any:
        return self.ebc.embedding_bags["t"]

    def loss(self) -> Tensor:
        return self(features(1)).sum()

    def row(self) -> Tensor:
        return self.ebc.table("t").lookup(torch.tensor([1]))[0].float()

    def steps(self) -> int:
        return int(self.ebc.table("t").stats()["step"])


UPDATED = 1 - HEAD  # the row after one backward of `loss`
Case = tuple[str, Callable[[Model], None]]
CASES: dict[str, Case] = {}


def tool(name: str, verdict: str) -> Callable[[Callable[[Model], None]], None]:
    """Adds a case; a case of the verdict "error" raises the error."""

    def add(case: Callable[[Model], None]) -> None:
        CASES[name] = (verdict, case)

    return add


def check_trained(model: Model, row: Tensor = UPDATED, steps: int = 1) -> None:
    assert torch.equal(model.row(), row) and model.steps() == steps


@tool("`AveragedModel` (EMA, SWA)", "error")
def _(model: Model) -> None:
    AveragedModel(model)


@tool("`SWALR`", "works")
def _(model: Model) -> None:
    SWALR(model.ebc.fused_optimizer, swa_lr=0.5, anneal_epochs=1).step()
    model.loss().backward()
    check_trained(model, 1 - 0.5 * HEAD)


@tool("`update_bn`", "works")
def _(model: Model) -> None:
    model.norm = nn.BatchNorm1d(1)
    update_bn([features(1), features(2)], model)
    assert model.steps() == 2 and model.ebc.table("t").num_rows == 2


@tool("`clip_grad_norm_`", "nothing")
def _(model: Model) -> None:
    model.loss().backward()
    assert float(clip_grad_norm_(model.ebc.parameters(), 0.1)) == 0
    check_trained(model)


@tool("`clip_grad_value_`", "nothing")
def _(model: Model) -> None:
    model.loss().backward()
    clip_grad_value_(model.parameters(), 0.1)
    check_trained(model)


def scaled_step(model: Any, fused: list[Any], head: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    dense = KeyedOptimizerWrapper(
        dict(head.named_parameters()), lambda some: torch.optim.SGD(some, lr=1.0)
    )
    optimizer = CombinedOptimizer([*fused, dense]) if fused else dense
    scaler.scale(model(features(1)).sum()).backward()
    scaler.step(optimizer)


@tool("`GradScaler`, which steps the optimizer of the rows", "error")
def _(model: Model) -> None:
    scaled_step(model, [model.ebc.fused_optimizer], model.head)


@tool("`GradScaler`, which steps the dense optimizer only", "nothing")
def _(model: Model) -> None:
    scaled_step(model, [], model.head)
    check_trained(model, 1 - 4 * HEAD)


@tool("`autocast`", "works")
def _(model: Model) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = model.ebc(features(1)).values()
        output = model.head(pooled)
    output.sum().backward()
    assert (pooled.dtype, output.dtype) == (torch.float32, torch.bfloat16)
    check_trained(model)


@tool("`detect_anomaly`", "works")
def _(model: Model) -> None:
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan"):
        (model.loss() * float("nan")).backward()
    check_trained(model, torch.ones(1, 4))


@tool("`checkpoint`", "works")
def _(model: Model) -> None:
    start = torch.zeros(1, requires_grad=True)
    for number, reentrant in enumerate((False, True)):
        checkpoint(lambda _: model.loss(), start, use_reentrant=reentrant).backward()
        check_trained(model, 1 - (number + 1) * HEAD, number + 1)
    compiled = torch.compile(
        lambda x: checkpoint(lambda _: model.loss(), x, use_reentrant=False), backend="eager"
    )
    compiled(start).backward()
    check_trained(model, 1 - 3 * HEAD, 3)


@tool("`save_on_cpu`", "works")
def _(model: Model) -> None:
    with torch.autograd.graph.save_on_cpu():
        model.loss().backward()
    check_trained(model)


@tool("`requires_grad_`", "works")
def _(model: Model) -> None:
    model.ebc.requires_grad_(False)
    model.loss().backward()
    assert model.ebc.table("t").num_rows == 0 and model.steps() == 0
    model.ebc.requires_grad_(True)
    model.loss().backward()
    check_trained(model)


@tool("`requires_grad_(False)` of a sharded model", "error")
def _(_: Model) -> None:
    workers.run(freeze_a_sharded_model, world_size=1)


@tool("`half`, `bfloat16`", "works")
def _(model: Model) -> None:
    model.loss().backward()
    for dtype, convert in ((torch.float16, model.ebc.half), (torch.bfloat16, model.ebc.bfloat16)):
        convert()
        rows, _ = model.ebc.table("t").lookup(torch.tensor([1]))
        assert rows.dtype == dtype and torch.equal(model.row(), UPDATED)


@tool("`half`, `bfloat16`, `double` of a sharded model", "error")
def _(_: Model) -> None:
    workers.run(convert_a_sharded_model, world_size=1)


@tool("`double`", "error")
def _(model: Model) -> None:
    model.double()


@tool("`share_memory`", "error")
def _(model: Model) -> None:
    model.share_memory()


@tool("`multiprocessing` by spawn", "works")
def _(model: Model) -> None:
    """Asserted by test_spawned_collections.py, which starts processes."""
    assert (Path(__file__).parent / "test_spawned_collections.py").exists()


@tool("`copy.deepcopy`", "works")
def _(model: Model) -> None:
    model.loss().backward()
    twin = copy.deepcopy(model)
    model.loss().backward()
    check_trained(twin)


@tool("`torch.save`, `torch.load`", "works")
def _(model: Model) -> None:
    model.loss().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    check_trained(torch.load(file, weights_only=False))


@tool("`functional_call`", "works")
def _(model: Model) -> None:
    given = {"head.weight": 2 * HEAD}
    torch.func.functional_call(model, given, (features(1),)).sum().backward()
    check_trained(model, 1 - 2 * HEAD)


@tool("`functional_call` with other rows", "error")
def _(model: Model) -> None:
    torch.func.functional_call(
        model, {"ebc.embedding_bags.t.weight": torch.zeros(100, 4)}, (features(1),)
    )


@tool("`torch.func.grad`, `vmap`, `jvp`, `vjp`", "error")
def _(model: Model) -> None:
    def scaled(x: Tensor) -> Tensor:
        return (model.ebc(features(1)).values() * x).sum()

    one = torch.ones(1)
    for transform in (
        lambda: torch.vmap(scaled)(one),
        lambda: torch.func.jvp(scaled, (one,), (one,)),
        lambda: torch.func.vjp(scaled, one),
    ):
        with pytest.raises(ValueError, match="outside of the transforms"):
            transform()
    model.ebc.eval()
    with pytest.raises(ValueError, match="outside of the transforms"):
        torch.vmap(scaled)(one)
    model.ebc.train()
    assert model.ebc.table("t").stats()["step"] == 0  # a table would keep tensors of the transform
    torch.func.grad(scaled)(one)


@tool("`torch.autograd.functional`", "nothing")
def _(model: Model) -> None:
    slope = torch.autograd.functional.jacobian(
        lambda x: (model.ebc(features(1)).values() * x).sum(), torch.ones(1)
    )
    assert float(slope) == 4
    check_trained(model, torch.ones(1, 4))


@tool("`torch.autograd.grad` of a table's `weight`", "error")
def _(model: Model) -> None:
    torch.autograd.grad(model.loss(), model.table.weight)


@tool("`backward(inputs=...)`", "nothing")
def _(model: Model) -> None:
    for number, inputs in enumerate((model.head.parameters(), model.parameters())):
        model.loss().backward(inputs=list(inputs))
        check_trained(model, torch.ones(1, 4), number + 1)


@tool("a second `backward` by `retain_graph`", "error")
def _(model: Model) -> None:
    loss = model.loss()
    loss.backward(retain_graph=True)
    loss.backward()


@tool("gradient accumulation", "nothing")
def _(model: Model) -> None:
    for _ in range(2):
        (model.loss() / 2).backward()
    check_trained(model, UPDATED, 2)  # two updates: SGD shows no difference, Adam does


@tool("forward hooks", "works")
def _(model: Model) -> None:
    calls: list[str] = []
    model.ebc.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.ebc.register_forward_hook(lambda *_: calls.append("after"))
    model.loss().backward()
    assert calls == ["before", "after"]


@tool("module backward hooks", "nothing")
def _(model: Model) -> None:
    calls: list[str] = []
    model.ebc.register_full_backward_hook(lambda *_: calls.append("called"))
    with pytest.warns(UserWarning, match="For backward hooks to be called"):
        model.loss().backward()
    assert not calls
    check_trained(model)


@tool("hooks of output tensors", "works")
def _(model: Model) -> None:
    pooled = model.ebc(features(1)).values()
    pooled.register_hook(lambda grad: 3 * grad)
    model.head(pooled).sum().backward()
    check_trained(model, 1 - 3 * HEAD)


@tool("hooks of the parameter `weight`", "nothing")
def _(model: Model) -> None:
    calls: list[str] = []
    model.table.weight.register_hook(lambda _: calls.append("grad"))
    model.table.weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    model.loss().backward()
    assert not calls
    check_trained(model)


@tool("schedulers", "works")
def _(model: Model) -> None:
    loss = model.loss()
    model.ebc.fused_optimizer.step()
    StepLR(model.ebc.fused_optimizer, 1, gamma=0.5).step()
    loss.backward()
    check_trained(model, 1 - 0.5 * HEAD)


@tool("`optimizer.state_dict`", "works")
def _(model: Model) -> None:
    model.loss().backward()
    state = model.ebc.fused_optimizer.state_dict()["state"]
    assert int(state["embedding_bags.t.weight"]["t.step"]) == 1


@tool("`add_param_group` of `fused_optimizer`", "error")
def _(model: Model) -> None:
    model.ebc.fused_optimizer.add_param_group({"params": [nn.Parameter(HEAD.clone())]})


@tool("a torch optimizer over `model.parameters()`", "nothing")
def _(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, weight_decay=1.0)
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()
    check_trained(model)
    assert not torch.equal(model.head.weight, HEAD)


@tool("`torch.nn.init` on `weight`", "nothing")
def _(model: Model) -> None:
    nn.init.zeros_(model.table.weight)
    model.loss().backward()
    check_trained(model)


@tool("`prune`, `parametrize` of `weight`", "error")
def _(model: Model) -> None:
    with pytest.raises(KeyError, match="weight"):
        other = Model()
        prune.l1_unstructured(other.table, "weight", 0.5)
        other.loss()
    parametrize.register_parametrization(model.table, "weight", nn.Identity())
    model.loss()


@tool("`parameters_to_vector`, `LBFGS` of a model", "error")
def _(model: Model) -> None:
    with pytest.raises(RuntimeError, match="expected device"):
        torch.optim.LBFGS(model.parameters()).step(lambda: model.loss().backward() or 0.0)
    parameters_to_vector(model.parameters())


@tool("`no_grad` in training mode", "works")
def _(model: Model) -> None:
    with torch.no_grad():
        assert not model.loss().requires_grad
    check_trained(model, torch.ones(1, 4))


@tool("`inference_mode`", "works")
def _(model: Model) -> None:
    with torch.inference_mode():
        model.loss()
    check_trained(model, torch.ones(1, 4))
    model.loss().backward()
    check_trained(model, UPDATED, 2)


@tool("`use_deterministic_algorithms`", "works")
def _(model: Model) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model.loss().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    check_trained(model)


@tool("`torch.compile`", "works")
def _(model: Model) -> None:
    torch.compile(model, backend="eager")(features(1)).sum().backward()
    check_trained(model)


@tool("`torch.export`, `torch.jit`", "error")
def _(model: Model) -> None:
    with pytest.raises(ValueError, match=r"torch\.jit\.script"):
        torch.jit.script(model)
    torch.export.export(model, (features(1),))


@tool("`torchrec.fx.symbolic_trace`", "works")
def _(model: Model) -> None:
    for trace in (symbolic_trace, torch.fx.symbolic_trace):
        with pytest.raises(
            ValueError, match=r"got a Proxy of torch\.fx.*leaf: torchrec\.fx\.symbolic_t"
        ):
            trace(model)
    with pytest.raises(ValueError, match=r"got a Proxy of torch\.fx"):
        symbolic_trace(dyn.DynamicEmbedding(100, 4, fused_params=SGD))
    leaf = type(model.ebc).__name__
    symbolic_trace(model, leaf_modules=[leaf])(features(1)).sum().backward()
    check_trained(model)


@tool("`torch.profiler`", "works")
def _(model: Model) -> None:
    with torch.profiler.profile() as profile:
        model.loss().backward()
    assert any("torchrec_dyn" in event.key for event in profile.key_averages())
    check_trained(model)


ERRORS = {
    "`AveragedModel` (EMA, SWA)": (ValueError, "got AveragedModel around one"),
    "`GradScaler`, which steps the optimizer of the rows": (ValueError, "got a step of GradScaler"),
    "`requires_grad_(False)` of a sharded model": (
        workers.WorkerError,
        r"expected frozen tables under requires_grad_\(False\), got tables \['t'\], .*\.freeze\(\)",
    ),
    "`half`, `bfloat16`, `double` of a sharded model": (
        workers.WorkerError,
        r"\('ebc'\): expected a conversion to the dtype of its outputs, torch.float32, got torch.float16",
    ),
    "`double`": (ValueError, "expected rows of float32"),
    "`share_memory`": (ValueError, r"got share_memory\(\)"),
    "`functional_call` with other rows": (ValueError, "functional_call cannot replace rows"),
    "`torch.func.grad`, `vmap`, `jvp`, `vjp`": (
        ValueError,
        "DynamicEmbeddingBagCollection: expected a call outside of the transforms of torch.func",
    ),
    "`torch.autograd.grad` of a table's `weight`": (
        RuntimeError,
        "not have been used in the graph",
    ),
    "a second `backward` by `retain_graph`": (RuntimeError, "expected one backward"),
    "`add_param_group` of `fused_optimizer`": (NotImplementedError, ""),
    "`prune`, `parametrize` of `weight`": (KeyError, "weight"),
    "`parameters_to_vector`, `LBFGS` of a model": (RuntimeError, "expected device"),
    "`torch.export`, `torch.jit`": (ValueError, "got torch.export"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_each_tool(name: str) -> None:
    verdict, case = CASES[name]
    if verdict != "error":
        case(Model())
        return
    kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        case(Model())


def lines_of_page() -> dict[str, list[str]]:
    rows = re.findall(
        r"^\| (.+?) \| (works|error|nothing) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.M
    )
    return {row[0]: list(row[1:]) for row in rows}


def test_the_page_has_these_lines() -> None:
    written = {name: line[0] for name, line in lines_of_page().items()}
    assert written == {name: verdict for name, (verdict, _) in CASES.items()}
    assert len(CASES) >= 30 and ERRORS.keys() == {n for n, v in written.items() if v == "error"}


# What TorchRec's fused tables do: a step of each, after which the row has moved by the same numbers.
def _retained(model: Any) -> None:
    loss = model(features(1)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _plain(model: Any) -> None:
    model(features(1)).sum().backward()


def _clipped(model: Any) -> None:
    _plain(model)
    assert float(clip_grad_norm_(model.module.ebc.parameters(), 0.1)) == 0
    clip_grad_value_(model.parameters(), 0.1)


def _hooked(model: Any) -> None:
    for parameter in model.module.ebc.parameters():
        parameter.register_hook(lambda _: pytest.fail("called"))
    _plain(model)


def _hooked_output(model: Any) -> None:
    pooled = model.module.ebc(features(1)).values()
    pooled.register_hook(lambda grad: 3 * grad)
    model.module.head(pooled).sum().backward()


def _hooked_module(model: Any) -> None:
    model.module.ebc.register_full_backward_hook(lambda *_: pytest.fail("called"))
    with pytest.warns(UserWarning, match="For backward hooks to be called"):
        _plain(model)


def _functional(model: Any) -> None:
    torch.autograd.functional.jacobian(
        lambda x: (model.module.ebc(features(1)).values() * x).sum(), torch.ones(1)
    )


def _anomalous(model: Any) -> None:
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan"):
        (model(features(1)).sum() * float("nan")).backward()


def _cast(model: Any) -> None:
    with torch.autocast("cpu"):
        pooled = model.module.ebc(features(1)).values()
        assert pooled.dtype == torch.float32
        loss = model.module.head(pooled).sum()
    loss.backward()


def _scheduled(model: Any) -> None:
    loss = model(features(1)).sum()
    model.fused_optimizer.step()
    StepLR(model.fused_optimizer, 1, gamma=0.5).step()
    loss.backward()


def _accumulated(model: Any) -> None:
    for _ in range(2):
        (model(features(1)).sum() / 2).backward()


def _recomputed(model: Any) -> None:
    checkpoint(lambda: model(features(1)).sum(), use_reentrant=False).backward()


def _optimized(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    _plain(model)
    optimizer.step()


ON_BOTH: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "plain": (_plain, 1, 1),
    "clip": (_clipped, 1, 1),
    "scaler of the dense part": (lambda one: scaled_step(one, [], one.module.head), 4, 4),
    "inputs": (
        lambda one: one(features(1)).sum().backward(inputs=list(one.module.head.parameters())),
        0,
        0,
    ),
    "hooks": (_hooked, 1, 1),
    "output hooks": (_hooked_output, 3, 3),
    "module hooks": (_hooked_module, 1, 1),
    "functional": (_functional, 0, 0),
    "anomaly": (_anomalous, 0, 0),
    "autocast": (_cast, 1, 1),
    "scheduler between forward and backward": (_scheduled, 0.5, 1),
    "accumulation": (_accumulated, 1, 1),
    "checkpoint": (_recomputed, 1, 1),
    "memory": (lambda one: (_plain(one), one.share_memory()), 1, 1),
    "optimizer": (_optimized, 1, 1),
}


def sharded(is_dynamic: bool, **options: Any) -> Any:
    kind = dyn.DynamicEmbeddingBagCollectionSharder if is_dynamic else EmbeddingBagCollectionSharder
    sharder, model = kind(fused_params={**SGD, **options}), Model(is_dynamic)
    place = {"t": table_wise(rank=0, compute_kernel="fused")}
    plan = construct_module_sharding_plan(model.ebc, place, sharder, 1, 1, "cpu")
    return DistributedModelParallel(
        model,
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
        init_data_parallel=False,
    )


def freeze_a_sharded_model() -> None:
    with pytest.raises(RuntimeError, match="leaf variables"):
        sharded(False).requires_grad_(False)
    model = sharded(True)
    _plain(model.requires_grad_(True))
    for module in (model, model.module, model.module.ebc):
        with pytest.raises(ValueError, match=r"^DynamicEmbeddingBagCollection\('ebc'\): .*\['t'\]"):
            module.requires_grad_(False)
    table = model.module.ebc.table("t")
    row, _ = table.lookup(torch.tensor([1]))
    table.freeze()
    model.requires_grad_(False)
    assert not model.module.head.weight.requires_grad
    model.module.head.requires_grad_(True)
    _plain(model)
    assert torch.equal(table.lookup(torch.tensor([1]))[0], row)
    table.unfreeze()
    model.requires_grad_(False)


def convert_a_sharded_model() -> None:
    """Without the error a forward of the dense part failed, by "mat1 and mat2 must have the same dtype"."""
    model = sharded(True, output_dtype=torch.float16)
    _plain(model.half())  # the dense part alone
    assert model.module.ebc.table("t").lookup(torch.tensor([1]))[0].dtype == torch.float32
    with pytest.raises(ValueError, match=r"outputs, torch\.float16, got torch\.float32"):
        model.float()
    model = sharded(True)
    _plain(model.to("cpu").float())
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(ValueError, match=rf"its outputs, torch.float32, got {dtype}"):
            model.to(dtype)
    _plain(model)
    model.half()


def moved(step: Callable[[Any], Any], is_dynamic: bool) -> list[float]:
    model = sharded(is_dynamic)
    step(model)
    row = model.eval().module.ebc(features(1)).values().detach()
    return [float(one) for one in (1 - row).flatten()]


def compare_with_static() -> None:
    for name, (step, times, times_static) in ON_BOTH.items():
        for is_dynamic, factor in ((True, times), (False, times_static)):
            expected = (factor * HEAD).flatten().tolist()
            assert moved(step, is_dynamic) == expected, (name, is_dynamic)
    assert moved(_retained, False) == (2 * HEAD).flatten().tolist()
    static = sharded(False)
    weight = static.module.ebc.embedding_bags["t"].weight
    assert parameters_to_vector(static.parameters()).numel() == 400 + HEAD.numel()
    nn.init.zeros_(weight)
    assert not static.module.ebc(features(1)).values().any()
    loss = static(features(1)).sum()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, weight)
    with pytest.raises(RuntimeError, match="with functorch transforms"):
        torch.func.grad(lambda x: (static.module.ebc(features(1)).values() * x).sum())(weight[0])
    with pytest.raises(NotImplementedError):
        static.fused_optimizer.add_param_group({"params": [weight]})
    for copied in (copy.deepcopy, AveragedModel):
        with pytest.raises(TypeError, match="cannot pickle"):
            copied(sharded(False))
        with pytest.raises(
            ValueError,
            match=r"^DynamicEmbeddingBagCollection\('ebc'\): .* got a copy or a pickle of it, ",
        ):
            copied(sharded(True))
    with pytest.raises(AttributeError, match="Can't pickle"):
        torch.save(sharded(False), io.BytesIO())
    for module in (one := sharded(True), one.module, one.module.ebc):
        with pytest.raises(
            ValueError, match=r"state dicts of a sharded .* as by torch\.save of the model: "
        ):
            torch.save(module, io.BytesIO())
    scaled_step(one := sharded(False), [one.fused_optimizer], one.module.head)  # no error
    with pytest.raises(ValueError, match=r"ShardedOptimizer\.step: .* got a step of GradScaler"):
        scaled_step(one := sharded(True), [one.fused_optimizer], one.module.head)


def test_tools_on_fused_tables_of_torchrec() -> None:
    workers.run(compare_with_static, world_size=1)
