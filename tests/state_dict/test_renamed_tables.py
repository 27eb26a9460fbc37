"""Tables that were saved under another name: by a planner of DCP, or in a state dict."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import (
    Setup,
    held,
    load,
    new,
    put,
    quietly,
    run_on,
    save,
    state_dict_of,
    train,
)
from renamed_cases import NAMES, RENAME, Renamed, check_same_contents
from sharded_training import Holder, optimizer_of
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner, open_checkpoint, rename_tables


def save_trained(setup: Setup, folder: str) -> None:
    model = new(setup)
    train(model, setup, range(2))
    save(model, folder)


def load_renamed(setup: Setup, folder: str, again: str, with_path: bool) -> None:
    model = new(setup)
    train(model, setup, range(1))
    load(model, folder, LoadPlanner(rename=RENAME, path=folder if with_path else None))
    save(model, again)
    train(model, setup, range(2, 3))  # rows are not torn, and no load is awaited


ADAGRAD = "EXACT_ROWWISE_ADAGRAD"  # a number per row and column shard: both plans cut alike
WHOLE, CUT = ("row_wise", "table_wise"), ("column_wise", "row_wise", "column_wise")
NODES = ("table_row_wise", "grid_shard", "table_column_wise")
PAIRS = [  # ranks, plans and kind of collection of the save; ranks and plans of the load
    (0, WHOLE, True, 0, WHOLE, ADAGRAD),
    (0, WHOLE, False, 2, (*WHOLE, "column_wise"), "ADAM"),
    (2, CUT, True, 0, WHOLE, "ADAM"),
    (2, CUT, True, 2, CUT, ADAGRAD),
    (4, NODES, True, 4, ("grid_shard", "three_columns", "row_wise"), "ADAM"),
    (2, WHOLE, True, 4, (*WHOLE, "table_row_wise"), ADAGRAD),
]


@pytest.mark.parametrize("with_path", [False, True])
@pytest.mark.parametrize(("ranks", "kinds", "pooled", "later", "other", "optimizer"), PAIRS)
def test_dcp_loads_renamed_tables(
    ranks: int, kinds: Any, pooled: bool, later: int, other: Any,
    optimizer: str, with_path: bool, tmp_path: Path,
) -> None:  # fmt: skip
    saved, again = tmp_path / "saved", tmp_path / "again"
    options: dict[str, Any] = {"pooled": pooled, "optimizer": optimizer, "names": NAMES}
    run_on(Setup(ranks, kinds, **options), save_trained, str(saved))
    run_on(Renamed(later, other, **options), load_renamed, str(saved), str(again), with_path)
    check_same_contents(saved, again, RENAME)
    for table in open_checkpoint(again).tables.values():
        table.verify()
    names = {table.name for table in open_checkpoint(again).tables.values()}
    assert names == {"flat", "sixteen", "tally"}


def load_state_dict(setup: Setup, file: bytes, again: str) -> None:
    """Loads the state dicts of an unsharded model, the optimizer's alone after the model's."""
    state = torch.load(io.BytesIO(file), weights_only=True)
    model, renamed = new(setup), rename_tables(state, RENAME)
    quietly(put, model, renamed)
    save(model, again)
    other = new(setup)
    other.load_state_dict(rename_tables(state["model"], RENAME))
    optimizer_of(other).load_state_dict(rename_tables(state["optimizer"], RENAME))
    first, second = held(model), held(other)
    assert first.keys() == second.keys() and all(first[k].equal(second[k]) for k in first)


@pytest.mark.parametrize(
    ("later", "other"), [(0, ("table_wise",)), (2, ("row_wise", "table_wise", "row_wise"))]
)
@pytest.mark.parametrize("optimizer", ["EXACT_ROWWISE_ADAGRAD", "lion"])
def test_state_dicts(optimizer: str, later: int, other: Any, tmp_path: Path) -> None:
    setup = Setup(0, optimizer=optimizer, names=NAMES)
    model = new(setup)
    train(model, setup, range(2))
    save(model, tmp_path / "saved")
    state, file = state_dict_of(model), io.BytesIO()
    before = copy.deepcopy(state["model"])
    rename_tables(state, RENAME)
    assert all(before[key].equal(value) for key, value in state["model"].items())  # as it was
    torch.save(state, file)
    again = tmp_path / "again"
    into = Renamed(later, other, optimizer=optimizer)
    run_on(into, load_state_dict, file.getvalue(), str(again))
    check_same_contents(tmp_path / "saved", again, RENAME)


def collection(*names: str) -> Any:
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=4, num_embeddings=50, feature_names=[f"f{number}"]
        )
        for number, name in enumerate(names)
    ]
    return dyn.DynamicEmbeddingBagCollection(configs, fused_params={"optimizer": "ADAM"})


def step(ebc: Any, *ids: int) -> None:
    keys = [f"f{number}" for number in range(len(ebc.embedding_bag_configs()))]
    values = torch.tensor(ids).repeat(len(keys))
    ebc(
        KeyedJaggedTensor(keys, values, lengths=torch.full((len(keys),), len(ids)))
    ).values().sum().backward()


def test_two_tables_swap_their_names() -> None:
    model, other = collection("a", "b"), collection("a", "b")
    step(model, 1, 2)
    swap = {"a": "b", "b": "a"}
    other.load_state_dict(rename_tables(model.state_dict(), swap))
    other.fused_optimizer.load_state_dict(rename_tables(model.fused_optimizer.state_dict(), swap))
    ids = torch.tensor([1, 2])
    for old, name in swap.items():
        assert other.table(name).lookup(ids)[0].equal(model.table(old).lookup(ids)[0])
    assert not other.table("a").lookup(ids)[0].equal(model.table("a").lookup(ids)[0])


def test_new_ids_start_as_in_a_table_of_the_new_name() -> None:
    model, other, fresh = collection("a"), collection("b"), collection("b")
    step(model, 1)
    other.load_state_dict(rename_tables(model.state_dict(), {"a": "b"}))
    batch = KeyedJaggedTensor(["f0"], torch.tensor([9]), lengths=torch.tensor([1]))
    with torch.no_grad():
        assert other(batch).values().equal(fresh(batch).values())
        assert not model(batch).values().equal(fresh(batch).values())


def test_what_was_damaged_is_refused() -> None:
    model, other = collection("a"), collection("b")
    step(model, 1, 2)
    for name in ("weight", "config"):
        state = copy.deepcopy(model.state_dict())
        changed = state[f"embedding_bags.a.{name}"]
        changed.view(torch.uint8).flatten()[-3] ^= 1
        with pytest.raises((ValueError, RuntimeError), match="damaged"):
            other.load_state_dict(rename_tables(state, {"a": "b"}))
    assert other.table("b").num_rows == 0


@pytest.mark.parametrize(
    ("rename", "text"),
    [
        ({"c": "d"}, r"expected names among the saved tables \['a', 'b'\], got \['c'\]"),
        ({"a": "b"}, r"expected new names that no other saved table has, got \['b'\]"),
        ({"a": "x", "b": "x"}, r"expected a new name for one saved table, got \['x'\] for several"),
        (["a", "b"], r"expected a dict of new names of tables .*, got \['a', 'b'\]"),
        ({"a": 3}, r"expected a dict of new names of tables .*, got \{'a': 3\}"),
    ],
)
def test_wrong_names(rename: Any, text: str, tmp_path: Path) -> None:
    model, other = Holder(collection("a", "b")), Holder(collection("a", "x"))
    step(model.collection, 1)
    for state in (model.state_dict(), state_dict_of(model)):
        with pytest.raises(ValueError, match=rf"^rename_tables\.rename: {text}"):
            rename_tables(state, rename)
    save(model, tmp_path)
    with pytest.raises((ValueError, CheckpointException), match=rf"LoadPlanner\.rename: {text}"):
        load(other, tmp_path, LoadPlanner(rename=rename))
    assert other.collection.table("a").num_rows == 0


def refuse_on_all_ranks(setup: Setup, folder: str) -> list[str]:
    model, told = new(setup), []
    before, rank = held(model), dist.get_rank()
    for rename in (
        {"nobody": "flat"},
        {"plain": "elsewhere"},
        {"sixteen": "flat"},  # "flat" is read for two tables, or "sixteen" is missing
        RENAME if rank else {"nobody": "flat"},  # wrong on one rank
    ):
        with pytest.raises(CheckpointException) as error:
            load(model, folder, LoadPlanner(rename=rename))
        told.append(str(error.value))
    with pytest.raises(ValueError, match=r"got those of table 'flat' of a sharded one"):
        rename_tables(model.state_dict(), {"flat": "plain"})
    after = held(model)
    assert all(after[key].equal(before[key]) for key in before)
    load(model, folder, LoadPlanner(rename=RENAME))
    return told


def test_wrong_names_are_errors_on_every_rank(tmp_path: Path) -> None:
    run_on(Setup(0, names=NAMES), save_trained, str(tmp_path))
    for told in run_on(Renamed(2, ("row_wise", "table_wise")), refuse_on_all_ranks, str(tmp_path)):
        nobody, elsewhere, missing, one = told
        assert "expected names among the saved tables" in nobody and "got ['nobody']" in nobody
        assert "expected new names among the tables ['flat', 'sixteen', 'tally']" in elsewhere
        assert "expected a checkpoint with this table" in missing or "expected a ch" in missing
        assert "got ['nobody']" in one
