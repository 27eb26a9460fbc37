"""A state dict is of the moment it was made: a table that changed since cannot be saved through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import (
    Setup,
    batch,
    differences,
    held,
    load,
    new,
    quietly,
    run_on,
    save,
    state_dict_of,
    train,
)
from checkpoint_small import COUNTED, case, on_one, sharded, step
from sharded_training import outputs_by_name
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_dyn as dyn

SETUP = Setup(2, ("row_wise", "three_columns"), tables=2)


def run_backward(out: dict[str, torch.Tensor]) -> None:
    torch.autograd.backward(list(out.values()), [torch.ones_like(one) for one in out.values()])


def change(model: Any, setup: Setup, how: str) -> None:
    collection, ids = model.module.collection, torch.arange(100, 103)
    if how == "trained":
        train(model, setup, range(3, 4))
    elif how == "assigned":
        dyn.assign_rows(collection, "sixteen", ids, torch.ones(3, 12))
    elif how == "erased":
        dyn.erase_rows(collection, "sixteen", ids)
    elif how == "loaded":
        model.load_state_dict(state_dict_of(new(setup))["model"])


def save_after(setup: Setup, folder: str, how: str) -> str:
    """Changes the model after its state dict was made; gives the error of the save."""
    model = new(setup)
    train(model, setup, range(3))
    if how == "updated in backward":  # pipelines run a forward before the backward of another step
        out = outputs_by_name(setup.case(), model(batch(setup.case(), 3, dist.get_rank(), 2)))
    state = state_dict_of(model)
    run_backward(out) if how == "updated in backward" else change(model, setup, how)
    with pytest.raises(CheckpointException) as caught:
        quietly(dcp.save, state, checkpoint_id=folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "how",
    [
        "trained",
        "assigned",
        "erased",
        "loaded",
        "updated in backward",
    ],
)
def test_a_table_that_changed_is_not_saved(tmp_path: Path, how: str) -> None:
    for text in run_on(SETUP, save_after, str(tmp_path / "torn"), how):
        assert "expected the table as it was when its state dict was made" in text
        assert "save first, or keep copy.deepcopy(state_dict)" in text
    assert not (tmp_path / "torn" / ".metadata").exists()


def load_own(setup: Setup, how: str) -> str:
    model = new(setup)
    train(model, setup, range(3))
    state = state_dict_of(model)
    model.load_state_dict(state["model"])  # nothing was read into it: nothing to do
    if how == "unchanged":
        return ""
    change(model, setup, how)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state["model"])
    return str(caught.value)


def test_a_state_dict_into_which_nothing_was_read_cannot_bring_old_rows_back() -> None:
    assert run_on(SETUP, load_own, "unchanged") == ["", ""]
    for text in run_on(SETUP, load_own, "trained"):
        assert "expected the table as it was when its state dict was made" in text


def load_between(setup: Setup, folder: str) -> tuple[str, list[str]]:
    """Loads between a forward and its backward; gives the error and what the backward changed."""
    model = new(setup)
    train(model, setup, range(3))
    save(model, folder)
    out = outputs_by_name(setup.case(), model(batch(setup.case(), 3, dist.get_rank(), 2)))
    was = held(load(model, folder))
    with pytest.raises(RuntimeError) as caught:
        run_backward(out)
    return str(caught.value), differences(held(model), was)


def test_a_backward_does_not_reach_rows_that_were_loaded_since(tmp_path: Path) -> None:
    for text, changed in run_on(SETUP, load_between, str(tmp_path / "saved")):
        assert "expected the tables of the forward at its backward" in text
        assert not changed


def save_after_erase(path: str) -> str:
    names = ("t", "u")
    model = sharded(case(names=names, config=COUNTED))
    step(model, [1, 2, 3, 4], [5, 6, 7, 8], names=names)
    state = model.state_dict()
    model.module.collection.table("t").erase(torch.tensor([1, 2, 3, 4]))
    try:
        quietly(dcp.save, {"model": state}, checkpoint_id=path)
    except BaseException as error:  # DCP's is no Exception
        return str(error)
    return "saved"


def test_ids_that_waited_were_erased_before_the_save(tmp_path: Path) -> None:
    assert "trained or changed since" in on_one(save_after_erase, tmp_path)
