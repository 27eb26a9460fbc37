"""Threads that read a table while another thread trains it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn

COLUMNS = 8
FRESH = 50  # unseen ids of a step
# Every occurrence adds -1 to all columns of the row, and 1 to its optimizer state.
TRAINED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
HOT = 0  # an id of every step


def collection(
    limit: int = 1 << 40, eviction: object = None, fused_params: dict | None = None
) -> dyn.DynamicEmbeddingBagCollection:
    """Returns a collection of one table "t" whose rows start at 0."""
    return dyn.DynamicEmbeddingBagCollection(
        [EmbeddingBagConfig(limit, COLUMNS, "t", feature_names=["f"])],
        dynamic=dyn.DynamicTableConfig(initializer=dyn.Constant(0.0), eviction=eviction),
        fused_params=fused_params or TRAINED,
    )


def batch(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))


def ids_of_step(step: int) -> Tensor:
    """Returns the hot id and FRESH ids of their own, for step 0, 1, ..."""
    return torch.cat([torch.tensor([HOT]), 1 + step * FRESH + torch.arange(FRESH)])


class Training:
    """Steps of growing ids.

    Attributes:
        done: number of steps that are complete; at most one more has begun.
    """

    def __init__(self, model: Callable[[KeyedJaggedTensor], Tensor]) -> None:
        self._model = model
        self.done = 0

    def step(self) -> None:
        self._model(batch(ids_of_step(self.done))).sum().backward()
        self.done += 1

    def known(self) -> Tensor:
        """Returns the ids of all complete steps."""
        return torch.arange(1 + self.done * FRESH)


@contextmanager
def often_switching() -> Iterator[None]:
    """Lets Python switch threads after each microsecond, not after 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def beside(*readers: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Calls each reader again and again in a thread of its own, until the block ends.

    Yields a function that returns True as long as no reader has failed; the block ends by the first error.
    """
    over, errors, calls = threading.Event(), [], [0] * len(readers)

    def repeat(number: int) -> None:
        try:
            while not over.is_set():
                readers[number]()
                calls[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(n,)) for n in range(len(readers))]
    with often_switching():
        try:
            for thread in threads:
                thread.start()
            yield lambda: not errors
        finally:
            over.set()
            for thread in threads:
                thread.join()
    if errors:
        raise errors[0]
    assert all(calls), f"readers that never finished a call: {calls}"
