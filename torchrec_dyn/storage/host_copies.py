"""Copies of rows between a GPU and the host, or another GPU, a few chunks at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows that cross between a GPU and the host at a time: the copy is fast, and little memory is held twice.
CROSSING_BYTES = 64 << 20


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
