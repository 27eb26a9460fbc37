"""Activation checkpointing runs lookups twice and trains as without it: for all rules and policies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interrupts import interrupted
from table_cases import ids_of, make_group, make_table, random_bags, same_state, without_probes
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchrec_dyn as dyn
from torchrec_dyn.lookup import recomputation
from torchrec_dyn.optimizers import OptimizerKind

Run = Callable[..., Any]
BAGS = 4
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "admit_after": {"admission": dyn.AdmitAfter(2)},
    "by_chance": {"admission": dyn.AdmitWithProbability(0.5)},
    "recent": {"eviction": dyn.LeastRecentlyUsed(), "num_embeddings": 16},
    "frequent": {"eviction": dyn.LeastFrequentlyUsed(), "num_embeddings": 16},
    "expire": {"eviction": dyn.ExpireAfter(steps=1)},
    "all": {
        "admission": dyn.AdmitAfter(2),
        "eviction": (dyn.ExpireAfter(steps=2), dyn.LeastRecentlyUsed()),
        "num_embeddings": 16,
        "unseen": "initial",
    },
}
HOW: dict[str, Run] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not_reentrant": partial(checkpoint, use_reentrant=False),
}


def plainly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class Model:
    """Two tables in one group and a few dense numbers."""

    def __init__(self, kind: OptimizerKind, policy: str) -> None:
        options = POLICIES[policy]
        self.tables = [make_table(kind, name=name, **options) for name in ("t", "u")]
        self.group = make_group(*self.tables)
        self.head = torch.linspace(-1, 1, 16).view(8, 2).requires_grad_()
        self.seed = 0
        self.hooks = 0
        self.grads: list[Tensor] = []

    def batch(self) -> tuple[Tensor, Tensor]:
        self.seed += 1
        return random_bags(self.seed, 2 * BAGS, 5, 40)

    def dense(self) -> Tensor:
        return torch.full((BAGS, 8), 0.25 * self.seed, requires_grad=True)

    def part(self, x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """The checkpointed function; it writes into the output of the lookup."""
        pooled = self.group(ids, offsets, training=True)
        hidden = (pooled.mul_(2.0) + x).sin().cos()
        return (hidden @ self.head).tanh()

    def with_hook(self, x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """`part` with a hook whose forward is an original one, although it runs in a backward."""
        hidden = self.group(ids, offsets, training=True) + x
        if hidden.requires_grad:
            hidden.register_hook(self.count_another)
        return hidden.sin().cos() @ self.head

    def count_another(self, grad: Tensor) -> None:
        self.hooks += 1
        self.group(*random_bags(100 + self.hooks, 2 * BAGS, 3, 40), training=True)

    def end(self) -> tuple[list[dict[str, Tensor]], list[Any], list[Tensor], int]:
        states = [table.export_state() for table in self.tables]
        assert self.head.grad is not None
        stats = [without_probes(table.stats()) for table in self.tables]
        return states, stats, [self.head.grad, *self.grads], self.hooks


def one_by_one(model: Model, run: Run) -> None:
    for _ in range(4):
        run(model.part, model.dense(), *model.batch()).sum().backward()


def two_in_a_step(model: Model, run: Run) -> None:
    """The second of the two updates rows before the first is run again."""
    for _ in range(3):
        one = run(model.part, model.dense(), *model.batch())
        other = run(model.part, model.dense(), *model.batch())
        (one * other).sum().backward()


def twice_in_one(model: Model, run: Run) -> None:
    def both(x: Tensor, *batches: Tensor) -> Tensor:
        return model.part(x, *batches[:2]) * model.part(x.sin(), *batches[2:])

    for _ in range(3):
        run(both, model.dense(), *model.batch(), *model.batch()).sum().backward()


def overlapped(model: Model, run: Run) -> None:
    """Forwards run ahead of backwards, as in pipelines, and evict rows of open forwards."""
    waiting = []
    for _ in range(5):
        waiting.append(run(model.part, model.dense(), *model.batch()))
        if len(waiting) > 2:
            waiting.pop(0).sum().backward()
    for output in waiting:
        output.sum().backward()


def nested(model: Model, run: Run) -> None:
    def outer(x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return run(model.part, x.sin(), ids, offsets).exp()

    for _ in range(3):
        run(outer, model.dense(), *model.batch()).sum().backward()


def beside_dropped(model: Model, run: Run) -> None:
    for _ in range(3):
        run(model.part, model.dense(), *model.batch())  # a step without a backward
        run(model.part, model.dense(), *model.batch()).sum().backward()


def with_hooks(model: Model, run: Run) -> None:
    for _ in range(3):
        output = run(model.with_hook, model.dense(), *model.batch())
        output.register_hook(model.count_another)
        output.sum().backward()


def in_threads(model: Model, run: Run) -> None:
    """Each forward and each backward is in a thread of its own."""
    outputs: list[Tensor] = []

    def in_thread(function: Callable[[], Any]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    for _ in range(3):
        arguments = (model.dense(), *model.batch())
        in_thread(lambda given=arguments: outputs.append(run(model.part, *given)))
        in_thread(lambda: outputs.pop().sum().backward())


def in_evaluation(model: Model, run: Run) -> None:
    """Rows that were read in evaluation are trained before the backward."""

    def read(x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return (model.group(ids, offsets, training=False) + x).sin().cos() @ model.head

    for _ in range(3):
        ids, offsets = model.batch()
        model.part(model.dense(), ids, offsets).sum().backward()
        evaluated = run(read, model.dense(), ids, offsets)
        model.part(model.dense(), ids, offsets).sum().backward()
        evaluated.sum().backward()


SCENES = [
    one_by_one, two_in_a_step, twice_in_one, overlapped, nested, beside_dropped, with_hooks,
    in_threads, in_evaluation,
]  # fmt: skip


def check_same(scene: Callable[..., None], kind: OptimizerKind, policy: str, run: Run) -> None:
    expected, got = Model(kind, policy), Model(kind, policy)
    scene(expected, plainly)
    scene(got, run)
    (states, stats, grads, hooks), other = expected.end(), got.end()
    assert hooks == other[3] and stats == other[1]
    assert all(same_state(*pair) for pair in zip(states, other[0], strict=True))
    torch.testing.assert_close(other[2], grads)  # torch adds dense gradients in another order
    assert stats[0]["withheld"] == 0 and stats[0]["ids_seen"] > 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("scene", SCENES)
def test_trains_as_without_checkpointing(scene: Callable[..., None], how: str) -> None:
    for policy in POLICIES if scene in (one_by_one, overlapped) else ("none", "all"):
        check_same(scene, OptimizerKind.ADAM, policy, HOW[how])


@pytest.mark.parametrize("how", HOW)
def test_every_optimizer(how: str) -> None:
    for kind in OptimizerKind:
        for policy in ("none", "all"):
            check_same(overlapped, kind, policy, HOW[how])


OTHER_WAYS: dict[str, Run] = {
    "to_the_end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "debug": partial(checkpoint, use_reentrant=False, debug=True),
    "without_rng": partial(checkpoint, use_reentrant=True, preserve_rng_state=False),
}


def _on_cpu(run: Run) -> Run:
    """Returns a run in which other hooks of saved tensors lie over those of checkpointing."""

    def hooked(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        def inside(*given: Any) -> Tensor:
            with save_on_cpu():
                return function(*given)

        return run(inside, *arguments)

    return hooked


def _mixed(outer: Run, inner: Run) -> Run:
    return lambda function, *given: outer(lambda *again: inner(function, *again), *given)


class _Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Tensor:
        return self.function(*given)


OTHER_WAYS["under_hooks"] = _on_cpu(HOW["not_reentrant"])
OTHER_WAYS["reentrant_within"] = _mixed(HOW["not_reentrant"], HOW["reentrant"])
OTHER_WAYS["reentrant_around"] = _mixed(HOW["reentrant"], HOW["not_reentrant"])
OTHER_WAYS["composable"] = lambda function, *given: composable(_Function(function))(*given)
OTHER_WAYS["wrapper"] = lambda function, *given: checkpoint_wrapper(_Function(function))(*given)
OTHER_WAYS["wrapper_reentrant"] = lambda function, *given: checkpoint_wrapper(
    _Function(function), CheckpointImpl.REENTRANT
)(*given)


@pytest.mark.everyday(5)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_ways_to_checkpoint(way: str) -> None:
    for scene in (nested,) if way == "debug" else (twice_in_one, overlapped, nested):
        check_same(scene, OptimizerKind.ADAM, "all", OTHER_WAYS[way])


def penalized(model: Model, run: Run) -> None:
    """Gradients of gradients in the dense part; the tables get one gradient."""
    for _ in range(3):
        x = model.dense()
        output = run(model.part, x, *model.batch())
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        ((slope**2).sum() + output.sum()).backward()


def with_backward(model: Model, run: Run) -> None:
    """The function itself runs a backward, which trains the rows: once, although it runs again."""

    def part(x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        model.group(ids, offsets, training=True).sin().sum().backward()
        return (x.sin().cos() @ model.head).tanh()

    for _ in range(3):
        run(part, model.dense(), *model.batch()).sum().backward()


def graph_of_gradients(model: Model, run: Run) -> None:
    for _ in range(3):
        run(model.part, model.dense(), *model.batch()).sum().backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_backwards_of_backwards_and_within() -> None:
    check_same(penalized, OptimizerKind.ADAM, "all", HOW["not_reentrant"])
    for way in (HOW["not_reentrant"], OTHER_WAYS["to_the_end"]):
        check_same(with_backward, OptimizerKind.ADAM, "all", way)
    for run in HOW.values():
        check_same(graph_of_gradients, OptimizerKind.ADAM, "all", run)


def weighted(model: Model, run: Run) -> None:
    """Weights of ids are computed and get gradients."""

    def part(x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        weights = x.sin().flatten()[: ids.numel()]
        return model.group(ids, offsets, weights, training=True).sin().cos() @ model.head

    for _ in range(3):
        x = torch.linspace(0.1, 2, 64, requires_grad=True)
        run(part, x, *model.batch()).sum().backward()
        assert x.grad is not None
        model.grads.append(x.grad)


@pytest.mark.parametrize("how", HOW)
def test_weights_with_gradients(how: str) -> None:
    for policy in ("none", "all"):
        check_same(weighted, OptimizerKind.ADAM, policy, HOW[how])


@pytest.mark.parametrize("how", HOW)
def test_a_frozen_table_and_a_backward_of_the_dense_part_again(how: str) -> None:
    model = Model(OptimizerKind.ADAM, "none")
    for table in model.tables:
        table.is_frozen = True
    ids, offsets = model.batch()
    grads = []
    for run in (plainly, HOW[how]):
        x = model.dense()
        output = run(model.part, x, ids, offsets)
        for _ in range(2):
            output.sum().backward(retain_graph=True)
        grads.append(x.grad)
    assert torch.equal(*grads) and model.tables[0].step == 0


@pytest.mark.parametrize("how", HOW)
def test_a_second_backward_is_an_error_as_without(how: str) -> None:
    model = Model(OptimizerKind.ADAM, "none")
    output = HOW[how](model.part, model.dense(), *model.batch())
    output.sum().backward(retain_graph=True)
    before = [table.export_state() for table in model.tables]
    with pytest.raises(RuntimeError, match="expected one backward through a forward, got a second"):
        output.sum().backward()
    after = [table.export_state() for table in model.tables]
    assert all(same_state(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("how", HOW)
def test_a_backward_after_a_load_is_an_error_as_without(how: str) -> None:
    model = Model(OptimizerKind.ADAM, "none")
    output = HOW[how](model.part, model.dense(), *model.batch())
    model.tables[0].load_state(model.tables[0].export_state())
    with pytest.raises(RuntimeError, match="expected the tables of the forward at its backward"):
        output.sum().backward()


@pytest.mark.parametrize("how", HOW)
def test_a_function_that_calls_other_lookups_when_it_runs_again(how: str) -> None:
    model = Model(OptimizerKind.ADAM, "none")
    ids, offsets = ids_of(1, 2, 3), torch.tensor([0, 1, 1, 1, 1, 1, 2, 3, 3])
    calls: list[Tensor] = []

    def part(x: Tensor, others: list[tuple[Tensor, Tensor]]) -> Tensor:
        for given in others[len(calls)]:
            x = x + model.part(x, *given) @ model.head.T
        calls.append(x)
        return x.sin()

    for again, text in (
        ([(ids + 1, offsets)], "expected the same ids in a recomputation .*, got others"),
        ([(ids[:2], offsets.clamp(max=2))], "expected 3 ids in a recomputation .*, got 2"),
        ([(ids, offsets)] * 2, "expected 1 lookups in a recomputation .*, got one more"),
    ):
        calls.clear()
        output = HOW[how](part, model.dense(), [[(ids, offsets)], again])
        step = model.tables[0].step
        with pytest.raises(RuntimeError, match=f"lookup of tables t, u: {text}"):
            output.sum().backward()
        assert model.tables[0].step == step and len(calls) == 1


def test_an_interrupt_leaves_the_hooks_of_saved_tensors_as_they_were() -> None:
    def hooks() -> list[Any]:
        found: list[Any] = []
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            found.append(top)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for one in reversed(found):
            torch._C._autograd._push_saved_tensors_default_hooks(*one)
        return found

    with save_on_cpu(), save_on_cpu():
        before, at = hooks(), 1
        while interrupted(recomputation._frames_with_hooks, at):
            assert hooks() == before
            at += 1
    assert len(before) == 2 and at > 9 and hooks() == []


ATEN = torch.ops.aten
SELECTIONS: dict[str, Any] = {
    "none": [],
    "of_the_function": [ATEN.mm.default, ATEN.sin.default, ATEN.clone.default],
    "of_lookups": [
        torch.ops.torchrec_dyn.gather_pool.default,
        ATEN.clone.default,
        ATEN.equal.default,
    ],
    "all": lambda *_, **__: CheckpointPolicy.MUST_SAVE,
}


def clones(model: Model, run: Run) -> None:
    """Ops that a lookup calls, too, before, between and after two lookups."""

    def part(x: Tensor, *batches: Tensor) -> Tensor:
        x = x.clone() + 1
        one = model.group(*batches[:2], training=True).clone() * x
        other = model.group(*batches[2:], training=True).clone() + 2 * one
        return (other.sin().clone() @ model.head).tanh()

    for _ in range(3):
        x = model.dense()
        run(part, x, *model.batch(), *model.batch()).sum().backward()
        assert x.grad is not None
        model.grads.append(x.grad)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_selective_checkpointing(selection: str) -> None:
    contexts = partial(create_selective_checkpoint_contexts, SELECTIONS[selection])
    plain, model = (Model(OptimizerKind.ADAM, "frequent") for _ in range(2))
    clones(plain, plainly)
    clones(model, partial(checkpoint, use_reentrant=False, context_fn=contexts))
    torch.testing.assert_close(model.end(), plain.end(), rtol=0, atol=0)
