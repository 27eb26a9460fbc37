"""Rows that `DistributedModelParallel.write` writes: a batch of ids with a row for each, as its weights.

Legend: N ids of a feature, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def rows_by_table(
    embeddings: KeyedJaggedTensor, names: Mapping[str, Sequence[str]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the ids [N] and the rows [N, D] to write into each table.

    Args:
        embeddings: the ids of each output name, with weights [all ids, D].
        names: the output names of each table to write, by table.

    Raises:
        ValueError: if the names of the batch are not these, or it has no such weights.
    """
    expected = [name for of_table in names.values() for name in of_table]
    if sorted(embeddings.keys()) != sorted(expected):
        raise ValueError(
            f"expected the features of its tables with enable_embedding_update, {expected}, got "
            f"{embeddings.keys()}."
        )
    weights = embeddings.weights_or_none()
    if weights is None or weights.dim() != 2 or len(weights) != embeddings.values().numel():
        got = "none" if weights is None else str(list(weights.shape))
        raise ValueError(
            f"expected weights [{embeddings.values().numel()}, embedding_dim], the row of each id, "
            f"got {got}."
        )
    sizes = embeddings.length_per_key()
    ids = dict(zip(embeddings.keys(), embeddings.values().split(sizes), strict=True))
    rows = dict(zip(embeddings.keys(), weights.split(sizes), strict=True))
    return {
        table: (
            torch.cat([ids[one] for one in of_table]),
            torch.cat([rows[one] for one in of_table]),
        )
        for table, of_table in names.items()
    }
