"""Collections of one model on two mock GPUs of a process; the first one is the current GPU."""

import copy

import pytest
import torch
from mock_device import CUDA, OTHER_GPU, MockDevice
from mock_streams import Streams
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn

pytestmark = pytest.mark.skipif(CUDA == OTHER_GPU, reason="has no two GPUs")
LRU = dyn.LeastRecentlyUsed()


@pytest.fixture
def device():
    with MockDevice(Streams()) as device:
        yield device
    assert device.mixed == device.without_kernel == []
    assert not device.is_mock or device.streams.unordered == []


class Model(nn.Module):
    """Pooled rows of `a` and sequences of `b`, each on a device of its own, and the sum of both."""

    def __init__(self):
        super().__init__()
        fused = {"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1, "defer_updates": True}
        options = {"fused_params": fused, "dynamic": dyn.DynamicTableConfig(eviction=LRU)}
        bags = [EmbeddingBagConfig(90, 4, "a", feature_names=["a"])]
        rows = [EmbeddingConfig(90, 4, "b", feature_names=["b"])]
        self.pooled = dyn.DynamicEmbeddingBagCollection(bags, **options)
        self.sequence = dyn.DynamicEmbeddingCollection(rows, **options)

    def forward(self, ids):
        """Returns [3, 4] on the device of the pooled rows; each sample has as many ids."""
        pooled, rows = (
            one(KeyedJaggedTensor([name], ids, lengths=torch.full((3,), len(ids) // 3)).to(place))
            for name, one, place in zip("ab", self.children(), self.places(), strict=True)
        )
        summed = rows["b"].values().view(3, -1, 4).sum(1)
        return pooled["a"] + summed.to(self.places()[0])

    def places(self):
        return [one.table(name).device for name, one in zip("ab", self.children(), strict=True)]


def on_two_gpus(model):
    there = copy.deepcopy(model)
    there.pooled.to(CUDA)
    there.sequence.to(OTHER_GPU)
    assert there.places() == [CUDA, OTHER_GPU]
    return there


def train(model, steps):
    """Returns norms of the gradients of training steps; each has new ids, and the last ones evict."""
    norms = []
    optimizers = [one.fused_optimizer for one in model.children()]
    for step in steps:
        loss = (model(torch.arange(36) + 20 * step) ** 2).mean()
        loss.backward()
        norms.append(float(dyn.clip_grad_norm_(model, 0.1)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms


def rows_of(model):
    found = []
    for name, one in zip("ab", model.children(), strict=True):
        ids = one.table(name).ids()
        found += [part.cpu() for part in (ids, *one.table(name).lookup(ids))]
    return found


def test_a_model_on_two_gpus_trains_as_on_the_cpu(device):
    here = Model()
    there = on_two_gpus(here)
    assert train(there, range(5)) == train(here, range(5))
    for got, expected in zip(rows_of(there), rows_of(here), strict=True):
        assert torch.equal(got, expected)
    assert [one.op for one in device.between] == ["_to_copy"] * 10 or not device.is_mock


def test_rows_move_from_one_gpu_to_the_other(device):
    there = on_two_gpus(Model())
    train(there, range(3))
    expected = rows_of(there)
    device.forget()
    there.sequence.to("cuda")
    assert there.places() == [CUDA, CUDA] and (device.between or not device.is_mock)
    for got, rows in zip(rows_of(there), expected, strict=True):
        assert torch.equal(got, rows)
    train(there, range(3, 5))


def test_an_error_of_one_gpu_is_raised_by_its_tables_only(device):
    there = on_two_gpus(Model())
    train(there, range(2))
    rows = there.sequence.local_tables()["b"].weights
    rows.read(torch.tensor([10**6], device=OTHER_GPU))  # its error is raised later
    there.pooled.table("a").lookup(torch.arange(3))
    there.pooled.state_dict()
    with pytest.raises(RuntimeError, match="expected rows"):
        there.sequence.table("b").lookup(torch.arange(3))
        there.sequence.state_dict()
    train(there, range(2, 3))


def test_calls_on_tables_wait_for_streams_of_both_gpus(device):
    """Nobody else orders these streams."""
    module = on_two_gpus(Model()).sequence
    streams = {gpu: torch.cuda.Stream(gpu) for gpu in (CUDA, OTHER_GPU)}
    ids, rows = torch.arange(9), torch.arange(36.0).view(9, 4)
    for gpu, other in ((OTHER_GPU, CUDA), (CUDA, OTHER_GPU)):
        with torch.cuda.stream(streams[gpu]):
            module.table("b").assign(ids, rows)
        module.table("b").erase(ids[:2])
        with torch.cuda.stream(streams[gpu]):
            assert module.table("b").assign(ids[:1], rows[:1]) is None
        with torch.cuda.stream(streams[other]):
            module.to(other)
        found = module.table("b").lookup(ids)
        assert found[1].tolist() == [True, False] + [True] * 7
        assert torch.equal(found[0][2:].cpu(), rows[2:])
