"""Calls on several streams of a GPU wait for each other; with fakes of torch's streams and events."""

import copy

import pytest
import torch
from life_cases import living_table
from mock_device import CUDA, MockDevice, run_lookups_backward
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import apply_delta, delta_apply, export_delta, mark
from torchrec_dyn.checkpoint_format import table_config
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict import TableSource, saved_tensors
from torchrec_dyn.storage.host_reads import StreamOrder

pytestmark = pytest.mark.mock_only  # tensors of a GPU take no fakes
OTHER_GPU = torch.device("cuda:1")


class Stream:
    def __init__(self, name, log, device=CUDA):
        self.name, self.log, self.device = name, log, device

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
        monkeypatch.setattr("torch.cuda.current_stream", self._stream)
        monkeypatch.setattr("torch.cuda.Event", Event)

    def _stream(self, device):
        other = Stream("other GPU", self.log, OTHER_GPU)
        return other if device == OTHER_GPU else self.streams[self.current]

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


def test_rows_that_move_to_another_gpu_are_read_after_the_last_call(cuda):
    order = StreamOrder()
    with order.turn(CUDA):
        pass
    log = cuda.on("B")
    with order.turn(OTHER_GPU), order.turn(CUDA):
        log.append("rows are read")
    assert log == [
        *("other GPU waits for A", "B waits for A", "rows are read"),
        *("event of B", "event of other GPU"),
    ]


def test_a_delta_is_applied_in_a_turn(cuda, tmp_path, monkeypatch):
    config = EmbeddingConfig(name="a", embedding_dim=4, num_embeddings=1000, feature_names=["a"])
    fused = {"optimizer": "EXACT_SGD", "learning_rate": 0.1}
    log, summary, write = cuda.log, delta_apply.sums_here, delta_apply.merge
    monkeypatch.setattr(
        delta_apply, "sums_here", lambda table: log.append("reads") or summary(table)
    )

    def merge(*asked):
        commit = write(*asked)
        return lambda: log.append("writes") or commit()

    monkeypatch.setattr(delta_apply, "merge", merge)
    with MockDevice():
        module = dyn.DynamicEmbeddingCollection([config], device="cuda", fused_params=fused)
        module.table("a").assign(torch.arange(5), torch.ones(5, 4))
        replica, marker = copy.deepcopy(module), mark(module)
        module.table("a").assign(torch.arange(3, 9), torch.zeros(6, 4))
        export_delta(module, tmp_path / "delta", marker)
        replica.table("a").erase(torch.arange(100, 101))  # the last call on this stream
        cuda.on("B")
        apply_delta(replica, tmp_path / "delta")
        # Each part is a turn; the first one waits, before anything is read.
        assert log[0] == "B waits for A" and "reads" in log, log
        assert log[-2:] == ["writes", "event of B"], log
        assert replica.table("a").num_rows == 9


def test_every_use_of_tables_is_a_turn(cuda):
    config = EmbeddingConfig(name="a", embedding_dim=4, num_embeddings=1000, feature_names=["a"])
    with MockDevice() as device:
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
    with MockDevice():
        table = living_table(dyn.LeastRecentlyUsed(), dyn.AdmitAfter(2), device="cuda")
        table.assign(torch.arange(9), torch.ones(9, 4))
        log = cuda.on("B")
        config = table_config("t", 4, 5, table.dtype, dyn.Constant(0))
        whole = Table.of_one(table, "t", config)
        ((model, _),) = saved_tensors([whole], "save", TableSource)
        assert log[0] == "B waits for A"
        cuda.on("A")
        assert len(model["weight"].local()) == 1 and log[0] == "A waits for B"


def test_lists_made_on_one_stream_are_kept_for_the_other(cuda):
    """Rows listed by age, and free rows: a step of the other stream uses them and drops some."""
    config = EmbeddingConfig(name="a", embedding_dim=4, num_embeddings=640, feature_names=["a"])
    with MockDevice() as device:
        module = dyn.DynamicEmbeddingCollection(
            [config],
            device="cuda",
            dynamic=dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed()),
        )

        def step(first, count):
            ids = torch.arange(first, first + count, device="cuda")
            lengths = torch.ones(count, dtype=torch.int64, device="cuda")
            module(KeyedJaggedTensor(["a"], ids, lengths=lengths))

        with pytest.warns(UserWarning, match="expected an optimizer"):
            step(0, 640)
        step(1000, 3)  # lists rows, and frees ten: seven are left
        table = module.local_tables()["a"]
        listed = table.life._listed._list
        (free,) = table.row_numbers._free
        cuda.on("B")
        device.forget()
        step(2000, 20)
        kept = [one for one, stream in device.recorded if stream is cuda.streams["B"]]
        assert any(one is listed for one in kept) and any(one is free for one in kept)


def test_what_a_table_had_before_is_kept_for_the_stream_that_replaces_it(cuda):
    with MockDevice() as device:
        table = living_table(dyn.LeastRecentlyUsed(), device="cuda")
        table.assign(torch.arange(9), torch.ones(9, 4))
        stores = (*table.stores, table.life.scores.store)
        before = [table.id_map.slots, *(block for store in stores for block in store.blocks)]
        cuda.on("B")
        device.forget()
        table.convert(torch.float16)
        kept = [one for one, stream in device.recorded if stream is cuda.streams["B"]]
        assert len(before) >= 3 and all(any(one is old for one in kept) for old in before)
