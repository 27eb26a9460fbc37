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
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(
            ranks,
            timeout=getattr(getattr(backend, "options", None), "_timeout", None),
            backend="gloo",
            # Other ranks need not call. Of all ranks it must be False: the name of a local group has the
            # number of groups of the rank, and ranks with different numbers would wait for each other.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        assert isinstance(made, dist.ProcessGroup)
        _made[group] = made
    return _made[group]
