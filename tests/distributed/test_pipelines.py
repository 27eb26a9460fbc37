"""TorchRec's pipelines over dynamic collections train and evaluate as plain loops do."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pipeline_runs
import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pipeline_model import Clicks, Run, batches, sharded_model
from pipeline_runs import HAS_LOOKUP_PREFETCH, PIPELINES, check_same_states
from shards import deep_but

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import apply_delta, export_delta, mark

SEQUENCES = ("row_wise", "table_wise", "column_wise")
BY_NODE = ("table_row_wise", "table_column_wise", "grid_shard")
STEPS = 4  # a pipeline is at most three batches ahead
PLANS = {
    "two_ranks": (
        Run(("table_wise", "row_wise", "column_wise"), SEQUENCES, beside=True, steps=STEPS), 2, 2,
    ),
    "batch_per_feature": (
        Run(("row_wise", "column_wise"), SEQUENCES, variable=True, warming=True, steps=STEPS), 2, 2,
    ),
    "two_nodes": (Run(BY_NODE, SEQUENCES, warming=True, steps=STEPS), 4, 2),
    "max": (Run((*BY_NODE, "row_wise"), ("row_wise",), largest=True, steps=STEPS), 4, 2),
}  # fmt: skip
# The lookup of a batch comes after the backward of the batch before: not one bit may change.
SAME_ORDER = ["sparse_dist", "sparse_dist_late_enqueue", "lite", "fused", "fused_late_lookup",
              "prefetch"]  # fmt: skip
EVALUATION = ["eval", "eval_fused", "eval_fused_ahead", "sparse_dist", "lite", "fused",
              "semi_sync", "prefetch"]  # fmt: skip


def train(plan: str, pipeline: str, **changes: Any) -> Any:
    run, world, local = PLANS[plan]
    run = dataclasses.replace(run, **changes)
    return workers.run(
        pipeline_runs.train, run, pipeline, world_size=world, local_size=local, timeout=120
    )


trained = cache(train)


# A pipeline does not see the plan: every pipeline with one plan, and two of them with every plan.
@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    "pipeline, plan",
    deep_but(
        [
            *((name, "two_ranks") for name in SAME_ORDER),
            *((name, plan) for name in ("sparse_dist", "prefetch") for plan in PLANS),
        ],
        itertools.product(SAME_ORDER, PLANS),
    ),
)
def test_trains_as_the_plain_loop(plan: str, pipeline: str) -> None:
    for got, expected in zip(trained(plan, pipeline), trained(plan, "base"), strict=True):
        assert len(expected["losses"]) == STEPS
        assert got["losses"] == expected["losses"]
        check_same_states(got["states"], expected["states"])


def check_train_and_overwrite(run: Run, names: list[str], folder: Path) -> None:
    for name in names:
        with pipeline_runs.shims_for(name), pipeline_runs.prefetched_steps():
            expected = pipeline_runs.train(run, name)
            model, follower = (
                sharded_model(dataclasses.replace(run, overwrites=True)) for _ in "12"
            )
            before = mark(model)
            outputs = pipeline_runs.drain(
                pipeline_runs.make_pipeline(run, name, model), batches(run)
            )
            export_delta(model, folder / name, before)
            apply_delta(follower, folder / name)
        assert [float(loss) for loss, _ in outputs] == expected["losses"]
        check_same_states(pipeline_runs.states_of(model), expected["states"])
        check_same_states(pipeline_runs.states_of(follower), expected["states"])


def test_a_batch_may_be_overwritten_by_the_dense_part(tmp_path: Path) -> None:
    """On one rank the dists return the ids of the batch itself; steps are taken ahead as on a GPU."""
    lives = [{}, {"eviction": dyn.LeastRecentlyUsed(), "unseen": "initial"}]
    run = Run(("table_wise", "table_wise"), ("table_wise", "row_wise"), steps=STEPS, lives=lives)
    names = ["sparse_dist", "semi_sync", "prefetch"]
    workers.run(check_train_and_overwrite, run, names, tmp_path, world_size=1)


@pytest.mark.parametrize(
    "optimizer, plan",
    deep_but(
        [("EXACT_ADAGRAD", "two_ranks")],
        itertools.product(["EXACT_SGD", "EXACT_ADAGRAD"], ["two_ranks", "two_nodes"]),
    ),
)
def test_semi_sync_trains_as_static_tables(plan: str, optimizer: str) -> None:
    fused_params = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1}
    changes: dict[str, Any] = {"fused_params": fused_params, "mean": False, "warming": False}
    dynamic = train(plan, "semi_sync", **changes)
    static = train(plan, "semi_sync", dynamic=False, **changes)
    plain = train(plan, "base", **changes)
    for got, expected, in_order in zip(dynamic, static, plain, strict=True):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        # Each loss but the first comes of rows that lack one backward: this is no plain loop.
        assert got["losses"][1:] != pytest.approx(in_order["losses"][1:], rel=1e-5)


def test_tables_grow_while_a_backward_is_due() -> None:
    slots = [
        count["slots"]
        for result in trained("two_ranks", "semi_sync")
        for count in result["stats"].values()
    ]
    one_step = dataclasses.replace(PLANS["two_ranks"][0], steps=1)
    first = workers.run(pipeline_runs.train, one_step, "base", world_size=2)
    before = [count["slots"] for result in first for count in result["stats"].values()]
    assert all(after >= 2 * old for after, old in zip(slots, before, strict=True))


def test_prefetch_inserts_and_forward_finds() -> None:
    for result in trained("two_ranks", "prefetch"):
        for count in result["stats"].values():
            assert count["ids_seen"] == count["hits"] > 0
    for result in trained("two_ranks", "base"):
        for count in result["stats"].values():
            assert count["ids_seen"] > count["hits"]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    "pipeline, plan",
    deep_but(
        [*((name, "two_ranks") for name in EVALUATION), ("eval", "two_nodes")],
        itertools.product(EVALUATION, ["two_ranks", "two_nodes"]),
    ),
)
def test_evaluation_changes_nothing(plan: str, pipeline: str) -> None:
    if pipeline == "eval_fused_ahead" and not HAS_LOOKUP_PREFETCH:
        pytest.skip("TorchRec's fused pipeline has no lookup prefetch")
    run, world, local = PLANS[plan]
    unseen = workers.run(
        pipeline_runs.evaluate, run, pipeline, world_size=world, local_size=local, timeout=120
    )
    assert min(unseen) > 0


def train_and_erase(run: Run, erased: torch.Tensor, at_step: int, erase: bool) -> dict[str, Any]:
    """Trains by SemiSync; ids are erased between lookup i + 1 and backward i, and occur again later."""
    source = batches(run)
    with pipeline_runs.shims_for("semi_sync"):
        model = sharded_model(run)
        if not erase:
            for batch in source[at_step + 2 :]:
                ids = batch.features._values
                batch.features._values = torch.where(torch.isin(ids, erased), renamed(ids), ids)
        forwards = iter(range(run.steps))

        def forward(batch: Clicks | None) -> Any:
            loss, output = model(batch)
            if next(forwards) == at_step and erase:
                loss.register_hook(lambda grad: _erase(run, model, erased))
            return loss, output

        pipeline = pipeline_runs.make_pipeline(run, "semi_sync", model, custom_model_fwd=forward)
        outputs = pipeline_runs.drain(pipeline, source)
        pipeline_runs.check_pipelined(run, pipeline)
    return pipeline_runs.results_of(run, model, outputs)


def renamed(ids: torch.Tensor) -> torch.Tensor:
    """Returns other ids that are used nowhere else."""
    return ids ^ 0x5555_0000_0000


def _erase(run: Run, model: Any, ids: torch.Tensor) -> None:
    mine: Callable[[], torch.Tensor] = lambda: ids if dist.get_rank() == 0 else ids[:0]  # noqa: E731
    for name in ("pooled", "sequences"):
        for table in run.tables(name):
            assert getattr(model.module, name).table(table).erase(mine()) > 0


@pytest.mark.parametrize("plan", deep_but(["two_ranks"], ["two_ranks", "two_nodes"]))
def test_rows_erased_before_their_backward(plan: str) -> None:
    run, world, local = PLANS[plan]
    # Rows that start alike, so that an erased id trains as one of another name. No Adagrad: of a
    # gradient near zero it makes a step of full length, whose sign is that of rounding.
    run = dataclasses.replace(
        run,
        beside=False,
        warming=False,
        steps=STEPS + 1,
        initializer=dyn.Constant(0.05),
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5},
    )
    erased = torch.tensor([-1, 2**63 - 1, *range(100, 130)])
    results = [
        workers.run(train_and_erase, run, erased, 1, erase, world_size=world,
                    local_size=local, timeout=120)
        for erase in (True, False)
    ]  # fmt: skip
    for got, expected in zip(*results, strict=True):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    counts = [count for result in results[0] for count in result["stats"].values()]
    assert sum(count["late_grads"] for count in counts) > 0
    assert sum(count["erased"] for count in counts) > 0
    rows, expected_rows = (rows_by_id(result) for result in results)
    for table, of_table in rows.items():
        for number, row in of_table.items():
            other = int(renamed(torch.tensor(number))) if number in erased else number
            expected = expected_rows[table][other]
            torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-6)


def rows_by_id(result: Any) -> dict[str, dict[int, torch.Tensor]]:
    """The rows on all ranks, by table and first column, and by id."""
    rows: dict[str, dict[int, torch.Tensor]] = {}
    for of_rank in result:
        for table, state in of_rank["states"].items():
            found = zip(state["ids"].tolist(), state["weight"], strict=True)
            rows.setdefault(table, {}).update(found)
    return rows


@pytest.mark.parametrize("pipeline", ["sparse_dist", "fused"])
def test_pause_for_evaluation(pipeline: str) -> None:
    run = PLANS["two_ranks"][0]
    results = workers.run(pipeline_runs.train_with_pause, run, pipeline, world_size=2, timeout=120)
    for got, expected in zip(results, trained("two_ranks", "base"), strict=True):
        assert got["losses"] == expected["losses"]
        check_same_states(got["states"], expected["states"])


def test_every_pipeline_is_exercised() -> None:
    assert set(PIPELINES) == {"base", "semi_sync", *SAME_ORDER, *EVALUATION}
