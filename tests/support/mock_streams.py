"""Streams and events of the mock device, which show uses of tensors that no stream has ordered."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from mock_device import MockTensor, Note
from mock_gpus import CUDA, OTHER_GPU, exchange_gpu, gpu_of
from torch.utils._pytree import tree_flatten


class Stream:
    """Stands for a stream of torch.cuda, of the current GPU unless it is told another.

    Attributes:
        seen: for each stream, the number of its last piece of work that this stream has waited for.
    """

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device, self.seen = gpu_of(device or "cuda"), {self: 0}

    def wait_stream(self, other: Stream) -> None:
        self._wait(other.seen)

    def wait_event(self, event: Event) -> None:
        self._wait(event.seen)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Does nothing: the read before it, or after it, is noted."""

    def _wait(self, seen: dict[Stream, int]) -> None:
        for stream, number in seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), number)


class Event:
    """Stands for an event of torch.cuda."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.seen = dict((stream or torch.cuda.current_stream()).seen)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self)


class Streams:
    """The streams of a mock device, as its attribute `streams`.

    Attributes:
        unordered: uses of tensors that did not wait for the stream that wrote them.
    """

    def __init__(self) -> None:
        self.unordered: list[Any] = []
        self._default = {gpu: Stream(gpu) for gpu in (CUDA, OTHER_GPU)}
        self._of_thread = threading.local()
        self._work = itertools.count(1)
        self._uses: dict[int, dict[Stream, int]] = {}  # of a memory: by each stream, the last one
        self._writes: dict[int, tuple[Stream, int]] = {}  # to a memory: the last one

    def current(self, device: Any = None) -> Stream:
        """Returns the current stream of this thread on a GPU."""
        chosen: dict[Any, Stream] = getattr(self._of_thread, "streams", self._default)
        return chosen[gpu_of(device or "cuda")]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Makes a stream the current one, and its GPU, as torch.cuda.stream."""
        before: dict[Any, Stream] = getattr(self._of_thread, "streams", self._default)
        stream = stream or self.current()
        self._of_thread.streams = {**before, stream.device: stream}
        gpu = exchange_gpu(stream.device.index)
        try:
            yield
        finally:
            self._of_thread.streams = before
            exchange_gpu(gpu)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as patches:
            for name, stand_in in (
                *(("Stream", Stream), ("Event", Event), ("stream", self.on)),
                *(("current_stream", self.current), ("is_initialized", lambda: True)),
                ("get_device_capability", lambda device=None: (9, 0)),
            ):
                patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
            yield

    def use(self, op: Any, given: dict[str, Any], gpus: list[torch.device], place: Any) -> None:
        """Notes an op that uses a tensor before it has waited for the tensor's last write.

        A copy to another GPU runs on the stream of its source; both streams wait for each other, as in torch.
        """
        stream = self.current(gpus[0])
        for gpu in gpus[1:]:
            stream.wait_stream(self.current(gpu))
        self._use(op, given, stream, place)
        for gpu in gpus[1:]:
            self.current(gpu).wait_stream(stream)
            self.current(gpu).seen[self.current(gpu)] = next(self._work)

    def _use(self, op: Any, given: dict[str, Any], stream: Stream, place: Any) -> None:
        written = set()
        for argument in op._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= set(_memories(given.get(argument.name)))
        stream.seen[stream] = number = next(self._work)
        for memory in _memories(given):
            before = [self._writes[memory]] if memory in self._writes else []
            uses = self._uses.setdefault(memory, {})
            if memory in written:
                before += uses.items()
                self._writes[memory] = stream, number
            if any(stream.seen.get(other, 0) < last for other, last in before):
                self.unordered.append(Note(op.name(), place()))
            uses[stream] = number

    def write(self, tensor: Any, is_awaited: bool = False) -> None:
        """Notes a tensor that an op has made; a view of another tensor changes nothing."""
        stream = self.current(tensor.device)
        for memory in _memories(tensor):
            number = 0 if is_awaited else stream.seen[stream]
            if self._uses.get(memory, {}).get(stream) != number or not number:
                self._writes[memory], self._uses[memory] = (stream, number), {}


def _memories(value: Any) -> Iterator[int]:
    """Yields the addresses of the memories of tensors of the device."""
    for one in tree_flatten(value)[0]:
        if isinstance(one, MockTensor) and one.numel():
            yield one.memory.untyped_storage().data_ptr()
