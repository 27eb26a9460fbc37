"""Threads: reading beside training, two threads that train, copies and forks of the lock."""

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from itertools import count

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from thread_cases import (
    FRESH,
    HOT,
    TRAINED,
    Training,
    batch,
    beside,
    collection,
    ids_of_step,
    often_switching,
)
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import mark

SECONDS = 0.7


def trained(model):
    return lambda features: model(features).values()


def check_rows(rows: Tensor, found: Tensor, steps: int, training: Training) -> None:
    """Checks rows of the hot id and of ids of complete steps."""
    assert bool(found.all()), f"{int((~found).sum())} known ids of {len(found)} are absent"
    assert torch.equal(rows, rows[:, :1].expand_as(rows)), "a torn row"
    assert -training.done - 1 <= float(rows[0, 0]) <= -steps, "a row of the hot id from no step"
    assert bool(torch.eq(rows[1:], -1).all()), "a row from no step"


def run_beside(step: Callable[[], None], readers: Sequence[Callable[[], None]], seconds: float):
    """Calls `step` for a time, while each reader runs in a thread of its own."""
    with beside(*readers) as all_well:
        end = time.monotonic() + seconds
        while time.monotonic() < end and all_well():
            step()


def test_known_ids_are_found_while_the_table_grows():
    model = collection()
    handle, training = model.table("t"), Training(trained(model))
    training.step()

    def lookup():
        steps, asked = training.done, training.known()[: 40 * FRESH]
        check_rows(*handle.lookup(asked), steps, training)

    def ids():
        known = training.known()
        got = handle.ids()
        assert len(got) <= 1 + (training.done + 1) * FRESH
        assert torch.equal(torch.isin(known, got), torch.ones_like(known, dtype=torch.bool))

    def stats():
        got = handle.stats()
        assert got["rows"] == got["inserted"] == 1 + got["step"] * FRESH
        assert got["ids_seen"] == got["step"] * (FRESH + 1) == got["hits"] + got["rows"]

    run_beside(training.step, [lookup, ids, stats], SECONDS)


def test_reading_a_table_that_evicts():
    model = collection(limit=10 * FRESH, eviction=dyn.LeastRecentlyUsed())
    handle, training = model.table("t"), Training(trained(model))
    training.step()

    def read():
        steps = training.done
        rows, found = handle.lookup(torch.tensor([HOT]))
        check_rows(rows, found, steps, training)
        assert handle.count(torch.tensor([HOT])).item() >= steps
        assert handle.last_seen(torch.tensor([HOT])).item() >= steps

    def whole():
        got = handle.stats()
        assert got["rows"] == got["inserted"] - got["evicted_full"] <= 10 * FRESH
        ids = handle.ids()
        assert len(ids) <= 10 * FRESH and HOT in ids
        assert handle.num_rows <= 10 * FRESH

    run_beside(training.step, [read, whole], SECONDS)


def test_state_dicts_are_of_one_moment():
    adagrad = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.0}
    policy = {"eviction": dyn.LeastRecentlyUsed(), "fused_params": adagrad}
    model = collection(limit=20 * FRESH, **policy)
    training = Training(trained(model))
    training.step()

    def rows():
        state = model.state_dict()
        other = collection(limit=20 * FRESH, **policy)
        other.load_state_dict(state)  # verifies content sums and distinct ids
        hot = torch.eq(state["embedding_bags.t.ids"], HOT)
        (seen,), (times,) = (
            state[f"embedding_bags.t.{name}"][hot] for name in ("last_seen", "count")
        )
        assert seen == times == state["embedding_bags.t.last_seen"].max()

    def optimizer():
        state = model.fused_optimizer.state_dict()["state"]["embedding_bags.t.weight"]
        squares, step = state["t.momentum1"], int(state["t.step"])
        assert torch.equal(squares, squares[:, :1].expand_as(squares)), "torn optimizer state"
        assert squares.max() in (step - 1, step)  # of the hot id; its last backward may be to come
        assert len(squares) <= 20 * FRESH

    run_beside(training.step, [rows, optimizer, optimizer], SECONDS)


def test_state_dicts_of_two_threads_do_not_mix():
    adagrad = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 1.0}
    model = collection(fused_params=adagrad)
    training = Training(trained(model))
    training.step()
    (states,) = model.fused_optimizer.state.values()
    entries = list(states.values())
    tensors = [entries[0].state_dict()]
    training.step()
    with ThreadPoolExecutor(1) as pool:
        (later,) = pool.submit(model.fused_optimizer.state_dict).result(10)["state"].values()
    tensors += [entry.state_dict() for entry in entries[1:]]
    earlier = dict(zip(states, tensors, strict=True))
    assert int(earlier["t.step"]) == 1 and int(later["t.step"]) == 2


def test_two_threads_train_one_module():
    model, steps = collection(), count()

    def step():
        model(batch(ids_of_step(next(steps)))).values().sum().backward()

    run_beside(step, [step], SECONDS)
    done, handle = next(steps), model.table("t")
    rows, found = handle.lookup(torch.arange(1 + done * FRESH))
    assert bool(found.all()) and handle.num_rows == len(rows)
    assert rows[HOT].eq(-done).all() and rows[1:].eq(-1).all()
    assert handle.stats()["step"] == done and handle.stats()["withheld"] == 0


def test_two_threads_make_the_rows_and_read_other_orders_of_features():
    """First forwards at the same time give one table; each thread gets the features of its own batch."""

    def run(order, start, model):
        values = torch.tensor([["a", "b"].index(key) for key in order])
        start.wait()
        for _ in range(20):
            out = model(KeyedJaggedTensor(list(order), values, lengths=torch.ones(2).long()))
            out.values().sum().backward()

    configs = [EmbeddingBagConfig(100, 4, name, feature_names=[name]) for name in ("a", "b")]
    for _ in range(20):
        model = dyn.DynamicEmbeddingBagCollection(configs, fused_params=TRAINED)
        start = threading.Barrier(2)
        with often_switching(), ThreadPoolExecutor(2) as pool:
            list(pool.map(run, ("ab", "ba"), [start] * 2, [model] * 2))
        for id, name in enumerate("ab"):
            assert model.table(name).ids().tolist() == [id]
            assert model.table(name).stats()["step"] == 40


def test_a_copy_beside_training_is_of_one_moment():
    model = collection()
    training = Training(trained(model))
    training.step()

    def copies():
        steps = training.done
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            handle = other.table("t")
            assert handle.num_rows == 1 + handle.stats()["step"] * FRESH
            check_rows(*handle.lookup(torch.arange(1 + steps * FRESH)), steps, training)

    run_beside(training.step, [copies], SECONDS)


def test_a_copy_has_a_lock_of_its_own():
    model = collection()
    model(batch(ids_of_step(0))).values().sum().backward()
    with model.unsharded_lookup.lock:
        other = copy.deepcopy(model)
        with ThreadPoolExecutor(1) as pool:  # waits for no lock of `model`
            assert pool.submit(other.table("t").lookup, torch.tensor([HOT])).result(10)[1].all()


@pytest.mark.parametrize("is_erased", [False, True])
def test_an_edit_is_not_lost_to_rows_of_another_optimizer(monkeypatch, is_erased):
    model = collection()
    (table,) = model.unsharded_lookup.tables
    handle, rows, ids = model.table("t"), table.rows, torch.tensor([7])
    handle.assign(torch.tensor([7 if is_erased else 8]), torch.ones(1, 8))

    def change():
        table.mark_optimizer([torch.optim.SGD], [{"lr": 0.1}])
        table.rows()

    other = threading.Thread(target=change)

    def rows_and_change():
        now = rows()
        if other.ident is None:
            other.start()
            other.join(0.1)
        return now

    with monkeypatch.context() as patch:
        patch.setattr(table, "rows", rows_and_change)
        if is_erased:
            handle.erase(ids)
        else:
            handle.assign(ids, torch.ones(1, 8))
    other.join()
    assert bool(handle.lookup(ids)[1]) == (not is_erased)


def test_a_forked_process_finds_tables_at_rest():
    model = collection()
    handle, training = model.table("t"), Training(trained(model))
    training.step()

    def fork():
        pid = os.fork()
        if not pid:
            is_whole = False
            try:
                signal.alarm(10)  # a child that waits for a lock ends here
                torch.set_num_threads(1)  # torch's other threads are not in the child
                rows = 1 + handle.stats()["step"] * FRESH
                is_whole = handle.num_rows == len(handle.ids()) == rows
            finally:
                os._exit(0 if is_whole else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    run_beside(training.step, [fork], SECONDS)


ASKED = torch.arange(3)
CALLS = {
    "forward": lambda model, _: model(batch(ASKED)),
    "backward": lambda _, output: output.sum().backward(),
    "lookup": lambda model, _: model.table("t").lookup(ASKED),
    "ids": lambda model, _: model.table("t").ids(),
    "num_rows": lambda model, _: model.table("t").num_rows,
    "stats": lambda model, _: model.table("t").stats(),
    "log_stats": lambda model, _: dyn.log_stats(model, {}, 0),
    "last_seen": lambda model, _: model.table("t").last_seen(ASKED),
    "count": lambda model, _: model.table("t").count(ASKED),
    "assign": lambda model, _: model.table("t").assign(ASKED, torch.ones(3, 8)),
    "erase": lambda model, _: model.table("t").erase(ASKED),
    "set_time": lambda model, _: model.set_time(3),
    "state_dict": lambda model, _: model.state_dict(),
    "optimizer": lambda model, _: model.fused_optimizer.state_dict(),
    "load": lambda model, _: model.load_state_dict(copy.deepcopy(SAVED)),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "half": lambda model, _: model.half(),
    "reset": lambda model, _: model.reset_parameters(),
    "mark": lambda model, _: mark(model),
}
SAVED = collection(eviction=dyn.LeastRecentlyUsed()).state_dict()


@pytest.mark.parametrize("call", CALLS)
def test_a_call_waits_for_the_lock(call):
    model = collection(eviction=dyn.LeastRecentlyUsed())
    output = model(batch(ids_of_step(0))).values()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread has started
        with model.unsharded_lookup.lock:
            waits = pool.submit(CALLS[call], model, output)
            with pytest.raises(TimeoutError):
                waits.result(0.05)
        waits.result(10)
