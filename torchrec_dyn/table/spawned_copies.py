"""The contents of a table for a process that is being started, by spawn or forkserver.

torch gives a new process the memory of pickled tensors, by file descriptors or by files: it must still exist
when the process starts. A table is pickled as a copy of its contents, which is gone by then. So this copy is
sent as bytes.
"""

from __future__ import annotations

import io
import multiprocessing.context
from collections.abc import Mapping

import torch
from torch import Tensor


def is_spawning() -> bool:
    """Returns True while this thread pickles what a new process gets."""
    return multiprocessing.context.get_spawning_popen() is not None


def to_saved_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Returns tensors as bytes; state: the tensors by name."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def from_saved_bytes(saved: bytes) -> dict[str, Tensor]:
    """Returns the tensors of `to_saved_bytes`, on their devices."""
    state: dict[str, Tensor] = torch.load(io.BytesIO(saved), weights_only=True)
    return state
