"""Tables of a pretended device are saved and loaded as tables of the CPU: the same tensors, on the host."""

import copy

import pytest
import torch
from device_twins import on_host
from life_cases import living_table
from pretended_device import PretendedDevice
from table_cases import same_state

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint_format import saved_config
from torchrec_dyn.optimizers import OptimizerKind
from torchrec_dyn.ranks import Piece, TableLayout
from torchrec_dyn.state_dict import (
    ModelSource,
    OptimizerSource,
    ShardPieces,
    checked_model_state,
    checked_optimizer_state,
    load_optimizer_state,
    load_tables,
    model_tensors,
    optimizer_tensors,
    saved_tensors,
)


def config_of(table):
    return saved_config.table_config(
        table.name, table.embedding_dim, table.config.seed, table.dtype, table.initializer
    )


def pieces_of(table):
    layout = TableLayout((Piece(0, table.embedding_dim, (0,)),), False)
    return ShardPieces(
        table.name, table.where, layout, [table], table, 0, None, config_of(table),
        table.optimizer, True, True,
    )  # fmt: skip


@pytest.fixture
def tables():
    """A full table on the CPU, its twin on a device, and an empty table there."""
    with PretendedDevice() as device:
        full, twin, empty = (
            living_table(
                dyn.ExpireAfter(time=9), dyn.AdmitAfter(2), kind=OptimizerKind.ADAM, device=where
            )
            for where in ("cpu", "cuda", "cuda")
        )
        full.assign(torch.arange(500), torch.arange(2000.0).view(500, 4))
        full.erase(torch.arange(40, 60))
        full.set_time(3)
        full.life.waiting.write(torch.arange(600, 650), torch.arange(50), torch.arange(50) + 1)
        state = full.export_state()
        state["momentum1"] = state["weight"] + 1
        full.load_state(state)
        twin.load_state(state)
        yield full, twin, empty
        assert device.mixed == []


def saved(table):
    """Returns the tensors of both state dicts of a table."""
    call, pieces = "save", [pieces_of(table)]
    sources = lambda one: [ModelSource(one, None), OptimizerSource(one, None)]  # noqa: E731
    return saved_tensors(None, call, pieces, sources)


def test_a_device_saves_the_tensors_of_the_cpu_in_memory_of_the_host(tables):
    full, twin, _ = tables
    for one, two in zip(saved(full), saved(twin), strict=True):
        assert one.keys() == two.keys()
        for name in one:
            blocks, others = one[name].local(), two[name].local()
            assert [offset for offset, _ in blocks] == [offset for offset, _ in others]
            assert all(
                torch.equal(a, b) and b.is_cpu
                for (_, a), (_, b) in zip(blocks, others, strict=True)
            ), name


def test_a_device_loads_what_the_cpu_saved(tables):
    full, _, empty = tables
    model, optimizer = copy.deepcopy(saved(full))
    state_dict, missing = {f"m.t.{name}": tensor for name, tensor in model.items()}, []
    load_tables(state_dict, "m.", [pieces_of(empty)], "Model", missing)
    assert missing == [] and empty.num_rows == full.num_rows
    load_optimizer_state(pieces_of(empty), optimizer)
    assert same_state(on_host(empty.export_state()), full.export_state())
    assert {store.device.type for store in empty.stores} == {"cuda"}
    assert empty.life.waiting.id_map.slots.is_cuda and empty.device.type == "cuda"


@pytest.mark.parametrize("loaded_to", ["cpu", "cuda"])
def test_state_dicts_of_an_unsharded_table(tables, loaded_to):
    full, twin, empty = tables
    model, optimizer = model_tensors(twin, config_of(twin)), optimizer_tensors(twin)
    assert same_state(on_host(model), model_tensors(full, config_of(full)))
    assert same_state(on_host(optimizer), optimizer_tensors(full))
    assert model["weight"].is_cuda and model["ids"].is_cuda
    model, optimizer = (
        {name: tensor.to(loaded_to) for name, tensor in part.items()} for part in (model, optimizer)
    )
    state, _ = checked_model_state("t", model, config_of(empty))
    empty.load_state(state)
    empty.load_state({**state, **checked_optimizer_state(empty, optimizer)})
    assert same_state(on_host(empty.export_state()), full.export_state())
