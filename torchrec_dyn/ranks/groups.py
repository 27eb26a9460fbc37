"""The group over which ranks exchange tensors of the CPU: NCCL sends tensors of GPUs only."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_HOST = torch.device("cpu")
_made: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group of the same ranks that can send tensors of the CPU. Collective.

    It is `group` itself if that has a backend for the CPU, as groups of "gloo" and of "cpu:gloo,cuda:nccl"
    have. Else it is a group of gloo with the same time-out, made by the first call; later calls return it
    without communication.
    """
    if _HOST in group._device_types:
        return group
    if group not in _made:
        backend: Any = group._get_backend(group._device_types[0])
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=getattr(getattr(backend, "options", None), "_timeout", None),
            backend="gloo",
            use_local_synchronization=True,  # other ranks need not call
        )
        assert isinstance(made, dist.ProcessGroup)
        _made[group] = made
    return _made[group]
