"""Runs tests that were written for the CPU's kernels on the kernels of another device.

`simt`: the CUDA kernels, compiled by a C++ compiler (csrc/simt.h); their tensors are on the CPU.
`cuda`: a GPU; arguments are copied there, and what a call returns or writes is copied back.
An op without such a kernel runs on the CPU.
"""

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn import ops

# csrc/sanitize/run names the library that it has built.
LIBRARY = Path(
    os.environ.get("TORCHREC_DYN_SIMT_LIBRARY")
    or Path(__file__).parents[2] / "build/simt/torchrec_dyn_simt.abi3.so"
)
# Descriptions of a call are on the CPU for every kernel (csrc/library.cpp).
DESCRIPTIONS = {"table_offsets", "new_offsets", "moved", "layout", "segments", "streams"}
DESCRIPTIONS |= {"steps", "versions", "mark_layout"}
CPU = torch.ops.torchrec_dyn


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
    """An op on a GPU, for tensors on the CPU."""

    def __init__(self, op):
        self._op = op
        self._schema = op._schema

    def __call__(self, *args, **kwargs):
        names = [argument.name for argument in self._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        sent = {
            name: value if name in DESCRIPTIONS else _moved(value, "cuda")
            for name, value in given.items()
        }
        try:
            result = self._op(**sent)
        finally:
            for argument in self._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    _copy_back(sent[argument.name], given[argument.name])
        return _moved(result, "cpu")


def _moved(value, device):
    if isinstance(value, Tensor):
        if value.is_contiguous() or value.layout != torch.strided:
            return value.to(device)
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return moved.copy_(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(one, device) for one in value)
    return value


def _copy_back(sent, given):
    if isinstance(given, Tensor):
        given.copy_(sent)
    elif isinstance(given, (list, tuple)):
        for one, other in zip(sent, given, strict=True):
            _copy_back(one, other)


def use_kernels(patch, device):
    """Lets `torchrec_dyn.ops` call the kernels of "simt" or "cuda", until the MonkeyPatch is undone."""
    for name in kernels_of(device):
        simt = device == "simt"
        op = getattr(simt_library() if simt else CPU, name).default
        patch.setattr(ops, name, op if simt else CudaOp(op))
