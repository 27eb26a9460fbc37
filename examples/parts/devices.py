"""The device of each process: the CPU, or one GPU a process; and what is missing for GPUs."""

from __future__ import annotations

import os

import torch

# An op of TorchRec's input dist; fbgemm-gpu-cpu has it for the CPU only.
_OP_OF_FBGEMM = "fbgemm::permute_2D_sparse_data"
_OP_OF_OURS = "torchrec_dyn::lookup"


def missing_for_cuda(processes: int) -> str:
    """Returns what this machine lacks for a GPU a process; empty if it lacks nothing.

    Args:
        processes: number of processes on this machine.
    """
    if torch.version.cuda is None:
        return f"a build of torch with CUDA, got torch {torch.__version__}"
    gpus = torch.cuda.device_count()
    if gpus < processes:
        return f"a GPU for each of {processes} processes, got {gpus}"
    for op, package in ((_OP_OF_FBGEMM, "fbgemm-gpu"), (_OP_OF_OURS, "torchrec_dyn")):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA"):
            return f"a build of {package} with kernels for CUDA, got one without"
    return ""


def device_of_process(kind: str) -> torch.device:
    """Returns the device of this process, which torchrun has started, and makes it torch's current one.

    Args:
        kind: "cpu" or "cuda".
    """
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """Returns the backend of the process group: rows go over nccl, numbers of the host over gloo."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
