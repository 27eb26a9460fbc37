"""Runs tests that were written for the CPU's kernels on the kernels of another device.

`simt`: the CUDA kernels, compiled by a C++ compiler (csrc/simt.h); their tensors are on the CPU.
`cuda`: a GPU; the memory of arguments is copied there, and what a call returns or writes is copied back.
An op without such a kernel runs on the CPU.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn import ops

# tests/csrc/run names the library that it has built.
LIBRARY = Path(
    os.environ.get("TORCHREC_DYN_SIMT_LIBRARY")
    or Path(__file__).parents[2] / "build/simt/torchrec_dyn_simt.abi3.so"
)
# Descriptions of a call are on the CPU for every kernel (csrc/library.cpp).
DESCRIPTIONS = {"table_offsets", "new_offsets", "moved", "layout", "segments", "streams"}
DESCRIPTIONS |= {
    "steps",
    "versions",
    "mark_layout",
    "first_bags",
    "first_features",
    "tables",
    "initial",
    "parameters",
    "first_rows",
    "reused_offsets",
    "score_layout",
    "rules",
    "cache_layout",
    "squares",
    "counters",
    "questions",
    "half_lives",
    "spans",
    "kept_offsets",
    "waiting_offsets",
    "waiting_steps",
}
CPU = torch.ops.torchrec_dyn
ALIGNMENT = 64  # of the memory of torch's tensors on the CPU; on a GPU it is 512


@functools.cache
def simt_library():
    """Returns the ops of the simt build; loads them when first called."""
    assert LIBRARY.exists(), f"expected {LIBRARY}, got no such file. Run make build."
    torch.ops.load_library(str(LIBRARY))
    return torch.ops.torchrec_dyn_simt


@functools.cache
def kernels_of(device):
    """Returns the names of the ops that have a kernel for "simt" or "cuda"."""
    library, key = ("torchrec_dyn", "CUDA") if device == "cuda" else ("torchrec_dyn_simt", "CPU")
    if device == "simt":
        simt_library()
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.split("::")[1] for name in registered if name.split("::")[0] == library}


class CudaOp:
    """An op on a GPU, for tensors on the CPU.

    Arguments lie there as they do here: they share memory, or begin between elements, where they do so here.
    """

    def __init__(self, op, device="cuda"):
        self._op, self._device = op, device
        self._schema = op._schema

    def __call__(self, *args, **kwargs):
        names = [argument.name for argument in self._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        moved = {name: value for name, value in given.items() if name not in DESCRIPTIONS}
        memories = _memories_of(moved, self._device)
        sent = mapped(lambda value: _sent(value, memories, self._device), moved)
        try:
            result = self._op(**{**given, **sent})
        finally:
            for argument in self._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for value in filter(_has_memory, leaves_of(given[argument.name])):
                        _memory_of(value, memories).copy_back()
        if self._op is torch.ops.torchrec_dyn.grow_block.default:
            result[len(given["block"]) :] = 0  # initcheck reports a copy of rows that nobody wrote
        return mapped(lambda value: value.cpu() if isinstance(value, Tensor) else value, result)


class _Memory:
    """Bytes on the CPU, and their copy on another device, at an address with the same remainder."""

    def __init__(self, begin, end, device):
        self.begin, self.end = begin, end
        self._here = _bytes_at(begin, end - begin, torch.device("cpu"))
        past = begin % ALIGNMENT
        whole = torch.empty(past + end - begin, dtype=torch.uint8, device=device)
        assert whole.data_ptr() % ALIGNMENT == 0
        self._there = whole[past:].copy_(self._here)

    def moved(self, tensor):
        """Returns the copy of a tensor that lies in these bytes."""
        address = self._there.data_ptr() + tensor.data_ptr() - self.begin
        device, count = self._there.device, _byte_count(tensor)
        like = torch.empty(0, dtype=tensor.dtype, device=device)
        return like.set_(_storage_at(address, count, device), 0, tensor.shape, tensor.stride())

    def copy_back(self):
        self._here.copy_(self._there)


def _storage_at(address, count, device):
    """Returns a storage of `count` bytes at any address, also between two elements of a tensor."""
    return torch._C._construct_storage_from_data_pointer(address, device, count)


def _bytes_at(address, count, device):
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(_storage_at(address, count, device), 0, (count,), (1,))


def _byte_count(tensor):
    """Returns the number of bytes from the first element of a tensor to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


def _has_memory(value):
    """Returns True for a tensor that has bytes on the CPU."""
    is_strided = isinstance(value, Tensor) and value.layout == torch.strided
    return is_strided and value.is_cpu and value.numel() > 0


def _memories_of(values, device):
    """Returns the memories of all tensors among values: one for those that overlap, so that they still do."""
    spans = []
    for value in sorted(filter(_has_memory, leaves_of(values)), key=Tensor.data_ptr):
        begin, end = value.data_ptr(), value.data_ptr() + _byte_count(value)
        if spans and begin < spans[-1][1]:
            begin, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((begin, end))
    return [_Memory(*span, device) for span in spans]


def _memory_of(tensor, memories):
    return next(one for one in memories if one.begin <= tensor.data_ptr() < one.end)


def _sent(value, memories, device):
    """Returns the copy of a tensor on the device; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    if _has_memory(value):
        return _memory_of(value, memories).moved(value)
    return value.to(device)


def use_kernels(patch, device):
    """Lets `torchrec_dyn.ops` call the kernels of "simt" or "cuda", until the MonkeyPatch is undone."""
    for name in kernels_of(device):
        simt = device == "simt"
        op = getattr(simt_library() if simt else CPU, name).default
        patch.setattr(ops, name, op if simt else CudaOp(op))


def is_on_cpu():
    """Returns True if `torchrec_dyn.ops` calls the kernels of the CPU."""
    return ops.lookup is CPU.lookup.default


# Values in nested lists, tuples and dicts; torch's pytree has more kinds, and takes three times as long.


def leaves_of(value: Any) -> list[Any]:
    """Returns the values, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves_of(one)]
    return [value]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns the same lists, tuples and dicts of the values of a function."""
    if isinstance(value, dict):
        return {key: mapped(function, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        made = [mapped(function, one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return function(value)
