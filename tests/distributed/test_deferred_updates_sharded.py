"""Deferred updates under plans: as unsharded on the global batches; ranks clip and skip together."""

from __future__ import annotations

import copy
import gc
import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from pipeline_model import Run, sharded_model
from pipeline_model import batches as run_batches
from pipeline_runs import (
    check_same_states,
    drain,
    make_pipeline,
    optimizer_of,
    shims_for,
    states_of,
    tables_of,
)
from sharded_cases import Case, Table, three_tables, usual_plan
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
EXPIRING = dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2), eviction=dyn.ExpireAfter(steps=1))
FREQUENT = dyn.DynamicTableConfig(
    admission=dyn.AdmitAfter(2), eviction=dyn.LeastFrequentlyUsed(half_life_steps=2)
)


def one_table(kind: str, rows: int = 1000, **options: Any) -> list[Table]:
    return [Table("t", ["a"], usual_plan(kind, 8, 2, 2, rows=rows), rows=rows, **options)]


CASES = {
    "tables and columns": Case(three_tables(LOCAL, 2, 2, (8, 4, 12))),
    "rows": Case(three_tables(("row_wise",), 2, 2), exact=False),
    "nodes": Case(three_tables(("table_row_wise", "grid_shard"), 2, 2), exact=False),
    "sequences": Case(three_tables(ALL, 2, 2), pooled=False),
    "sequences, each id once": Case(three_tables(ALL, 2, 2), pooled=False, dedup=True),
    "variable, weighted": Case(
        three_tables(LOCAL, 2, 2), batch_sizes=[5, 3], variable=True, weighted=True
    ),
    "expired rows": Case(one_table("row_wise", config=EXPIRING), exact=False, steps=4),
    "evicted columns": Case(one_table("column_wise", 32, config=FREQUENT), steps=4),
    "expired sequences": Case(
        one_table("row_wise", config=EXPIRING), pooled=False, dedup=True, exact=False, steps=4
    ),
}


def check_train_deferred(case: Case, most: float) -> None:
    """Trains with three batches a step; `most` is the largest norm, infinite for no clipping."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case = replace(case, fused_params=DEFERRED)
    unsharded = collection_of(case, fused_params=case.fused_params)
    sharded = shard(case, copy.deepcopy(unsharded))
    steps = case.steps if case.tables[0].config else 2
    for step in range(steps):
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
        assert stats["step"] == steps, stats
        if table.config:
            check_life(sharded.module.collection, unsharded, table.name)


def check_life(sharded: Any, unsharded: Any, table: str) -> None:
    ids, stats = dyn.read_ids(unsharded, table), dyn.read_stats(sharded, table)
    assert torch.equal(dyn.read_ids(sharded, table), ids)
    counts = [dyn.read_counts(model, table, ids) for model in (sharded, unsharded)]
    assert torch.equal(*counts)
    assert stats["evicted_full"] + stats["evicted_expired"] > 0 and stats["late_grads"] == 0, stats


@pytest.mark.everyday(6)
@pytest.mark.parametrize("name", CASES)
def test_accumulates_as_unsharded(name: str) -> None:
    workers.run(check_train_deferred, CASES[name], math.inf, world_size=2)


@pytest.mark.parametrize("name", ["rows", "sequences"])
def test_clips_as_unsharded(name: str) -> None:
    workers.run(check_train_deferred, replace(CASES[name], exact=False), 0.5, world_size=2)


def rows_of(case: Case, model: Any) -> list[torch.Tensor]:
    ids = torch.arange(100, 140)
    return [dyn.lookup_rows(model.module.collection, table.name, ids)[0] for table in case.tables]


def check_scaled(spoiled: str) -> None:
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
    workers.run(check_scaled, spoiled, world_size=2)


def backward(case: Case, model: Any, number: int) -> torch.Tensor:
    """Returns the outputs of a batch, after their backward."""
    output = model(batches(case, number)[0][dist.get_rank()]).values()
    output.sum().backward()
    return output


def check_resharded_between() -> None:
    case = Case(one_table("row_wise"), fused_params=DEFERRED)
    moved = {"t": usual_plan("table_wise", 8, 2, 2)}
    model = shard(case, collection_of(case))

    def move() -> None:
        model.sharders[0].reshard(model.module.collection, moved, model._env, model.device)

    kept = backward(case, model, 0)
    ids = dyn.read_ids(model.module.collection, "t")
    before, _ = dyn.lookup_rows(model.module.collection, "t", ids)
    with pytest.raises(ValueError, match=r"updates that wait .* step\(\), or zero_grad\(\)"):
        move()
    model.fused_optimizer.zero_grad()
    move()  # although the outputs are still there
    backward(case, model, 0)
    model.fused_optimizer.step()
    after, _ = dyn.lookup_rows(model.module.collection, "t", ids)
    assert kept.requires_grad and not torch.equal(before, after)


def test_a_reshard_with_pending_updates_is_refused() -> None:
    workers.run(check_resharded_between, world_size=2)


def skipped() -> list[int]:
    """A loop that skips batches. TorchRec's requests hold the graph of a forward until Python collects."""
    case, rank = (
        Case(one_table("row_wise", config=EXPIRING), fused_params=DEFERRED),
        dist.get_rank(),
    )
    model = shard(case, collection_of(case))
    [(shard_here,)] = [group.tables for group in model.module.collection._shards.table_groups()]
    steps = []

    def train_step(number: int, trains: bool) -> None:
        model.fused_optimizer.zero_grad()
        loss = model(batches(case, number)[0][rank]).values().sum()
        if trains:
            loss.backward()
            model.fused_optimizer.step()

    gc.disable()
    try:
        for number, trains in enumerate([True, False, False, True, False, True]):
            if rank:
                gc.collect()
            train_step(number, trains)
            steps.append(shard_here.step)
        assert len(shard_here.forwards) == (0 if rank else 3)
    finally:
        gc.enable()
    return steps


def test_a_skipped_batch_is_a_step_of_all_ranks_whatever_python_has_collected() -> None:
    assert workers.run(skipped, world_size=2) == [[1, 2, 3, 4, 5, 6]] * 2


def check_saved_between(folder: str) -> None:
    """A save has the rows of the last step; a load drops the gradients, and `step()` says so."""
    case = Case(one_table("row_wise"), fused_params=DEFERRED)
    model = shard(case, collection_of(case))
    backward(case, model, 0)
    model.fused_optimizer.step()
    backward(case, model, 0)
    ids = dyn.read_ids(model.module.collection, "t")
    before, _ = dyn.lookup_rows(model.module.collection, "t", ids)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "rows": model.fused_optimizer.state_dict()}

    dcp.save(state(), checkpoint_id=folder)
    model.fused_optimizer.step()
    assert not torch.equal(dyn.lookup_rows(model.module.collection, "t", ids)[0], before)
    backward(case, model, 0)
    loaded = state()
    dcp.load(loaded, checkpoint_id=folder, planner=dyn.checkpoint.LoadPlanner())
    model.load_state_dict(loaded["model"])
    model.fused_optimizer.load_state_dict(loaded["rows"])
    with pytest.raises(RuntimeError, match=r"the optimizer's step\(\).* dropped"):
        model.fused_optimizer.step()
    assert torch.equal(dyn.lookup_rows(model.module.collection, "t", ids)[0], before)


def test_saves_and_loads_between_backward_and_step(tmp_path: Any) -> None:
    workers.run(check_saved_between, str(tmp_path / "saved"), world_size=2)


RUN = Run(("table_wise", "row_wise"), ("row_wise",), steps=5, fused_params=DEFERRED)


def in_cycles(ahead: bool, run: Run = RUN) -> Any:
    """A plain loop of cycles of two batches, the last of one; `ahead`: as semi-sync pipelines look up."""
    model = sharded_model(run)
    optimizer = optimizer_of(run, model)
    lookups = [model.module.pooled, model.module.sequences]
    forwards = [lookup.forward for lookup in lookups]
    source = run_batches(run)
    rows = [forward(source[0].features) for forward in forwards]
    for number, batch in enumerate(source):
        for lookup, of_lookup in zip(lookups, rows, strict=True):
            lookup.forward = lambda features, looked_up=of_lookup: looked_up
        loss = model(batch)[0]
        for following in source[number + 1 : number + 2]:
            if ahead:
                rows = [forward(following.features) for forward in forwards]
        loss.backward()
        if number % 2 or number == run.steps - 1:
            optimizer.step()
            optimizer.zero_grad()
        for following in source[number + 1 : number + 2]:
            if not ahead:
                rows = [forward(following.features) for forward in forwards]
    return states_of(model), steps_of(model)


def steps_of(model: Any) -> list[int]:
    return [table.stats()["step"] for table in tables_of(model).values()]


def by_the_wrapper(pipeline: str, cleared: bool, run: Run = RUN) -> Any:
    model = sharded_model(run)
    with shims_for(pipeline):
        inner = make_pipeline(run, pipeline, model)
        config = GradientAccumulationConfig(num_steps=2)
        wrapper = GradientAccumulationWrapper(inner, inner._optimizer, model, config)
        if cleared:
            wrapper.optimizer_wrapper.zero_grad()
        drain(wrapper, run_batches(run))
    return states_of(model), steps_of(model)


expected_cycles = cache(partial(workers.run, in_cycles, world_size=2))


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist", "prefetch", "semi_sync"])
def test_accumulates_by_the_wrapper_of_torchrec(pipeline: str) -> None:
    """It flushes the last, partial cycle. The dense gradients are summed in another order, up to rounding."""
    ahead = pipeline == "semi_sync"
    got = workers.run(by_the_wrapper, pipeline, ahead, world_size=2)
    expected = expected_cycles(ahead)
    for (one, steps), (another, expected_steps) in zip(got, expected, strict=True):
        check_same_states(one, another, tolerance=1e-5)
        # In the semi-sync pipeline the third lookup runs before the first step, the fifth before the second.
        assert steps == expected_steps == [2 if ahead else 3] * len(steps)
