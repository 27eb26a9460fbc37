"""A GPU in place of the mock device: the same tests of host code, on real kernels, streams and memory.

    TORCHREC_DYN_REAL_DEVICE=1 python -m pytest tests/modules/test_on_a_device.py

What only the mock device can note stays empty here. A test that looks at nothing else is marked `mock_only`;
one that compares results, too, asks `device.is_mock` before it looks at notes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from mock_gpus import CUDA, OTHER_GPU


class RealDevice:
    """Has the methods of `MockDevice` that tests call; its lists of notes stay empty."""

    is_mock = False

    def __init__(self, streams: Any = None) -> None:
        self.streams = streams
        self.reads: list[Any] = []
        self.mixed: list[Any] = []
        self.between: list[Any] = []
        self.without_kernel: list[Any] = []
        self.recorded: list[Any] = []
        self.order: list[Any] = []
        # torch gives each process of a node the GPU of its local rank. All share the first one here.
        self._patch = mock.patch.object(torch.cuda, "set_device", lambda device: None)

    def __enter__(self) -> RealDevice:
        # Tests ask tensors of the mock device for their memory, which is on the CPU.
        torch.Tensor.memory = property(lambda tensor: tensor.cpu())  # type: ignore[attr-defined]
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()
        torch.cuda.synchronize()
        for gpu in {CUDA, OTHER_GPU}:  # an error of this device must not be raised by the next test
            try:
                torch.ops.torchrec_dyn.raise_errors(torch.empty(0, device=gpu))
            except RuntimeError:
                if error[0] is None:
                    raise

    def of(
        self, memory: torch.Tensor, is_awaited: bool = False, gpu: torch.device = CUDA
    ) -> torch.Tensor:
        """Returns a copy on a GPU."""
        return memory.to(gpu)

    def here(self) -> Any:
        """Returns a context for another thread, which needs none."""
        return nullcontext()

    def forget(self) -> None:
        """Does nothing: nothing was noted."""

    def finish_copies(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize()
