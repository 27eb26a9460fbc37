"""The first calls of a model within a mode of torch: it goes on as a twin that was in no mode."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import optimizer_of
from mock_device import CUDA, MockDevice, run_lookups_backward
from sharded_cases import POOLED, SEQUENCE, Case, Table, usual_plan
from sharded_training import Holder, collection_of, shard
from table_cases import bits
from torch import Tensor
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner, mark

LIVES: list[dict[str, Any]] = [
    {},
    {"eviction": dyn.ExpireAfter(steps=2), "admission": dyn.AdmitAfter(2)},
    {"eviction": dyn.LeastRecentlyUsed()},
    {"eviction": dyn.LeastFrequentlyUsed(half_life_steps=2), "unseen": "initial"},
]
ON_NONFINITE = ["write", "skip", "error"]
BAGS = 4


@contextmanager
def _set(turn: Callable[[Any], None], inside: Any, outside: Any) -> Iterator[None]:
    turn(inside)
    try:
        yield
    finally:
        turn(outside)


# Each mode, and that of the twin: inference mode has no gradients.
MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], ...]] = {
    "inference": (torch.inference_mode, torch.no_grad),
    "float64": (
        lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
        nullcontext,
    ),
    "meta": (lambda: torch.device("meta"), nullcontext),
    "deterministic": (
        lambda: _set(torch.use_deterministic_algorithms, True, False),
        nullcontext,
    ),
}


def case_of(kinds: list[str], rule: Any, defers: bool, pooled: bool = True) -> Case:
    """Returns a case with a table for each value of `on_nonfinite` and each life; plans take turns."""
    settings = [(life, what) for life in LIVES for what in ON_NONFINITE]
    tables = [
        Table(
            f"t{n}",
            [f"f{n}"],
            usual_plan(kinds[n % len(kinds)], 8, 1, 1, rows=12),
            rows=12,
            config=dyn.DynamicTableConfig(on_nonfinite=what, **life),
        )
        for n, (life, what) in enumerate(settings)
    ]
    fused = {"optimizer": rule, "learning_rate": 0.1, "defer_updates": defers}
    return Case(tables, pooled=pooled, fused_params=fused)


def made(case: Case, is_sharded: bool) -> Any:
    if is_sharded:
        return shard(case, collection_of(case))
    return Holder(collection_of(case, fused_params=case.fused_params))


def batch(case: Case, step: int) -> KeyedJaggedTensor:
    numbers = torch.Generator().manual_seed(step)
    features = [feature for table in case.tables for feature in table.features]
    lengths = torch.randint(1, 3, (BAGS * len(features),), generator=numbers)
    ids = torch.randint(9, (int(lengths.sum()),), generator=numbers)
    return KeyedJaggedTensor(features, ids, lengths=lengths)


def train(model: Any, case: Case, features: KeyedJaggedTensor, spoils: str = "") -> list[Tensor]:
    """Trains a step; the gradient of the tables with `on_nonfinite=spoils` has a NaN."""
    outputs = model(features)
    outs = [outputs[table.features[0]] for table in case.tables]
    outs = outs if case.pooled else [one.values() for one in outs]
    grads = [
        torch.linspace(-1, 1, out.numel(), dtype=torch.float32, device="cpu").view_as(out)
        for out in outs
    ]
    for table, grad in zip(case.tables, grads, strict=True):
        if table.config is not None and table.config.on_nonfinite == spoils:
            grad[0, 0] = math.nan
    try:
        if outs[0].requires_grad:
            torch.autograd.backward(outs, grads)
            optimizer_of(model).step()
    except RuntimeError as error:
        assert spoils == "error" and "NaN" in str(error)
    return [out.detach().clone() for out in outs]


def held(model: Any, case: Case) -> list[Tensor]:
    """Returns the contents and the counters of all tables."""
    handles = [getattr(model, "module", model).collection.table(one.name) for one in case.tables]
    states = [shard.export_state() for one in handles for shard in one.shards]
    counts = [[one.stats()[name] for name in ("step", "nonfinite", "waiting")] for one in handles]
    return [state[name] for state in states for name in sorted(state)] + [torch.tensor(counts)]


def load(model: Any, saved: dict[str, Any], path: str | None) -> None:
    if path is not None:
        saved = {"model": model.state_dict()}
        dcp.load(saved, checkpoint_id=path, planner=LoadPlanner())
    model.load_state_dict(saved["model"])


def runs(
    case: Case, mode: Callable[[], Any], is_sharded: bool, saved: dict[str, Any], path: str | None
) -> list[Tensor]:
    """Trains a model that is made, trained once and loaded in a mode; returns all outputs and contents."""
    batches = [batch(case, step) for step in range(9)]
    with mode():
        model = made(case, is_sharded)
        found = train(model, case, batches[0])
        marker = mark(model)
    for features, spoils in zip(batches[1:4], ("", "skip", "error"), strict=True):
        found += train(model, case, features, spoils)
    # Another optimizer state marks all rows as changed.
    optimizer_of(model).load_state_dict(optimizer_of(model).state_dict())
    marker = mark(model)
    found += [*held(model, case), *train(model, case, batches[4])]
    with mode():
        load(model, saved, path)
    found += [*train(model, case, batches[5], "skip"), *held(model, case)]
    with mode():
        if is_sharded:
            twin, marker = model, mark(model)
        else:
            twin = copy.deepcopy(model)
    found += [*train(twin, case, batches[6], "skip"), *held(twin, case)]
    if not is_sharded:
        twin.bfloat16().requires_grad_(False)
        found += [*train(twin.requires_grad_(True), case, batches[7]), *held(twin, case)]
    del marker
    return found


def check_twins(name: str, cases: list[Case], is_sharded: bool, folder: str) -> None:
    mode, of_twin = MODES[name]
    for number, case in enumerate(cases):
        donor = made(case, is_sharded)
        for step in range(20, 23):
            train(donor, case, batch(case, step))
        saved, path = {"model": donor.state_dict()}, None
        if is_sharded:
            path = f"{folder}/{number}"
            dcp.save(saved, checkpoint_id=path)
        found, expected = (runs(case, one, is_sharded, saved, path) for one in (mode, of_twin))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(bits(one), bits(other)), case


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_a_model_outlives_the_mode_of_its_first_calls(mode: str, tmp_path: Path) -> None:
    cases = [
        case_of(["table_wise"], dyn.Lion(), False),
        case_of(["table_wise"], "ADAM", True),
        case_of(["table_wise"], dyn.Lion(), True, pooled=False),
    ]
    check_twins(mode, cases, False, str(tmp_path))


def check_train_sharded(folder: str) -> None:
    cases = [case_of(POOLED, dyn.Lion(), False), case_of(SEQUENCE, "ADAM", True, pooled=False)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_twins("inference", cases, True, f"{folder}/inference")
        for mode in ("float64", "meta"):
            check_twins(mode, cases[:1], True, f"{folder}/{mode}")


def test_a_sharded_model_outlives_the_mode_of_its_first_calls(tmp_path: Path) -> None:
    workers.run(check_train_sharded, str(tmp_path), world_size=1, timeout=120)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("mode", [*sorted(MODES.keys() - {"inference"}), "cuda"])
def test_tables_on_a_gpu_outlive_the_mode_of_their_first_calls(mode: str) -> None:
    """Not inference mode, which the mock device does not know."""
    case = case_of(["table_wise"], dyn.Lion(), False, pooled=False)
    case.tables[0].features.append("g0")  # a table of two features beside tables of one

    def trained(mode: Callable[[], Any]) -> list[Tensor]:
        model, batches = collection_of(case, fused_params=case.fused_params), []
        batches = [batch(case, step).to(CUDA) for step in range(4)]
        with mode():
            output, marker = model.to(CUDA)(batches[0]), mark(model)
        run_lookups_backward(output)  # outside: it draws numbers
        run_lookups_backward(model(batches[1]))
        optimizer = model.fused_optimizer
        optimizer.load_state_dict(optimizer.state_dict())
        marker = mark(model)
        for features in batches[2:]:
            run_lookups_backward(model(features))
        del marker
        states = [model.table(one.name).shards[0].export_state() for one in case.tables]
        return [state[name].cpu() for state in states for name in sorted(state)]

    first, of_twin = MODES.get(mode, (lambda: torch.device("cuda"), nullcontext))
    with MockDevice():
        for one, other in zip(trained(first), trained(of_twin), strict=True):
            assert torch.equal(bits(one), bits(other))
