"""The rows of a batch are cut into parts for threads (csrc/row_parts_cpu.h): more for a table of many ids."""

import ctypes
import heapq
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from update_rules import hyper_of

from torchrec_dyn import ops

ROOT = Path(__file__).parents[2]
# The function of the header: writes the table, the ids, the number of the part, and the parts of the table.
SOURCE = """
#include "row_parts_cpu.h"
using namespace torchrec_dyn;
extern "C" int64_t list_parts(const int64_t* ids, int64_t tables, int64_t least, RowPart* parts) {
  const auto list = row_parts({ids, ids + tables}, least);
  std::copy(list.begin(), list.end(), parts);
  return static_cast<int64_t>(list.size());
}
"""
MOST_PARTS = 64
ROWWISE_ADAGRAD = 2
COLUMNS = 20


@pytest.fixture(scope="module")
def row_parts(tmp_path_factory):
    if shutil.which("c++") is None:
        pytest.skip("compiles a library")
    library = tmp_path_factory.mktemp("row_parts") / "row_parts.so"
    command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", "-xc++", "-"]
    # The compiler does not run with a sanitizer's library.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([*command, "-o", library], input=SOURCE, text=True, check=True, env=plain)
    function = ctypes.CDLL(str(library)).list_parts

    def row_parts(ids, least):
        given = (ctypes.c_int64 * len(ids))(*ids)
        parts = (ctypes.c_int64 * 4 * (MOST_PARTS * len(ids)))()
        count = function(given, ctypes.c_int64(len(ids)), ctypes.c_int64(least), parts)
        return [tuple(part) for part in parts[:count]]

    return row_parts


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=30), st.sampled_from([1, 4, 8, 384]))
def test_a_table_has_parts_for_its_share_of_the_ids(row_parts, ids, least):
    listed = row_parts(ids, least)
    for table, count in enumerate(ids):
        numbers = sorted(part for t, _, part, _ in listed if t == table)
        assert numbers == list(range(len(numbers)))
        cut = len(numbers)
        assert {(t, n, of) for t, n, _, of in listed if t == table} == (
            {(table, count // cut, cut)} if count else set()
        )
        if count:
            assert cut == MOST_PARTS or count * least <= cut * sum(ids), "a part is too large"
            assert cut == 1 or 2 * count * least > cut * sum(ids), "half as many parts would do"
    if least > 1:
        assert listed == sorted(listed, key=lambda one: (-one[1].bit_length(), one[0], one[2]))


@pytest.mark.parametrize(
    "ids", [[1850] + [30] * 25, [1750] + [50] * 15, [1640] + [50] * 14, [100] * 26, [100, 1]]
)
def test_threads_share_the_ids_evenly(row_parts, ids):
    """A thread takes the next part when it has done its last: the longest has little more than its share."""
    for threads in (2, 4, 8):
        loads = [0.0] * threads
        for _, size, _, _ in row_parts(ids, 4 * threads):
            heapq.heapreplace(loads, loads[0] + size)
        assert max(loads) <= 1.3 * sum(ids) / threads


def uneven_update(draw):
    """Returns an update of five tables, one with most of the ids, one without any, in two segments each."""
    sizes, bag = [9000, 300, 0, 30, 4000], 10
    bags = [size // bag for size in sizes] * 2
    starts = torch.tensor([0, *bags]).cumsum(0).tolist()
    count = bag * starts[-1]
    return {
        "grad": torch.randn(starts[-1] * COLUMNS, generator=draw),
        "ids": torch.randint(2**40, (count,), generator=draw),
        "rows": torch.randint(-1, 512, (count,), generator=draw),
        "offsets": torch.arange(0, count + 1, bag), "bag_weights": None,
        "weights": [torch.zeros(512, COLUMNS, dtype=torch.bfloat16) for _ in sizes],
        "states": [torch.zeros(512, 1) for _ in sizes],
        "layout": torch.tensor([[t, 1, 9, COLUMNS] for t in range(5)]),
        "segments": torch.tensor(
            [[n % 5, starts[n], bags[n], starts[n] * COLUMNS, COLUMNS] for n in range(10)]
        ),
        "streams": torch.tensor([[7 * t, 0, 1] for t in range(5)]),
        "mean": False, "optimizer": ROWWISE_ADAGRAD, "hyper": hyper_of(ROWWISE_ADAGRAD),
        "grad_scales": [1.0] * 5, "senders": None, "marks": [], "mark_layout": None,
        "on_nonfinite": [], "nonfinite": [],
    }  # fmt: skip


def test_threads_do_not_change_the_bits_of_uneven_tables(threads):
    states = []
    for count in (1, 2, 4, 8):
        threads(count)
        given = uneven_update(torch.Generator().manual_seed(1))
        ops.update_rows_(**given)
        states.append([t.view(torch.uint8) for t in (*given["weights"], *given["states"])])
    for state in states[1:]:
        assert all(map(torch.equal, state, states[0]))
    assert [bool(state.any()) for state in states[0][5:]] == [True, True, False, True, True]


def test_tables_alone_are_updated_as_side_by_side():
    """Each table finds its own segments, and sums in the order of the batch."""
    whole = uneven_update(torch.Generator().manual_seed(1))
    ops.update_rows_(**whole)
    for table in (0, 1, 3, 4):
        alone = uneven_update(torch.Generator().manual_seed(1))
        alone["rows"] = torch.where(
            torch.repeat_interleave(
                alone["segments"][:, 0], 10 * alone["segments"][:, 2]
            ) == table, alone["rows"], -1,
        )  # fmt: skip
        ops.update_rows_(**alone)
        for name in ("weights", "states"):
            for t in range(5):
                expected = whole[name][t] if t == table else torch.zeros_like(whole[name][t])
                assert torch.equal(alone[name][t], expected), (table, name, t)
