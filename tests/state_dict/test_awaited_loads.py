"""A forward between `dcp.load` and `load_state_dict` is an error, until the rows are loaded or dropped."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import differences, held, put, quietly, save, state_dict_of, tables_of
from checkpoint_small import case, on_one, read, sharded, step
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner, drop_load
from torchrec_dyn.state_dict import TableLoad

NAMES = ("t", "u")
AWAITED = r"expected load_state_dict after dcp.load .* for tables \['t', 'u'\] are not in these.*drop_load"


def forward(model: Any) -> None:
    step(model, [5], [6], names=NAMES)


def check_awaited(model: Any) -> None:
    """Asserts that training and evaluation are errors that change nothing."""
    for mode in (True, False):
        with pytest.raises(ValueError, match=AWAITED):
            forward(model.train(mode))
    model.train()


def check_in_all_ways(path: str) -> None:
    model = sharded(case(world=2, names=NAMES))
    step(model, [1, 2], [3, 4], names=NAMES)
    save(model, path)

    def rows() -> list[int]:
        return [dyn.read_num_rows(model.module.collection, name) for name in NAMES]

    # loaded: the next forward trains
    state = read(state_dict_of(model), path)
    check_awaited(model)
    model.load_state_dict(state["model"])
    forward(model)
    assert rows() == [3, 3]
    # dropped, and the state dict is gone
    state = read(state_dict_of(model), path)
    assert drop_load(model) == list(NAMES) and drop_load(model) == []
    forward(model)
    del state
    # forgotten: the error does not depend on the state dict
    read(state_dict_of(model), path)
    gc.collect()
    check_awaited(model)
    # one table of two is not enough
    state = read(state_dict_of(model), path)["model"]
    part = {key: value for key, value in state.items() if ".u." not in key}
    model.load_state_dict(part, strict=False)
    with pytest.raises(ValueError, match=r"tables \['u'\]"):
        forward(model)
    model.load_state_dict({k: v for k, v in state.items() if ".u." in k}, strict=False)
    forward(model)
    assert rows() == [3, 3]
    # the optimizer alone, and what DCP loads by itself
    optimizer = {"optimizer": state_dict_of(model)["optimizer"]}
    read(optimizer, path)
    forward(model)


def test_on_every_rank(tmp_path: Path) -> None:
    workers.run(check_in_all_ways, str(tmp_path / "saved"), world_size=2)


def test_a_dropped_load_frees_its_rows_and_leaves_the_table(tmp_path: Path) -> None:
    assert on_one(drops_staged_rows, tmp_path)


def drops_staged_rows(path: str) -> bool:
    model = sharded(case())
    step(model, [1, 2, 3])
    save(model, path)
    step(model, [4, 5])
    before = held(model)
    state = read(state_dict_of(model), path)
    targets = {id(value.entry): value.entry for value in state["model"].values()}.values()
    staged = [target.staged for target in targets]
    drop_load(model)
    return (
        all(rows is not None for rows in staged)
        and all(target.staged is None for target in targets)
        and str(held(model)) == str(before)
    )


def drops_one_of_two(path: str) -> tuple[int, int]:
    student, teacher = sharded(case()), sharded(case())
    step(student, [1, 2, 3])
    step(teacher, [4, 5, 6, 7])

    def both() -> dict[str, Any]:
        return {"student": state_dict_of(student), "teacher": state_dict_of(teacher)}

    quietly(dcp.save, both(), checkpoint_id=path)
    expected = held(teacher)
    student, teacher = sharded(case()), sharded(case())
    state = read(both(), path)
    assert drop_load(student) == ["t"]
    put(teacher, state["teacher"])
    assert not differences(held(teacher), expected)
    step(student, [1])
    step(teacher, [4])
    return tables_of(student)[0].num_rows, tables_of(teacher)[0].num_rows


def test_a_dropped_load_leaves_the_rows_of_another_model(tmp_path: Path) -> None:
    assert on_one(drops_one_of_two, tmp_path) == (1, 4)


def fails_on_one_rank(path: str) -> None:
    model = sharded(case(2, "row_wise", rows=4000))
    step(model, list(range(0, 900, 3)))
    save(model, path)

    def fail(folder: str) -> Any:
        planner, state = LoadPlanner(path=folder), state_dict_of(model)
        with pytest.raises(CheckpointException):
            quietly(dcp.load, state, checkpoint_id=path, planner=planner)
        return state

    is_last = dist.get_rank() == 1
    fail(f"{path}_not_mounted" if is_last else path)  # before any rank reads rows
    step(model, [1])
    assert drop_load(model) == []
    with pytest.MonkeyPatch.context() as patch:
        if is_last:
            patch.setattr(TableLoad, "_check_configs", mock.Mock(side_effect=OSError))
        state = fail(path)
    with pytest.raises(ValueError, match=r"rows that were read for tables \['t'\]"):
        step(model, [1])
    with pytest.raises(ValueError, match="got a load that failed"):  # not the table's own tensors
        model.load_state_dict(state["model"])
    assert drop_load(model) == ["t"]
    step(model, [1])


def test_a_load_that_fails_on_one_rank_is_awaited_on_all_or_none(tmp_path: Path) -> None:
    workers.run(fails_on_one_rank, str(tmp_path / "saved"), world_size=2)
