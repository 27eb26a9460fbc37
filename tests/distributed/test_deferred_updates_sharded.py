"""Deferred updates under plans: as unsharded on the global batches; ranks clip and skip together."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from pipeline_model import Run, sharded_model
from pipeline_model import batches as run_batches
from pipeline_runs import check_same_states, drain, make_pipeline, optimizer_of, states_of
from sharded_cases import Case, three_tables
from sharded_training import (
    batches,
    check_rows,
    collection_of,
    outputs_by_name,
    shard,
    with_dense_sgd,
)
from torch import nn
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)

import torchrec_dyn as dyn

DEFERRED = {"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1, "eps": 1e-2, "defer_updates": True}
LOCAL = ("table_wise", "column_wise")
ALL = ("table_wise", "row_wise", "column_wise")
CASES = {
    "tables and columns": Case(three_tables(LOCAL, 2, 2, (8, 4, 12))),
    "rows": Case(three_tables(("row_wise",), 2, 2), exact=False),
    "nodes": Case(three_tables(("table_row_wise", "grid_shard"), 2, 2), exact=False),
    "sequences": Case(three_tables(ALL, 2, 2), pooled=False),
    "sequences, each id once": Case(three_tables(ALL, 2, 2), pooled=False, dedup=True),
    "variable, weighted": Case(
        three_tables(LOCAL, 2, 2), batch_sizes=[5, 3], variable=True, weighted=True
    ),
}


def train_deferred(case: Case, most: float) -> None:
    """Trains with three batches a step; `most` is the largest norm, infinite for no clipping."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case = replace(case, fused_params=DEFERRED)
    unsharded = collection_of(case, fused_params=case.fused_params)
    sharded = shard(case, copy.deepcopy(unsharded))
    for step in range(2):
        for number in range(3 * step, 3 * step + 3):
            per_rank, together = batches(case, number)
            for model, batch, divisor in (
                (sharded, per_rank[rank], 1),
                (unsharded, together, world),
            ):
                outputs = outputs_by_name(case, model(batch))
                grads = [of.detach() * 0.5 + 0.1 for of in outputs.values()]
                torch.autograd.backward(list(outputs.values()), [one / divisor for one in grads])
        if most < math.inf:
            norm, expected = (dyn.clip_grad_norm_(of, most) for of in (sharded, unsharded))
            assert float(norm) == pytest.approx(float(expected), rel=1e-5) and norm > most
        check_rows(case, sharded.module.collection, unsharded)  # before the step: as they were
        sharded.fused_optimizer.step(), unsharded.fused_optimizer.step()
        check_rows(case, sharded.module.collection, unsharded)
    for table in case.tables:
        stats = dyn.read_stats(sharded.module.collection, table.name)
        assert stats["step"] == 2, stats


@pytest.mark.parametrize("name", CASES)
def test_accumulates_as_unsharded(name: str) -> None:
    workers.run(train_deferred, CASES[name], math.inf, world_size=2)


@pytest.mark.parametrize("name", ["rows", "sequences"])
def test_clips_as_unsharded(name: str) -> None:
    workers.run(train_deferred, replace(CASES[name], exact=False), 0.5, world_size=2)


def rows_of(case: Case, model: Any) -> list[torch.Tensor]:
    ids = torch.arange(100, 140)
    return [dyn.lookup_rows(model.module.collection, table.name, ids)[0] for table in case.tables]


def scaled(spoiled: str) -> None:
    """Rank 1 alone has an infinite gradient: in a row, or in the dense part after its exchange."""
    torch.manual_seed(0)
    case = replace(
        CASES["rows"], tables=three_tables(("row_wise", "table_wise"), 2, 2, (8, 4, 4)),
        fused_params=DEFERRED,
    )  # fmt: skip
    model = shard(case, collection_of(case, fused_params=case.fused_params))
    model.module.head = nn.Linear(2, 1)
    dense = model.module.head
    optimizer = with_dense_sgd(model, 0.1)
    scaler = dyn.GradScaler(model, "cpu", init_scale=8.0)
    trained = []
    for step in range(3):
        optimizer.zero_grad()
        per_rank, _ = batches(case, step)
        output = model(per_rank[dist.get_rank()]).values()
        loss = output.sum() + dense(torch.ones(2)).sum()
        factor = torch.ones(())
        if step == 1 and dist.get_rank() == 1 and spoiled == "rows":
            factor = torch.full_like(output[:, :1], math.inf)
            output.register_hook(lambda grad, by=factor: grad * by)
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 1 and spoiled == "dense":
            dense.weight.grad[0, 0] = math.inf
        before = rows_of(case, model)
        weight = dense.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        same = [a.equal(b) for a, b in zip(before, rows_of(case, model), strict=True)]
        assert same == [step == 1] * 3, (step, same)
        assert torch.equal(weight, dense.weight) == (step == 1)
        trained.append(scaler.get_scale())
    assert trained == [8.0, 4.0, 4.0]


@pytest.mark.parametrize("spoiled", ["rows", "dense"])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(spoiled: str) -> None:
    workers.run(scaled, spoiled, world_size=2)


RUN = Run(("table_wise", "row_wise"), ("row_wise",), steps=5, fused_params=DEFERRED)


def in_cycles() -> Any:
    """A plain loop of cycles of two batches, the last of one."""
    model = sharded_model(RUN)
    optimizer = optimizer_of(RUN, model)
    for number, batch in enumerate(run_batches(RUN)):
        if number % 2 == 0:
            optimizer.zero_grad()
        model(batch)[0].backward()
        if number % 2 or number == RUN.steps - 1:
            optimizer.step()
    return states_of(model)


def by_the_wrapper(pipeline: str) -> Any:
    model = sharded_model(RUN)
    inner = make_pipeline(RUN, pipeline, model)
    config = GradientAccumulationConfig(num_steps=2)
    drain(GradientAccumulationWrapper(inner, inner._optimizer, model, config), run_batches(RUN))
    return states_of(model)


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist"])
def test_accumulates_by_the_wrapper_of_torchrec(pipeline: str) -> None:
    """It flushes the last, partial cycle. The dense gradients are summed in another order."""
    got = workers.run(by_the_wrapper, pipeline, world_size=2)
    expected = workers.run(in_cycles, world_size=2)
    for one, another in zip(got, expected, strict=True):
        check_same_states(one, another)
