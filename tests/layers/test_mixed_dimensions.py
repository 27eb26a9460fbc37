"""Block and quotient-remainder embeddings in models: trained under every plan, and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mixed_training
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly
from mixed_cases import batch, some_grad
from mixed_training import collection_of
from workers import run

from torchrec_dyn import serving

OPS = ("mult", "add", "concat")
MIXED = ["row_wise", "table_wise", "column_wise"]


@pytest.mark.parametrize("plan", [["table_wise"], ["row_wise"], ["column_wise"], MIXED])
@pytest.mark.parametrize("kind", ["block", "mult"])
def test_two_ranks_train_as_one(kind: str, plan: list[str]) -> None:
    assert min(run(mixed_training.train_beside, kind, plan, [5, 3], False, world_size=2)) > 50


def test_quotients_and_remainders_that_travel_once() -> None:
    sizes = [0, 6]
    rows = run(mixed_training.train_beside, "mult", MIXED, sizes, True, True, world_size=2)
    assert min(rows) > 50


@pytest.mark.parametrize("kind", ["add", "concat"])
def test_the_other_ops(kind: str) -> None:
    assert min(run(mixed_training.train_beside, kind, MIXED, [4, 4], False, world_size=2)) > 50


@pytest.mark.parametrize("kind", ["block", "mult"])
def test_weighted_bags_and_a_rank_without_any(kind: str) -> None:
    assert min(run(mixed_training.train_beside, kind, MIXED, [0, 6], True, world_size=2)) > 50


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("block", ["table_row_wise", "grid_shard", "row_wise"]), ("mult", MIXED)],
)
def test_two_nodes_of_two_ranks(kind: str, plan: list[str]) -> None:
    sizes = [3, 5, 1, 4]
    rows = run(mixed_training.train_beside, kind, plan, sizes, False, world_size=4, local_size=2)
    assert min(rows) > 50


@pytest.mark.parametrize("kind", ["block", *OPS])
def test_a_batch_size_per_feature(kind: str) -> None:
    assert min(run(mixed_training.train_varied, kind, MIXED, world_size=2)) > 10


def test_projections_made_on_meta_start_alike_on_all_ranks() -> None:
    assert run(mixed_training.from_meta, "block", world_size=2) == [2, 2]


AHEAD: dict[str, Any] = {"pipeline_postproc": True}


@pytest.mark.parametrize(
    ("kind", "pipeline", "options", "run_ahead"),
    [
        ("block", "TrainPipelineSparseDist", {}, 1),
        ("mult", "TrainPipelineSparseDist", {}, 0),
        ("mult", "TrainPipelineSparseDist", AHEAD, 2),
        ("concat", "TrainPipelineSparseDist", AHEAD, 2),
    ],
)
def test_pipelines(kind: str, pipeline: str, options: dict[str, Any], run_ahead: int) -> None:
    plain = run(mixed_training.train_pipelined, kind, "TrainPipelineBase", {}, world_size=2)
    piped = run(mixed_training.train_pipelined, kind, pipeline, options, world_size=2)
    for (expected, _), (got, modules) in zip(plain, piped, strict=True):
        assert got == expected
        assert modules == run_ahead


@pytest.mark.parametrize("kind", ["block", "mult"])
def test_a_checkpoint_moves_to_another_plan(kind: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = run(mixed_training.train_and_save, kind, folder, world_size=2)
    loaded = run(mixed_training.load, kind, folder, MIXED, world_size=4, local_size=2)
    assert all(one == pytest.approx(saved[0], rel=1e-5) for one in [*saved, *loaded])


# Served: the inner collections are replaced


@pytest.mark.parametrize("kind", ["block", "mult", "concat"])
def test_served_rows_in_the_place_of_trained_ones(kind: str, tmp_path: Path) -> None:
    model = collection_of(kind)
    for step in range(2):
        output = model(batch(step)).values()
        output.backward(some_grad(output))
    model.eval()
    expected = model(batch(0)).values().detach()
    quietly(dcp.save, {"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    folder = tmp_path / "served"
    serving.build(tmp_path / "saved", folder)
    if kind == "block":
        configs = model.rows.embedding_bag_configs()
        model.rows = serving.ServingEmbeddingBagCollection(folder, configs)
    else:
        for width, one in model.rows.items():
            model.rows[width] = serving.ServingEmbeddingCollection(folder, one.embedding_configs())
    assert expected.abs().sum() > 0
    assert torch.equal(model(batch(0)).values(), expected)
