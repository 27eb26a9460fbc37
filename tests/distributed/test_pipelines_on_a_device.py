"""TorchRec's pipelines, on streams of a pretended device, train and evaluate as plain loops on the CPU do."""

import dataclasses
from functools import cache
from typing import Any

import device_pipelines
import pytest
import workers
from pipeline_model import Run
from pipeline_runs import PIPELINES, check_same_states
from sharded_life import NOT_OF_THE_STREAM

import torchrec_dyn as dyn

LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
KINDS = ("table_wise", "row_wise", "column_wise")
PLAIN = Run(KINDS, KINDS, steps=4)  # a pipeline is at most three batches ahead
FULL = dataclasses.replace(
    PLAIN,
    steps=5,
    rows=90,
    drift=40,
    dedup=True,
    lives=[
        {"eviction": LFU},
        {"admission": dyn.AdmitAfter(2), "eviction": LRU, "unseen": "initial"},
        {"admission": dyn.AdmitWithProbability(0.7), "eviction": (dyn.ExpireAfter(steps=3), LFU)},
    ],
)
RUNS = {"plain": PLAIN, "with policies": FULL}
TRAINING = [name for name in PIPELINES if "eval" not in name]
# The number of streams that use the tensors of others, where it is not two.
USERS = {"base": 1, "lite": 1, "prefetch": 4}


@cache
def on_cpu(run: str, ahead: bool) -> Any:
    return workers.run(device_pipelines.train_on_cpu, RUNS[run], ahead, world_size=2)


EVERYDAY = {("sparse_dist", "with policies"), ("semi_sync", "with policies")}
EVERYDAY |= {("prefetch", "with policies"), ("prefetch", "plain")}
CASES = [
    pytest.param(name, run, marks=[] if (name, run) in EVERYDAY else [pytest.mark.deep])
    for name in TRAINING
    for run in RUNS
]


@pytest.mark.parametrize(("pipeline", "run"), CASES)
def test_trains_as_a_plain_loop_on_the_cpu(pipeline: str, run: str) -> None:
    results = workers.run(device_pipelines.train_on_device, RUNS[run], pipeline, world_size=2)
    late = 0
    for got, expected in zip(results, on_cpu(run, pipeline == "semi_sync"), strict=True):
        assert got["losses"] == expected["losses"]
        check_same_states(got["states"], expected["states"])
        for table, counts in expected["stats"].items():
            # A prefetch without policies inserts: then the forward finds all ids.
            inserted_before = (
                {"hits", "unseen"} if (pipeline, run) == ("prefetch", "plain") else set()
            )
            for key in counts.keys() - NOT_OF_THE_STREAM - inserted_before:
                assert got["stats"][table][key] == counts[key], f"{table} {key}"
            late += got["stats"][table]["late_grads"]
        assert got["mixed"] == got["without_kernel"] == got["unordered"] == []
        assert got["users"] == USERS.get(pipeline, 2)
    # Step i + 1 removes rows before backward i.
    assert (late > 0) == (run == "with policies" and pipeline in ("prefetch", "semi_sync"))


@pytest.mark.parametrize("run", [pytest.param("plain", marks=pytest.mark.deep), "with policies"])
def test_evaluates_as_a_plain_loop_on_the_cpu(run: str) -> None:
    unseen = workers.run(device_pipelines.evaluate_on_device, RUNS[run], world_size=2)
    assert min(unseen) > 0
