"""Served collections that are moved, copied and pickled as other modules are: rows stay in their files."""

import copy
import io
import pickle

import pytest
import torch
from serving_cases import Plain, bag_configs, batch, save, save_delta, sequence_configs
from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_dyn import serving

IDS = [*range(-60, 60)]  # of which some are in no table
A = Plain("a", 16).with_random(range(-50, 50))
B = Plain("b", 16).with_random(range(-9, 30), seed=1)
DTYPES = [torch.float32, torch.float16, torch.int8, torch.int4]
FEATURES = batch(["f_b", "f_a"], IDS, 9, seed=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return save(folder / "saved", A, B)


def pooled(folder):
    configs = bag_configs(A, B, pooling={"b": PoolingType.MEAN})
    return serving.ServingEmbeddingBagCollection(folder, configs, unseen="initial")


def sequences(folder):
    return serving.ServingEmbeddingCollection(folder, sequence_configs(A, B), unseen="initial")


def numbers(collection):
    """Returns all numbers that the collection reads, in the order of the features."""
    found = collection(FEATURES)
    parts = [found] if isinstance(found, KeyedTensor) else found.values()
    return torch.cat([one.values().flatten() for one in parts])


def saved_and_loaded(collection):
    file = io.BytesIO()
    torch.save(collection, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MOVES = {
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "meta": lambda model: model.to("meta"),
    "meta, then to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "cpu": lambda model: model.cpu(),
    "share_memory": lambda model: model.share_memory(),
}
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("make", [pooled, sequences])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_moves_change_nothing(checkpoint, tmp_path, monkeypatch, dtype, make, move):
    serving.build(checkpoint, tmp_path / "served", rows=dtype)
    expected = numbers(make(tmp_path / "served"))
    model = nn.Module()
    model.sparse = make(tmp_path / "served")
    empty_like = torch.empty_like  # of `to_empty`: what the allocator hands out is any number
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(1))
    places = [one.data_ptr() for one in model.sparse.buffers()]
    assert move(model) is model
    monkeypatch.undo()
    assert torch.equal(numbers(model.sparse), expected)
    assert [one.data_ptr() for one in model.sparse.buffers()] == places  # mapped, not copied


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", [pooled, sequences])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_opens_the_directory(checkpoint, tmp_path, dtype, make, duplicate):
    serving.build(checkpoint, tmp_path / "served", rows=dtype)
    one = make(tmp_path / "served")
    twin = duplicate(one)
    assert twin is not one and twin.generation == one.generation
    assert torch.equal(numbers(twin), numbers(one))
    save_delta(tmp_path / "delta", [A, B], [A.with_random([1, 99], seed=3).without([2]), B])
    serving.apply_delta(tmp_path / "served", tmp_path / "delta")
    assert twin.refresh()
    later = duplicate(one)  # which serves the old generation itself
    assert one.generation != later.generation == twin.generation and not later.refresh()
    assert torch.equal(numbers(later), numbers(make(tmp_path / "served")))
    assert one.refresh() and torch.equal(numbers(later), numbers(one))


def test_a_pickle_has_no_rows(checkpoint, tmp_path):
    serving.build(checkpoint, tmp_path / "few")
    serving.build(save(tmp_path / "more", A.with_random(range(2000)), B), tmp_path / "big")
    few, big = (len(pickle.dumps(pooled(tmp_path / name))) for name in ("few", "big"))
    assert few == big
    pickled = pickle.dumps(pooled(tmp_path / "few"))
    (tmp_path / "few").rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"few: expected"):
        pickle.loads(pickled)


def test_a_relative_path_is_that_of_the_first_directory(checkpoint, tmp_path, monkeypatch):
    serving.build(checkpoint, tmp_path / "served")
    save_delta(tmp_path / "delta", [A, B], [A.with_random([1, 99], seed=3), B])
    monkeypatch.chdir(tmp_path)
    one = pooled("served")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    serving.apply_delta(tmp_path / "served", tmp_path / "delta")
    assert one.refresh() and torch.equal(numbers(one), numbers(pooled(tmp_path / "served")))
    for duplicate in COPIES.values():
        twin = duplicate(duplicate(one))
        assert torch.equal(numbers(twin), numbers(one)) and not twin.refresh()


def test_features_on_another_device_are_refused(checkpoint, tmp_path):
    serving.build(checkpoint, tmp_path / "served")
    features = batch(["f_a", "f_b"], IDS, 9, seed=1).to(torch.device("meta"))
    with pytest.raises(ValueError, match=r"Bag.*: expected features on the CPU.*, got meta\. Call"):
        pooled(tmp_path / "served")(features)
