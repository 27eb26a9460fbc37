"""Runs each op of the simt build with each of its tensors without memory, on a device that is lost or not.

LD_PRELOAD is the library of failing_memory.cpp.
"""

import ctypes

import torch
from device_ops import LIBRARY, kernels_of, simt_library
from failed_allocations import bits, memory
from mock_device import HOST_RESULTS
from op_samples import SAMPLES

ops = simt_library()
lost = ctypes.c_int64.in_dll(ctypes.CDLL(str(LIBRARY)), "torchrec_dyn_lost_device")


def error_of(op, make, failing, is_lost):
    """Returns the error of a call whose tensor number `failing` gets no memory; None if it has fewer."""
    sample, error = make(), None
    before, lost.value = bits(sample), is_lost
    memory.fail_after(failing)
    try:
        getattr(ops, op).default(**sample)
    except (MemoryError, RuntimeError) as raised:
        error = raised
    memory.fail_after(-1)
    lost.value = 0
    assert all(map(torch.equal, before, bits(sample))) or error is None, op
    return error


def failed_calls(op, make):
    """Returns the number of tensors of a call. Each has failed once, in two ways."""
    failed, of_host = 0, 0
    while (error := error_of(op, make, failed, is_lost=False)) is not None:
        assert isinstance(error, MemoryError), (op, failed, error)
        assert f"{op}: expected memory for this call, got none" in str(error), error
        error = error_of(op, make, failed, is_lost=True)
        is_of_device = "expected an allocation to succeed" in str(error)
        assert is_of_device == isinstance(error, RuntimeError), (op, failed, error)
        failed, of_host = failed + 1, of_host + (not is_of_device)
    assert of_host == (len(HOST_RESULTS.get(op, ())) if failed else 0), (op, of_host)
    return failed


if __name__ == "__main__":
    for op in sorted(kernels_of("simt") & SAMPLES.keys()):
        print(op, sum(failed_calls(op, make) for make in SAMPLES[op]))
