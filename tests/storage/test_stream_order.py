"""Calls on several streams of a GPU wait for each other; with fakes of torch's streams and events."""

import pytest
import torch
from pretended_device import CUDA, PretendedDevice, run_lookups_backward
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.storage.stream_order import StreamOrder


class Stream:
    device = CUDA

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.stream.name}")


class Event:
    stream = None

    def record(self, stream):
        self.stream = stream
        stream.log.append(f"event of {stream.name}")


class Cuda:
    """Fakes of torch.cuda with two streams, `current` among them."""

    def __init__(self, monkeypatch):
        self.log = []
        self.streams = {name: Stream(name, self.log) for name in "AB"}
        self.current = "A"
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.current_stream", lambda _: self.streams[self.current])
        monkeypatch.setattr("torch.cuda.Event", Event)

    def on(self, name):
        """Makes a stream the current one and forgets what has happened."""
        self.current = name
        self.log.clear()
        return self.log


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def test_a_call_waits_for_the_last_call_of_another_stream(cuda):
    order = StreamOrder()

    def call():
        with order.turn(CUDA):
            cuda.log.append(f"call on {cuda.current}")
            with order.turn(CUDA):  # part of the same call
                pass

    call()
    call()
    assert cuda.log == ["call on A", "event of A"] * 2
    log = cuda.on("B")
    call()
    assert log == ["B waits for A", "call on B", "event of B"]
    log = cuda.on("A")
    with pytest.raises(KeyError), order.turn(CUDA):
        raise KeyError
    assert log == ["A waits for B", "event of A"]  # kernels may have started before the error
    log = cuda.on("B")
    with order.turn(torch.device("cpu")):
        assert log == []


def test_every_use_of_tables_is_a_turn(cuda):
    config = EmbeddingConfig(name="a", embedding_dim=4, num_embeddings=1000, feature_names=["a"])
    with PretendedDevice() as device:
        module = dyn.DynamicEmbeddingCollection([config], device="cuda")
        ids = torch.arange(5, device="cuda")
        features = KeyedJaggedTensor(["a"], ids, lengths=torch.full((5,), 1, device="cuda"))
        with pytest.warns(UserWarning, match="expected an optimizer"):
            output = module(features)
        assert {id(ids), id(cuda.streams["A"])} <= {
            id(one) for pair in device.recorded for one in pair
        }
        calls = {
            "forward": lambda: module(features),
            "backward": lambda: run_lookups_backward(output),
            "lookup": lambda: module.table("a").lookup(ids),
            "erase": lambda: module.table("a").erase(ids[:1]),
            "state dict": lambda: module.state_dict(),
            "growth": lambda: module.table("a").assign(
                torch.arange(100, device="cuda"), torch.ones(100, 4, device="cuda")
            ),
            "to": lambda: module.half(),
        }
        for number, (name, call) in enumerate(calls.items()):
            here, there = "BA" if number % 2 == 0 else "AB"
            log = cuda.on(here)
            device.forget()
            call()
            assert log[0] == f"{here} waits for {there}" and log[-1] == f"event of {here}", (
                name,
                log,
            )
            # The outgoing slots of a map are dropped: the stream that still moves ids may not own them.
            assert (name == "growth") == any(len(one) == 64 for one, _ in device.recorded), name


@pytest.mark.parametrize("policy", [dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()])
def test_lists_made_on_one_stream_are_kept_for_the_other(cuda, policy):
    """Candidates for eviction, and free rows: a step of the other stream uses them and drops some."""
    config = EmbeddingConfig(name="a", embedding_dim=4, num_embeddings=640, feature_names=["a"])
    with PretendedDevice() as device:
        module = dyn.DynamicEmbeddingCollection(
            [config], device="cuda", dynamic=dyn.DynamicTableConfig(eviction=policy)
        )

        def step(first, count):
            ids = torch.arange(first, first + count, device="cuda")
            lengths = torch.ones(count, dtype=torch.int64, device="cuda")
            module(KeyedJaggedTensor(["a"], ids, lengths=lengths))

        with pytest.warns(UserWarning, match="expected an optimizer"):
            step(0, 640)
        step(1000, 3)  # lists candidates, and frees ten rows: seven are left
        table = module.local_tables()["a"]
        lists = table.life._candidates
        listed = lists._listed.ids if isinstance(policy, dyn.LeastFrequentlyUsed) else lists._rows
        (free,) = table.row_numbers._free
        cuda.on("B")
        device.forget()
        step(2000, 20)
        kept = [one for one, stream in device.recorded if stream is cuda.streams["B"]]
        assert any(one is listed for one in kept) and any(one is free for one in kept)
