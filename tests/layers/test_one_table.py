"""Modules of one table in models: every plan, uneven inputs, pipelines, the stock planner, checkpoints."""

from functools import cache
from typing import Any

import one_table_training
import pytest
import workers
from one_table_training import KINDS, OneTable

SEQUENCE = ["table_wise", "row_wise", "column_wise"]
WHOLE_ROWS = ["table_wise", "column_wise", "table_column_wise"]
POOLED = [*WHOLE_ROWS, "row_wise", "table_row_wise", "grid_shard"]


def train_beside(of: OneTable) -> int:
    rows = workers.run(
        one_table_training.train_beside, of, world_size=of.world, local_size=of.local, timeout=120
    )
    return sum(rows)


@pytest.mark.parametrize("padding", [None, 100])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_rows(plan: str, padding: int | None) -> None:
    assert train_beside(OneTable("rows", plan, options={"padding_idx": padding})) > 50


@pytest.mark.parametrize("plan", POOLED)
@pytest.mark.parametrize(("mode", "weighted"), [("sum", True), ("mean", False), ("mean", True)])
def test_bags(mode: str, plan: str, weighted: bool) -> None:
    exact = plan in WHOLE_ROWS
    of = OneTable(mode, plan, 4, 2, exact, weighted, options={"padding_idx": 100})
    assert train_beside(of) > 50


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_bags_whose_weights_learn(mode: str, plan: str) -> None:
    of = OneTable(mode, plan, weighted=True, options={"weight_gradients": True})
    assert train_beside(of) > 50


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_tiles(plan: str, weighted: bool) -> None:
    assert train_beside(OneTable("tile", plan, weighted=weighted)) > 30


@pytest.mark.parametrize("mode", ["rows", "mean", "tile"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_several_calls_a_step(mode: str, plan: str) -> None:
    assert train_beside(OneTable(mode, plan, calls=3)) > 30


@pytest.mark.parametrize("mode", ["rows", "mean", "tile"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_no_ids_on_any_rank(mode: str, plan: str) -> None:
    assert train_beside(OneTable(mode, plan, empty=True)) == 0


@pytest.mark.parametrize("mode", ["rows", "tile"])
def test_each_id_is_sent_once(mode: str) -> None:
    assert train_beside(OneTable(mode, "row_wise", exact=False, dedup=True)) > 30


# In models: pipelines, the stock planner, checkpoints, and errors


@cache
def trained(pipeline: str, **options: Any) -> Any:
    return workers.run(run, pipeline, options, world_size=2)


def run(pipeline: str, options: dict[str, Any]) -> Any:
    return one_table_training.train(pipeline, **options)


@pytest.mark.parametrize(
    ("pipeline", "ahead"),
    [
        ("TrainPipelineSparseDist", False),
        ("TrainPipelineSparseDist", True),
        ("TrainPipelineSparseDistLite", False),
        ("TrainPipelineSparseDistLite", True),
    ],
)
def test_pipelines_train_as_the_plain_loop(pipeline: str, ahead: bool) -> None:
    plain = trained("TrainPipelineBase")
    options = {"pipeline_postproc": True} if ahead else {}
    for (got, pipelined), (expected, _) in zip(trained(pipeline, **options), plain, strict=True):
        assert got == expected
        # A module reads the input: TorchRec pipelines it only in pipelines that run such modules ahead.
        assert pipelined == ([f"{name}.collection" for name in KINDS] if ahead else [])


def test_called_twice_in_a_pipeline() -> None:
    # Without running ahead: correct numbers. With it: an error of TorchRec, not the first call's rows twice.
    assert trained("TrainPipelineSparseDist", twice=True) == trained(
        "TrainPipelineBase", twice=True
    )
    refused = workers.run(call_twice_ahead, world_size=2)
    assert all("invoked more than once" in fault for fault in refused)


def call_twice_ahead() -> str:
    with pytest.raises(AssertionError) as caught:
        one_table_training.train("TrainPipelineSparseDist", twice=True, pipeline_postproc=True)
    return str(caught.value)


def test_planner_and_what_is_refused() -> None:
    for kinds, refused, same, told in workers.run(one_table_training.plan_and_name, world_size=2):
        assert kinds == list(KINDS.values())
        assert refused.startswith(
            "DynamicEmbeddingBag(table='words'): expected weights without requires_grad"
        )
        assert refused.endswith("Make the module with weight_gradients=True, or detach them.")
        assert "'embedding'" in same and "unique in the model" in same, same
        assert "8, 1000, mode='mean', name='words', is_weighted=True" in told


def test_checkpoints_move_to_another_plan() -> None:
    (names, _) = workers.run(one_table_training.save_and_move, world_size=2)
    assert any(name.startswith("words.collection.embedding_bags.words.") for name in names)
    assert any(name.startswith("user.collection.embeddings.user.") for name in names)
