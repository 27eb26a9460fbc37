"""Tables on a pretended GPU are saved and loaded as tables of the CPU: the same bytes, in chunks."""

import copy
import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from delta_cases import NAMES, Model
from pretended_device import CUDA, PretendedDevice, run_lookups_backward
from serving_cases import Plain, bag_configs
from static_collections import OPTIMIZERS, batch, ebc, loss_of
from table_cases import same_state
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import checkpoint, serving
from torchrec_dyn.checkpoint import LoadPlanner, apply_delta, export_delta, mark
from torchrec_dyn.checkpoint_format import content_sums, saved_tensor
from torchrec_dyn.migration import from_static, load_static
from torchrec_dyn.storage import RowStore
from torchrec_dyn.table import contents

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SPREAD = 2**58 + 1  # ids of both signs


@pytest.fixture
def device():
    with PretendedDevice() as device:
        yield device


@pytest.fixture
def read_at_once(monkeypatch):
    """Makes chunks small, and returns the numbers of rows that were read at once on the device."""
    monkeypatch.setattr(saved_tensor, "CHUNK_BYTES", 64)
    for module in (content_sums, contents):
        monkeypatch.setattr(module, "CROSSING_BYTES", 64)
    counts, read = [], RowStore.read

    def counted(store, rows):
        if not rows.is_cpu:
            counts.append(len(rows))
        return read(store, rows)

    monkeypatch.setattr(RowStore, "read", counted)
    return counts


def train(model, place, steps):
    """Runs training steps with 40 ids a table; tables with a small limit get few."""
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for collection, names in ((model.pooled, NAMES[:3]), (model.sequence, NAMES[3:])):
            most = [4 if name in ("lru", "timed") else 40 for name in names]
            ids = [torch.randint(0, 30, (count,), generator=draw) * SPREAD + step for count in most]
            features = KeyedJaggedTensor(
                [f"f_{name}" for name in names], torch.cat(ids), lengths=torch.tensor(most)
            )
            run_lookups_backward(collection(features.to(torch.device(place))), seed=step)


def twins():
    """Returns a trained model on the CPU, and its twin on the device."""
    here = Model("ADAMW")
    train(here, "cpu", range(3))
    there = copy.deepcopy(here).to("cuda")
    for model, place in ((here, "cpu"), (there, CUDA)):
        train(model, place, range(3, 5))
    return here, there


def states(model):
    return {
        name: {key: value.cpu() for key, value in state.items()}
        for name, state in model.states().items()
    }


def assert_same(one, other):
    expected, got = states(one), states(other)
    for name, state in expected.items():
        assert same_state(got[name], state), name


def both(model):
    """Returns the state dicts of a model and of its optimizers."""
    optimizers = {
        name: getattr(model, name).fused_optimizer.state_dict() for name in ("pooled", "sequence")
    }
    return {"model": model.state_dict(), "optimizers": optimizers}


def load(model, path):
    state = both(model)
    dcp.load(state, checkpoint_id=path, planner=LoadPlanner(), no_dist=True)
    model.load_state_dict(state["model"])
    for name, one in state["optimizers"].items():
        getattr(model, name).fused_optimizer.load_state_dict(one)


def sums_of(path):
    """Returns a hash of each file of a checkpoint but its metadata, which name the call."""
    files = sorted(path.glob("*.distcp")) if path.is_dir() else [path]
    assert files
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_a_checkpoint_of_a_device_has_the_bytes_of_the_cpus(device, tmp_path, read_at_once):
    here, there = twins()
    for name, model in (("here", here), ("there", there)):
        dcp.save(both(model), checkpoint_id=tmp_path / name, no_dist=True)
        waiting = dcp.async_save(both(model), checkpoint_id=tmp_path / f"{name}2", no_dist=True)
        train(model, "cpu" if model is here else CUDA, range(5, 6))  # the copy is on the host
        waiting.result()
    assert len({str(sums_of(tmp_path / name)) for name in ("here", "there", "here2", "there2")}) == 1
    assert max(read_at_once) <= 8  # of 60 and more
    there.load_state_dict(there.state_dict())
    fresh = Model("ADAMW")
    for model in (there, fresh, Model("ADAMW").to("cuda")):
        load(model, tmp_path / ("here" if model is not fresh else "there"))
        dcp.save(both(model), checkpoint_id=tmp_path / "again", no_dist=True)
        assert sums_of(tmp_path / "again") == sums_of(tmp_path / "here")
    assert device.mixed == [] and device.without_kernel == []
