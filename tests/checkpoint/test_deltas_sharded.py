"""Deltas of sharded tables, applied to copies under other plans, on other ranks, and unsharded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import workers
from checkpoint_cases import (
    LOCAL_SIZES,
    ROW_WISE,
    ROW_WISE_STATES,
    Setup,
    batch,
    held,
    load,
    new,
    quietly,
    same_bits,
    save,
    train,
)
from sharded_training import collection_of
from shards import deep_but

from torchrec_dyn.checkpoint import apply_delta, export_delta, mark
from torchrec_dyn.state_dict import saved_sums
from torchrec_dyn.whole_model import tables_of

STEPS = ((0, 2), (2, 5))


def edit(model, setup: Setup, round_: int) -> None:
    """Erases and assigns some ids that the batches name, each rank its own."""
    rank = dist.get_rank()
    for name in EDITED:
        handle = model.module.collection.table(name)
        ids = batch(setup.case(), round_, rank, setup.world)[f"f_{name}"].values()
        handle.erase(ids[::3].contiguous())
        others = ids[1::4].contiguous()
        handle.assign(others, (others[:, None] % 7 + torch.arange(12.0)) / 16)


def sums_of(model) -> list:
    """The content sums of all tables, by name."""
    tables = tables_of(model, "test")
    sums = saved_sums(tables, "test")
    return sorted(
        ((table.name, sums) for table, sums in zip(tables, sums, strict=True)),
        key=lambda pair: pair[0],
    )


def export_all(setup: Setup, folder: str) -> list:
    """Trains and exports, from the untrained model on; a full checkpoint is saved on the way."""
    model = new(setup)
    marker, sums = mark(model), []
    for number, (begin, end) in enumerate(STEPS):
        train(model, setup, range(begin, end))
        edit(model, setup, number)
        marker = quietly(export_delta, model, f"{folder}/{number}", marker)
        if number == 0:
            save(model, f"{folder}/full")
        sums.append(sums_of(model))
    return sums


def apply_all(setup: Setup, folder: str, numbers) -> list:
    model, sums = new(setup), []
    if numbers[0]:
        load(model, f"{folder}/full")
    for number in numbers:
        quietly(apply_delta, model, f"{folder}/{number}")
        sums.append(sums_of(model))
    return sums


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns the folder of `export_all` of a setup, and its sums; each setup exports once."""

    @cache
    def once(setup: Setup):
        folder = tmp_path_factory.mktemp("exported")
        return folder, run(export_all, setup, str(folder))

    return once


def run(function, setup: Setup, *args):
    """The same on every rank."""
    world = setup.world
    results = workers.run(
        function, setup, *args, world_size=world, local_size=LOCAL_SIZES[world], timeout=200
    )
    assert all(one == results[0] for one in results)
    return results[0]


EDITED = ("plain", "counted", "drawn")
CASES = [
    (Setup(2, ("row_wise",)), Setup(2, ("column_wise",))),
    (Setup(4, ("grid_shard", "table_row_wise"), names=EDITED), Setup(1, names=EDITED)),
    (
        Setup(2, ("column_wise", "row_wise")),
        Setup(3, ("row_wise", "three_columns", "table_wise")),
    ),
    (
        Setup(3, ("row_wise", "table_wise"), False, "ADAM"),
        Setup(2, ("three_columns",), False, "ADAM"),
    ),
]


@pytest.mark.parametrize(("source", "copy"), deep_but(CASES[:2], CASES))
def test_full_and_deltas_are_full_later_on_any_plan(exported, source, copy):
    folder, expected = exported(source)
    assert expected[0] != expected[1]
    assert run(apply_all, copy, str(folder), [0, 1]) == expected
    assert run(apply_all, copy, str(folder), [1]) == expected[1:]


def test_an_unsharded_copy(exported):
    setup = CASES[1][0]
    folder, expected = exported(setup)
    copy = collection_of(setup.case(), fused_params=setup.case().fused_params)
    for number in range(len(STEPS)):
        quietly(apply_delta, copy, folder / str(number))
        assert sums_of(copy) == expected[number]


@pytest.mark.parametrize("optimizer", deep_but(ROW_WISE[:1], ROW_WISE))
def test_row_wise_state_under_equal_and_other_cuts(tmp_path, optimizer):
    """Other cuts: all but the numbers per column shard is as it was; those are converted."""
    source = Setup(2, ("column_wise",), optimizer=optimizer, names=EDITED)
    expected = run(export_all, source, str(tmp_path))
    assert run(apply_all, source, str(tmp_path), [0, 1]) == expected
    other = replace(source, kinds=("row_wise",))
    other = run(apply_all, other, str(tmp_path), [0, 1])
    for mine, theirs in zip(other[-1], expected[-1], strict=True):
        row_wise = ROW_WISE_STATES[optimizer]
        differs = {name for name, total in mine[1].items() if total != theirs[1][name]}
        assert row_wise in differs and differs <= {row_wise, "optimizer_config"}


def goes_on(setup: Setup, folder: str) -> None:
    """A copy under the same plan trains on as its model does."""
    model, copy = new(setup), new(setup)
    marker = mark(model)
    train(model, setup, range(3))
    quietly(export_delta, model, f"{folder}/0", marker)
    quietly(apply_delta, copy, f"{folder}/0")
    for one in (model, copy):
        train(one, setup, (3, 4, 6, 9))  # ids expire
    mine, theirs = held(model), held(copy)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not same_bits(mine[name], theirs[name])]


def test_a_copy_trains_on_as_its_model_does(tmp_path):
    run(goes_on, Setup(2, ("row_wise", "column_wise")), str(tmp_path))


def fails_on_one_rank(setup: Setup, folder: str) -> None:
    """Whatever goes wrong on one rank is an error on all, and no table changes."""
    model, copy = new(setup), new(setup)
    marker = mark(model)
    train(model, setup, range(3))
    before = held(copy)

    def refuses(call, message):
        with pytest.raises((ValueError, RuntimeError), match=message):
            quietly(call)
        after = held(copy)
        assert not [name for name in before if not same_bits(before[name], after[name])]

    mine = f"{folder}/0" if dist.get_rank() else __file__
    refuses(lambda: export_delta(model, mine, marker), "expected a new directory")
    other = mark(copy) if dist.get_rank() else marker
    if not dist.get_rank():
        mark(copy)
    refuses(
        lambda: export_delta(model, f"{folder}/0", other), "expected a marker of this table object"
    )
    assert not Path(folder, "0").exists()
    quietly(export_delta, model, f"{folder}/0", marker)
    path = f"{folder}/nowhere" if dist.get_rank() else f"{folder}/0"
    refuses(lambda: apply_delta(copy, path), "nowhere")
    shards = copy.module.collection._shards._tables["plain"]
    if dist.get_rank():
        for shard in shards:
            shard.reserve = _no_memory
    refuses(lambda: apply_delta(copy, f"{folder}/0"), "no memory")
    for shard in shards:
        shard.__dict__.pop("reserve", None)
    quietly(apply_delta, copy, f"{folder}/0")
    assert sums_of(copy) == sums_of(model)
    before = held(copy)
    refuses(lambda: apply_delta(copy, f"{folder}/0"), "was applied already")


def _no_memory(rows: int) -> None:
    raise MemoryError("no memory")


def test_an_error_on_one_rank_is_an_error_on_all_and_changes_nothing(tmp_path):
    run(fails_on_one_rank, Setup(2, ("row_wise",), names=EDITED), str(tmp_path))
