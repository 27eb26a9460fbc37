"""New rows begin with `initial_accumulator_value`; rows that were saved keep what was saved."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly
from table_cases import ids_of, make_group, make_table, same_state
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

START = 0.375
SUMS = [OptimizerKind.EXACT_ADAGRAD, OptimizerKind.EXACT_ROWWISE_ADAGRAD, OptimizerKind.FTRL]
every_kind = pytest.mark.parametrize("kind", SUMS, ids=lambda kind: kind.name)


def table_of(kind, **options):
    rule = RowOptimizer(kind, 0.1, initial_accumulator_value=START)
    return make_table(optimizer=rule, **options)


def begins(state, places=slice(None)):
    """Returns True if the states of some rows are those of new rows."""
    others = state["momentum2"][places].any() if "momentum2" in state else False
    return bool((state["momentum1"][places] == START).all()) and not others


@pytest.mark.usefixtures("device")
@every_kind
def test_rows_begin_with_the_value(kind):
    """Inserted, assigned, loaded without states, and again in the row of an id that was removed."""
    table = table_of(kind)
    table.find_or_insert(ids_of(1, 2, 3))
    table.assign(ids_of(4), torch.ones(1, 4))
    assert begins(table.export_state())
    output = make_group(table)(ids_of(1, 2), ids_of(0, 1, 2), training=True)
    output.backward(torch.ones(2, 4))
    state = table.export_state()
    places = {number: place for place, number in enumerate(state["ids"].tolist())}
    assert begins(state, [places[3], places[4]])
    assert (state["momentum1"][[places[1], places[2]]] == START + 1).all()

    same = table_of(kind)
    same.load_state(state)
    assert same_state(same.export_state(), state)  # what was saved, not the value

    table.erase(ids_of(1, 2))
    table.find_or_insert(ids_of(5, 6))
    assert begins(table.export_state())
    bare = table_of(kind)
    bare.load_state({name: state[name] for name in ("ids", "weight")})
    assert begins(bare.export_state())


@every_kind
def test_a_checkpoint_keeps_what_was_saved(kind, tmp_path):
    """A model that is loaded without its optimizer begins anew, in the rows it has and in those to come."""
    tables = [EmbeddingBagConfig(100, 8, "t", feature_names=["f"])]
    learning = {"optimizer": kind.name, "learning_rate": 0.1, "initial_accumulator_value": START}
    made, loaded = (
        dyn.DynamicEmbeddingBagCollection(tables, fused_params=learning) for _ in range(2)
    )
    made(KeyedJaggedTensor(["f"], ids_of(1, 2, 3), lengths=ids_of(3))).values().sum().backward()
    (kept,) = (table.export_state() for table in made.local_tables().values())
    assert not begins(kept)
    path = str(tmp_path / "c")
    quietly(dcp.save, {"model": made.state_dict(), "optimizer": made.fused_optimizer.state_dict()},
            checkpoint_id=path)  # fmt: skip
    state = {"model": loaded.state_dict(), "optimizer": loaded.fused_optimizer.state_dict()}
    quietly(dcp.load, state, checkpoint_id=path, planner=LoadPlanner())
    loaded.load_state_dict(state["model"])
    (table,) = loaded.local_tables().values()
    now = table.export_state()
    assert now["ids"].numel() == 3 and begins(now)
    loaded.fused_optimizer.load_state_dict(state["optimizer"])
    (table,) = loaded.local_tables().values()
    assert same_state(table.export_state(), kept)
    table.find_or_insert(ids_of(5))
    now = table.export_state()
    assert begins(now, now["ids"] == 5)
