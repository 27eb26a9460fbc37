"""Prepared tables: their ops equal those that take lists; what a handle keeps, and for how long."""

import copy
import gc
import itertools
import os
import pickle
import random

import pytest
import torch
from another_process import call
from device_ops import CudaOp, is_on_cpu, simt_library
from fuzz_ops import CASES, copies
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases_lookup import draw_find
from op_samples import OF_TABLES, find_sample, pooled, prepared, tables_in, two_maps, update, whole
from table_cases import assert_same, bits
from thread_cases import beside
from torch.multiprocessing.reductions import StorageWeakRef

from torchrec_dyn import ops
from torchrec_dyn.storage import RowStore

CPU = torch.ops.torchrec_dyn
on_devices = pytest.mark.usefixtures("device")
of_seeds = given(seed=st.integers(0, 2**40))


@on_devices
@settings(max_examples=80)
@of_seeds
def test_find_and_pool_is_a_lookup_and_a_gather(seed):
    tables, batch, offsets = draw_find(random.Random(seed))
    begins = offsets[batch["first_bags"]]
    begins_of_tables = begins[batch["first_features"]]
    ids, segments, elements, own = batch["ids"], batch["segments"], batch["elements"], offsets
    rows, absent = CPU.lookup(ids, begins_of_tables, tables["slots"], tables["moved"])
    if segments is None:  # each id is a bag
        width, own, parts = int(tables["layout"][0, 3]), None, itertools.pairwise(begins_of_tables)
        segments = torch.tensor([[t, a, b - a, a * width, width] for t, (a, b) in enumerate(parts)])
        elements = len(ids) * width
    lists = rows, own, batch["bag_weights"], tables["weights"], tables["layout"], segments
    expected = CPU.gather_pool(*lists, batch["mean"], elements, batch["dtype"])
    for pools in (0, 1, 2):
        out, found, bags, numbers = ops.find_and_pool(**prepared({**tables, **batch}, pools=pools))
        assert torch.equal(found, rows)
        assert torch.equal(bags, offsets)
        assert torch.equal(numbers, torch.cat([begins, absent, whole(0)]))
        assert (out.dtype, len(out)) == (batch["dtype"], elements if pools else 0)
        if pools == 2 or (pools == 1 and not (is_on_cpu() and absent.any())):
            assert_same(out, expected)


wild = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2, 3, 4, 5, 6, 2**31 - 1, 2**62, 2**63 - 1])
LENGTHS = [(2, 1, 0, 2), (2, 1, 0, 3), (2, 1, 0, 1), (6, -1, 0, 0), (2**63 - 1, 2**63 - 1, 2, 5)]
OFFSETS = [(0, 2, 3, 3, 5), (0, 2, 1, 3, 5), (1, 2, 3, 3, 5), (0, 2, 3, 3, 6), (0, 0, 0, 0, 5)]


@on_devices
@settings(max_examples=150)
@given(
    lengths=st.none() | st.sampled_from(LENGTHS) | st.tuples(*[wild] * 4),
    offsets=st.sampled_from([None, *OFFSETS]) | st.tuples(*[wild] * 5),
    pools=st.integers(0, 2),
    is_sequence=st.booleans(),
)
def test_wrong_lengths_and_offsets_are_flagged_and_change_nothing(
    lengths, offsets, pools, is_sequence
):
    if lengths is None and offsets is None:
        offsets = OFFSETS[0]
    sums = offsets if lengths is None else (0, *itertools.accumulate(lengths))
    is_right = (
        sums[0] == 0 and sums[-1] == 5 and [*sums] == sorted(sums) and offsets in (None, sums)
    )
    tables, batch = tables_in(update(0) | two_maps()), find_sample(pools=pools)
    if is_sequence:
        tables["layout"][1, 3], tables["weights"][2], batch["segments"] = 3, torch.ones(4, 3), None
    before, numbers = copies(tables), (*(lengths or ()), *(offsets or ()))
    fits = all(-(2**31) <= number < 2**31 for number in numbers)
    for dtype in (torch.int64, torch.int32)[: 1 + fits]:
        for name, given_numbers in (("lengths", lengths), ("offsets", offsets)):
            batch[name] = given_numbers and torch.tensor(given_numbers, dtype=dtype)
        _, rows, _, numbers = ops.find_and_pool(**prepared(batch | tables))
        assert numbers[-1] == (not is_right)
        assert not is_right or rows.tolist().count(-1) == numbers[-3:-1].sum()
    for name in ("slots", "weights"):
        assert all(map(torch.equal, tables[name], before[name]))


def outcome(op, arguments):
    """Returns the result of a call, or its error without the name of the op."""
    try:
        return op(**arguments)
    except RuntimeError as error:
        return str(error).split("\n")[0].partition(": ")[2]


def on_its_device(tables):
    """Returns copies of tables whose memory calls change: on a GPU it would be that of other copies."""
    there = copies(tables)
    for name in ("weights", "states", "nonfinite"):
        if isinstance(ops.prepare_tables, CudaOp):
            there[name] = [block.cuda() for block in there[name]]
    return there


@on_devices
@settings(max_examples=60)
@of_seeds
def test_updates_are_those_of_lists(seed):
    """With optimizer states, marks, senders, and numbers that are not finite."""
    lists = CASES["update_rows_"](random.Random(seed))
    if seed % 2 and lists["nonfinite"]:
        lists["on_nonfinite"][-1] = 2  # an error
    lists, tables = on_its_device(lists), on_its_device(lists)
    expected = outcome(ops.update_rows_, lists)
    assert outcome(ops.update_prepared_, prepared(tables)) == expected
    for name in ("weights", "states", "nonfinite", "marks"):
        for block, other in zip(tables[name], lists[name], strict=True):
            assert torch.equal(bits(block), bits(other)), name


@on_devices
@settings(max_examples=60)
@of_seeds
def test_pooling_and_its_gradient_are_those_of_lists(seed):
    lists = CASES["gather_pool"](random.Random(seed))
    expected = CPU.gather_pool(**lists)
    out = torch.full((lists.pop("elements"),), 7.0, dtype=lists.pop("dtype"))
    ops.pool_prepared_(**prepared(lists, out=out, new_index=None))
    assert_same(out, expected)
    lists = CASES["bag_weights_grad"](random.Random(seed))
    assert_same(ops.weights_grad_prepared(**prepared(lists)), CPU.bag_weights_grad(**lists))


@on_devices
@pytest.mark.parametrize("target", ["slots", "weights", "states", "nonfinite"])
def test_what_a_call_reads_or_writes_is_no_memory_of_the_tables(target):
    senders = torch.tensor([0, 1, 1, -1, -1], dtype=torch.int32)
    tables = update(2, senders, [torch.zeros(64).byte()], whole(0, 1, 6, 1, 1, 0, 6, 1).view(2, 4))
    tables |= two_maps() | {"on_nonfinite": [1, 1], "nonfinite": [whole(0), whole(0)]}
    tables["bag_weights"] = torch.ones(5)
    memory = torch.zeros(512, dtype=torch.uint8)

    def put(tensor, place):
        own = memory[place : place + tensor.nbytes]
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    tables[target] = [put(tables[target][0], 128), *tables[target][1:]]
    end, handle = 128 + tables[target][0].nbytes, ops.prepare_tables(**tables_in(tables))
    update_call = {k: v for k, v in tables.items() if k not in OF_TABLES} | {"tables": handle}
    pool_call = {
        k: update_call[k] for k in ("rows", "offsets", "bag_weights", "segments", "mean", "tables")
    }
    pool_call |= {"out": torch.ones(10), "new_index": whole(0, -1, -1, -1, 3)}
    described = ("segments", "streams", "mark_layout", "tables")
    for op, sample in (("update_prepared_", update_call), ("pool_prepared_", pool_call)):
        for name, value in sample.items():
            tensor = value[0] if name == "marks" else value
            if not isinstance(tensor, torch.Tensor) or name in described:
                continue
            for place in (128 - tensor.nbytes, end, 128, end - 8):  # beside the tables, and in them
                moved = put(tensor, place)
                before, arguments = (
                    memory.clone(),
                    {**sample, name: [moved] if name == "marks" else moved},
                )
                if place in (128 - tensor.nbytes, end):
                    getattr(ops, op)(**arguments)
                    continue
                with pytest.raises(
                    RuntimeError, match=f"{op}: expected tensors that share no memory"
                ):
                    getattr(ops, op)(**arguments)
                assert torch.equal(memory, before), name


# Handles


def calls_of(handle):
    for op, lists in (("weights_grad_prepared", pooled()), ("update_prepared_", update(2))):
        lists.pop("bag_weights") if op == "weights_grad_prepared" else None
        yield op, prepared({"grad": torch.ones(10)} | lists) | {"tables": handle}
    yield (
        "pool_prepared_",
        prepared(pooled(), out=torch.ones(10), new_index=None) | {"tables": handle},
    )
    yield "find_and_pool", find_sample() | {"tables": handle}


def check_takes(handle):
    for op, arguments in calls_of(handle):
        getattr(ops, op)(**arguments)


DROPPED = "expected the result of prepare_tables in this process, got another tensor, or one whose"


def check_refuses(handle, library=ops):
    for op, arguments in calls_of(handle):
        with pytest.raises(RuntimeError, match=f"{op}: {DROPPED}"):
            getattr(library, op)(**arguments)


def some_tables():
    return tables_in(
        two_maps() | update(2) | {"on_nonfinite": [1, 1], "nonfinite": [whole(0), whole(0)]}
    )


@on_devices
def test_tables_live_as_long_as_their_handle():
    tables = on_its_device(some_tables())
    kept = [t for name in ("slots", "weights", "states", "nonfinite") for t in tables[name]]
    kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in kept]
    handle, other = ops.prepare_tables(**tables), ops.prepare_tables(**tables)
    del tables
    copied = [handle.clone(), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))]
    for same in (other, handle, *copied):
        check_takes(same)
    del other, same
    check_takes(handle)
    assert isinstance(ops.find_and_pool, CudaOp) or not any(ref.expired() for ref in kept)
    del handle
    assert all(storage.expired() for storage in kept)
    others = {int(ops.prepare_tables(**some_tables())) for _ in range(100)}
    assert len(others) == 100
    for dead in (*copied, whole(0), whole(random.getrandbits(62))):
        check_refuses(dead)


@pytest.mark.simt
def test_a_handle_is_of_one_library():
    here, there = (one.prepare_tables(**some_tables()) for one in (CPU, simt_library()))
    check_refuses(here, simt_library())
    check_refuses(there, CPU)


def use_in_a_fork(sent):
    """A handle of another process is none; a fork has the tables of its handles for itself."""
    check_refuses(pickle.loads(sent))
    handle = ops.prepare_tables(**some_tables())
    child, number, status = os.fork(), handle.clone(), 1
    if child == 0:
        try:
            check_takes(handle)
            del handle
            check_refuses(number)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    check_takes(handle)


def test_handles_and_processes():
    handle = ops.prepare_tables(**some_tables())
    call(use_in_a_fork, pickle.dumps(handle))


@on_devices
def test_threads_use_a_handle_that_another_drops():
    """A call that has begun keeps the tables."""
    sample = find_sample()
    expected = ops.find_and_pool(**sample)[0]
    newest = ops.prepare_tables(**tables_in(update(0) | two_maps()))
    copied = newest.clone()

    def use():
        found = outcome(ops.find_and_pool, sample | {"tables": copied})
        assert found.startswith(DROPPED) if isinstance(found, str) else found[0].equal(expected)

    with beside(use, use) as all_well:
        for _ in range(200):
            assert all_well()
            newest = ops.prepare_tables(**tables_in(update(0) | two_maps()))
            copied = newest.clone()


@on_devices
def test_garbage_is_collected_within_calls(request):
    """The last references to handles are in cycles."""
    sample, kept = find_sample(), []
    expected = ops.find_and_pool(**sample)[0]
    request.addfinalizer(lambda before=gc.get_threshold(): gc.set_threshold(*before))
    gc.set_threshold(1)
    for _ in range(50):
        tables = tables_in(update(0) | two_maps())
        kept.append(StorageWeakRef(tables["weights"][0].untyped_storage()))
        cycle = [ops.prepare_tables(**tables)]
        cycle.append(cycle)
        del tables, cycle
        assert torch.equal(ops.find_and_pool(**sample)[0], expected)
    gc.collect()
    assert all(storage.expired() for storage in kept)


@on_devices
def test_prepared_tables_do_not_grow():
    """Rows of memory that a store got later are outside of the tables."""
    store, slots, moved = (
        RowStore(3, 2, torch.float32, torch.device("cpu")),
        two_maps()["slots"][:1],
        whole(-1),
    )
    store.reserve(4)

    def prepare():
        layout = torch.tensor([[0, len(store.blocks), store.shift, 3]])
        tables = {"slots": slots, "moved": moved, "weights": [*store.blocks], "layout": layout}
        return ops.prepare_tables(**tables_in(tables))

    old, capacity = prepare(), store.capacity
    CPU.insert(whole(8), whole(capacity), whole(0, 1), slots, moved)
    batch = find_sample(ids=whole(5, 8), lengths=whole(1, 1), first_bags=whole(0, 2), elements=6)
    batch |= {"first_features": whole(0, 1), "segments": whole(0, 0, 2, 0, 3).view(1, 5)}
    store.reserve(capacity + 1)
    with pytest.raises(RuntimeError, match=rf"find_and_pool: expected rows in \[-1, {capacity}\)"):
        ops.find_and_pool(**batch | {"tables": old})
    assert ops.find_and_pool(**batch | {"tables": prepare()})[1].tolist() == [0, capacity]


@pytest.mark.xfail(strict=True, reason="read_rule says update_rows_")
def test_an_error_names_the_op():
    with pytest.raises(RuntimeError, match="update_prepared_: expected the number of hyper"):
        ops.update_prepared_(**prepared(update(0)) | {"hyper": []})


@pytest.mark.xfail(strict=True, reason="the fake kernel returns `elements` numbers for pools 0")
def test_the_fake_kernel_pools_nothing():
    torch.library.opcheck(CPU.find_and_pool, (), find_sample(pools=0), test_utils="test_faketensor")


@pytest.mark.xfail(strict=True, reason="the number that is dropped is read from the tensor")
def test_a_handle_that_is_overwritten_drops_no_others():
    handle, other = (ops.prepare_tables(**some_tables()) for _ in range(2))
    other.copy_(handle)
    del other
    check_takes(handle)
