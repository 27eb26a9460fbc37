"""Numbers and rows that cross between host and device, and the streams on which calls run.

The host waits once for many numbers. Rows cross in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_HOST = torch.empty(0, dtype=torch.int64, device="cpu")


def host_numbers(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Returns numbers as int64 on the CPU, whatever torch's default device is.

    Faster than `torch.tensor(numbers, device="cpu")`, and a step makes several for each table.
    """
    return _HOST.new_tensor(numbers)


def read(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the numbers of int64 tensors [] or [K] of one device: a GPU's host waits once for all."""
    if not tensors:
        return []
    if tensors[0].is_cpu:  # nothing to wait for
        return [int(number) for tensor in tensors for number in tensor.flatten().tolist()]
    numbers: list[int] = torch.hstack(list(tensors)).tolist()
    return numbers


def places_of(mask: Tensor, count: int) -> Tensor:
    """Returns the first `count` places where mask [M] is True, then -1; does not wait for a GPU."""
    if mask.is_cpu:  # where `nonzero_static` takes 11 microseconds, `nonzero` 3
        places = mask.nonzero().flatten()
        missing = count - places.numel()
        if missing > 0:
            return torch.nn.functional.pad(places, (0, missing), value=-1)
        return places[:count] if missing else places
    return torch.nonzero_static(mask, size=count).flatten()


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns values [...] on a device; the same tensor if they are there already."""
    return to_host(values) if device.type == "cpu" else values.to(device)


def to_host(values: Tensor) -> Tensor:
    """Returns values [...] on the CPU, from a GPU through pinned memory, which torch keeps."""
    if values.is_cpu or not torch.cuda.is_available():
        return values.cpu()
    pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(values)


def for_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns values [...] that can be copied into rows on a device; moves another GPU's there.

    GPUs that cannot reach each other's memory copy between torch's memory only, as torch does it; rows are
    in ranges of addresses (block_memory.py), which torch does not know.
    """
    is_of_another_gpu = values.device.type == device.type and values.device != device
    return values.clone().to(device) if is_of_another_gpu else values


class StreamOrder:
    """The order of the calls of one collection. Its owner is the collection's lock, which callers hold."""

    def __init__(self) -> None:
        self._stream: Any = None  # of the last call
        self._done: Any = None  # event at the end of the last call
        self._devices: tuple[torch.device, ...] = ()  # of the calls that run, one inside the other

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Runs one call: its kernels run after those of all earlier calls.

        Does nothing without streams, and inside another turn on this device.
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
    """Keeps the memory of tensors on one GPU until the present kernels of this stream have run.

    Needed where a tensor of another stream is dropped early: its memory is free for that stream at once.
    None and tensors of the CPU are skipped.
    """
    given = [tensor for tensor in tensors if tensor is not None and tensor.is_cuda]
    if given and _has_streams(given[0].device):
        # Asked for once: that takes longer than a record.
        stream = torch.cuda.current_stream(given[0].device)
        for tensor in given:
            tensor.record_stream(stream)


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_initialized()
