"""Calls on several streams of a GPU wait for each other; with fakes of torch's streams and events."""

import pytest
import torch
from life_cases import living_table
from pretended_device import CUDA, PretendedDevice, run_lookups_backward
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint_format import table_config
from torchrec_dyn.state_dict import ModelSource, OptimizerSource, saved_tensors, whole_pieces
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


def test_saves_and_their_reads_of_rows_take_turns(cuda):
    with PretendedDevice():
        table = living_table(dyn.LeastRecentlyUsed(), dyn.AdmitAfter(2), device="cuda")
        table.assign(torch.arange(9), torch.ones(9, 4))
        log = cuda.on("B")
        pieces = whole_pieces(
            table, "t", table, table_config("t", 4, 5, table.dtype, dyn.Constant(0))
        )
        sources = [ModelSource(pieces, None), OptimizerSource(pieces, None)]
        model, _ = saved_tensors(None, "save", [pieces], lambda _: sources)
        assert log[0] == "B waits for A"
        cuda.on("A")
        assert len(model["weight"].local()) == 1 and log[0] == "A waits for B"
