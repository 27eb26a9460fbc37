"""Copies between a GPU and the host, or another GPU, a few chunks of rows at a time; numbers on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Rows that cross between a GPU and the host at a time: the copy is fast, and little memory is held twice.
CROSSING_BYTES = 64 << 20
_HOST = torch.empty(0, dtype=torch.int64, device="cpu")


def host_numbers(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Returns numbers as int64 on the CPU, whatever torch's default device is.

    Faster than `torch.tensor(numbers, device="cpu")`, and a step makes several for each table.
    """
    return _HOST.new_tensor(numbers)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns values [...] of any dtype on a device; the same tensor if they are there already."""
    return to_host(values) if device.type == "cpu" else values.to(device)


def to_host(values: Tensor) -> Tensor:
    """Returns values [...] of any dtype on the CPU; the same tensor if they are there already.

    From a GPU they are copied into pinned memory, which torch keeps for the next copy.
    """
    if values.is_cpu or not torch.cuda.is_available():
        return values.cpu()
    pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(values)


def for_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns values [...] of any dtype that can be copied into rows on a device; moves another GPU's there.

    GPUs that cannot reach each other's memory copy between torch's memory only, as torch does it; rows are
    in ranges of addresses (growing_block.py), which torch does not know.
    """
    is_of_another_gpu = values.device.type == device.type and values.device != device
    return values.clone().to(device) if is_of_another_gpu else values


class HostCopy:
    """A copy of values of a GPU to the host, under way: kernels that are queued next do not hold it up."""

    def __init__(self, values: Tensor) -> None:
        self._copy = torch.empty(
            values.shape,
            dtype=values.dtype,
            device="cpu",
            pin_memory=torch.cuda.is_available(),
        )
        self._copy.copy_(values, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        """Waits for the copy, not for the kernels behind it, and returns it."""
        self._done.synchronize()
        return self._copy
