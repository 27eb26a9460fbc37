"""Runs every op again and again, each time with another allocation that fails.

LD_PRELOAD is the library of failing_memory.cpp.
"""

import ctypes
import os
from pathlib import Path

import torch
from op_samples import NAMESPACE, SAMPLES, empty, whole
from update_rules import hyper_of

import torchrec_dyn

memory = ctypes.CDLL(os.environ["LD_PRELOAD"])
memory.waits_to_fail.restype = ctypes.c_bool


def many_rows():
    """Returns an update whose tables are split into parts, and whose rows are shorter than float32."""
    ids, rows = 9000, torch.arange(9000) % 701
    return {
        "grad": torch.ones(ids * 5), "ids": rows, "rows": rows, "offsets": None, "bag_weights": None,
        "weights": [torch.ones(1024, 5, dtype=torch.bfloat16)],
        "momentum1": [torch.ones(1024, 1)], "momentum2": [],
        "layout": torch.tensor([[0, 1, 10, 5]]), "segments": torch.tensor([[0, 0, ids, 0, 5]]),
        "streams": whole(1, 0, 1).reshape(1, 3), "mean": False, "optimizer": 2,
        "hyper": hyper_of(2), "grad_scales": [1.0],
        "senders": (rows % 3).int(), "marks": [torch.zeros(128, dtype=torch.uint8)],
        "mark_layout": torch.tensor([[0, 1, 7, 1]]),
    }  # fmt: skip


def many_slots():
    """Returns a map that grows in several pieces."""
    outgoing = empty(1 << 17)
    ids = torch.arange(-40_000, 40_000)
    NAMESPACE.insert(ids, ids + 40_000, whole(0, len(ids)), [outgoing], whole(-1))
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


def failed_calls(op, make):
    """Returns the number of allocations of a call. Each has failed once, and no argument had changed."""
    kernel, failed = getattr(NAMESPACE, op).default, 0
    while True:
        sample = make()
        before = bits(sample)
        memory.fail_after(failed)
        try:
            kernel(**sample)
        except MemoryError as error:
            assert not memory.waits_to_fail()
            assert f"{op}: expected memory for this call, got none" in str(error), error
        else:
            assert memory.waits_to_fail(), (
                f"{op}: allocation {failed} failed, and no error was raised"
            )
            memory.fail_after(-1)
            return failed
        assert all(map(torch.equal, before, bits(sample))), f"{op}: allocation {failed}"
        failed += 1


def find_core():
    """Tells the library where the code of the core is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "r-x" in line and line.endswith(Path(torchrec_dyn._C.__file__).name):
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            memory.set_core(ctypes.c_void_p(begin), ctypes.c_void_p(end))
            return
    raise RuntimeError("the core is not loaded")


if __name__ == "__main__":
    find_core()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.ones(1 << 20).add_(1)  # starts the threads
        for op, makes in SAMPLES.items():
            for make in [*makes, *MORE.get(op, [])] if threads == 1 else MORE.get(op, []):
                print(threads, op, failed_calls(op, make))
