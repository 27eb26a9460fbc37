"""Loads into tables with other policies, another dtype or fewer rows; and training after them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import contents, differences, load, quietly, save, tables_of
from checkpoint_small import AGED, LRU, both, case, on_one, put_both, read, sharded, step, unsharded

import torchrec_dyn as dyn

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


def test_nor_do_they_in_an_unsharded_table() -> None:
    before = unsharded(case())
    for _ in range(30):
        step(before, [1, 2, 3, 4])
    model = unsharded(case(config=AGED))
    put_both(model, both(before))
    step(model, [1])
    assert model.table("t").num_rows == 4


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


def test_a_table_that_has_a_policy_now(tmp_path: Path) -> None:
    trained = unsharded(case())
    step(trained, [1, 2, 3])
    quietly(dcp.save, both(trained), checkpoint_id=str(tmp_path))
    model = unsharded(case(config=LRU))
    put_both(model, read(both(model), str(tmp_path)))
    assert model.table("t").num_rows == 3


# Other dtypes and fewer rows


def test_rows_of_another_dtype_and_the_same_number(tmp_path: Path) -> None:
    trained = unsharded(case(data_type="FP16"))
    step(trained, [1, 2, 3])
    quietly(dcp.save, both(trained), checkpoint_id=str(tmp_path))
    model = unsharded(case())
    step(model, [1, 2, 3])
    put_both(model, read(both(model), str(tmp_path)))
    rows, expected = (one.table("t").lookup(torch.tensor([1, 2, 3]))[0] for one in (model, trained))
    assert torch.equal(rows, expected.float())


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


# Policies


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
