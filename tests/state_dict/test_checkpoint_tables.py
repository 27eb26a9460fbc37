"""What a loaded table is: the saved one and nothing else, even empty, above the limit, or not at all."""

from __future__ import annotations

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
    quietly,
    run_on,
    save,
    state_dict_of,
    train,
)
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_training import collection_of, shard
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.state_dict.load_planner import LoadPlanner

NAMES = ("plain", "sixteen", "counted")
SETUP = Setup(2, ("row_wise", "column_wise", "table_wise"), names=NAMES)


def empty(model: Any) -> None:
    collection = getattr(model, "module", model).collection
    for name in NAMES:
        dyn.erase_rows(collection, name, dyn.read_ids(collection, name))


def save_tables(setup: Setup, folder: str) -> None:
    """Saves tables that were never trained, trained ones, and trained ones that were emptied."""
    model = new(setup)
    save(model, f"{folder}/never")
    train(model, setup, range(3))
    save(model, f"{folder}/trained")
    empty(model)
    save(model, f"{folder}/emptied")


def replace_tables(setup: Setup, folder: str, which: str) -> list[str]:
    """Loads into trained tables, saves, and trains on as tables do that were loaded when new."""
    model, fresh = new(setup), new(setup)
    train(model, setup, range(4, 7))
    load(model, f"{folder}/{which}")
    save(model, f"{folder}/{which} again on {setup.world}")
    load(fresh, f"{folder}/{which}")
    for one in (model, fresh):
        train(one, setup, range(8, 10))
    return differences(held(model), held(fresh))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the tables that `save_tables` saves."""
    folder = tmp_path_factory.mktemp("saved")
    run_on(SETUP, save_tables, str(folder))
    return folder


@pytest.mark.parametrize("world", [2, 0])
def test_loading_replaces_what_a_table_has(saved: Path, world: int) -> None:
    setup = Setup(world, ("column_wise", "row_wise"), names=NAMES)
    for which in ("never", "trained", "emptied"):
        found = run_on(setup, replace_tables, str(saved), which)
        assert not any(found), which
        there, here = contents(saved / which), contents(saved / f"{which} again on {world}")
        assert not differences(here, there), which
        rows = [key for key in there if key.endswith((".ids", ".weight"))]
        assert bool(rows) == (which == "trained")


def small(setup: Setup, **options: Any) -> Any:
    """A model of one table that differs in some of its options."""
    dim, seed = options.get("dim", 12), options.get("seed", 0)
    rows, config = options.get("rows", 1000), dyn.DynamicTableConfig(seed=seed)
    plan = usual_plan(setup.kinds[0], dim, setup.world, setup.world, rows=rows)
    fused = {"optimizer": EmbOptimType[options.get("optimizer", "ADAM")], "learning_rate": 0.1}
    tables = [Table("plain", ["f_plain"], plan, dim, rows=rows, config=config)]
    case = Case(tables, fused_params=fused)
    return shard(case, collection_of(case))


def fill(model: Any, count: int, dim: int = 12) -> None:
    ids = torch.arange(count)[dist.get_rank() :: dist.get_world_size()]
    dyn.assign_rows(model.module.collection, "plain", ids, ids[:, None].expand(-1, dim).float())


def save_small(setup: Setup, folder: str) -> None:
    model = small(setup)
    fill(model, 60)
    save(model, folder)


def load_into(setup: Setup, folder: str, options: dict[str, Any]) -> tuple[str, list[str]]:
    """The error of loading into another table, and what has changed there."""
    model = small(setup, **options)
    fill(model, 20, options.get("dim", 12))
    was = held(model)
    with pytest.raises(ValueError) as caught:
        load(model, folder)
    return str(caught.value), differences(held(model), was)


ROW_WISE = Setup(2, ("row_wise",))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dim": 8}, "expected a checkpoint with embedding_dim 8 as the model has, got 12"),
        ({"dim": 16}, "expected a checkpoint with embedding_dim 16 as the model has, got 12"),
        ({"seed": 5}, "expected a checkpoint with seed 5 as the model has, got 0"),
        (
            {"optimizer": "EXACT_ADAGRAD"},
            "expected optimizer state of exact_adagrad as the model has, got that of adam",
        ),
    ],
)
def test_another_table_is_refused_on_every_rank(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    run_on(ROW_WISE, save_small, str(tmp_path / "saved"))
    for text, changed in run_on(ROW_WISE, load_into, str(tmp_path / "saved"), options):
        assert message in text and "table('plain')" in text
        assert not changed


def load_under_limit(setup: Setup, folder: str, rows: int) -> tuple[int, int]:
    """Loads a table of 60 rows under another limit; an id that comes next starts as the checkpoint says."""
    model = load(small(setup, rows=rows), folder)
    same, collection = small(setup), model.module.collection
    ids = torch.tensor([7_000_000])
    loaded = dyn.read_num_rows(collection, "plain")
    starts = [initial_row(one, ids) for one in (model, load(same, folder))]
    assert torch.equal(*starts)
    return loaded, dyn.read_num_rows(collection, "plain")


def initial_row(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The row that training gives an unseen id."""
    from torchrec import KeyedJaggedTensor

    model(KeyedJaggedTensor(["f_plain"], ids, lengths=torch.tensor([1])))
    return dyn.lookup_rows(model.module.collection, "plain", ids)[0]


def test_the_limit_can_be_raised(tmp_path: Path) -> None:
    # The default initializer depends on the limit: that of the checkpoint goes on.
    run_on(ROW_WISE, save_small, str(tmp_path / "saved"))
    assert run_on(ROW_WISE, load_under_limit, str(tmp_path / "saved"), 5000) == [(60, 61)] * 2


def load_above_limit(setup: Setup, folder: str) -> tuple[int, str]:
    model = load(small(setup, rows=20), folder)
    loaded = dyn.read_num_rows(model.module.collection, "plain")
    save(model, folder + " again")
    with pytest.raises(Exception) as caught:
        for first in range(10**6, 10**6 + 50):
            initial_row(model, torch.arange(first, first + 1))
    return loaded, str(caught.value)


def test_rows_above_the_limit_are_loaded_all_the_same(tmp_path: Path) -> None:
    one = Setup(1, ("table_wise",))
    run_on(one, save_small, str(tmp_path / "saved"))
    ((loaded, text),) = run_on(one, load_above_limit, str(tmp_path / "saved"))
    assert loaded == 60 and "20" in text
    ids = "model/collection.embedding_bags.plain.ids"
    assert len(contents(tmp_path / "saved again")[ids]) == 60


def load_some(setup: Setup, folder: str) -> dict[str, Any]:
    """Loads a model of five tables from a checkpoint of two."""
    model = new(Setup(setup.world, setup.kinds, tables=5))
    train(model, Setup(setup.world, setup.kinds, tables=5), range(4, 6))
    was, told = held(model), {}

    state = state_dict_of(model)
    with pytest.raises(CheckpointException) as caught:
        quietly(dcp.load, state, checkpoint_id=folder, planner=LoadPlanner())
    told["load"], told["changed"] = str(caught.value), differences(held(model), was)

    state = state_dict_of(model)
    planner = LoadPlanner(allow_partial_load=True)
    quietly(dcp.load, state, checkpoint_id=folder, planner=planner)
    model.load_state_dict(state["model"])
    optimizer_of(model).load_state_dict(state["optimizer"])
    told["loaded"] = sorted({key.split(" ")[0] for key in differences(held(model), was)})

    was, left_out = held(model), "collection.embedding_bags.brain."
    kept = {key: one for key, one in state_dict_of(model)["model"].items() if left_out not in key}
    with pytest.raises(RuntimeError) as strict:
        model.load_state_dict(dict(kept))
    told["strict"] = str(strict.value)
    found = model.load_state_dict(dict(kept), strict=False)
    told["missing"], told["unexpected"] = found.missing_keys, found.unexpected_keys
    with pytest.raises(RuntimeError) as other:
        model.load_state_dict({**state_dict_of(model)["model"], "collection.other": torch.ones(1)})
    told["other"] = str(other.value)
    told["kept"] = differences(held(model), was)
    return told


def save_some(setup: Setup, folder: str) -> None:
    model = new(setup)
    train(model, setup, range(2))
    save(model, folder)


def test_missing_tables_are_told(tmp_path: Path) -> None:
    run_on(Setup(2, SETUP.kinds, tables=2), save_some, str(tmp_path / "two"))
    for told in run_on(Setup(2, SETUP.kinds, tables=2), load_some, str(tmp_path / "two")):
        assert (
            "table('brain'): expected a checkpoint with this table, got one without" in told["load"]
        )
        assert not told["changed"] and not told["kept"]
        assert set(told["loaded"]) <= {"plain", "sixteen"} and "plain" in told["loaded"]
        # TorchRec asks each sharded module by itself, so the names begin there.
        keys = [f"embedding_bags.brain.{name}" for name in ("weight", "ids")]
        assert all(key in told["strict"] for key in keys)
        assert told["missing"] == keys and told["unexpected"] == []
        assert 'Unexpected key(s) in state_dict: "other"' in told["other"]


# Loading never drops, evicts or fails for a limit; the next training step restores it

KEY = "model/collection.embedding_bags.t."
MANY, FEW = 1000, 20


def model_of(limit: int, counters: int | None) -> Any:
    """A model of one table that evicts the least recently used and admits at the second sight."""
    config = dyn.DynamicTableConfig(
        admission=dyn.AdmitAfter(2, counters=counters), eviction=dyn.LeastRecentlyUsed()
    )
    plan = usual_plan("table_wise", 8, 1, 1, rows=limit)
    fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
    case = Case([Table("t", ["f"], plan, rows=limit, config=config)], fused_params=fused)
    return shard(case, collection_of(case))


def see(model: Any, ids: list[int]) -> None:
    batch = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
    model(batch).values().sum().backward()


def load_under_less(folder: str) -> dict[str, Any]:
    model = model_of(MANY, MANY)
    for step in range(60):  # the later, the more recent
        see(model, [step, step, 1000 + step])
    save(model, f"{folder}/saved")
    model = load(model_of(FEW, FEW), f"{folder}/saved")
    save(model, f"{folder}/again")
    see(model, [59, 59])
    kept = dyn.read_ids(model.module.collection, "t").sort()[0].tolist()
    waiting = dyn.read_counts(model.module.collection, "t", torch.arange(1000, 1060)).tolist()
    see(model, [5000, 5000])
    return {"kept": kept, "waiting": waiting, "then": model.module.collection.table("t").num_rows}


def test_a_table_above_its_limits_comes_back_to_them(tmp_path: Path) -> None:
    (told,) = workers.run(load_under_less, str(tmp_path), world_size=1)
    saved, again = contents(tmp_path / "saved"), contents(tmp_path / "again")
    assert len(saved[KEY + "ids"]) == len(saved[KEY + "waiting"]) == 60
    for name in ("ids", "weight", "last_seen", "count", "waiting"):
        assert torch.equal(saved[KEY + name], again[KEY + name]), name
    assert told["then"] <= FEW
    assert told["kept"][-1] == 59 and len(told["kept"]) in (FEW, 60)
    assert told["kept"] == list(range(60 - len(told["kept"]), 60))
    assert sum(told["waiting"]) in (FEW, 60)
