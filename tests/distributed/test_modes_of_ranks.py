"""Ranks in different modes, or with batches of different forms: one error on all, no table changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import workers
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import check_same_states, make_pipeline, states_of
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_training import batches as batches_of
from sharded_training import collection_of, shard

from torchrec_dyn.storage import commit
from torchrec_dyn.whole_model import tables_of

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


def text_of_forms(varying: list[int]) -> str:
    return (
        rf"expected batches of one form on every rank, got a size per feature on ranks \{varying}"
    )


def check_mixed_modes(run: Run, evaluating: list[int]) -> None:
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
        workers.run(check_mixed_modes, run, evaluating, world_size=world, local_size=local)


def check_mixed_forms(run: Run, varying: list[int]) -> None:
    model, (first, second, third) = sharded_model(run), batches(run)
    model(first)[0].backward()
    before = states_of(model)
    if dist.get_rank() in varying:
        second = batches(replace(run, variable=True))[1]
    with pytest.raises(ValueError, match=text_of_forms(varying)):
        model(second)
    check_same_states(states_of(model), before)
    # The ranks are still in step.
    model(third)[0].backward()
    assert str(states_of(model)) != str(before)


@pytest.mark.parametrize("name", [name for name, (run, _, _) in RUNS.items() if not run.variable])
def test_one_rank_with_a_size_per_feature(name: str) -> None:
    run, world, local = RUNS[name]
    for varying in ([0], [1]):
        workers.run(check_mixed_forms, run, varying, world_size=world, local_size=local)


def check_mixed_in_a_pipeline(name: str, by_form: bool) -> None:
    model = sharded_model(USUAL)
    pipeline = make_pipeline(USUAL, name, model)
    is_other = dist.get_rank() == 1
    model.train(by_form or not is_other)
    stream = batches(replace(USUAL, variable=by_form and is_other))
    with pytest.raises(ValueError, match=text_of_forms([1]) if by_form else text_of([1])):
        pipeline.progress(iter(stream))


@pytest.mark.parametrize("by_form", [False, True])
@pytest.mark.parametrize("pipeline", ["sparse_dist", "lite"])
def test_in_a_pipeline(pipeline: str, by_form: bool) -> None:
    workers.run(check_mixed_in_a_pipeline, pipeline, by_form, world_size=2)


def check_torn_on_one_rank() -> None:
    model, (first, second, _) = sharded_model(USUAL), batches(USUAL)
    model(first)[0].backward()
    if dist.get_rank() == 1:
        shards = tables_of(model, "a test")[0]
        with pytest.raises(MemoryError), commit(shards):
            raise MemoryError
    for mode in (True, False):
        with pytest.raises(
            RuntimeError, match=r"on ranks \[1\] torn by an exception within a change"
        ):
            model.train(mode)(second)


def test_torn_tables_of_one_rank() -> None:
    workers.run(check_torn_on_one_rank, world_size=2)


def check_backward_in_evaluation() -> None:
    """Trains a dense part alone, with tables on one rank or on all."""
    one, all_ranks = shard_by_hand("table_wise", [([0], 0, 8)]), usual_plan("row_wise", 8, 2, 2)
    for pooled in (True, False):
        for plans in ([one], [all_ranks], [one, all_ranks]):
            tables = [Table(f"t{i}", [f"f{i}"], plan) for i, plan in enumerate(plans)]
            case = Case(tables, pooled=pooled)
            model, dense = shard(case, collection_of(case)).eval(), torch.nn.Linear(8, 1)
            rows = model(batches_of(case, 0)[0][dist.get_rank()])
            parts = rows.to_dict().values() if pooled else [one.values() for one in rows.values()]
            sum(dense(part).square().sum() for part in parts).backward()
            assert dense.weight.grad is not None
            assert all(model.module.collection.table(table.name).num_rows == 0 for table in tables)


def test_a_backward_in_evaluation_meets_on_all_ranks() -> None:
    """A rank without tables waited for the others, whose outputs required no gradient."""
    workers.run(check_backward_in_evaluation, world_size=2)
