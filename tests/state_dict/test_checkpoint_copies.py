"""A copy of a state dict holds the rows of that moment, and training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import (
    Setup,
    contents,
    differences,
    held,
    load,
    new,
    optimizer_of,
    put,
    quietly,
    run_on,
    state_dict_of,
    train,
)
from checkpoint_small import case, on_one, sharded, step, unsharded
from saved_cases import pieces
from sharded_training import Holder
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torchrec.inference.state_dict_transform import state_dict_gather

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format.saved_tensor import numbers_of

SETUP = Setup(2, ("row_wise", "column_wise", "three_columns", "table_wise"))


def compare_loaded(setup: Setup, was: dict[str, Any], fill: Callable[[Any], Any]) -> list[str]:
    model = new(setup)
    fill(model)
    return differences(held(model), was)


def save_while_training(setup: Setup, folder: str, stager: Any) -> list[str]:
    """Trains on while an asynchronous save is under way; gives what differs from the moment of the call."""
    model = new(setup)
    train(model, setup, range(3))
    was = held(model)
    future = quietly(
        dcp.async_save,
        state_dict_of(model),
        checkpoint_id=folder,
        process_group=dist.new_group(),  # its collectives run beside those of training
        async_stager=stager and stager(),
    )
    train(model, setup, range(3, 6))
    assert differences(held(model), was)
    quietly(future.result)
    return compare_loaded(setup, was, lambda fresh: load(fresh, folder))


@pytest.mark.parametrize("stager", [None, BlockingAsyncStager])
def test_async_save_saves_the_moment_of_the_call(tmp_path: Path, stager: Any) -> None:
    setup = replace(SETUP, names=("plain", "sixteen", "counted"))
    assert run_on(setup, save_while_training, str(tmp_path / "saved"), stager) == [[], []]


def copy_and_go_back(setup: Setup, folder: str) -> list[list[str]]:
    """A deep copy goes back into the model, into another one, and into a checkpoint."""
    model = new(setup)
    train(model, setup, range(3))
    was, kept = held(model), copy.deepcopy(state_dict_of(model))
    train(model, setup, range(3, 5))
    quietly(dcp.save, kept, checkpoint_id=folder)
    put(model, copy.deepcopy(kept))
    return [
        differences(held(model), was),
        compare_loaded(setup, was, lambda fresh: put(fresh, kept)),
        compare_loaded(setup, was, lambda fresh: load(fresh, folder)),
    ]


def test_deepcopy_keeps_the_rows(tmp_path: Path) -> None:
    assert run_on(SETUP, copy_and_go_back, str(tmp_path / "saved")) == [[[], [], []]] * 2


def test_a_copy_of_a_copy_has_numbers_of_its_own() -> None:
    """The parts of a copy are in memory, so another copy could refer to them."""
    whole = torch.arange(12.0).reshape(6, 2)
    first = copy.deepcopy(pieces(whole.clone(), rows=[4]))
    for second in (copy.deepcopy(first), first.clone()):
        assert torch.equal(numbers_of(second), whole)
        for _, block in second.local():
            block.fill_(-1)
        assert torch.equal(numbers_of(first), whole)


def save_with_torch(setup: Setup, folder: str, weights_only: bool) -> list[str]:
    """Every rank saves its own file and reads it again."""
    model = new(setup)
    train(model, setup, range(3))
    was, path = held(model), f"{folder}/{dist.get_rank()}.pt"
    torch.save(state_dict_of(model), path)
    train(model, setup, range(3, 4))
    return compare_loaded(
        setup, was, lambda fresh: put(fresh, torch.load(path, weights_only=weights_only))
    )


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_save_writes_the_rows_of_this_rank(tmp_path: Path, weights_only: bool) -> None:
    assert run_on(SETUP, save_with_torch, str(tmp_path), weights_only) == [[], []]


def give_whole(setup: Setup) -> dict[str, Any]:
    model = new(setup)
    train(model, setup, range(3))
    return state_dict_of(model)


def take_whole(setup: Setup, state: dict[str, Any], folder: str) -> None:
    model = new(setup)
    train(model, setup, range(5, 6))
    put(model, state)
    quietly(dcp.save, state_dict_of(model), checkpoint_id=folder)


def test_plain_tensors_of_all_rows_load_into_any_plan(tmp_path: Path) -> None:
    whole = Setup(0)
    (state,) = run_on(whole, give_whole)
    quietly(dcp.save, state, checkpoint_id=str(tmp_path / "whole"))
    for world, kinds in ((2, SETUP.kinds), (3, ("row_wise",)), (0, ("table_wise",))):
        path = str(tmp_path / str(world))
        run_on(Setup(world, kinds), take_whole, copy.deepcopy(state), path)
        assert not differences(contents(path), contents(tmp_path / "whole"))


def taken_in_small_chunks(path: str) -> list[list[str]]:
    """Plain tensors, then DCP's, of more rows and ids that wait than are read at once."""
    config = dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2), eviction=dyn.LeastRecentlyUsed())
    of = case(config=config)
    whole = Holder(unsharded(of))
    for _ in range(2):
        step(whole.collection, list(range(40)))
    step(whole.collection, [7, *range(50, 70)])
    plain = {"model": whole.state_dict(), "optimizer": optimizer_of(whole).state_dict()}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CHUNK_BYTES", "IDS_LOADED_TOGETHER"):
            patch.setattr(knobs, name, 7)
        model, again = sharded(of), sharded(of)
        put(model, copy.deepcopy(plain))
        quietly(dcp.save, state_dict_of(model), checkpoint_id=path)
        load(again, path)
    return [differences(held(one), held(whole)) for one in (model, again)]


def test_tables_of_many_chunks(tmp_path: Path) -> None:
    assert on_one(taken_in_small_chunks, tmp_path) == [[], []]


def copied_row_wise_state(kind: str) -> list[str]:
    model = sharded(case(2, kind, optimizer="EXACT_ROWWISE_ADAGRAD"))
    step(model, list(range(20)))
    expected = held(model)
    state = copy.deepcopy(state_dict_of(model))
    step(model, [1, 50])
    put(model, state)
    return differences(held(model), expected)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "three_columns"])
def test_copies_of_row_wise_state(kind: str) -> None:
    assert workers.run(copied_row_wise_state, kind, world_size=2) == [[], []]


# The state dict of another live model


def load_from_another(setup: Setup) -> list[list[str]]:
    """Returns the differences after a load from another model, and after a step of both."""
    model, other = new(setup), new(setup)
    train(model, setup, range(2))
    train(other, setup, range(2, 4))
    put(model, state_dict_of(other))
    loaded = differences(held(model), held(other))
    train(model, setup, range(4, 5))
    train(other, setup, range(4, 5))
    return [loaded, differences(held(model), held(other))]


@pytest.mark.parametrize("pooled", [True, False])
def test_a_model_loads_the_state_dict_of_another_model(pooled: bool) -> None:
    setup = Setup(2, ("table_wise", "row_wise"), pooled=pooled)
    assert run_on(setup, load_from_another) == [[[], []], [[], []]]


def own_on_one_rank() -> list[str]:
    models = [sharded(case(2)) for _ in range(2)]
    texts = []
    for model, other in (models, [one.fused_optimizer for one in models]):
        states = [one.state_dict() for one in (model, other)]
        with pytest.raises(ValueError) as caught:
            model.load_state_dict(states[dist.get_rank()])
        texts.append(str(caught.value))
    return texts


def test_state_dicts_of_two_models_by_rank_are_an_error() -> None:
    heard = workers.run(own_on_one_rank, world_size=2)
    assert heard[0] == heard[1] and "expected the same tables on every rank" in heard[0][0]
    assert "expected the same tables on every rank, got" in heard[0][1]


# TorchRec's state_dict_gather


def gather_into_unsharded(kind: str, ids: list[int]) -> str:
    model, whole = sharded(case(2, kind)), Holder(unsharded(case()))
    step(model, [1, 2, 3, 4])
    step(whole.collection, ids)
    try:
        state_dict_gather(model.state_dict(), whole.state_dict())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "gathered"


@pytest.mark.parametrize("ids", [[], [1, 2, 3, 4]])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_state_dict_gather_is_the_same_error_on_every_rank(kind: str, ids: list[int]) -> None:
    heard = workers.run(gather_into_unsharded, kind, ids, world_size=2)
    assert heard[0] == heard[1]
    assert heard[0].startswith(
        "ValueError: SavedTensor: expected to be saved by torch.distributed."
    )
    assert "dcp.save" in heard[0]
