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


class DeviceOp:
    """One op, called as torch's are: op(...) or op.default(...)."""

    def __init__(self, op, device):
        self._op = op
        self._device = device
        self._schema = op.default._schema

    @property
    def default(self):
        return self

    def __call__(self, *args, **kwargs):
        if self._device == "cpu":
            return self._op.default(*args, **kwargs)
        names = [argument.name for argument in self._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        sent = {name: self._sent(name, value) for name, value in given.items()}
        try:
            result = self._op.default(**sent)
        finally:
            for argument in self._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    _copy_back(sent[argument.name], given[argument.name])
        return _moved(result, "cpu")

    def _sent(self, name, value):
        return value if name in DESCRIPTIONS else _moved(value, self._device)


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


class DeviceOps:
    """The ops with the kernels of a device, in the place of `ops._ops`."""

    def __init__(self, device):
        self._device = device

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in kernels_of(self._device):
            return getattr(CPU, name)
        if self._device == "simt":
            return DeviceOp(getattr(simt_library(), name), "cpu")
        return DeviceOp(getattr(CPU, name), "cuda")


class _Namespace:
    """The ops that `torchrec_dyn.ops` calls at this moment."""

    def __getattr__(self, name):
        return getattr(ops._ops, name)


NAMESPACE = _Namespace()
