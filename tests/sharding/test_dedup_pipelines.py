"""Pipelines over sequences that send each id once train and evaluate as plain loops do."""

import dataclasses
from functools import cache
from typing import Any

import pipeline_runs
import pytest
import torch
import workers
from pipeline_model import Run

import torchrec_dyn as dyn

PLAIN = Run(("row_wise",), ("row_wise", "table_wise", "column_wise"), dedup=True, new_ids=15)
LIVES = [
    {"eviction": dyn.LeastFrequentlyUsed()},
    {"admission": dyn.AdmitAfter(3), "eviction": dyn.LeastRecentlyUsed()},
]
RUNS = {
    "plain": PLAIN,
    "lives, a batch size per feature": dataclasses.replace(
        PLAIN, lives=LIVES, variable=True, rows=90, drift=40
    ),
}


@cache
def trained(run: str, pipeline: str) -> Any:
    return workers.run(pipeline_runs.train, RUNS[run], pipeline, world_size=2, timeout=120)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("pipeline", ["sparse_dist", "fused", "prefetch"])
def test_trains_as_the_plain_loop(run: str, pipeline: str) -> None:
    for got, expected in zip(trained(run, pipeline), trained(run, "base"), strict=True):
        assert got["losses"] == expected["losses"]
        for table, state in expected["states"].items():
            for part, value in state.items():
                assert torch.equal(got["states"][table][part], value), f"{table} {part}"


def test_plain_loop_learns_as_without_dedup() -> None:
    each = dataclasses.replace(PLAIN, dedup=False)
    expected = workers.run(pipeline_runs.train, each, "base", world_size=2)
    for got, without in zip(trained("plain", "base"), expected, strict=True):
        assert got["losses"] == pytest.approx(without["losses"], rel=1e-5)


@pytest.mark.parametrize("pipeline", ["eval", "prefetch"])
def test_evaluates_as_the_plain_loop_and_changes_nothing(pipeline: str) -> None:
    unseen = workers.run(pipeline_runs.evaluate, PLAIN, pipeline, world_size=2, timeout=120)
    assert min(unseen) > 0
