"""Notes ops of torch and FBGEMM that add floats in an order that CUDA leaves open, so a run would not repeat.

    with OrderOfSums() as noted:
        loss(model(features)).backward()
    assert noted.sums == set()

`index_put_` that accumulates is not among them: CUDA sorts its positions, and adds in order.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torchrec
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGES = (Path(__file__).resolve().parents[2] / "torchrec_dyn", Path(torchrec.__file__).parent)
aten = torch.ops.aten
OPEN = {
    *(aten.index_add, aten.index_add_, aten.index_reduce, aten.index_reduce_),
    *(aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_),
    *(aten.cumsum, aten.cumsum_, aten.cumprod, aten.cumprod_, aten.logcumsumexp, aten.histc),
    *(aten.embedding_dense_backward, aten._embedding_bag_dense_backward, aten.put_, aten.put),
    torch.ops.fbgemm.group_index_select_dim0,
}


class OrderOfSums(TorchDispatchMode):
    """While entered, notes calls of such ops.

    Attributes:
        sums: op and place of each call: the file and function of our package or of TorchRec that called it,
            or "backward".
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, kwargs = func.overloadpacket, kwargs or {}
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        if op is aten.bincount:
            is_open = named.get("weights") is not None
        elif op is aten.segment_reduce:
            is_open = named["data"].dim() == 1  # CUDA then adds in another order than the CPU
        else:
            tensors = [one for one in named.values() if isinstance(one, torch.Tensor)]
            is_open = op in OPEN and (not tensors or tensors[0].is_floating_point())
            # Each sum of distinct places has one number.
            is_open = is_open and not ("index" in named and _are_distinct(named["index"]))
        if is_open:
            self.sums.add((op.__name__, _place()))
        return func(*args, **kwargs)


def _are_distinct(places: torch.Tensor) -> bool:
    return places.unique().numel() == places.numel()


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for package in PACKAGES:
            if path.is_relative_to(package):
                return f"{path.relative_to(package.parent)}: {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"
