"""What a review of the checkpoint core found, each in its smallest case: parts, copies and ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import (
    contents,
    differences,
    held,
    load,
    put,
    quietly,
    save,
    state_dict_of,
    tables_of,
)
from checkpoint_small import (
    case,
    on_one,
    read,
    sharded,
    step,
)
from sharded_training import Holder, collection_of, sharder_of
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.state_dict.load_planner import LoadPlanner


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


# Some of a checkpoint.


def only_the_model(path: str) -> int:
    trained = sharded(case())
    step(trained, [1, 2, 3])
    quietly(dcp.save, {"model": trained.state_dict()}, checkpoint_id=path)
    model = sharded(case())
    put(model, read(state_dict_of(model), path, allow_partial_load=True))
    return tables_of(model)[0].num_rows


def test_a_partial_load_without_optimizer_state(tmp_path: Path) -> None:
    assert on_one(only_the_model, tmp_path) == 3


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


# Several ranks.


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
    heard = workers.run(key_missing_on_one_rank, world_size=2, group_timeout=5)
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
            device=torch.device("cpu"),
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
    assert workers.run(other_group, str(tmp_path / "saved"), world_size=2) == [[], []]


# Going on after a load is going on.


def gone_on(path: str) -> list[str]:
    config = dyn.DynamicTableConfig(
        admission=dyn.AdmitAfter(2),
        eviction=(dyn.ExpireAfter(time=10), dyn.LeastFrequentlyUsed()),
    )
    of = case(config=config, rows=64)

    def train(model: Any, steps: range) -> Any:
        for number in steps:
            model.module.collection.set_time(3 * number)
            step(model, [1, 1, *range(3 * number, 3 * number + 9)])
        return model

    model = train(sharded(of), range(20))
    save(model, path)
    moved = train(load(sharded(of), path), range(20, 40))
    save(train(model, range(20, 40)), f"{path}_stayed")
    save(moved, f"{path}_moved")
    return differences(contents(f"{path}_stayed"), contents(f"{path}_moved"))


def test_policies_go_on(tmp_path: Path) -> None:
    assert on_one(gone_on, tmp_path) == []
