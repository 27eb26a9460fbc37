"""TorchRec's pipelines, on streams of a mock device, train and evaluate as plain loops on the CPU do."""

import dataclasses
from functools import cache
from typing import Any

import device_pipelines
import pytest
import workers
from pipeline_model import Run
from pipeline_runs import EXPERIMENTAL, HAS_LOOKUP_PREFETCH, PIPELINES, check_same_states
from sharded_life import NOT_OF_THE_STREAM

import torchrec_dyn as dyn

needs_lookup_prefetch = pytest.mark.skipif(
    not HAS_LOOKUP_PREFETCH, reason="TorchRec's fused pipeline has no lookup prefetch"
)
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
RUNS = {
    "plain": (PLAIN, 2),
    "with policies": (FULL, 2),
    "one rank": (dataclasses.replace(FULL, without_ids=1), 1),  # nothing is sent
    "processed": (
        dataclasses.replace(FULL, variable=True, processed=True, dedup=False, without_ids=2), 2,
    ),
}  # fmt: skip
TRAINING = [name for name in PIPELINES if "eval" not in name]
# The number of streams that use the tensors of others, where it is not two.
USERS = {"base": 1, "lite": 1, "prefetch": 4}


@cache
def on_cpu(run: str, ahead: bool) -> Any:
    made, world = RUNS[run]
    return workers.run(device_pipelines.train_on_cpu, made, ahead, world_size=world)


EVERYDAY = {("sparse_dist", "processed"), ("semi_sync", "with policies")}
EVERYDAY |= {("prefetch", "with policies"), ("prefetch", "one rank")}
BY_RUN = {
    "plain": TRAINING,
    "with policies": [*TRAINING, *EXPERIMENTAL],
    "one rank": ["sparse_dist", "fused", "semi_sync", "prefetch"],
    # Not SemiSync: the optimizer changes the position weights between their forward and their backward.
    "processed": ["sparse_dist", "fused", "prefetch"],
}
CASES = [
    pytest.param(name, run, marks=[] if (name, run) in EVERYDAY else [pytest.mark.deep])
    for run, names in BY_RUN.items()
    for name in names
]


@pytest.mark.parametrize(("pipeline", "run"), CASES)
def test_trains_as_a_plain_loop_on_the_cpu(pipeline: str, run: str) -> None:
    made, world = RUNS[run]
    results = workers.run(device_pipelines.train_on_device, made, pipeline, world_size=world)
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
    is_ahead = pipeline in ("prefetch", "prefetch_ems", "semi_sync")
    assert (late > 0) == (run != "plain" and is_ahead)


EVALUATION = [
    ("eval", "with policies"),
    *(
        pytest.param(name, run, marks=[pytest.mark.deep, *marks])
        for name, run, marks in (
            ("eval", "plain", []),
            ("eval_fused", "with policies", []),
            ("eval_fused_ahead", "processed", [needs_lookup_prefetch]),
        )
    ),
]


@pytest.mark.parametrize(("pipeline", "run"), EVALUATION)
def test_evaluates_as_a_plain_loop_on_the_cpu(pipeline: str, run: str) -> None:
    made, world = RUNS[run]
    unseen = workers.run(device_pipelines.evaluate_on_device, made, pipeline, world_size=world)
    assert min(unseen) > 0
