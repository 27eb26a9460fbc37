"""Large outputs reuse the memory of dropped outputs (csrc/output_memory.h): one owner at a time."""

import itertools
import os
import random
import resource
import sys
import threading

import pytest
import torch
from another_process import call
from table_cases import make_group, make_table

from torchrec_dyn import ops
from torchrec_dyn.initializers import Normal

MIB = 1 << 20
COLUMNS = 16


def output_of(number, size, dtype=torch.float32):
    """Returns the output of a forward: `size` bytes, each element `number`."""
    block = torch.full((1, COLUMNS), float(number))
    count = size // (COLUMNS * dtype.itemsize)
    segments = torch.tensor([[0, 0, count, 0, COLUMNS]])
    layout = torch.tensor([[0, 1, 0, COLUMNS]])
    rows = torch.zeros(count, dtype=torch.int64)
    elements = count * COLUMNS
    return ops.gather_pool(rows, None, None, [block], layout, segments, False, elements, dtype)


def bytes_of(output):
    """Returns the first address of an output and the address after it."""
    return output.data_ptr(), output.data_ptr() + output.numel() * output.itemsize


def check(held):
    """Asserts that no two outputs share a byte, and that each still has its number."""
    ends = sorted(bytes_of(output) for _, output in held)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    assert all((output == number).all() for number, output in held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [MIB, 3 * MIB, 20 * MIB])
def test_the_memory_of_a_dropped_output_serves_the_next(size, dtype):
    first, second = output_of(1, size, dtype), output_of(2, size, dtype)
    places = [first.data_ptr(), second.data_ptr()]
    assert places[0] != places[1]
    del first, second  # the memory dropped last is most likely in the caches
    third = output_of(3, size, dtype)
    fourth = output_of(4, size, dtype)
    assert [fourth.data_ptr(), third.data_ptr()] == places
    check([(3, third), (4, fourth)])


def test_memory_serves_outputs_of_half_its_size_and_more():
    """Kept memory is reused only for outputs that fit and have at least half its size."""
    large = output_of(1, 40 * MIB)
    place = large.data_ptr()
    del large
    small, larger = output_of(2, 10 * MIB), output_of(3, 44 * MIB)
    assert place not in (small.data_ptr(), larger.data_ptr())
    half = output_of(4, 22 * MIB)
    assert half.data_ptr() == place
    check([(2, small), (3, larger), (4, half)])


def test_outputs_alive_at_once_share_no_memory():
    """Outputs around 256 KiB, the least size of kept memory, and larger outputs are created and dropped."""
    least = MIB // 4
    draw, held = random.Random(1), []
    for number in range(300):
        size = draw.choice([least - 64, least, least + 64, 2 * MIB, 2 * MIB + 64, 3 * MIB, 5 * MIB])
        dtype = draw.choice([torch.float32, torch.float16])
        held.append((number, output_of(number, size, dtype)))
        while held and draw.random() < 0.48:
            held.pop(draw.randrange(len(held)))
        if number % 10 == 0:
            check(held)
    check(held)


def test_whatever_looks_at_an_output_keeps_its_memory():
    """A view, a numpy array and a tensor saved by autograd outlive the tensor that the op returned."""
    views = [
        (1, output_of(1, 2 * MIB).view(-1, COLUMNS)[5:]),
        (2, torch.from_numpy(output_of(2, 2 * MIB).numpy())),
        (3, output_of(3, 2 * MIB).detach()),
    ]
    scale = torch.full((2 * MIB // 4,), 0.5, requires_grad=True)
    product = output_of(4, 2 * MIB) * scale  # saves the output
    for number in range(5, 15):
        output_of(number, 2 * MIB)
    assert all((view == number).all() for number, view in views)
    product.sum().backward()
    assert (scale.grad == 4).all()


def test_an_output_stays_as_it_is_while_later_batches_run():
    """An output is kept while training runs forwards and backwards of the same size."""
    columns, bags = 64, 8192
    table = make_table(num_embeddings=20_000, embedding_dim=columns, initializer=Normal(0.0, 1.0))
    group, offsets = make_group(table), torch.arange(bags + 1)
    first = group(torch.arange(bags), offsets, training=True)
    assert first.numel() * 4 >= MIB
    copy, upstream = first.detach().clone(), torch.ones(bags, columns)
    for step in range(4):
        later = group(torch.arange(bags) + 1000 * step, offsets, training=True)
        assert later.data_ptr() != first.data_ptr()
        later.backward(upstream)
        group(torch.arange(bags), offsets, training=False)
    assert torch.equal(first, copy)
    first.backward(upstream)


def test_threads_take_and_drop_memory_side_by_side():
    """Each thread keeps a few outputs and looks for another thread's number in them."""
    errors = []

    def work(thread):
        draw, held = random.Random(thread), []
        try:
            for turn in range(60):
                number = 100 * thread + turn
                held.append((number, output_of(number, draw.choice([1, 2, 3]) * MIB)))
                if len(held) > 3:
                    held.pop(draw.randrange(4))
                check(held)
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def check_keeps_no_more_than_256_mib():
    held = [output_of(number, 64 * MIB) for number in range(7)]
    places = [output.data_ptr() for output in held]
    before = resident()
    for k in range(7):  # in order: the first three are unused for the longest time
        held[k] = None
    assert before - resident() > 3 * 64 * MIB - 20 * MIB
    again = [output_of(number, 64 * MIB) for number in range(4)]
    assert [output.data_ptr() for output in again] == places[:2:-1]


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has memory of its own")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_more_than_256_mib_is_kept():
    """In a process of its own: nothing else changes its memory."""
    call(check_keeps_no_more_than_256_mib)


def check_serves_the_next_output():
    place = output_of(1, 300 * MIB).data_ptr()
    before = resident()
    again = output_of(2, 300 * MIB)
    assert again.data_ptr() == place
    assert resident() - before < 20 * MIB
    del again
    output_of(3, 2 * MIB)
    assert before - resident() > 300 * MIB - 20 * MIB


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has memory of its own")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_above_the_limit_serves_the_next_output_alone():
    """A step whose output is larger than 256 MiB reuses its memory, until another output is dropped."""
    call(check_serves_the_next_output)
