"""A checkpoint of static tables is not loaded into dynamic ones: the error names what loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import Setup, held, new, quietly, train
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from torchrec_dyn.state_dict.load_planner import LoadPlanner

EXPECTED = (
    "expected a dynamic table, got a static one. Leave its weight out of the load, and load its"
)
WAYS = ("torchrec_dyn.checkpoint.load_static", "torchrec_dyn.from_static")


def static_state() -> dict[str, Any]:
    """Returns the state dict of a model whose collection has a static table in place of the dynamic one."""
    table = EmbeddingBagConfig(9, 12, "plain", feature_names=["f_plain"])
    model = torch.nn.Module()
    model.collection = EmbeddingBagCollection(tables=[table])
    return model.state_dict()


def load_static_tables(path: str, world: int) -> list[str]:
    """Returns the errors of `load_state_dict` and of DCP."""
    setup = Setup(world, ("row_wise",), tables=1)
    model, told = new(setup), []
    train(model, setup, [1])
    before = held(model)
    for is_strict in (True, False):
        with pytest.raises(ValueError) as caught:
            model.load_state_dict(static_state(), strict=is_strict)
        told.append(str(caught.value))
    for allow_partial_load in (True, False):
        planner = LoadPlanner(allow_partial_load=allow_partial_load)
        state = {"model": model.state_dict()}
        with pytest.raises(CheckpointException) as failed:
            quietly(dcp.load, state, checkpoint_id=path, planner=planner)
        told.append(str(failed.value))
    now = held(model)
    assert before.keys() == now.keys()
    for name, one in before.items():
        assert torch.equal(one, now[name]) if isinstance(one, torch.Tensor) else one == now[name]
    return told


@pytest.mark.parametrize("world", [0, 2])
def test_a_static_table_is_refused(world: int, tmp_path: Path) -> None:
    """The weight was dropped without a word, or torch named a missing key."""
    quietly(dcp.save, {"model": static_state()}, checkpoint_id=tmp_path)
    if world:
        first, second = workers.run(load_static_tables, str(tmp_path), world, world_size=world)
        assert first == second
    else:
        first = load_static_tables(str(tmp_path), world)
    assert len(first) == 4
    for told in first:
        assert EXPECTED in told and all(way in told for way in WAYS)
    assert "'plain'" in first[0] and ".load_state_dict" in first[0]
    assert "'model.collection.embedding_bags.plain' of the checkpoint: expected" in first[2]
