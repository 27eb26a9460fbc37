"""The pooled outputs of each sample, where features may have fewer bags than there are samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import reorder_inverse_indices

from torchrec_dyn.lookup import repeat_rows


def outputs_by_sample(
    pooled: Sequence[Tensor], inverse_indices: tuple[list[str], Tensor] | None, names: list[str]
) -> Tensor:
    """Returns the outputs of all features side by side, with the bags that each sample refers to.

    TorchRec's `process_pooled_embeddings` does the same, but adds gradients in any order on CUDA.

    Args:
        pooled: [bags, columns] of each feature.
        inverse_indices: feature names, and for each of them the bag of each sample, [features, B]; None if
            bag i belongs to sample i.
        names: feature name of each output.

    Returns:
        [B, sum of columns].
    """
    if inverse_indices is not None:
        bags = reorder_inverse_indices(inverse_indices, names)
        pooled = [repeat_rows(of_bags, one) for of_bags, one in zip(pooled, bags, strict=True)]
    return torch.cat(list(pooled), dim=1)
