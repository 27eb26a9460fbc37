"""A commit: signals wait for its end, and another exception tears the tables until they are loaded."""

import copy
import os
import pickle
import signal
import tempfile
import threading

import pytest
import torch
from interrupt_cases import batch_of, collection_of

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints, export_rows, mark
from torchrec_dyn.storage import commit
from torchrec_dyn.table import TableChange


class Stop(BaseException):
    """Raised by a handler."""


@pytest.fixture
def handled(request):
    """Handlers of two signals that raise; the calls of them."""
    calls = []

    def stop(number, frame):
        calls.append(number)
        raise Stop(number)

    numbers = signal.SIGUSR1, signal.SIGUSR2
    before = [signal.signal(number, stop) for number in numbers]
    yield calls
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def trained():
    """A collection with two tables, and the output of its last forward, without backward."""
    model = collection_of(dyn.DynamicTableConfig(), dyn.DynamicTableConfig())
    batch = batch_of([1, 2, 3], [4, 5])
    model(batch).values().sum().backward()
    return model, model(batch).values()


def tear(model, name="t0"):
    with pytest.raises(MemoryError), commit(model.local_tables()[name]):
        raise MemoryError


def test_signals_wait_for_the_outermost_commit(handled):
    handlers = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    done = []
    with pytest.raises(Stop) as raised, commit():
        with commit():
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR1)
        done.append(list(handled))
    assert done == [[]]
    assert handled == [signal.SIGUSR2, signal.SIGUSR1]
    assert raised.value.args == (signal.SIGUSR1,)
    assert raised.value.__context__.args == (signal.SIGUSR2,)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]


def test_a_signal_tears_nothing(handled):
    model, _ = trained()
    with pytest.raises(Stop), commit(model.local_tables()["t0"]):
        os.kill(os.getpid(), signal.SIGUSR1)
    model.table("t0").lookup(torch.tensor([1]))


def test_a_commit_of_another_thread_leaves_the_handlers(handled):
    handler, seen = signal.getsignal(signal.SIGUSR1), []

    def work():
        with commit():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]


CALLS = {
    "forward": lambda model, output: model(batch_of([1], [2])),
    "evaluation": lambda model, output: model.eval()(batch_of([1], [2])),
    "backward": lambda model, output: output.sum().backward(),
    "lookup": lambda model, output: model.table("t1").lookup(torch.tensor([1])),
    "assign": lambda model, output: model.table("t0").assign(torch.tensor([1]), torch.ones(1, 4)),
    "erase": lambda model, output: model.table("t0").erase(torch.tensor([1])),
    "export_state": lambda model, output: model.local_tables()["t0"].export_state(),
    "half": lambda model, output: model.half(),
    "stats": lambda model, output: model.table("t0").stats(),
    "mark": lambda model, output: mark(model),
    "export_rows": lambda model, output: export_rows(model, "t0", f"{tempfile.mkdtemp()}/rows"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_torn_table_can_only_be_loaded(call):
    model, output = trained()
    saved = copy.deepcopy(model.state_dict())
    tear(model)
    with pytest.raises(
        RuntimeError, match=r"got 't0' torn by an exception within a change\. Load a"
    ):
        CALLS[call](model, output)
    model.train().load_state_dict(saved)
    if call != "backward":
        CALLS[call](model, output)


def test_an_exception_in_the_commit_of_a_step_tears(monkeypatch):
    model, _ = trained()
    saved = copy.deepcopy(model.state_dict())

    def fail(*_):
        raise OSError

    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(TableChange, "commit", fail)
        model(batch_of([90], [91]))
    with pytest.raises(RuntimeError, match="got 't0', 't1' torn"):
        model(batch_of([1], [2]))
    model.load_state_dict(saved)
    assert model.table("t0").num_rows == 3


def test_a_load_into_the_state_dict_of_a_torn_table():
    model, _ = trained()
    saved = copy.deepcopy(model.state_dict())
    tear(model)
    places, torn = model.state_dict(), copy.deepcopy(model.state_dict())
    for name, tensor in places.items():
        tensor.copy_(saved[name])
    with pytest.raises((ValueError, RuntimeError), match="table='t0'"):
        model.load_state_dict(torn)
    model.load_state_dict(places)
    assert model.table("t0").num_rows == 3 and "torn" not in repr(model)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_torn(twin):
    model, _ = trained()
    saved = copy.deepcopy(model.state_dict())
    tear(model)
    other = twin(model)
    model.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="'t0' torn"):
        other(batch_of([1], [2]))
    other.load_state_dict(saved)
    other(batch_of([1], [2]))


def test_a_torn_table_is_not_saved_and_a_restore_takes_the_mark_off(tmp_path):
    model, _ = trained()
    saves = Checkpoints(tmp_path)
    saves.save(model, model.fused_optimizer, step=1)
    tear(model)
    with pytest.raises(RuntimeError, match="'t0' torn"):
        saves.save(model, model.fused_optimizer, step=2)
    saves.restore(model, model.fused_optimizer)
    model(batch_of([1], [2]))
