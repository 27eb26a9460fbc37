"""The group over which ranks exchange tensors of the CPU: NCCL sends tensors of GPUs only."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_HOST = torch.device("cpu")
_made: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_beside: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


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
        if not _has_all_ranks(group):
            raise ValueError(
                f"process group of ranks {ranks}: expected a backend for tensors of the CPU, or all "
                f"{dist.get_world_size()} ranks in order, got backend '{dist.get_backend(group)}' alone. "
                "Create the group with backend='cpu:gloo,cuda:nccl'."
            )
        _made[group] = _new_group(group)
    return _made[group]


def background_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group of gloo of the same ranks, for a thread beside the one that trains. Collective.

    The first call makes it; later calls return it without communication.

    Raises:
        ValueError: if `group` has not all ranks in their order.
    """
    if group not in _beside:
        if not _has_all_ranks(group):
            raise ValueError(
                f"process group of ranks {dist.get_process_group_ranks(group)}: expected all "
                f"{dist.get_world_size()} ranks in order to save in the background, got some. "
                "Save without it."
            )
        _beside[group] = _new_group(group)
    return _beside[group]


def _has_all_ranks(group: dist.ProcessGroup) -> bool:
    """Returns True if a group like this one can be made.

    torch sorts the ranks of a new group, and counts the groups of a rank to name a group of some ranks: ranks
    in different numbers of groups would wait for each other.
    """
    return dist.get_process_group_ranks(group) == list(range(dist.get_world_size()))


def _new_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    backend: Any = group._get_backend(group._device_types[0])
    made = dist.new_group(
        timeout=getattr(getattr(backend, "options", None), "_timeout", None), backend="gloo"
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
