"""Memory that cannot be allocated is MemoryError from every op, and no argument has changed then."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch
from another_process import call
from table_cases import ids_of

from torchrec_dyn import ops

MIB = 1 << 20
COLUMNS = 1 << 26  # a row of float32 is 256 MiB

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
plain = pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has memory of its own")


def limit_memory(more):
    """Limits the address space of this process to `more` bytes beyond the present ones."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, -1))


def wide_table(dtype):
    """Returns the common arguments of lookup ops: one table with one row, one bag."""
    return {
        "rows": ids_of(0), "offsets": None, "bag_weights": None,
        "weights": [torch.empty(1, COLUMNS, dtype=dtype)],
        "layout": torch.tensor([[0, 1, 0, COLUMNS]]), "mean": False,
        "segments": torch.tensor([[0, 0, 1, 0, COLUMNS]]),
    }  # fmt: skip


def update(given, **more):
    ops.update_rows_(
        **{"ids": ids_of(7), **given, **more}, states=[],
        streams=ids_of(1, 0, 1).view(1, 3), optimizer=0, hyper=[0.1],
        senders=None, marks=[], mark_layout=None, on_nonfinite=[], nonfinite=[],
    )  # fmt: skip


def errors_with_little_memory(threads):
    torch.set_num_threads(threads)
    torch.ones(1 << 20).add_(1)  # starts the threads
    halves, floats = wide_table(torch.float16), wide_table(torch.float32)
    floats["weights"][0][0, :5] = 3.0
    grad = torch.empty(COLUMNS)
    limit_memory(100 * MIB)
    calls = {
        "gather_pool": lambda: ops.gather_pool(
            **halves, elements=COLUMNS, dtype=torch.float16
        ),
        "update_rows_": lambda: update(floats, grad=grad, grad_scales=[2.0]),
        "mix64": lambda: ops.mix64(grad.view(torch.int64)),
        "gather_rows": lambda: ops.gather_rows(
            ids_of(0), floats["weights"], 0, COLUMNS, torch.float32
        ),
        "new_slots": lambda: ops.new_slots(torch.empty(0, 2, dtype=torch.int64), 1 << 24),
    }  # fmt: skip
    errors = {}
    for op, function in calls.items():
        try:
            function()
        except MemoryError as error:
            errors[op] = str(error)
    assert floats["weights"][0][0, :5].tolist() == [3.0] * 5
    return errors


@linux
@plain
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_errors_reach_python(threads):
    """An exception in a function of several SIMD levels, or in a thread of torch, ended the process."""
    errors = call(errors_with_little_memory, threads)
    rule = (
        "expected memory for this call, got none from the system; nothing was written. Free memory"
    )
    for op in ("gather_pool", "update_rows_", "mix64", "gather_rows", "new_slots"):
        assert f"{op}: {rule}" in errors.get(op, "no error"), errors


def updates_after_a_memory_error():
    """Returns the error of an update too large for the memory, and the row after a small update."""
    torch.set_num_threads(1)
    ids = torch.zeros(8 << 20, dtype=torch.int64)
    common = {
        "rows": ids,
        "offsets": None,
        "bag_weights": None,
        "mean": False,
        "grad_scales": [1.0],
    }
    table = {"weights": [torch.ones(1, 1)], "layout": torch.tensor([[0, 1, 0, 1]])}
    many = {"segments": torch.tensor([[0, 0, len(ids), 0, 1]]), "grad": torch.ones(len(ids))}
    limit_memory(200 * MIB)
    error = None
    try:
        update(common, ids=ids, **table, **many)
    except MemoryError as raised:
        error = str(raised)
    few = {"segments": torch.tensor([[0, 0, 1, 0, 1]]), "grad": torch.ones(1)}
    update({**common, "rows": ids[:1]}, **table, **few)
    return error, float(table["weights"][0])


@linux
@plain
def test_an_update_too_large_for_the_memory_leaves_room_for_smaller_updates():
    """Workspaces are kept: their size must not be that of the update that failed."""
    error, weight = call(updates_after_a_memory_error)
    assert "update_rows_: expected memory for this call" in error
    assert abs(weight - 0.9) < 1e-6


def resident_growth_of_a_wide_table_without_ids():
    given = wide_table(torch.float32)
    columns = 1 << 30
    given |= {
        "rows": ids_of(), "weights": [], "layout": torch.tensor([[0, 0, 0, columns]]),
        "segments": torch.tensor([[0, 0, 0, 0, columns]]),
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ops.gather_pool(**given, elements=0, dtype=torch.float16)
    update(given, ids=ids_of(), grad=torch.empty(0), grad_scales=[1.0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@linux
def test_a_wide_table_without_ids_takes_no_memory():
    assert call(resident_growth_of_a_wide_table_without_ids) < 100 << 10  # KiB; the row is 4 GiB
