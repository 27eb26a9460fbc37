"""One rank in evaluation and others in training: the same error on every rank, before any table changes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import workers
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import check_same_states, make_pipeline, states_of

KINDS = ("table_wise", "row_wise", "column_wise")
BY_NODE = ("table_row_wise", "table_column_wise", "grid_shard")
USUAL = Run(KINDS, KINDS, steps=3)
RUNS = {
    "usual": (USUAL, 2, 2),
    "each_id_once": (Run(KINDS, KINDS, dedup=True, steps=3), 2, 2),
    "batch_per_feature": (Run(("row_wise", "column_wise"), KINDS, variable=True, steps=3), 2, 2),
    "two_nodes": (Run(BY_NODE, KINDS, steps=3), 4, 2),
}


def text_of(evaluating: list[int]) -> str:
    return rf"expected every rank in the same mode, got ranks \[{evaluating[0]}\] in evaluation"


def mixed_modes(run: Run, evaluating: list[int]) -> None:
    model, (first, second, third) = sharded_model(run), batches(run)
    model(first)[0].backward()
    before = states_of(model)
    model.train(dist.get_rank() not in evaluating)
    with pytest.raises(ValueError, match=text_of(evaluating)):
        model(second)
    check_same_states(states_of(model), before)
    # The ranks are still in step.
    for mode in (False, True):
        model.train(mode)
        loss, _ = model(third)
    loss.backward()
    assert str(states_of(model)) != str(before)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", RUNS)
def test_one_rank_in_evaluation(name: str) -> None:
    run, world, local = RUNS[name]
    for evaluating in ([0], [1]):
        workers.run(mixed_modes, run, evaluating, world_size=world, local_size=local)


def mixed_in_a_pipeline(name: str) -> None:
    model = sharded_model(USUAL)
    pipeline = make_pipeline(USUAL, name, model)
    model.train(dist.get_rank() == 0)
    with pytest.raises(ValueError, match=text_of([1])):
        pipeline.progress(iter(batches(USUAL)))


@pytest.mark.parametrize("pipeline", ["sparse_dist", "lite"])
def test_in_a_pipeline(pipeline: str) -> None:
    workers.run(mixed_in_a_pipeline, pipeline, world_size=2)
