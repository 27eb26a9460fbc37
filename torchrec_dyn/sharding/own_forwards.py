"""Input dists send by the present plan, whatever a train pipeline has put back when it was detached."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import ismethod
from typing import Any

from torch import nn


def send_by_own_forwards(input_dists: Iterable[nn.Module]) -> None:
    """Drops forwards that belong to the input dists of before a move.

    A pipeline remembers the forwards that it found when it began. Detached behind a move
    (distributed/resharding.py), it hangs them on the input dists of now.

    Args:
        input_dists: TorchRec's, one per sharding type.
    """
    for input_dist in input_dists:
        sender: Any = getattr(input_dist, "_dist", input_dist)
        forward = vars(sender).get("forward")
        if ismethod(forward) and forward.__self__ is not sender:
            del sender.forward
