"""Sharded models under activation checkpointing train as without it, in plain loops and in pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import check_same_states, drain, make_pipeline, states_of, stats_of
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.train_pipeline.backward_injection import (
    FirstGradTensorFinder,
    InjectionSite,
    register_backward_hook,
)

import torchrec_dyn as dyn

KINDS = ("table_wise", "row_wise", "column_wise")
ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
LIVES = (
    {},
    {"admission": dyn.AdmitAfter(2)},
    {"eviction": (dyn.ExpireAfter(steps=1), dyn.LeastRecentlyUsed())},
)
RUN = Run(KINDS, KINDS, steps=4, fused_params=ADAM, lives=LIVES)


def plainly(model: Any, batch: Any) -> torch.Tensor:
    return model(batch)[0]


def not_reentrant(model: Any, batch: Any) -> torch.Tensor:
    return checkpoint(plainly, model, batch, use_reentrant=False)


def reentrant(model: Any, batch: Any) -> torch.Tensor:
    def run(_: torch.Tensor) -> torch.Tensor:
        return plainly(model, batch)

    return checkpoint(run, torch.zeros(1, requires_grad=True), use_reentrant=True)


def train(forward: Callable[[Any, Any], torch.Tensor], injects: bool) -> Any:
    """Trains; with `injects` each backward runs a forward of another batch, which is an original one."""
    model = sharded_model(RUN, init_data_parallel=False)
    others, losses = iter(batches(RUN, 50)), []

    def look_up(batch: Any) -> None:
        model.module.pooled(batch.features).values()
        model.module.sequences(batch.features).keys()

    if injects:
        site = InjectionSite("head", FirstGradTensorFinder())
        register_backward_hook(site, model.module, lambda _: look_up(next(others)))
    optimizer = torch.optim.SGD(model.module.head.parameters(), lr=0.1)
    for batch in batches(RUN):
        optimizer.zero_grad()
        loss = forward(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert not injects or next(others, None) is None
    return losses, states_of(model), stats_of(model)


trained = cache(partial(workers.run, train, world_size=2, timeout=120))


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    "forward, injects", [(not_reentrant, False), (reentrant, False), (not_reentrant, True)]
)
def test_trains_as_without_checkpointing(forward: Any, injects: bool) -> None:
    for got, expected in zip(trained(forward, injects), trained(plainly, injects), strict=True):
        assert got[0] == expected[0] and got[2] == expected[2]
        check_same_states(got[1], expected[1])


def in_pipeline(name: str, is_checkpointed: bool) -> Any:
    model = sharded_model(RUN, init_data_parallel=False)
    dense = model.module.head.forward

    def checkpointed(batch: Any, pooled: Any, sequences: Any, beside: Any) -> Any:
        pooled.keys(), sequences.keys()  # wait for the outputs, which can be waited for once
        return checkpoint(dense, batch, pooled, sequences, beside, use_reentrant=False)

    if is_checkpointed:
        model.module.head.forward = checkpointed
    outputs = drain(make_pipeline(RUN, name, model), batches(RUN))
    return [float(loss) for loss, _ in outputs], states_of(model)


def test_a_checkpointed_head_in_a_pipeline() -> None:
    got = workers.run(in_pipeline, "sparse_dist", True, world_size=2)
    expected = workers.run(in_pipeline, "sparse_dist", False, world_size=2)
    for (losses, states), (plain_losses, plain_states) in zip(got, expected, strict=True):
        assert losses == plain_losses and len(losses) == RUN.steps
        check_same_states(states, plain_states)
