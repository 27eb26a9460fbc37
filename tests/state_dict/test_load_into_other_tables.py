"""Loads into tables with other policies, another name or dtype, or fewer rows; and training after them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import (
    Setup,
    contents,
    differences,
    held,
    load,
    optimizer_of,
    quietly,
    run_on,
    save,
    state_dict_of,
    tables_of,
)
from checkpoint_small import (
    AGED,
    COUNTED,
    LRU,
    case,
    on_one,
    sharded,
    step,
    unsharded,
)
from sharded_cases import shard_by_hand
from sharded_training import Holder
from table_cases import same_state
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner
from torchrec_dyn.checkpoint_format import open_checkpoint

# Rows without scores, into a table with a policy


def rows_after_a_step(path: str) -> int:
    before = sharded(case())
    for _ in range(30):
        step(before, [1, 2, 3, 4])
    save(before, path)
    model = load(sharded(case(config=AGED)), path)
    step(model, [1])
    return tables_of(model)[0].num_rows


def test_rows_of_a_table_without_policy_do_not_expire_at_once(tmp_path: Path) -> None:
    assert on_one(rows_after_a_step, tmp_path) == 4


@pytest.mark.parametrize("number", [0, 13])
@pytest.mark.parametrize("name", ["ids", "weight", "count", "waiting"])
def test_unsharded_one_wrong_number_of_plain_tensors_is_found(name: str, number: int) -> None:
    """`torch.save` verifies nothing; the table is as it was."""
    config = dyn.DynamicTableConfig(eviction=LRU.eviction, admission=dyn.AdmitAfter(2))
    saved, model = unsharded(case(config=config)), unsharded(case(config=config))
    for one in (saved, model):
        step(one, [*range(20), *range(20), *range(30, 50)])
    state = saved.state_dict()
    state[f"embedding_bags.t.{name}"].view(-1)[number] += 1
    before = model.local_tables()["t"].export_state()
    with pytest.raises(ValueError, match=r"content sum|canonical order"):
        model.load_state_dict(state)
    assert same_state(model.local_tables()["t"].export_state(), before)


@pytest.mark.parametrize("left_out", [(), ("weight_checksum",)], ids=["summed", "not summed"])
@pytest.mark.parametrize("has_scores", [True, False])
def test_unsharded_ids_come_in_any_order(has_scores: bool, left_out: tuple[str, ...]) -> None:
    """DCP's tensors of a checkpoint without scores are empty."""
    model = unsharded(case(config=LRU))
    saved = unsharded(case(config=LRU if has_scores else None))
    step(saved, list(range(20)))
    state = {
        key: one.flip(0) if key.endswith((".ids", ".weight", ".last_seen", ".count")) else one
        for key, one in saved.state_dict().items()
        if not key.endswith(left_out)
    }
    if not has_scores:
        nothing = torch.empty(0, dtype=torch.int64)
        state |= {"embedding_bags.t.last_seen": nothing, "embedding_bags.t.count": nothing}
    model.load_state_dict(state)
    got, expected = (one.local_tables()["t"].export_state() for one in (model, saved))
    assert got["ids"].equal(expected["ids"]) and got["weight"].equal(expected["weight"])
    assert not has_scores or got["last_seen"].equal(expected["last_seen"])
    state["embedding_bags.t.ids"][0] = state["embedding_bags.t.ids"][1]
    with pytest.raises(ValueError, match=r"distinct ids|canonical order"):
        model.load_state_dict(state)
    assert same_state(model.local_tables()["t"].export_state(), got)


def test_nor_where_the_module_is_copied_between_the_two_loads() -> None:
    before = unsharded(case())
    for _ in range(30):
        step(before, [1, 2, 3, 4])
    model = unsharded(case(config=AGED))
    model.load_state_dict(before.state_dict())
    model = copy.deepcopy(model)
    model.fused_optimizer.load_state_dict(before.fused_optimizer.state_dict())
    step(model, [1])
    assert model.table("t").num_rows == 4


# Another name


def renamed(state: Any) -> Any:
    """Returns a state dict with table "u" in place of "t"."""
    if not isinstance(state, dict):
        return state
    return {re.sub(r"\bt\.", "u.", key): renamed(value) for key, value in state.items()}


def load_renamed(setup: Setup, path: str) -> list[str]:
    """Returns the errors of the loads of a renamed table, after which the table is as before."""

    def make(name: str) -> Any:
        of = case(max(1, setup.world), "row_wise", names=(name,))
        return sharded(of) if setup.world else Holder(unsharded(of))

    trained, model = make("t"), make("u")
    step(trained, [1, 2, 3])
    step(model, [1, 2, 3], names=("u",))
    before, state = held(model), renamed(state_dict_of(trained))
    quietly(dcp.save, state, checkpoint_id=path)
    loads = [
        lambda: model.load_state_dict(state["model"]),
        lambda: load(model, path),
        lambda: load(model, path, LoadPlanner(path=path)),
        lambda: open_checkpoint(path),
        lambda: optimizer_of(model).load_state_dict(state["optimizer"]),
    ]
    told = []
    for one in loads:
        with pytest.raises((ValueError, CheckpointException)) as caught:
            one()
        told.append(str(caught.value))
    assert not differences(held(model), before)
    return told


@pytest.mark.parametrize("world", [0, 2])
def test_a_renamed_table_is_named(tmp_path: Path, world: int) -> None:
    """It was said to be damaged: all content sums depend on the table's name."""
    for told in run_on(Setup(world), load_renamed, str(tmp_path)):
        for text in told[:3]:
            assert "expected a checkpoint with table 'u' as the model has, got 't'" in text
        assert "embedding_bags.u" in told[3] and "got a config of 't'" in told[3]
        assert "optimizer" in told[4]
        assert all("table was renamed" in text and "saved name" in text for text in told)
        assert not any("damaged" in text for text in told[:4])


# Other dtypes and fewer rows


def plain_rows_of(dtype: torch.dtype) -> bool:
    model, ids = sharded(case()), torch.arange(3)
    rows = (torch.arange(24).view(3, 8) * 3).to(dtype)
    prefix = "collection.embedding_bags.t."
    model.load_state_dict({f"{prefix}weight": rows, f"{prefix}ids": ids})
    found, _ = tables_of(model)[0].lookup(ids)
    return torch.equal(found, rows.float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16])
def test_plain_rows_of_another_dtype(dtype: torch.dtype) -> None:
    assert workers.run(plain_rows_of, dtype, world_size=1) == [True]


@pytest.mark.parametrize("config", [None, LRU, COUNTED])
def test_a_table_that_nothing_used_is_saved_as_one_whose_rows_are_there(
    config: dyn.DynamicTableConfig | None,
) -> None:
    """Its tensors are empty, of the same shapes and dtypes; the checksum is the same."""
    never, used = (unsharded(case(config=config, data_type="FP16")) for _ in range(2))
    assert used.table("t").num_rows == 0
    assert not differences(never.state_dict(), used.state_dict())


def states_of_fewer_rows(path: str) -> bool:
    model = sharded(case())  # 64 rows a block
    step(model, list(range(90)))
    table = tables_of(model)[0]
    ids, rows = table.id_map.contents()
    table.erase(ids[rows != 0])
    model.fused_optimizer.load_state_dict(copy.deepcopy(model.fused_optimizer.state_dict()))
    step(model, ids[rows == 0].tolist())
    return torch.equal(table.export_state()["momentum1"], torch.full((1, 8), 2.0))


def test_optimizer_state_of_fewer_rows_than_there_were(tmp_path: Path) -> None:
    assert on_one(states_of_fewer_rows, tmp_path)


# Row-wise state of other column cuts

ROW_WISE = {"optimizer": "EXACT_ROWWISE_ADAGRAD"}


def train_in_thirds(path: str) -> None:
    """Saves state of the cuts 0, 3, 6 and 8, which differs between them."""
    model = sharded(case(2, "three_columns", **ROW_WISE))
    ids = torch.arange(5)
    features = KeyedJaggedTensor(["f_t"], ids, lengths=torch.ones_like(ids))
    model(features).values().backward(torch.arange(40.0).view(5, 8))
    save(model, path)


def state_of(model: Any, path: str) -> list[torch.Tensor]:
    return [one.export_state()["momentum1"] for one in tables_of(load(model, path))]


def state_in_halves(path: str) -> list[torch.Tensor]:
    return state_of(sharded(case(2, "column_wise", **ROW_WISE)), path)


def test_row_wise_state_is_the_mean_over_the_columns(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    workers.run(train_in_thirds, path, world_size=2)
    (saved,) = (one for key, one in contents(path).items() if key.endswith("momentum1"))
    assert not saved[:, 0].equal(saved[:, 1]) and not saved[:, 1].equal(saved[:, 2])
    (whole,) = state_of(Holder(unsharded(case(**ROW_WISE))), path)
    torch.testing.assert_close(whole, saved @ torch.tensor([3.0, 3.0, 2.0]) / 8)
    (first,), (second,) = workers.run(state_in_halves, path, world_size=2)
    torch.testing.assert_close(first, saved @ torch.tensor([3.0, 1.0, 0.0]) / 4)
    torch.testing.assert_close(second, saved @ torch.tensor([0.0, 2.0, 2.0]) / 4)


def copies_of_other_cuts() -> str:
    of, cuts = case(2, "three_columns", **ROW_WISE), [([0], 0, 4), ([1], 4, 2), ([0], 6, 2)]
    other = case(2, **ROW_WISE)
    other.tables[0].plan = shard_by_hand("column_wise", cuts, 100)
    model, copied = sharded(other), sharded(of)
    for one in (model, copied):
        step(one, [1, 2, 3])
    state = copy.deepcopy(copied.fused_optimizer.state_dict())
    with pytest.raises(ValueError) as caught:
        model.fused_optimizer.load_state_dict(state)
    return str(caught.value)


def test_copies_of_row_wise_state_of_other_cuts_are_refused() -> None:
    for text in workers.run(copies_of_other_cuts, world_size=2):
        assert "state cut at columns [0, 4, 6, 8], got a copy of state cut at [0, 3, 6, 8]" in text


# Policies
