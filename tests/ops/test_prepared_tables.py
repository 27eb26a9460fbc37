"""Prepared tables: their ops equal those that take lists; what a handle keeps, and for how long."""

import copy
import gc
import itertools
import math
import os
import pickle
import random
import signal

import pytest
import torch
from another_process import call
from device_ops import is_on_cpu, simt_library
from fuzz_ops import CASES, copies
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases_lookup import draw_find
from op_samples import SAMPLES, find_sample, prepared, tables_in, two_maps, update, whole
from table_cases import assert_same, bits
from thread_cases import beside
from torch.multiprocessing.reductions import StorageWeakRef

from torchrec_dyn import ops
from torchrec_dyn.storage import RowStore

CPU = torch.ops.torchrec_dyn
TABLES = SAMPLES["prepare_tables"][1]  # with states, and counts of numbers that are not finite
pytestmark = pytest.mark.usefixtures("device")
# Tables on a GPU are copies: a test does not see what becomes of them.
on_hosts = pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True)
on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)


@settings(max_examples=80)
@given(seed=st.integers(0, 2**40))
def test_find_and_pool_is_a_lookup_and_a_gather(seed):
    tables, batch, offsets = draw_find(random.Random(seed))
    begins = offsets[batch["first_bags"]]
    begins_of_tables = begins[batch["first_features"]]
    ids, segments, own = batch["ids"], batch["segments"], offsets
    shape = (
        (batch["output_rows"], batch["columns"]) if batch["columns"] else (batch["output_rows"],)
    )
    rows, absent = CPU.lookup(ids, begins_of_tables, tables["slots"], tables["moved"])
    if segments is None:  # each id is a bag
        width, own, parts = int(tables["layout"][0, 3]), None, itertools.pairwise(begins_of_tables)
        segments = torch.tensor([[t, a, b - a, a * width, width] for t, (a, b) in enumerate(parts)])
        shape = (len(ids), width)
    lists = rows, own, batch["bag_weights"], tables["weights"], tables["layout"], segments
    expected = CPU.gather_pool(*lists, batch["mean"], math.prod(shape), batch["dtype"]).view(shape)
    new_ids, new_counts, new_offsets, new_index = CPU.collect_new(ids, rows, begins_of_tables)
    for pools, collects in ((0, 2), (1, 1), (2, 0), (1, 2)):
        given = prepared({**tables, **batch}, pools=pools, collects=collects)
        out, found, bags, numbers, *new = ops.find_and_pool(**given)
        assert torch.equal(found, rows)
        assert torch.equal(bags, offsets)
        lists = collects and absent.any()
        expected_new = new_offsets if lists else torch.zeros_like(new_offsets)
        parts = [begins, begins_of_tables, absent, expected_new]
        assert torch.equal(numbers, torch.cat(parts))
        for got, wanted in zip(new, (new_ids, new_counts, new_index), strict=True):
            assert torch.equal(got, wanted if lists else whole())
        assert (out.dtype, out.shape) == (batch["dtype"], shape if pools else (0,))
        if pools == 2 or (pools == 1 and not (is_on_cpu() and absent.any())):
            assert_same(out, expected)


wild = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2, 3, 4, 5, 6, 2**31 - 1, 2**62, 2**63 - 1])
LENGTHS = [(2, 1, 0, 2), (2, 1, 0, 3), (2, 1, 0, 1), (6, -1, 0, 0), (2**63 - 1, 2**63 - 1, 2, 5)]
OFFSETS = [(0, 2, 3, 3, 5), (0, 2, 1, 3, 5), (1, 2, 3, 3, 5), (0, 2, 3, 3, 6), (0, 0, 0, 0, 5)]


@settings(max_examples=150)
@given(
    lengths=st.none() | st.sampled_from(LENGTHS) | st.tuples(*[wild] * 4),
    offsets=st.sampled_from([None, *OFFSETS]) | st.tuples(*[wild] * 5),
    pools=st.integers(0, 2),
    collects=st.integers(0, 2),
    is_sequence=st.booleans(),
)
def test_wrong_lengths_and_offsets_are_flagged(lengths, offsets, pools, collects, is_sequence):
    if lengths is None and offsets is None:
        offsets = OFFSETS[0]
    sums = offsets if lengths is None else (0, *itertools.accumulate(lengths))
    is_right = offsets in (None, sums) and sums[::4] == (0, 5) and [*sums] == sorted(sums)
    tables, batch = TABLES(), find_sample(pools=pools, collects=collects)
    if is_sequence:
        tables["layout"][1, 3], tables["weights"][2], batch["segments"] = 3, torch.ones(4, 3), None
    before, numbers = copies(tables), (*(lengths or ()), *(offsets or ()))
    fits = all(-(2**31) <= number < 2**31 for number in numbers)
    for dtype in (torch.int64, torch.int32)[: 1 + fits]:
        for name, sent in (("lengths", lengths), ("offsets", offsets)):
            batch[name] = sent and torch.tensor(sent, dtype=dtype)
        _, rows, _, numbers, *new = ops.find_and_pool(**prepared(batch | tables))
        assert (len(numbers) > 0) == is_right
        assert not is_right or rows.tolist().count(-1) == numbers[-5:-3].sum()
        assert is_right or [len(one) for one in new] == [0, 0, 0]
    for name in ("slots", "weights"):
        assert all(map(torch.equal, tables[name], before[name]))


def outcome(op, arguments):
    """Returns the result of a call, or its error without the name of the op."""
    try:
        return op(**arguments)
    except RuntimeError as error:
        return str(error).split("\n")[0].partition(": ")[2]


@on_hosts
@settings(max_examples=60)
@given(seed=st.integers(0, 2**40))
def test_updates_are_those_of_lists(seed):
    """With optimizer states, marks, senders, and numbers that are not finite."""
    lists = CASES["update_rows_"](random.Random(seed))
    if seed % 2 and lists["nonfinite"]:
        lists["on_nonfinite"][-1] = 2  # an error
    tables = copies(lists)
    expected = outcome(ops.update_rows_, lists)
    assert outcome(ops.update_prepared_, prepared(tables)) == expected
    for name in ("weights", "states", "nonfinite", "marks"):
        for block, other in zip(tables[name], lists[name], strict=True):
            assert torch.equal(bits(block), bits(other)), name


@settings(max_examples=60)
@given(seed=st.integers(0, 2**40))
def test_pooling_is_that_of_lists(seed):
    lists = CASES["gather_pool"](random.Random(seed))
    expected = CPU.gather_pool(**lists)
    out = torch.full((lists.pop("elements"),), 7.0, dtype=lists.pop("dtype"))
    ops.pool_prepared_(**prepared(lists, out=out, new_index=None, initial_ids=None))
    assert_same(out, expected)


@on_hosts
@pytest.mark.parametrize("target", ["slots", "weights", "states", "nonfinite"])
def test_what_a_call_reads_or_writes_is_no_memory_of_the_tables(target):
    def put(tensor, place):
        own = memory[place : place + tensor.nbytes]
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    marks = {"marks": [torch.zeros(64).byte()], "mark_layout": torch.tensor([[0, 1, 6, 1]] * 2)}
    lists = update(2, torch.tensor([0, 1, 1, -1, -1]).int(), weighted=True) | marks | TABLES()
    pool = {"out": torch.ones(10), "new_index": whole(0, -1, -1, -1, 3), "initial_ids": None}
    pool |= {name: lists[name] for name in ("rows", "offsets", "bag_weights", "segments", "mean")}
    for op, sample in (("update_prepared_", prepared(lists)), ("pool_prepared_", pool)):
        for name in sample.keys() - {"segments", "streams", "mark_layout", "tables"}:
            tensor = sample[name][0] if name == "marks" else sample[name]
            for is_before in (True, False) if isinstance(tensor, torch.Tensor) else ():
                memory, tables = torch.zeros(512, dtype=torch.uint8), TABLES()
                begin = 256 - tables[target][0].nbytes
                tables[target][0] = put(tables[target][0], begin)
                own = put(tensor, begin + 8 - tensor.nbytes if is_before else 256 - 8)
                arguments = sample | {name: [own] if name == "marks" else own}
                arguments["tables"] = ops.prepare_tables(**tables)
                before = memory.clone()
                with pytest.raises(RuntimeError, match=f"{op}: expected tensors that share no mem"):
                    getattr(ops, op)(**arguments)
                assert torch.equal(memory, before), name


# Handles


def calls_of(handle):
    for op in ("find_and_pool", "pool_prepared_", "weights_grad_prepared", "update_prepared_"):
        yield op, SAMPLES[op][2 if op == "update_prepared_" else 0]() | {"tables": handle}


def check_takes(handle):
    for op, arguments in calls_of(handle):
        getattr(ops, op)(**arguments)


DROPPED = "expected the result of prepare_tables in this process, got another tensor, or one whose"


def check_refuses(handle, library=ops):
    for op, arguments in calls_of(handle):
        with pytest.raises(RuntimeError, match=f"{op}: {DROPPED}"):
            getattr(library, op)(**arguments)


@on_hosts
def test_tables_live_as_long_as_their_handle():
    tables = TABLES()
    kept = [t for name in ("slots", "weights", "states", "nonfinite") for t in tables[name]]
    kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in kept]
    handle, other = ops.prepare_tables(**tables), ops.prepare_tables(**tables)
    del tables
    copied = [handle.clone(), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))]
    for same in (other, handle, *copied):
        check_takes(same)
    del other, same
    check_takes(handle)
    assert not any(storage.expired() for storage in kept)
    del handle
    assert all(storage.expired() for storage in kept)
    others = [ops.prepare_tables(**TABLES()) for _ in range(100)]
    for dead in (*copied, whole(0), whole(random.getrandbits(62))):
        check_refuses(dead)
    assert len({*map(int, others)}) == 100


def test_a_handle_is_of_one_library():
    other = simt_library() if is_on_cpu() else CPU
    here, there = (one.prepare_tables(**TABLES()) for one in (ops, other))
    check_refuses(there)
    check_refuses(here, other)


def use_in_a_fork(sent):
    """A handle of another process is none; a fork has the tables of its handles for itself."""
    check_refuses(pickle.loads(sent))
    handle = ops.prepare_tables(**TABLES())
    child, number = os.fork(), handle.clone()
    if child == 0:
        try:
            check_takes(handle)
            del handle
            check_refuses(number)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    check_takes(handle)


@on_cpu
def test_handles_and_processes():
    handle = ops.prepare_tables(**TABLES())
    call(use_in_a_fork, pickle.dumps(handle))


def fork_while_threads_prepare():
    tables, sample = TABLES(), find_sample()
    with beside(*[lambda: ops.prepare_tables(**tables)] * 4):
        for _ in range(100):
            if (child := os.fork()) == 0:
                try:
                    signal.alarm(5)
                    ops.find_and_pool(**sample)
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0


@on_cpu
def test_a_fork_waits_for_no_thread_of_its_parent():
    call(fork_while_threads_prepare)


def test_threads_use_handles_that_are_dropped(request):
    """A call that has begun keeps its tables. Handles are in cycles, dropped by what allocates next."""
    sample, kept = find_sample(), []
    expected = ops.find_and_pool(**sample)[0]
    newest = ops.prepare_tables(**TABLES())
    copied, before = newest.clone(), gc.get_threshold()

    def use():
        found = outcome(ops.find_and_pool, sample | {"tables": copied})
        assert found.startswith(DROPPED) if isinstance(found, str) else found[0].equal(expected)

    request.addfinalizer(lambda: gc.set_threshold(*before))
    gc.set_threshold(1)
    with beside(use, use) as all_well:
        for _ in range(200):
            assert all_well()
            tables = TABLES()
            kept.append(StorageWeakRef(tables["weights"][0].untyped_storage()))
            newest = [ops.prepare_tables(**tables)]
            copied = newest[0].clone()
            newest.append(newest)
    del tables, newest
    gc.collect()
    assert all(storage.expired() for storage in kept)


def test_prepared_tables_do_not_grow():
    """Rows of memory that a store got later are outside of the tables."""
    store = RowStore(3, 2, torch.float32, torch.device("cpu"))
    store.reserve(4)
    maps = {"slots": two_maps()["slots"][:1], "moved": whole(-1)}

    def prepare():
        layout = torch.tensor([[0, len(store.blocks), store.shift, 3]])
        return ops.prepare_tables(**tables_in({**maps, "weights": store.blocks, "layout": layout}))

    old, capacity = prepare(), store.capacity
    CPU.insert(whole(8), whole(capacity), whole(0, 1), **maps)
    batch = find_sample(
        ids=whole(5, 8), lengths=whole(1, 1), first_bags=whole(0, 2), output_rows=2, columns=3
    )
    batch |= {"first_features": whole(0, 1), "segments": whole(0, 0, 2, 0, 3).view(1, 5)}
    store.reserve(capacity + 1)
    with pytest.raises(RuntimeError, match=rf"find_and_pool: expected rows in \[-1, {capacity}\)"):
        ops.find_and_pool(**batch | {"tables": old})
    assert ops.find_and_pool(**batch | {"tables": prepare()})[1].tolist() == [0, capacity]


def test_an_error_names_the_op():
    with pytest.raises(RuntimeError, match="update_prepared_: expected the number of hyper"):
        ops.update_prepared_(**prepared(update(0)) | {"hyper": []})
    with pytest.raises(RuntimeError, match="update_prepared_: expected rows in"):
        ops.update_prepared_(**prepared(update(0)) | {"rows": whole(9, 0, 0, 0, 0)})


@on_cpu
def test_the_fake_kernel_pools_nothing():
    torch.library.opcheck(CPU.find_and_pool, (), find_sample(pools=0), test_utils="test_faketensor")


def test_a_handle_that_is_overwritten_drops_no_others():
    handle = ops.prepare_tables(**TABLES())
    ops.prepare_tables(**TABLES()).copy_(handle)
    check_takes(handle)
