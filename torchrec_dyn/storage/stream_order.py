"""StreamOrder: the calls that use the tables of a collection run on a GPU in the order of the calls.

A call puts kernels into the current stream of its thread. Kernels of another stream may run before or beside
them. So a call waits for the last call on another stream, on the GPU: the host does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class StreamOrder:
    """The order of the calls of one collection. Its owner is the collection's lock, which callers hold."""

    def __init__(self) -> None:
        self._stream: Any = None  # of the last call
        self._done: Any = None  # event at the end of the last call
        self._devices: tuple[torch.device, ...] = ()  # of the calls that run, one inside the other

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Runs one call: its kernels run after those of all earlier calls.

        Does nothing for a device without streams, and for a call inside another call's turn on this device.
        """
        outer = self._devices
        if device in outer or not _has_streams(device):
            yield
            return
        stream = torch.cuda.current_stream(device)
        if self._done is not None and stream != self._stream:
            stream.wait_event(self._done)
        try:
            self._devices = (*outer, device)
            yield
        finally:  # also after an error: kernels may have started
            self._devices = outer
            if self._stream is None or self._stream.device != stream.device:
                self._done = torch.cuda.Event()  # an event belongs to a GPU
            self._done.record(stream)
            self._stream = stream


def stream_on(device: torch.device) -> Any:
    """Returns the current stream; None on a device without streams."""
    return torch.cuda.current_stream(device) if _has_streams(device) else None


def wait_for_stream(stream: Any) -> None:
    """Makes the current stream wait, on the GPU, for all present work of another; None has no work."""
    if stream is None:
        return
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        current.wait_stream(stream)


def keep_in_use(*tensors: Tensor | None) -> None:
    """Keeps the memory of tensors from other use until the present kernels of the current stream have run.

    Needed where a tensor that another stream has allocated may be dropped early: memory that is dropped is
    free for that stream at once, and kernels of this stream may still read it. None and tensors of the CPU
    are skipped; the others are on one device.
    """
    given = [tensor for tensor in tensors if tensor is not None and tensor.is_cuda]
    if given and _has_streams(given[0].device):
        # Asked for once: that takes longer than a record.
        stream = torch.cuda.current_stream(given[0].device)
        for tensor in given:
            tensor.record_stream(stream)


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_initialized()
