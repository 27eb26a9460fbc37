"""Usual tools of torch on an unsharded collection, as docs/guide/inspect/tools.md says."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.func
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.fx import symbolic_trace
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
HEAD = torch.tensor([[0.5, -0.25, 1.0, 2.0]])
UPDATED = 1 - HEAD  # the row after one backward of `loss`
NEW = torch.ones(1, 4)


def features(*ids: int) -> KeyedJaggedTensor:
    values = torch.tensor(ids)
    return KeyedJaggedTensor(["f"], values, lengths=torch.ones_like(values))


class Model(nn.Module):
    """A table whose rows start as ones, and a dense layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"], init_fn=None)
        ones = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0))
        self.ebc: Any = dyn.DynamicEmbeddingBagCollection(
            [config], dynamic=ones, fused_params={**SGD, **options}
        )
        self.head = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(HEAD)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        return self.head(self.ebc(batch).values())

    def loss(self) -> Tensor:
        return self(features(1)).sum()

    def row(self) -> Tensor:
        return self.ebc.table("t").lookup(torch.tensor([1]))[0].float()

    def check(self, row: Tensor = UPDATED, steps: int = 1) -> None:
        assert torch.equal(self.row(), row)
        assert int(self.ebc.table("t").stats()["step"]) == steps

    def optimizer(self) -> CombinedOptimizer:
        dense = KeyedOptimizerWrapper(
            dict(self.head.named_parameters()), partial(torch.optim.SGD, lr=1.0)
        )
        return CombinedOptimizer([self.ebc.fused_optimizer, dense])


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.mark.filterwarnings("ignore")
def test_averages_and_clipping_leave_the_rows_out(model: Model) -> None:
    average = AveragedModel(model)
    model.loss().backward()
    assert float(clip_grad_norm_(model.ebc.parameters(), 0.1)) == 0
    average.update_parameters(model)
    model.check()
    assert not average.module.row().any()  # it has no rows
    clipping = GradientClippingOptimizer(model.optimizer(), GradientClipping.NORM, 1e-3)
    clipping.step()
    assert torch.equal(model.head.weight, HEAD - 1)  # nothing is clipped


@pytest.mark.parametrize("steps_rows", [True, False])
def test_a_scaler_of_torch_scales_the_update_of_rows(model: Model, steps_rows: bool) -> None:
    optimizer = model.optimizer() if steps_rows else torch.optim.SGD(model.head.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model.loss()).backward()
    scaler.step(optimizer)
    model.check(1 - 4 * HEAD)


def test_batch_statistics_and_autocast(model: Model) -> None:
    model.norm = nn.BatchNorm1d(1)
    update_bn([features(1), features(2)], model)
    assert model.ebc.table("t").num_rows == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = model.ebc(features(1)).values()
        output = model.head(pooled)
    output.sum().backward()
    assert (pooled.dtype, output.dtype) == (torch.float32, torch.bfloat16)
    model.check(steps=3)


def test_an_anomaly_raises_before_the_rows_are_updated(model: Model) -> None:
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan"):
        (model.loss() * float("nan")).backward()
    model.check(NEW)


def test_requires_grad_freezes_the_tables(model: Model) -> None:
    model.ebc.requires_grad_(False)
    model.loss().backward()
    assert model.ebc.table("t").num_rows == 0
    model.ebc.requires_grad_(True)
    model.loss().backward()
    model.check()


def test_every_functional_call_with_rows_is_an_error(model: Model) -> None:
    for _ in range(3):  # until the tables are grouped
        model.loss().backward()
    rows = {"ebc.embedding_bags.t.weight": torch.zeros(100, 4)}
    for _ in range(2):
        with pytest.raises(ValueError, match="functional_call cannot replace rows"):
            torch.func.functional_call(model, rows, (features(1),))


def test_functional_calls_and_transforms(model: Model) -> None:
    given = {"head.weight": 2 * HEAD}
    torch.func.functional_call(model, given, (features(1),)).sum().backward()
    model.check(1 - 2 * HEAD)
    rows = {"ebc.embedding_bags.t.weight": torch.zeros(100, 4)}
    with pytest.raises(ValueError, match="functional_call cannot replace rows"):
        torch.func.functional_call(model, rows, (features(1),))

    def scaled(x: Tensor) -> Tensor:
        return (model.ebc(features(1)).values() * x).sum()

    x = torch.ones(1)
    for transform in (
        lambda: torch.func.grad(scaled)(x),
        lambda: torch.vmap(scaled)(x),
        lambda: torch.func.jvp(scaled, (x,), (x,)),
        lambda: torch.func.vjp(scaled, x),
    ):
        with pytest.raises(ValueError, match=r"expected a call outside of the transforms of torch"):
            transform()
    model.check(1 - 2 * HEAD)
    torch.autograd.functional.jacobian(scaled, x)
    for inputs in (model.head.parameters(), model.parameters()):
        model.loss().backward(inputs=list(inputs))
    model.check(1 - 2 * HEAD, 4)  # read, not updated


def test_backwards(model: Model) -> None:
    for _ in range(2):
        (model.loss() / 2).backward()
    model.check(steps=2)  # two updates: SGD shows no difference, Adam does
    loss = model.loss()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
def test_hooks(model: Model) -> None:
    calls: list[str] = []
    model.ebc.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.ebc.register_forward_hook(lambda *_: calls.append("after"))
    model.ebc.register_full_backward_hook(lambda *_: calls.append("never"))
    model.ebc.embedding_bags["t"].weight.register_hook(lambda _: calls.append("never"))
    with pytest.warns(UserWarning, match="For backward hooks to be called"):
        pooled = model.ebc(features(1)).values()
    pooled.register_hook(lambda grad: 3 * grad)
    model.head(pooled).sum().backward()
    model.check(1 - 3 * HEAD)
    assert calls == ["before", "after"]


def test_optimizers_and_schedulers(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, weight_decay=1.0)
    nn.init.zeros_(model.ebc.embedding_bags["t"].weight)
    loss = model.loss()
    model.ebc.fused_optimizer.step()
    StepLR(model.ebc.fused_optimizer, 1, gamma=0.5).step()
    loss.backward()
    optimizer.step()
    model.check(1 - 0.5 * HEAD)
    assert not torch.equal(model.head.weight, HEAD)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_training_mode_counts_a_step(model: Model, mode: Any) -> None:
    with mode():
        assert not model.loss().requires_grad
    model.check(NEW)
    model.loss().backward()
    model.check(steps=2)


@pytest.mark.filterwarnings("ignore")
def test_compilers(model: Model) -> None:
    torch.compile(model, backend="eager")(features(1)).sum().backward()
    model.check()
    with pytest.raises(ValueError, match=r"torch\.jit\.script"):
        torch.jit.script(model)
    with pytest.raises(ValueError, match=r"got torch\.export"):
        torch.export.export(model, (features(1),))
    for module in (model, dyn.DynamicEmbedding(100, 4, fused_params=SGD)):
        with pytest.raises(ValueError, match=r"got a Proxy of torch\.fx.*leaf: torchrec\.fx\.symb"):
            symbolic_trace(module)
    leaf = type(model.ebc).__name__
    symbolic_trace(model, leaf_modules=[leaf])(features(1)).sum().backward()
    model.check(UPDATED - HEAD, 2)


def plainly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


RUNS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not_reentrant": partial(checkpoint, use_reentrant=False),
    "compiled": torch.compile(partial(checkpoint, use_reentrant=False), backend="eager"),
}


@pytest.mark.parametrize("how", RUNS)
def test_a_lookup_in_a_checkpointed_function_is_an_error(model: Model, how: str) -> None:
    x = torch.zeros(1, requires_grad=True)
    with pytest.raises(ValueError, match=r"outside of torch.utils.checkpoint, got one inside.*out"):
        RUNS[how](lambda x: model.loss() + x, x)
    assert model.ebc.table("t").num_rows == 0
    for freezes in (False, True):
        pooled = model.ebc(features(1)).values()
        RUNS[how](lambda pooled: model.head(pooled).sin().sum(), pooled).backward()
        model.ebc.requires_grad_(not freezes)
    model.check(model.row(), 2)
    frozen = model.row()
    RUNS[how](lambda x: model.loss() + x, x).backward()  # reads the same rows again
    model.check(frozen, 2)


@pytest.mark.parametrize("how", RUNS)
def test_a_forward_from_a_hook_in_a_checkpointed_backward(how: str) -> None:
    """As TorchRec's backward injection: an original forward, although a backward runs."""
    models = [Model(), Model()]
    for model, run in zip(models, (plainly, RUNS[how]), strict=True):
        pooled = model.ebc(features(1)).values()
        pooled.register_hook(lambda _, model=model: model(features(2)) and None)
        run(lambda pooled, model=model: model.head(pooled).sin().sum(), pooled).backward()
        assert model.ebc.table("t").num_rows == 2
    models[1].check(models[0].row(), 2)


def check_convert_a_sharded_model() -> None:
    def sharded(**options: Any) -> Any:
        sharders = [dyn.DynamicEmbeddingBagCollectionSharder({**SGD, **options})]
        return DistributedModelParallel(
            Model(), sharders=sharders, device=torch.device("cpu"), init_data_parallel=False
        )

    model = sharded(output_dtype=torch.float16)
    model.half()(features(1)).sum().backward()  # the dense part alone
    table = model.module.ebc.table("t")
    assert table.lookup(torch.tensor([1]))[0].dtype == torch.float32
    with pytest.raises(ValueError, match=r"outputs, torch\.float16, got torch\.float32"):
        model.float()
    model = sharded()
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(ValueError, match=rf"its outputs, torch.float32, got {dtype}"):
            model.to(dtype)
    for module in (model, model.module.ebc):
        for copied in (copy.deepcopy, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(ValueError, match=r"got a copy or a pickle of it"):
                copied(module)
    model.module.head.requires_grad_(False)
    model.module.ebc.requires_grad_(False)  # the rows are no parameters
    model(features(1)).sum().backward()
    row, _ = model.module.ebc.table("t").lookup(torch.tensor([1]))
    assert torch.equal(row, UPDATED)


def test_a_sharded_model_is_not_converted_nor_copied() -> None:
    workers.run(check_convert_a_sharded_model, world_size=1)
