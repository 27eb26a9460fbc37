"""A caller may overwrite a batch after its forward, and a gradient after its backward.

Each kind of module trains twice on the same batches. One run uses fresh tensors. The other overwrites the
ids, lengths and offsets of a batch as soon as its forward has returned, and gradients and weights as soon as
the backward has. Each backward runs after the forward of the next batch, as in a pipeline. Features are in
the order of the tables: else a collection copies the ids.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import workers
from mixed_cases import IDS, tables
from mock_device import CUDA, MockDevice, run_lookups_backward
from sharded_cases import usual_plan
from sharded_training import Holder
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import LazyAwaitable, ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.keyed import CombinedOptimizer

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints, apply_delta, export_delta, mark

FEATURES = ["f", "g", "h"]
BAGS = 6
STEPS = 5
ADAM = {"optimizer": "ADAM", "learning_rate": 0.1}
DEFERRED = {**ADAM, "defer_updates": True}
POLICIES = dyn.DynamicTableConfig(
    eviction=dyn.LeastRecentlyUsed(), admission=dyn.AdmitAfter(2), unseen="initial"
)


class Descent(dyn.RowRule):
    """SGD, in Python."""

    name = "descent"

    def update(self, rows, grads, states, learning_rate, step):
        rows.add_(grads, alpha=-learning_rate)


@dataclass
class Given:
    """The tensors of one batch."""

    ids: Tensor
    lengths: Tensor
    offsets: Tensor
    weights: Tensor

    def features(self, weighted: bool, by_offsets: bool) -> KeyedJaggedTensor:
        weights = self.weights if weighted else None
        if by_offsets:
            return KeyedJaggedTensor(FEATURES, self.ids, weights, offsets=self.offsets)
        return KeyedJaggedTensor(FEATURES, self.ids, weights, lengths=self.lengths)


def given(step: int) -> Given:
    """Returns a batch of ids that repeat; each bag of the feature h has one id."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, (len(FEATURES) * BAGS,), generator=generator)
    lengths[-BAGS:] = 1
    ids = torch.tensor(IDS)[torch.randint(len(IDS), (int(lengths.sum()),), generator=generator)]
    weights = torch.rand(ids.numel(), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Given(ids, lengths, offsets, weights)


def pooled(dtype: str = "FP32", pooling: str = "SUM", **options: Any) -> nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=width,
            num_embeddings=1000,
            feature_names=features,
            pooling=PoolingType[pooling],
            data_type=DataType[dtype],
        )
        for name, width, features in (("a", 8, ["f", "g"]), ("b", 12, ["h"]))
    ]
    return dyn.DynamicEmbeddingBagCollection(configs, **{"fused_params": ADAM, **options})


def sequences(**options: Any) -> nn.Module:
    configs = [
        EmbeddingConfig(name=name, embedding_dim=8, num_embeddings=1000, feature_names=features)
        for name, features in (("a", ["f", "g"]), ("b", ["h"]))
    ]
    return dyn.DynamicEmbeddingCollection(configs, **{"fused_params": ADAM, **options})


class OneTable(nn.Module):
    """A module of one table, which takes the ids of all features."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        if isinstance(self.module, dyn.DynamicEmbeddingBag):
            return self.module(JaggedTensor(features.values(), offsets=features.offsets()))
        return self.module(features.values())


def uses(**options: bool) -> dyn.DynamicTableConfig:
    return dyn.DynamicTableConfig(features=(dyn.FeatureUse("g", **options),))


# A module, whether its batches have weights, and whether they are made of offsets.
KINDS: dict[str, tuple[Callable[[], nn.Module], bool, bool]] = {
    "pooled": (pooled, False, False),
    "offsets": (pooled, False, True),
    "mean": (lambda: pooled(pooling="MEAN"), False, True),
    "float16": (lambda: pooled("FP16"), False, False),
    "sequences": (sequences, False, False),
    "policies": (lambda: pooled(dynamic=POLICIES), False, True),
    "scores": (
        lambda: pooled(dynamic=dyn.DynamicTableConfig(eviction=dyn.LowestScore())), True, False
    ),
    "does not insert": (lambda: pooled(dynamic={"a": uses(inserts=False)}), False, False),
    "does not train": (lambda: pooled(dynamic={"a": uses(trains=False)}), False, False),
    "deferred": (lambda: pooled(fused_params=DEFERRED), False, True),
    "deferred, float16": (lambda: pooled("FP16", fused_params=DEFERRED), False, False),
    "deferred, weights": (lambda: pooled(fused_params=DEFERRED, is_weighted=True), True, True),
    "deferred sequences": (lambda: sequences(fused_params=DEFERRED), False, False),
    "weights": (lambda: pooled(is_weighted=True), True, False),
    "rule": (lambda: pooled(fused_params={"optimizer": Descent()}), False, False),
    "rule, float16": (lambda: pooled("FP16", fused_params={"optimizer": Descent()}), False, False),
    "blocks": (
        lambda: dyn.BlockEmbeddingBagCollection(tables(), {"a": 2, "b": 4, "c": 8}, fused_params=ADAM),
        False,
        False,
    ),
    "pairs": (
        lambda: dyn.QuotientRemainderEmbeddingBagCollection(
            tables(), dict.fromkeys("abc", 7), "mult", fused_params=ADAM
        ),
        False,
        False,
    ),
    "embedding": (lambda: OneTable(dyn.DynamicEmbedding(8, 1000, fused_params=ADAM)), False, False),
    "bag": (lambda: OneTable(dyn.DynamicEmbeddingBag(8, 1000, fused_params=ADAM)), False, True),
}  # fmt: skip


def values_of(output: Any) -> list[Tensor]:
    if isinstance(output, LazyAwaitable):
        output = output.wait()
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [output[name].values() for name in FEATURES]
    return [output.values()]


def optimizers_of(model: nn.Module) -> list[Any]:
    if isinstance(model, DistributedModelParallel):
        return [model.fused_optimizer]
    return [one.fused_optimizer for one in model.modules() if hasattr(one, "fused_optimizer")]


class Run:
    """Trains a module; a backward comes after the forward of the next batch."""

    def __init__(
        self, model: nn.Module, weighted: bool, by_offsets: bool, overwrites: bool
    ) -> None:
        self.model, self.overwrites = model, overwrites
        self._form = weighted, by_offsets
        self.outputs: list[Tensor] = []
        self._waits: tuple[list[Tensor], Given] | None = None

    def step(self, number: int) -> None:
        batch = given(number)
        outputs = values_of(self.model(batch.features(*self._form)))
        self.outputs += [one.detach().clone() for one in outputs]
        if self.overwrites:
            batch.ids.fill_(10**12)
            batch.lengths.zero_()
            batch.offsets.zero_()
        before, self._waits = self._waits, (outputs, batch)
        self._train(before)

    def end(self) -> None:
        before, self._waits = self._waits, None
        self._train(before)

    def _train(self, before: tuple[list[Tensor], Given] | None) -> None:
        if before is None:
            return
        outputs, batch = before
        grads = [
            torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view_as(one) for one in outputs
        ]
        torch.autograd.backward(outputs, grads)
        if self.overwrites:
            batch.weights.fill_(math.nan)
            for grad in grads:
                grad.fill_(math.nan)
        for optimizer in optimizers_of(self.model):
            optimizer.step()


def equal(one: Any, other: Any) -> bool:
    if hasattr(one, "local"):  # the parts of a sharded table that this rank saves
        return equal(one.local(), other.local())
    if hasattr(one, "keys"):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return all(equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one.equal(other)) if hasattr(one, "equal") else one == other


def contents(model: nn.Module) -> list[Any]:
    return [model.state_dict(), *(one.state_dict() for one in optimizers_of(model))]


def run_twice(
    make: Callable[[], nn.Module],
    weighted: bool,
    by_offsets: bool,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> tuple[Run, Run]:
    """Returns the run with fresh tensors, and the run that overwrites them, before the first step."""
    torch.manual_seed(0)
    made = make()
    fresh, spoilt = (
        Run(wrap(copy.deepcopy(made)), weighted, by_offsets, overwrites)
        for overwrites in (False, True)
    )
    return fresh, spoilt


def train_twice(runs: tuple[Run, Run], steps: range) -> None:
    """Trains both runs, and asserts that outputs, rows and optimizer states are equal."""
    for run in runs:
        for number in steps:
            run.step(number)
        run.end()
    fresh, spoilt = runs
    assert equal(spoilt.outputs, fresh.outputs)
    assert equal(contents(spoilt.model), contents(fresh.model))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_overwritten_changes_no_row_and_no_delta(kind, tmp_path):
    runs = fresh, spoilt = run_twice(*KINDS[kind])
    train_twice(runs, range(2))
    follower, before = copy.deepcopy(fresh.model), mark(spoilt.model)
    train_twice(runs, range(2, STEPS))
    export_delta(spoilt.model, tmp_path / "delta", before)
    apply_delta(follower, tmp_path / "delta")
    assert equal(contents(follower), contents(fresh.model))


def test_what_is_overwritten_changes_no_save(tmp_path):
    """A save in each step, of which most are deltas, also between a forward and its backward."""
    _, run = run_twice(*KINDS["pooled"])
    kept = Checkpoints(tmp_path / "run", full_every=10)
    for number in range(STEPS):
        run.step(number)
        kept.save(run.model, CombinedOptimizer(optimizers_of(run.model)), step=number)
    kept.close()
    fresh = pooled()
    optimizer = CombinedOptimizer(optimizers_of(fresh))
    restored = Checkpoints(tmp_path / "run").restore(fresh, optimizer)
    assert (restored.step, restored.skipped) == (STEPS - 1, [])
    assert equal(contents(fresh), contents(run.model))


def test_weights_that_are_overwritten_before_the_backward_are_torchs_error():
    """As of torch.nn.EmbeddingBag: the backward needs the weights, and keeps no copy."""
    model = pooled(is_weighted=True)
    batch = given(0)
    output = model(batch.features(True, False)).values()
    before = copy.deepcopy(contents(model))
    batch.weights.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    assert equal(contents(model), before)


PLANS = [
    ["table_wise", "row_wise"],
    ["column_wise", "table_wise"],
    ["table_column_wise", "table_row_wise"],
    ["grid_shard", "table_wise"],
]


def sharded_by(types: list[str]) -> Callable[[Any], nn.Module]:
    def shard(collection: Any) -> nn.Module:
        pooled = isinstance(collection, dyn.DynamicEmbeddingBagCollection)
        configs = collection.embedding_bag_configs() if pooled else collection.embedding_configs()
        plan = {
            config.name: usual_plan(kind, config.embedding_dim, 1, 1)
            for config, kind in zip(configs, types, strict=False)
        }
        return DistributedModelParallel(
            Holder(collection),
            plan=ShardingPlan({"collection": plan}),
            sharders=dyn.default_sharders(),
        )

    return shard


def check_train_twice_on_one_rank(kinds: list[str], types: list[str], folder: Path) -> None:
    for kind in kinds:
        runs = fresh, spoilt = run_twice(*KINDS[kind], sharded_by(types))
        train_twice(runs, range(2))
        follower, _ = twins = run_twice(*KINDS[kind], sharded_by(types))
        train_twice(twins, range(2))
        before = mark(spoilt.model)
        train_twice(runs, range(2, STEPS))
        export_delta(spoilt.model, folder / kind, before)
        apply_delta(follower.model, folder / kind)
        assert equal(follower.model.state_dict(), fresh.model.state_dict()), kind


@pytest.mark.parametrize("types", PLANS)
def test_one_rank_whose_dists_return_the_tensors_of_the_caller(types, tmp_path):
    kinds = ["pooled", "offsets", "float16", "policies", "deferred", "deferred, float16", "rule"]
    if types in PLANS[:2]:
        kinds += ["sequences", "deferred sequences"]
    workers.run(check_train_twice_on_one_rank, kinds, types, tmp_path, world_size=1)


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("dtype", ["FP32", "FP16"])
def test_on_a_device_as_fresh_tensors_on_the_cpu(dtype, defers):
    here = pooled(dtype, fused_params=DEFERRED if defers else ADAM)
    there = copy.deepcopy(here)
    fresh = Run(here, False, True, False)
    for number in range(STEPS):
        fresh.step(number)
        fresh.end()
    with MockDevice():
        there.to(CUDA)
        for number in range(STEPS):
            features = given(number).features(False, True).to(CUDA)
            output = there(features)
            features.values().fill_(10**12)
            features.offsets().zero_()
            grad = torch.linspace(-1, 1, output.values().numel()).to(CUDA)
            run_lookups_backward(output, grad=grad)
            grad.fill_(math.nan)
            there.fused_optimizer.step()
        for name in ("a", "b"):
            rows, found = there.table(name).lookup(torch.tensor(IDS).to(CUDA))
            expected = here.table(name).lookup(torch.tensor(IDS))
            assert torch.equal(rows.cpu(), expected[0]) and torch.equal(found.cpu(), expected[1])
