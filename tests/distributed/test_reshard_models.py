"""DistributedModelParallel.reshard in training: losses, learning rates, pipelines, what others hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pipeline_model import DIM, Run, batches, sharded_model
from pipeline_runs import drain, make_pipeline, optimizer_of, shims_for, states_of
from sharded_cases import usual_plan
from torchrec.distributed.types import ParameterSharding

import torchrec_dyn as dyn

TW, RW, CW = "table_wise", "row_wise", "column_wise"
LIVES = [
    {"eviction": dyn.LeastFrequentlyUsed()},
    {"admission": dyn.AdmitAfter(2), "eviction": dyn.LeastRecentlyUsed(), "unseen": "initial"},
]
ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05}
SPREAD = Run((TW, CW, TW), (TW, RW, CW), lives=LIVES, warming=True, steps=5)
SPREAD_THEN = {"pooled": (CW, TW, TW), "sequences": (RW, CW, TW)}
# Full tables: where rows are spread each rank has a limit of its own, so these are not.
FULL = Run((TW, CW, TW), (TW, CW), rows=90, lives=LIVES, drift=40, fused_params=ADAM, steps=5)
FULL_THEN = {"pooled": (CW, TW, TW), "sequences": (CW, TW)}
BESIDE = Run((TW, TW), (TW, RW))
Kinds = Mapping[str, tuple[str, ...]]


def changed(run: Run, kinds: Kinds, name: str) -> dict[str, ParameterSharding]:
    """The new plan of the tables of a collection, on other ranks than before."""
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    return {
        table: usual_plan(kind, DIM, world, local, turn + 1, run.rows)
        for turn, (table, kind) in enumerate(zip(run.tables(name), kinds[name], strict=True))
    }


def reshard(model: Any, run: Run, kinds: Kinds) -> None:
    for name in kinds:
        plan = changed(run, kinds, name)
        assert model.reshard({name: (0.0, plan)}, name) == 0.0
        assert model.plan.plan[name][f"{name}_0"].ranks == plan[f"{name}_0"].ranks


def trained(run: Run, kinds: Kinds | None) -> tuple[list[float], int | float]:
    """Losses, and how many ids left, of a run whose tables move behind the third step and the fourth."""
    model = sharded_model(run)
    optimizer = optimizer_of(run, model)  # it holds the groups of before
    losses = []
    for step, batch in enumerate(batches(run)):
        if kinds is not None and step in (3, 4):
            reshard(model, run, kinds)
            kinds = {name: tuple(reversed(of)) for name, of in kinds.items()}
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = [dyn.read_stats(model.module.pooled, table) for table in run.tables("pooled")]
    return losses, sum(one["evicted_full"] for one in stats)


@pytest.mark.parametrize("run, kinds", [(SPREAD, SPREAD_THEN), (FULL, FULL_THEN)])
def test_losses_are_those_of_a_model_that_stayed(run: Run, kinds: Kinds) -> None:
    moved = workers.run(trained, run, kinds, world_size=2)
    assert moved == workers.run(trained, run, None, world_size=2)
    assert all((evicted > 50) == (run is FULL) for _, evicted in moved)


def check_rates() -> None:
    """A table moves to a rank that had none: a scheduler made before reaches it there."""
    run = Run((TW,), (RW,), fused_params=dict(ADAM, learning_rate=0.4))
    model = sharded_model(run)
    groups = list(model.fused_optimizer.param_groups)
    scheduler = torch.optim.lr_scheduler.StepLR(model.fused_optimizer, step_size=1, gamma=0.5)
    held = model.fused_optimizer
    model.fused_optimizer.step()
    scheduler.step()
    reshard(model, run, {"pooled": (TW,)})
    assert [group["lr"] for group in model.fused_optimizer.param_groups] == [0.2, 0.2]
    assert all(a is b for a, b in zip(model.fused_optimizer.param_groups, groups, strict=True))
    kernels = [k for lookup in model.module.pooled._lookups for k in lookup._emb_modules]
    assert len(kernels) == dist.get_rank()  # it lay on rank 0
    assert all(kernel.group.learning_rate == 0.2 for kernel in kernels)
    held.step()
    scheduler.step()
    assert all(kernel.group.learning_rate == 0.1 for kernel in kernels)
    keys = held.state_dict()["state"].keys()
    assert keys == model.fused_optimizer.state_dict()["state"].keys() and len(keys) == 2


def test_learning_rates_stay_and_follow_schedulers_of_before() -> None:
    workers.run(check_rates, world_size=2)


def through_pipeline(run: Run, name: str, kinds: Kinds) -> tuple[list[float], list[float]]:
    """Losses of a plain loop that stayed, and of a pipeline that was drained, moved, and went on."""
    with shims_for(name):
        plain = drain(make_pipeline(run, "base", sharded_model(run)), batches(run))
        model = sharded_model(run)
        pipeline, source = make_pipeline(run, name, model), batches(run)
        left = iter(source[:4])
        outputs = [pipeline.progress(left)]
        before = states_of(model)
        with pytest.raises(ValueError, match=r"expected no (batch on its way|forward that waits)"):
            reshard(model, run, kinds)
        assert str(states_of(model)) == str(before)
        outputs += drain(pipeline, left)
        early = model.module.pooled._free_features_storage_early = (
            True  # as a pipeline's option does
        )
        reshard(model, run, kinds)
        assert model.module.pooled.is_pipelined and model.module.sequences.is_pipelined
        assert model.module.pooled._free_features_storage_early is early
        model.module.pooled._free_features_storage_early = False
        outputs += drain(pipeline, source[4:])
    return [float(loss) for loss, _ in plain], [float(loss) for loss, _ in outputs]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["sparse_dist", "prefetch", "fused"])
def test_pipelines_run_out_before_tables_move(name: str) -> None:
    run, kinds = Run((TW, CW), (TW, RW)), {"pooled": (CW, TW), "sequences": (RW, CW)}
    for plain, moved in workers.run(through_pipeline, run, name, kinds, world_size=2):
        assert moved == plain


def without_pipeline(run: Run, kinds: Kinds, detached_before: bool) -> list[float]:
    """Losses of a model whose pipeline is detached before or behind a move."""
    model = sharded_model(run)
    pipeline, source = make_pipeline(run, "sparse_dist", model), batches(run)
    outputs = drain(pipeline, source[:2])
    if detached_before:
        pipeline.detach()
    reshard(model, run, kinds)
    if detached_before:
        pipeline.attach()
    outputs += drain(pipeline, source[2:4])
    pipeline.detach()
    outputs += drain(make_pipeline(run, "base", model), source[4:])
    return [float(loss) for loss, _ in outputs]


@cache
def stayed_beside() -> Any:
    return workers.run(trained, BESIDE, None, world_size=2)


@pytest.mark.parametrize(
    "kinds, before",
    [({"pooled": (TW, TW), "sequences": (TW, RW)}, False), ({"pooled": (CW, CW)}, True)],
)
def test_a_pipeline_can_be_detached(kinds: Kinds, before: bool) -> None:
    for moved, (stayed, _) in zip(
        workers.run(without_pipeline, BESIDE, kinds, before, world_size=2),
        stayed_beside(),
        strict=True,
    ):
        assert moved == stayed


def check_held_by_others() -> None:
    run = Run((TW, TW), (TW,), lives=LIVES)
    model = sharded_model(run)
    pooled = model.module.pooled
    handle = pooled.table("pooled_0")
    seen: list[int] = []
    pooled.register_forward_hook(lambda *_: seen.append(1))
    model(batches(run)[0])[0].backward()
    ids, count = handle.read_ids(), handle.read_num_rows()
    assert count > 20
    model.eval()
    reshard(model, run, {"pooled": (RW, CW)})
    assert model.module.pooled is pooled and pooled.table("pooled_0") is handle
    assert handle.read_num_rows() == count and torch.equal(handle.read_ids(), ids)
    told: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(told, handle.num_rows)
    assert sum(told) == count and min(told) > 5, "the handle shows the rows that are here now"
    model(batches(run, first_step=5)[0])
    assert len(seen) == 2 and handle.read_num_rows() == count, "evaluation inserts nothing"
    model.train()
    model(batches(run, first_step=5)[0])[0].backward()
    assert handle.read_num_rows() > count
    count = handle.read_num_rows()
    handle.freeze()
    reshard(model, run, {"pooled": (TW, TW)})
    assert handle.is_frozen and handle.read_num_rows() == count
    model(batches(run, first_step=9)[0])[0].backward()
    assert handle.read_num_rows() == count, "a frozen table stays frozen"
    handle.unfreeze()
    model(batches(run, first_step=9)[0])[0].backward()
    assert handle.read_num_rows() > count


def test_what_others_hold_of_a_collection_goes_on() -> None:
    workers.run(check_held_by_others, world_size=2)
