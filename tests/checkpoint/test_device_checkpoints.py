"""Tables of a model on two mock GPUs are saved and loaded as those of the CPU: the same bytes, in chunks."""

import copy
import hashlib
from contextlib import closing

import pytest
import torch
import torch.distributed.checkpoint as dcp
from delta_cases import NAMES, Model
from device_twins import on_host, small_chunks
from mock_device import CUDA, OTHER_GPU, MockDevice, run_lookups_backward
from table_cases import same_state
from torch.utils._pytree import tree_map_only
from torchrec import KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_dyn import checkpoint
from torchrec_dyn.checkpoint import Checkpoints, LoadPlanner, apply_delta, export_delta, mark
from torchrec_dyn.checkpoint_format import saved_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SPREAD = 2**58 + 1  # ids of both signs


@pytest.fixture(scope="module")
def first_twins():
    """Returns the device, a trained model on the CPU, and its twin, with a collection on each GPU."""
    with MockDevice() as device:
        here = Model("ADAMW")
        train(here, "cpu", range(3))
        there = copy.deepcopy(here).to("cuda")
        there.sequence.to(OTHER_GPU)
        for model, place in ((here, "cpu"), (there, CUDA)):
            train(model, place, range(3, 5))
        yield device, here, there


@pytest.fixture
def device(first_twins):
    first_twins[0].forget()
    return first_twins[0]


@pytest.fixture
def twins(device, first_twins):
    """Returns copies of both; notes of the copies go to the same device."""
    return copy.deepcopy(first_twins[1:], {id(device): device})


@pytest.fixture
def read_at_once(monkeypatch):
    """Returns the bytes of rows that were read at once on the device; chunks have 256 bytes."""
    return small_chunks(monkeypatch, 256)


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
            gpu = OTHER_GPU if collection is model.sequence else CUDA
            features = features.to(torch.device(place) if place == "cpu" else gpu)
            run_lookups_backward(collection(features), seed=step)


def states(model):
    return {name: on_host(state) for name, state in model.states().items()}


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


def optimizers_of(model):
    names = ("pooled", "sequence")
    return CombinedOptimizer([(name, getattr(model, name).fused_optimizer) for name in names])


def load(model, path):
    state = both(model)
    dcp.load(state, checkpoint_id=path, planner=LoadPlanner(), no_dist=True)
    put(model, state)


def put(model, state):
    model.load_state_dict(state["model"])
    for name, one in state["optimizers"].items():
        getattr(model, name).fused_optimizer.load_state_dict(one)


def sums_of(path):
    """Returns a hash of each file of a checkpoint but its metadata, which name the call."""
    files = sorted(path.glob("*.distcp")) if path.is_dir() else [path]
    assert files
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_a_checkpoint_of_a_device_has_the_bytes_of_the_cpus(device, twins, tmp_path, read_at_once):
    here, there = twins
    dcp.save(both(here), checkpoint_id=tmp_path / "here", no_dist=True)
    waiting = dcp.async_save(both(there), checkpoint_id=tmp_path / "there", no_dist=True)
    assert 0 < max(read_at_once) <= 512  # optimizer state of float16 rows is twice as wide
    train(there, CUDA, range(5, 6))  # the copy is on the host
    waiting.result()
    assert sums_of(tmp_path / "there") == sums_of(tmp_path / "here")
    for model in (there, Model("ADAMW")):
        load(model, tmp_path / "there")
        assert_same(here, model)
    assert device.mixed == [] and device.without_kernel == []


def test_a_save_in_the_background_has_the_rows_of_its_moment(device, twins, tmp_path, monkeypatch):
    copied, restored = saved_tensor._copied, []

    def copied_here(
        *args,
    ):  # torch has left the mock device: DCP copies inside of a function of torch
        with device.here():
            return copied(*args)

    monkeypatch.setattr(saved_tensor, "_copied", copied_here)
    for name, model, place in zip(("here", "there"), twins, ("cpu", CUDA), strict=True):
        fresh = Model("ADAMW")
        with closing(Checkpoints(tmp_path / name, full_every=2)) as checkpoints:
            for step in (5, 6):  # a full save, and a delta
                saving = checkpoints.async_save(model, optimizers_of(model), step=step)
                train(model, place, [step])
                saving.result()
        with closing(Checkpoints(tmp_path / name)) as checkpoints:
            assert checkpoints.restore(fresh, optimizers_of(fresh)).step == 6
        restored.append(fresh)
    assert_same(*restored)
    assert not same_state(states(fresh)["plain"], states(twins[1])["plain"])
    assert device.mixed == [] and device.without_kernel == []


def test_state_dicts_on_the_device_can_be_loaded(device, twins):
    """As torch.load(map_location="cuda") returns them."""
    here, there = twins
    moved = tree_map_only(
        torch.Tensor, lambda one: one if one.is_meta else one.to(CUDA), both(here)
    )
    fresh = Model("ADAMW")
    for model in (there, fresh):
        put(model, moved)
        assert_same(here, model)
    assert device.mixed == []


def test_a_damaged_load_changes_nothing(device, twins):
    here, there = twins
    before, state = states(there), both(here)
    weight = state["model"]["pooled.embedding_bags.plain.weight"]
    moment = state["optimizers"]["pooled"]["state"]["embedding_bags.plain.weight"]
    for damaged in (weight, moment["plain.momentum1"], moment["plain.step"]):
        damaged += 1
        with pytest.raises((RuntimeError, ValueError), match=r"content sum|damaged state"):
            put(there, state)
        damaged -= 1
        assert all(same_state(states(there)[name], one) for name, one in before.items())


def test_deltas_of_a_device_have_the_bytes_of_the_cpus(device, twins, tmp_path, read_at_once):
    here, there = twins
    copies = [copy.deepcopy(model) for model in (here, there)]
    read_at_once.clear()
    for name, model, place in (("here", here, "cpu"), ("there", there, CUDA)):
        marker = mark(model)
        model.pooled.table("plain").erase((torch.arange(5) * SPREAD).to(place))
        train(model, place, range(7, 9))
        export_delta(model, tmp_path / name, marker)
    assert sums_of(tmp_path / "there") == sums_of(tmp_path / "here")
    assert 0 < max(read_at_once) <= 512  # optimizer state of float16 rows is twice as wide
    for model in copies:
        apply_delta(model, tmp_path / "there")
        assert_same(here, model)
        with pytest.raises(ValueError, match="it was applied already"):
            apply_delta(model, tmp_path / "here")
    assert_same(here, there)
    assert device.mixed == [] and device.without_kernel == []


def test_rows_of_a_device_are_written_and_read_as_files(device, twins, tmp_path):
    here, there = twins
    for name, model in (("here", here), ("there", there)):
        checkpoint.export_rows(model.pooled, "plain", tmp_path / name)
    assert sums_of(tmp_path / "there") == sums_of(tmp_path / "here")
    fresh = [Model("ADAMW"), Model("ADAMW").to("cuda")]
    for model in fresh:
        rows = here.tables()["plain"].num_rows
        assert checkpoint.import_rows(model.pooled, "plain", tmp_path / "there") == rows
    assert_same(*fresh)
    assert device.mixed == []


def test_no_save_hides_an_error_of_the_device(device, twins):
    _, there = twins
    table = there.tables()["plain"]
    table.weights.read(torch.tensor([10**6]).to(CUDA))  # its error is raised later
    with pytest.raises(RuntimeError, match="expected rows"):
        mark(there)
    mark(there)
