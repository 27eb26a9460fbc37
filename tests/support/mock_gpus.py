"""The GPUs of the mock device, and which of them is the current one: "cuda" means it, as in torch."""

import os
import threading
from typing import NamedTuple

import torch

CUDA = OTHER_GPU = torch.device("cuda:0")
if not os.environ.get("TORCHREC_DYN_REAL_DEVICE") or torch.cuda.device_count() > 1:
    OTHER_GPU = torch.device("cuda:1")


class _Current(threading.local):
    """The current GPU of each thread."""

    gpu = 0


_current = _Current()


def gpu_of(value):
    """Returns the GPU that a device or its name means; None for other values."""
    if not is_cuda(value):
        return None
    device = torch.device(value)
    return torch.device("cuda", _current.gpu) if device.index is None else device


def exchange_gpu(gpu):
    """Makes a GPU, by its number, the current one, unless it is below 0; returns the one before."""
    before = _current.gpu
    _current.gpu = before if gpu < 0 else gpu
    return before


def choose_gpu(device):
    """Makes a GPU, by its number or its device, the current one."""
    exchange_gpu(device if isinstance(device, int) else gpu_of(device).index)


def is_cuda(value):
    """Returns True for a device of CUDA, or its name."""
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class CurrentStream(NamedTuple):
    """Stands for torch's current stream of a GPU."""

    device: torch.device
