"""The functions of torch.distributed.checkpoint.state_dict on models with dynamic collections."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from pipeline_model import ClickModel, Run, batches, sharded_model
from pipeline_runs import check_same_states, optimizer_of, states_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner

KINDS = ("table_wise", "row_wise", "column_wise")
LIVES = ({}, {"admission": dyn.AdmitAfter(2), "eviction": dyn.ExpireAfter(time=100)})
RUN = Run(KINDS, KINDS, lives=LIVES, steps=2)
FULL = StateDictOptions(full_state_dict=True)


def train(model: Any, first_step: int = 0) -> list[float]:
    """Trains the rows, not the dense part."""
    losses = []
    for batch in batches(RUN, first_step):
        loss, _ = model(batch)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def check_unsharded_round_trip() -> None:
    model, again = ClickModel(RUN, dynamic=True), ClickModel(RUN, dynamic=True)
    train(model)
    dense = [torch.optim.Adam(of.head.parameters(), lr=0.1) for of in (model, again)]
    dense[0].step()
    state, of_dense = get_state_dict(model, dense[0])
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in state.items())
    rows, found = model.pooled.table("pooled_0").lookup(state["pooled.embedding_bags.pooled_0.ids"])
    assert found.all() and rows.equal(state["pooled.embedding_bags.pooled_0.weight"])
    set_state_dict(again, dense[1], model_state_dict=copy.copy(state), optim_state_dict=of_dense)
    for name in ("pooled", "sequences"):
        state_of_rows = getattr(model, name).fused_optimizer.state_dict()
        getattr(again, name).fused_optimizer.load_state_dict(state_of_rows)
    assert train(again, 2) == train(model, 2)
    full = get_model_state_dict(model, options=FULL)
    set_model_state_dict(again, full, options=FULL)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in full.items())


def test_unsharded() -> None:
    workers.run(check_unsharded_round_trip, world_size=1)


def check_sharded_round_trip() -> None:
    model, again = sharded_model(RUN), sharded_model(RUN)
    train(model)
    assert get_model_state_dict(model.module).keys() == model.module.state_dict().keys()
    train(model, 2)
    set_model_state_dict(again.module, get_model_state_dict(model.module))
    check_same_states(rows(again), rows(model))
    again.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    check_same_states(states_of(again), states_of(model))
    assert train(again, 4) == train(model, 4)


def rows(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the contents of the tables without optimizer state."""
    kept = ("ids", "weight", "last_seen", "count", "waiting", "clock")
    return {
        table: {name: value for name, value in state.items() if name in kept}
        for table, state in states_of(model).items()
    }


def check_saved_by_dcp() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = sharded_model(RUN)
    train(model)
    dcp.save(get_model_state_dict(model.module), checkpoint_id=folder[0])
    again = sharded_model(RUN)
    state = get_model_state_dict(again.module)
    dcp.load(state, checkpoint_id=folder[0], planner=LoadPlanner())
    set_model_state_dict(again.module, state)
    check_same_states(rows(again), rows(model))


@pytest.mark.everyday(2)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("function", [check_sharded_round_trip, check_saved_by_dcp])
def test_sharded(function: Any, world: int) -> None:
    workers.run(function, world_size=world)


def check_whole_state_dict() -> None:
    model, sharded = ClickModel(RUN, dynamic=True), sharded_model(RUN)
    with pytest.raises(ValueError, match="expected full_state_dict=False, got True: the rows stay"):
        get_model_state_dict(sharded.module, options=FULL)
    train(model)
    state = [get_model_state_dict(model, options=FULL)]
    dist.broadcast_object_list(state)  # each rank sets all rows and keeps its own
    ids = state[0]["pooled.embedding_bags.pooled_1.ids"]
    expected = state[0]["pooled.embedding_bags.pooled_1.weight"]
    set_model_state_dict(sharded.module, state[0], options=FULL)
    got, found = dyn.lookup_rows(sharded.module.pooled, "pooled_1", ids)
    assert len(ids) and found.all() and got.equal(expected)


def test_full_state_dict() -> None:
    workers.run(check_whole_state_dict, world_size=2)


def check_optimizer_state(dynamic: bool) -> None:
    run = Run(("table_wise",), ("table_wise",), dynamic=dynamic, steps=2, new_ids=10)
    model = sharded_model(run)
    for optimizer in (model.fused_optimizer, optimizer_of(run, model)):
        with pytest.raises(KeyError, match="weight"):
            get_optimizer_state_dict(model.module, optimizer)


@pytest.mark.parametrize("dynamic", [True, False])
def test_optimizer_state_of_rows_fails_as_with_static_tables(dynamic: bool) -> None:
    workers.run(check_optimizer_state, dynamic, world_size=1)
