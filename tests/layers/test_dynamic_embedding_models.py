"""Modules of one table in a model: pipelines, the stock planner, checkpoints, and what is refused."""

from functools import cache
from typing import Any

import one_table_pipelines
import pytest
import workers
from one_table_pipelines import KINDS


@cache
def trained(pipeline: str, **options: Any) -> Any:
    return workers.run(run, pipeline, options, world_size=2)


def run(pipeline: str, options: dict[str, Any]) -> Any:
    return one_table_pipelines.train(pipeline, **options)


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
        # Input is read by a module: TorchRec runs it ahead only where it may run such modules ahead.
        assert pipelined == ([f"{name}.collection" for name in KINDS] if ahead else [])


def test_called_twice_in_a_pipeline() -> None:
    # Not run ahead: right numbers. Run ahead: an error of TorchRec's, not the first call's rows twice.
    assert trained("TrainPipelineSparseDist", twice=True) == trained(
        "TrainPipelineBase", twice=True
    )
    refused = workers.run(call_twice_ahead, world_size=2)
    assert all("invoked more than once" in fault for fault in refused)


def call_twice_ahead() -> str:
    with pytest.raises(AssertionError) as caught:
        one_table_pipelines.train("TrainPipelineSparseDist", twice=True, pipeline_postproc=True)
    return str(caught.value)


def test_planner_and_what_is_refused() -> None:
    for kinds, refused, same, told in workers.run(one_table_pipelines.plan_and_name, world_size=2):
        assert kinds == list(KINDS.values())
        assert refused.startswith(
            "DynamicEmbeddingBag(table='words'): expected weights that need no"
        )
        assert refused.endswith("Make the module with weight_gradients=True, or detach them.")
        assert "'embedding'" in same and "own" in same, same
        assert "8, 1000, mode='mean', name='words', is_weighted=True" in told


def test_checkpoints_move_to_another_plan() -> None:
    (names, _) = workers.run(one_table_pipelines.save_and_move, world_size=2)
    assert any(name.startswith("words.collection.embedding_bags.words.") for name in names)
    assert any(name.startswith("user.collection.embeddings.user.") for name in names)
