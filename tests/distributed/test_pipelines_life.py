"""Pipelines over full tables: ids come and go, and rows learn, as in plain loops."""

import dataclasses
from functools import cache, partial
from typing import Any

import pipeline_runs
import pytest
import torch
import workers
from life_cases import NOT_OF_THE_STREAM
from pipeline_model import Run

import torchrec_dyn as dyn

LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
LIVES = [
    {"eviction": LFU},
    {"admission": dyn.AdmitAfter(2), "eviction": LRU, "unseen": "initial"},
    {"admission": dyn.AdmitWithProbability(0.7), "eviction": (dyn.ExpireAfter(steps=3), LFU)},
]
SEQUENCES = ("row_wise", "table_wise", "column_wise")
FULL = Run(
    ("table_wise", "row_wise", "column_wise"), SEQUENCES, beside=True,
    rows=90, lives=LIVES, drift=40, steps=8,
)  # fmt: skip
BY_NODE = dataclasses.replace(
    FULL, pooled=("table_row_wise", "table_column_wise", "grid_shard"), rows=200, steps=20
)
# As in test_pipelines.py: the lookup of a batch comes after the backward of the batch before.
SAME_ORDER = ["sparse_dist", "lite", "fused", "prefetch"]
OF_THE_STREAM = ["ids", "last_seen", "count", "waiting", "step"]


@cache
def trained(by_node: bool, pipeline: str) -> Any:
    world, local = (4, 2) if by_node else (2, 2)
    run = BY_NODE if by_node else FULL
    own: dict[str, Any] = {
        "ahead": partial(pipeline_runs.train_in_a_loop, ahead=True),
        "steps": pipeline_runs.train_with_steps_ahead,
        "pause": pipeline_runs.pause_with_steps_ahead,
    }
    arguments = (run,) if pipeline in own else (run, pipeline)
    function = own.get(pipeline, pipeline_runs.train)
    return workers.run(function, *arguments, world_size=world, local_size=local, timeout=300)


def check_same(got: Any, expected: Any, parts: list[str] | None = None) -> None:
    for table, state in expected["states"].items():
        assert got["states"][table].keys() == state.keys()
        for part in parts or state:
            if part in state:
                assert torch.equal(got["states"][table][part], state[part]), f"{table} {part}"
        for key, count in expected["stats"][table].items():
            if key not in NOT_OF_THE_STREAM:
                assert got["stats"][table][key] == count, f"{table} {key}"


def late_grads(result: Any) -> int:
    return sum(count["late_grads"] for count in result["stats"].values())


def test_tables_are_full() -> None:
    counts = [count for result in trained(False, "base") for count in result["stats"].values()]
    for cause in ("evicted_full", "evicted_expired", "refused", "waiting"):
        assert sum(count[cause] for count in counts) > 20, cause


PLANS = pytest.mark.parametrize(
    "by_node", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["two ranks", "two nodes"]
)


@pytest.mark.everyday(2)
@PLANS
@pytest.mark.parametrize("pipeline", SAME_ORDER)
def test_trains_as_the_plain_loop(by_node: bool, pipeline: str) -> None:
    for got, expected in zip(trained(by_node, pipeline), trained(by_node, "base"), strict=True):
        assert got["losses"] == expected["losses"]
        check_same(got, expected)
        assert late_grads(got) == 0


@PLANS
def test_steps_taken_when_prefetching_change_no_result(by_node: bool) -> None:
    """Step i + 1 comes before backward i, as on CUDA: rows of ids that it removes get late gradients."""
    late = 0
    for got, expected in zip(trained(by_node, "steps"), trained(by_node, "base"), strict=True):
        assert got["losses"] == expected["losses"]
        check_same(got, expected)
        late += late_grads(got)
    assert late > 0


def test_a_pause_between_a_step_and_its_forward_changes_no_result() -> None:
    """The pipeline is detached, and other batches are evaluated; later batches are of another iterator."""
    for got, expected in zip(trained(False, "pause"), trained(False, "base"), strict=True):
        assert got["losses"] == expected["losses"]
        check_same(got, expected)


@PLANS
def test_lookups_ahead_choose_the_same_ids(by_node: bool) -> None:
    """Rows learn a step later; who comes and goes depends on the stream alone."""
    late = 0
    for got, expected in zip(trained(by_node, "semi_sync"), trained(by_node, "base"), strict=True):
        assert got["losses"] != expected["losses"]
        check_same(got, expected, OF_THE_STREAM)
        late += late_grads(got)
    assert late > 0


@PLANS
def test_lookups_ahead_train_as_a_loop_in_their_order(by_node: bool) -> None:
    for got, expected in zip(trained(by_node, "semi_sync"), trained(by_node, "ahead"), strict=True):
        assert got["losses"] == expected["losses"]
        check_same(got, expected)
        assert late_grads(got) == late_grads(expected)
