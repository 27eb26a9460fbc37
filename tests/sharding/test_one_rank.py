"""On one rank nothing is sent: every plan trains as the unsharded collection, in few Python calls."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pipeline_runs
import pytest
import torch
import torch.distributed as dist
import workers
from pipeline_model import Run
from pipeline_runs import check_same_states
from processed_training import train_processed
from sharded_cases import (
    EVERY_PLAN,
    FUSED_PARAMS,
    POOLED,
    SEQUENCE,
    SPREAD_ROWS,
    WHOLE_ROWS,
    Case,
    Table,
    case_of_plans,
    usual_plan,
)
from sharded_training import Holder, check_trains_as_unsharded, collection_of, sharder_of
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.ranks import SHARDING_TRAITS

LRU = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed(), gradient="mean_over_senders")
POLICIES = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed(), admission=dyn.AdmitAfter(2))
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weighted": True},
    "variable": {"variable": True},
    "weighted, variable": {"weighted": True, "variable": True},
    "no examples": {"batch_sizes": [0], "backward": False},
    "qcomm": {"qcomm": "FP16"},
    "dedup": {"dedup": True},
}


def cases_of(plans: str) -> dict[str, Case]:
    kinds, _ = EVERY_PLAN[plans]
    pooled = plans != "sequences"
    chosen = {
        name: options
        for name, options in VARIATIONS.items()
        if ("dedup" if pooled else "weighted") not in options
    }
    cases = {
        name: dataclasses.replace(case_of_plans(plans, 1, 1), exact=True, **options)
        for name, options in chosen.items()
    }
    for kind in kinds:  # one type: its ids are not split; and in the order of its features
        table = Table("t", ["b", "a"], usual_plan(kind, 8, 1, 1), config=LRU)
        cases[kind] = Case([table], pooled)
        if pooled:
            mean = dataclasses.replace(table, pooling="MEAN")
            # The sums of spread rows are divided after the output dist.
            cases[f"{kind}, mean"] = Case([mean, *cases["plain"].tables], exact=kind in WHOLE_ROWS)
    return cases


def train_cases(cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        try:
            rows = check_trains_as_unsharded(case)
        except Exception as error:
            raise AssertionError(f"case '{name}'") from error
        assert rows > 0 or not case.backward


@pytest.mark.parametrize("plans", EVERY_PLAN)
def test_every_plan_trains_as_unsharded(plans: str) -> None:
    workers.run(train_cases, cases_of(plans), world_size=1)


def train_processors() -> None:
    for kinds in (WHOLE_ROWS, SPREAD_ROWS):
        tables = [
            Table(f"t{i}", [f"f{i}", "shared"], usual_plan(kind, 8, 1, 1))
            for i, kind in enumerate(kinds)
        ]
        for form, variable in (("collection", False), ("collection", True), ("modules", False)):
            case = Case(tables, weighted=True, variable=variable)
            assert train_processed(case, form) > 0


def test_processors_train_as_unsharded() -> None:
    workers.run(train_processors, world_size=1)


def train_through_pipelines(run: Run) -> None:
    """Beside a static collection, whose exchanges the pipelines join."""
    expected = pipeline_runs.train(run, "base")
    for name in ("sparse_dist", "sparse_dist_late_enqueue", "fused", "prefetch"):
        got = pipeline_runs.train(run, name)
        assert got["losses"] == expected["losses"], name
        check_same_states(got["states"], expected["states"])


@pytest.mark.parametrize("variable", [False, True])
def test_pipelines_train_as_a_plain_loop(variable: bool) -> None:
    run = Run(("table_wise", "row_wise", "column_wise"), SEQUENCE, variable=variable, steps=4)
    run = dataclasses.replace(run, beside=not variable, dedup=variable)
    workers.run(train_through_pipelines, run, world_size=1)


def train_full_tables(run: Run) -> None:
    """In a plain loop and through pipelines, which take steps ahead, too, or look up before the backward."""
    expected = pipeline_runs.train(run, "base")
    results = {
        name: pipeline_runs.train(run, name) for name in ("sparse_dist", "fused", "prefetch")
    }
    results["steps"] = pipeline_runs.train_with_steps_ahead(run)
    for name, got in results.items():
        assert got["losses"] == expected["losses"], name
        check_same_states(got["states"], expected["states"])
    evicted = [count["evicted_full"] for count in expected["stats"].values()]
    assert min(evicted) > 0
    early, loop = pipeline_runs.train(run, "semi_sync"), pipeline_runs.train_in_a_loop(run, True)
    assert early["losses"] == loop["losses"] != expected["losses"]
    check_same_states(early["states"], loop["states"])


def test_pipelines_over_full_tables_train_as_loops() -> None:
    lives = [{"eviction": dyn.LeastRecentlyUsed(), "unseen": "initial"}]
    run = Run(("table_wise", "table_wise"), ("row_wise", "row_wise"), lives=lives)
    run = dataclasses.replace(run, rows=60, drift=40, steps=8)
    workers.run(train_full_tables, run, world_size=1)


def calls_of(function: Callable[[], Any]) -> tuple[Any, int]:
    """Returns a result and the number of Python calls that it took, without those of its own."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, calls - 1


def calls_of_stages(
    kind: str, is_static: bool = False, config: dyn.DynamicTableConfig | None = None
) -> int:
    """Returns the Python calls of a forward of ten tables, stage by stage."""
    world = dist.get_world_size()
    plans = [usual_plan(kind, 8, world, world, turn) for turn in range(10)]
    case = Case([Table(f"t{i}", [f"f{i}"], plan, config=config) for i, plan in enumerate(plans)])
    model = DistributedModelParallel(
        Holder(collection_of(case, is_static)),
        plan=ShardingPlan({"collection": {table.name: table.plan for table in case.tables}}),
        sharders=[EmbeddingBagCollectionSharder(FUSED_PARAMS) if is_static else sharder_of(case)],
    )
    module = model.module.collection
    lengths = torch.arange(640) % 3
    features = KeyedJaggedTensor(
        [f"f{i}" for i in range(10)], torch.arange(int(lengths.sum())) % 50, lengths=lengths
    )
    for _ in range(3):
        module(features).values().sum().backward()
    ctx, _ = calls_of(module.create_context)
    sent, sending = calls_of(lambda: module.input_dist(ctx, features))
    arrived, waiting = calls_of(lambda: sent.wait().wait())
    looked_up, lookup = calls_of(lambda: module.compute(ctx, arrived))
    output, sending_back = calls_of(lambda: module.output_dist(ctx, looked_up).wait())
    assert output.values().requires_grad
    return sending + waiting + lookup + sending_back


def check_calls() -> None:
    for kind in POOLED:
        # Ids of column shards are repeated, and their outputs are put in order.
        most = 300 if SHARDING_TRAITS[kind].cuts_columns else 200
        assert calls_of_stages(kind) <= most, kind
        assert calls_of_stages(kind, config=POLICIES) <= most + 60, kind


def check_calls_of_ranks() -> None:
    for kind in ("table_wise", "row_wise"):
        ours, static = calls_of_stages(kind), calls_of_stages(kind, is_static=True)
        assert ours <= static, (kind, ours, static)


def test_a_forward_takes_few_python_calls() -> None:
    """TorchRec's static tables take 518, or 628 if rows are spread, and 617 if columns are cut."""
    workers.run(check_calls, world_size=1)


def test_a_forward_of_two_ranks_takes_no_more_python_calls_than_static_tables() -> None:
    workers.run(check_calls_of_ranks, world_size=2)
