"""Loads of a part: some tables, some tensors, some ranks. Nothing that is missing goes unnoticed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import (
    differences,
    held,
    optimizer_of,
    put,
    quietly,
    save,
    state_dict_of,
    tables_of,
)
from checkpoint_small import COUNTED, LRU, case, on_one, read, sharded, step, unsharded
from sharded_training import Holder, collection_of, sharder_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.state_dict.load_planner import LoadPlanner
from torchrec_dyn.storage import canonical_order
from torchrec_dyn.table import TableShard


def load_the_model_only(path: str) -> list[tuple[int, int, int, int]]:
    names = ("t", "u")
    of = case(2, "row_wise", names, LRU, rows=40_000)
    trained = sharded(of)
    # These ids are in four cells: rank 0 reads the first two, rank 1 all but the first.
    ids = torch.arange(16_400)
    step(trained, ids.tolist(), ids.tolist(), names=names)
    ordered = ids[canonical_order(ids)].tolist()
    for _ in range(3):  # only rank 0 reads the last id of "t", and only rank 1 that of "u"
        step(trained, ordered[:1], ordered[12_300:12_301], names=names)
    save(trained, path)
    model = sharded(of)
    state = read({"model": model.state_dict()}, path)
    model.load_state_dict(state["model"])
    tables = tables_of(model)
    told = [(one.step, one.row_numbers.high_water_mark, scored_rows(one)) for one in tables]
    more = list(range(10**6, 10**6 + 40))
    step(model, more, more, names=names)
    return [
        (*one, table.row_numbers.high_water_mark) for one, table in zip(told, tables, strict=True)
    ]


def scored_rows(table: TableShard) -> int:
    """Returns the number of rows that have a score; asserts that this is the number of ids."""
    last_seen, _ = table.life.scores.read(torch.arange(table.row_numbers.high_water_mark))
    scored = int((last_seen >= 0).sum())
    assert scored == table.num_rows
    return scored


def test_a_model_only_load_on_two_ranks(tmp_path: Path) -> None:
    """Without optimizer state scores tell the step. A rank keeps its own rows."""
    found = workers.run(load_the_model_only, str(tmp_path / "saved"), world_size=2)
    assert [step for of_rank in found for step, *_ in of_rank] == [4] * 4
    for _, high, scored, later in found[0]:
        assert high == scored < later


TIMED = dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=10))


def last_known_step(path: str, config: dyn.DynamicTableConfig) -> int:
    trained, model = (sharded(case(config=config)) for _ in range(2))
    ids, collection = torch.arange(9), trained.module.collection
    collection.set_time(4)
    for one in ids[canonical_order(ids)].tolist():
        step(trained, [one])
    step(trained, [])
    collection.set_time(5)  # of the next step, which has not run
    save(trained, path)
    model.load_state_dict(read({"model": model.state_dict()}, path)["model"])
    return tables_of(model)[0].step


@pytest.mark.parametrize("config, last", [(LRU, 9), (COUNTED, 9), (TIMED, 10)])
def test_the_step_of_a_model_only_load_is_the_last_that_is_known(
    tmp_path: Path, config: dyn.DynamicTableConfig, last: int
) -> None:
    """The score of the last id tells it, or its counter; of a step without ids only the clock tells."""
    path = str(tmp_path / "saved")
    assert workers.run(last_known_step, path, config, world_size=1) == [last]


def again_after_a_missing_key(path: str) -> int:
    names = ("t", "u")
    trained = sharded(case(names=names))
    step(trained, [1, 2, 3], [4, 5, 6], names=names)
    quietly(dcp.save, {"model": trained.state_dict()}, checkpoint_id=path)
    model = sharded(case(names=names))
    state = read({"model": model.state_dict()}, path)["model"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({key: one for key, one in state.items() if ".u." not in key})
    model.load_state_dict(state)
    return sum(table.num_rows for table in tables_of(model))


def test_a_load_again_after_one_that_missed_a_key(tmp_path: Path) -> None:
    assert on_one(again_after_a_missing_key, tmp_path) == 6


def misfits(path: str) -> list[str]:
    model, heard = sharded(case()), []
    prefix = "collection.embedding_bags.t."
    for shape in ((3, 16), (5, 8), (2, 8), (3, 4)):
        state = {f"{prefix}weight": torch.ones(shape), f"{prefix}ids": torch.arange(3)}
        try:
            model.load_state_dict(state)
            heard.append("loaded")
        except ValueError:
            heard.append("error")
        except RuntimeError as error:
            heard.append(str(error))
    return heard


def test_plain_tensors_that_do_not_fit(tmp_path: Path) -> None:
    assert on_one(misfits, tmp_path) == ["error"] * 4


def without_checksums(path: str) -> str:
    trained, model = sharded(case()), sharded(case())
    step(trained, [1, 2, 3])
    save(trained, path)
    file = Path(path) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for key in [one for one in metadata.state_dict_metadata if one.endswith("checksum")]:
        del metadata.state_dict_metadata[key]
    file.write_bytes(pickle.dumps(metadata))
    try:
        put(model, read(state_dict_of(model), path))
    except BaseException as error:  # DCP's is no Exception
        return str(error)
    return f"loaded {len(held(model))} tensors, {tables_of(model)[0].num_rows} rows unverified"


def test_a_checkpoint_that_lost_its_checksum(tmp_path: Path) -> None:
    assert "checksum" in on_one(without_checksums, tmp_path)


# Some of the ranks, and collections that nobody shards


def key_missing_on_one_rank() -> str:
    model = sharded(case(2, "row_wise"))
    step(model, list(range(20)))
    state = copy.deepcopy(model.state_dict())
    if torch.distributed.get_rank() == 1:
        del state["collection.embedding_bags.t.ids"]
    try:
        model.load_state_dict(state)
    except Exception as error:
        return str(error)
    return "loaded"


def test_a_key_that_one_rank_lacks_is_an_error_on_all() -> None:
    heard = workers.run(key_missing_on_one_rank, world_size=2, group_timeout=30)
    assert not any("Timed out" in one or one == "loaded" for one in heard)


def other_group(path: str) -> list[str]:
    group = torch.distributed.new_group([1])
    if torch.distributed.get_rank() == 0:
        return []
    of = case()
    plan = ShardingPlan({"collection": {"t": of.tables[0].plan}})

    def model() -> Any:
        return DistributedModelParallel(
            Holder(collection_of(of)),
            env=ShardingEnv.from_process_group(group),
            plan=plan,
            sharders=[sharder_of(of)],
        )

    trained, fresh = model(), model()
    step(trained, list(range(20)))
    quietly(dcp.save, state_dict_of(trained), checkpoint_id=path, process_group=group)
    state = state_dict_of(fresh)
    quietly(dcp.load, state, checkpoint_id=path, planner=LoadPlanner(), process_group=group)
    put(fresh, state)
    return differences(held(fresh), held(trained))


def test_ranks_that_are_not_all(tmp_path: Path) -> None:
    # In a pool of its own: rank 1 makes groups without rank 0, and later ones of both would never meet.
    found = workers.run(other_group, str(tmp_path / "saved"), world_size=2, group_timeout=60)
    assert found == [[], []]


class Beside(nn.Module):
    """A collection that nobody shards, beside a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = unsharded(case())
        self.dense = nn.Linear(2, 2)


def repeated_ids(path: str) -> str:
    module = Beside()
    collection = module.collection
    step(collection, [1, 2])
    model = DistributedModelParallel(module, plan=ShardingPlan({}), sharders=[])
    state: dict[str, Any] = dict(model.state_dict())
    prefix = "collection.embedding_bags.t."
    del state[f"{prefix}weight_checksum"], state[f"{prefix}config"]
    state |= {f"{prefix}weight": torch.ones(2, 8), f"{prefix}ids": torch.tensor([7, 7])}
    try:
        model.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return f"loaded, got {collection.table('t').ids().tolist()}"


def test_an_unsharded_collection_in_a_sharded_model_reports_what_is_wrong(tmp_path: Path) -> None:
    assert "repeated" in on_one(repeated_ids, tmp_path)


def test_a_config_beside_tensors_of_another_module_makes_them_no_table(tmp_path: Path) -> None:
    """DCP's own checks stay: of a tensor that is missing, and of another size."""
    loss = torch.arange(4.0)
    for config in ("lr=1", torch.zeros(3, dtype=torch.uint8)):
        saved = {"trainer": {"config": config, "loss": loss, "step": torch.tensor(3)}}
        quietly(dcp.save, saved, checkpoint_id=tmp_path)
        for changed in ({"average": torch.ones(5)}, {"loss": torch.zeros(8)}):
            state = {"trainer": {**saved["trainer"], **changed}}
            with pytest.raises(CheckpointException, match=f"trainer.{next(iter(changed))}"):
                quietly(dcp.load, state, checkpoint_id=tmp_path, planner=LoadPlanner())


# Loads without our planner


def load_without_the_planner(path: str) -> list[str]:
    """Returns the errors of loads with DCP's own planner, of nested and of flat state dicts."""
    of = case(dist.get_world_size(), "row_wise", ("t", "u"))
    trained, model = sharded(of), sharded(of)
    step(trained, [1, 2, 3], [4], names=("t", "u"))

    def states(one: Any) -> list[dict[str, Any]]:
        return [state_dict_of(one), one.state_dict(), optimizer_of(one).state_dict()]

    told = []
    for number, (saved, loaded) in enumerate(zip(states(trained), states(model), strict=True)):
        quietly(dcp.save, saved, checkpoint_id=f"{path}/{number}")
        with pytest.raises(CheckpointException) as caught:
            quietly(dcp.load, loaded, checkpoint_id=f"{path}/{number}")
        told.append(str(caught.value))
    return told


@pytest.mark.parametrize("world", [1, 2])
def test_a_load_without_the_planner_names_it(tmp_path: Path, world: int) -> None:
    """DCP told of sizes that differ."""
    for told in workers.run(load_without_the_planner, str(tmp_path), world_size=world):
        for text in told:
            assert (
                "got another planner. Call dcp.load(..., planner=torchrec_dyn.checkpoint.Load"
                in text
            )
