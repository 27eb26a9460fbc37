"""What feature processors ask of a batch and of a plan: positions that travel, bags that are not too long."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torchrec.modules.feature_processor_ import (
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Processors: TypeAlias = nn.ModuleDict | FeatureProcessorsCollection


def with_weights_of_its_own(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Copies a batch, which is the caller's, so far that positions can be written over its weights.

    Args:
        features: not changed.
    """
    made, weights = copy.copy(features), features.weights_or_none()
    made._jt_dict = None  # of the caller's weights
    if weights is None:
        made._weights = torch.zeros_like(features.values(), dtype=torch.float32)
    else:
        made._weights = weights.detach().float().clone()  # float16 cannot count beyond 2048
    return made


def check_positions_travel(processors: Processors, spread: Sequence[str], where: str) -> None:
    """Refuses processors that would take the place of an id on its rank for its position.

    Args:
        processors: of the features.
        spread: names of the tables whose rows are spread.
        where: the collection, for messages.

    Raises:
        ValueError: if a processor has no pre_process_input.
    """
    is_collection = isinstance(processors, FeatureProcessorsCollection)
    each: Sequence[Any] = [processors] if is_collection else list(processors.values())
    for one in each:
        if not hasattr(one, "pre_process_input"):
            raise ValueError(
                f"{where}: expected feature processors with pre_process_input where rows are spread, "
                f"as those of tables {spread}, got {type(one).__name__}. Give it one (which does nothing "
                "if positions do not count), or shard these tables table-wise or column-wise."
            )


@contextmanager
def told_of_positions(processors: Processors, have_travelled: bool) -> Iterator[None]:
    """Lets TorchRec's processors know whether the weights of the batches inside are positions.

    They remember it of whatever batch went before, perhaps under another plan; and unsharded none has any.

    Args:
        processors: of the features.
        have_travelled: whether they are.
    """
    told: list[Any] = [one for one in processors.modules() if hasattr(one, "_pre_processed")]
    for one in told:
        one._pre_processed = have_travelled
    try:
        yield
    finally:
        for one in told:
            one._pre_processed = False


def longest_bags(processors: Processors) -> dict[str, int]:
    """Gives how many position weights a feature has; a processor of another type may do without."""
    weights: Mapping[str, Tensor]
    if type(processors) is PositionWeightedModuleCollection:
        weights = dict(cast(Any, processors).position_weights.items())
    elif isinstance(processors, nn.ModuleDict):
        weights = {
            name: cast(Tensor, one.position_weight)
            for name, one in processors.items()
            if type(one) is PositionWeightedModule
        }
    else:
        weights = {}
    return {name: one.numel() for name, one in weights.items()}
