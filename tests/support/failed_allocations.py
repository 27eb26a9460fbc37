"""Runs every op again and again, each time with another allocation that fails.

First the kernels of the CPU, then those of the simt build, on a device that is lost or not (tensors only).

LD_PRELOAD is the library of failing_memory.cpp.
"""

import ctypes
import os
from pathlib import Path

import torch
from device_ops import LIBRARY, kernels_of, simt_library
from mock_device import HOST_RESULTS
from op_samples import SAMPLES, empty, whole
from update_rules import hyper_of

import torchrec_dyn
from torchrec_dyn import ops

memory = ctypes.CDLL(os.environ["LD_PRELOAD"])
memory.waits_to_fail.restype = ctypes.c_bool


def many_rows():
    """Returns an update whose tables are split into parts, and whose rows are shorter than float32."""
    ids, rows = 9000, torch.arange(9000) % 701
    return {
        "grad": torch.ones(ids * 5), "ids": rows, "rows": rows, "offsets": None, "bag_weights": None,
        "weights": [torch.ones(1024, 5, dtype=torch.bfloat16)],
        "states": [torch.ones(1024, 1)],
        "layout": torch.tensor([[0, 1, 10, 5]]), "segments": torch.tensor([[0, 0, ids, 0, 5]]),
        "streams": whole(1, 0, 1).reshape(1, 3), "mean": False, "optimizer": 2,
        "hyper": hyper_of(2), "grad_scales": [1.0],
        "senders": (rows % 3).int(), "marks": [torch.zeros(128, dtype=torch.uint8)],
        "mark_layout": torch.tensor([[0, 1, 7, 1]]), "on_nonfinite": [], "nonfinite": [],
    }  # fmt: skip


def many_slots():
    """Returns a map that grows in several pieces."""
    outgoing = empty(1 << 17)
    ids = torch.arange(-40_000, 40_000)
    ops.insert(ids, ids + 40_000, whole(0, len(ids)), [outgoing], whole(-1))
    return {"outgoing": outgoing, "slots": empty(1 << 17), "moved": 0, "until": 1 << 17}


def large_output():
    """Returns a lookup of 2 MiB, whose memory is not torch's."""
    return {
        "rows": torch.arange(1 << 15) % 16, "offsets": None, "bag_weights": None,
        "weights": [torch.ones(16, 32)], "layout": torch.tensor([[0, 1, 4, 32]]),
        "segments": torch.tensor([[0, 0, 1 << 15, 0, 32]]), "mean": False, "elements": 1 << 20,
        "dtype": torch.float16,
    }  # fmt: skip


MORE = {"update_rows_": [many_rows], "move_slots": [many_slots], "gather_pool": [large_output]}


def tensors_of(sample):
    for value in sample.values():
        yield from value if isinstance(value, list) else [value]


def bits(sample):
    return [t.clone().view(torch.uint8) for t in tensors_of(sample) if isinstance(t, torch.Tensor)]


def error_of(kernel, make, failing):
    """Returns the error of a call whose allocation number `failing` fails; None if it has fewer."""
    sample, error = make(), None
    before = bits(sample)
    memory.fail_after(failing)
    try:
        kernel(**sample)
    except (MemoryError, RuntimeError) as raised:
        error = raised
        assert not memory.waits_to_fail()
        assert all(map(torch.equal, before, bits(sample))), (kernel, failing)
    else:
        assert memory.waits_to_fail(), f"{kernel}: allocation {failing} failed without an error"
    memory.fail_after(-1)
    return error


def check_error(op, error):
    assert isinstance(error, MemoryError), (op, error)
    assert f"{op}: expected memory for this call, got none" in str(error), error


def failed_calls(op, make):
    """Returns the number of allocations of a call. Each has failed once, and no argument had changed."""
    failed = 0
    while (error := error_of(getattr(ops, op), make, failed)) is not None:
        check_error(op, error)
        failed += 1
    return failed


def failed_calls_of_a_device(op, make):
    """Returns the number of tensors of a call of the simt build. Each has failed once, in two ways."""
    kernel = getattr(simt_library(), op).default
    lost = ctypes.c_int64.in_dll(ctypes.CDLL(str(LIBRARY)), "torchrec_dyn_lost_device")
    failed, of_host = 0, 0
    while (error := error_of(kernel, make, failed)) is not None:
        check_error(op, error)
        lost.value = True
        error = error_of(kernel, make, failed)
        lost.value = False
        is_of_device = "expected an allocation to succeed" in str(error)
        assert is_of_device == isinstance(error, RuntimeError), (op, failed, error)
        failed, of_host = failed + 1, of_host + (not is_of_device)
    assert of_host == (len(HOST_RESULTS.get(op, ())) if failed else 0), (op, of_host)
    return failed


def find_core():
    """Tells the library where the code of the core is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "r-x" in line and line.endswith(Path(torchrec_dyn._C.__file__).name):
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            memory.set_core(ctypes.c_void_p(begin), ctypes.c_void_p(end))
            return
    raise RuntimeError("the core is not loaded")


def fail_on_the_cpu():
    find_core()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.ones(1 << 20).add_(1)  # starts the threads
        for op, makes in SAMPLES.items():
            for make in [*makes, *MORE.get(op, [])] if threads == 1 else MORE.get(op, []):
                print(threads, op, failed_calls(op, make))


def fail_on_a_device():
    for op in sorted(kernels_of("simt") & SAMPLES.keys()):
        print("device", op, sum(failed_calls_of_a_device(op, make) for make in SAMPLES[op]))


if __name__ == "__main__":
    fail_on_the_cpu()
    fail_on_a_device()
