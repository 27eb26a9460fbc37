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

    Raises:
        ValueError: if `group` has no backend for the CPU, and not all ranks in their order.
    """
    if _HOST in group._device_types:
        return group
    if group not in _made:
        ranks = dist.get_process_group_ranks(group)
        if ranks != list(range(dist.get_world_size())):
            # torch sorts the ranks of a new group, and counts the groups of a rank to name a group of some
            # ranks: ranks in different numbers of groups would wait for each other.
            raise ValueError(
                f"process group of ranks {ranks}: expected a backend for tensors of the CPU, or all "
                f"{dist.get_world_size()} ranks in order, got backend '{dist.get_backend(group)}' alone. "
                "Create the group with backend='cpu:gloo,cuda:nccl'."
            )
        backend: Any = group._get_backend(group._device_types[0])
        made = dist.new_group(
            timeout=getattr(getattr(backend, "options", None), "_timeout", None), backend="gloo"
        )
        assert isinstance(made, dist.ProcessGroup)
        _made[group] = made
    return _made[group]
