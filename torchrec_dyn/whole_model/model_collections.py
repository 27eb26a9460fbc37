"""The dynamic collections of a model, sharded or not."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_dyn.whole_model.by_id import Collection


def collections_of(model: nn.Module, where: str) -> Iterator[tuple[str, Collection]]:
    """Yields the dynamic collections of a model with their paths, in one order on all ranks.

    Args:
        model: DistributedModelParallel, any module, or a collection.
        where: who asks, for messages.

    Raises:
        ValueError: at the end, if there is none.
    """
    found = False
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, Collection):
            found = True
            yield path, module
    if not found:
        raise ValueError(
            f"{where}: expected a model with a dynamic collection, got {type(model).__name__} "
            "without one. Make its collections dynamic first, e.g. with make_dynamic."
        )
