"""How the gradients that several ranks send for one row become one gradient.

Let g_r be what rank r sends for an id, the sum over its occurrences there, and W the ranks.

- "mean_over_ranks": sum of g_r / W, as TorchRec's dists divide.
- "mean_over_senders": sum of g_r / the number of ranks that sent the id in this batch.
- "sum": sum of g_r.

Source: ReCIS' `grad_reduce_by` "worker", "id", and "worker_sum".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig


@dataclass(frozen=True)
class Senders:
    """Which rank sent what of a batch, and what became of its gradients on the way.

    Attributes:
        bags: [F][ranks] bags of each feature and rank, in the order of the batch.
        divisor: what the dists have divided gradients by.
    """

    bags: Sequence[Sequence[int]]
    divisor: int


@dataclass(frozen=True)
class Reduction:
    """What `ops.update_rows_` does to the sums of a batch.

    Attributes:
        scales: [T] of each table's sums.
        senders: [N] int32, who sent each id of a table that divides by the senders, else -1; None where
            no table does.
    """

    scales: list[float]
    senders: Tensor | None


def asks_for_senders(configs: Sequence[DynamicTableConfig]) -> bool:
    """Tells whether a batch of these tables needs its `Senders`."""
    return any(config.gradient != "mean_over_ranks" for config in configs)


def reduction_of(
    configs: Sequence[DynamicTableConfig],
    offsets: Tensor,
    bounds: Sequence[int],
    senders: Senders | None,
) -> Reduction:
    """Says what to do to the sums of one batch.

    Args:
        configs: T tables'.
        offsets: [bags + 1] int64, where each bag begins.
        bounds: [T + 1] which ids are whose.
        senders: of the batch; None where nobody sent it.
    """
    if senders is None:
        return Reduction([1.0] * len(configs), None)
    scales = [
        1.0 if config.gradient == "mean_over_ranks" else float(senders.divisor)
        for config in configs
    ]
    if all(config.gradient != "mean_over_senders" for config in configs):
        return Reduction(scales, None)
    who = _sender_of_each_id(offsets, senders.bags)
    for config, (begin, end) in zip(configs, pairwise(bounds), strict=True):
        if config.gradient != "mean_over_senders":
            who[begin:end] = -1
    return Reduction(scales, who)


def _sender_of_each_id(offsets: Tensor, bags: Sequence[Sequence[int]]) -> Tensor:
    """Lists the ranks of the ids, [N] int32.

    Args:
        offsets: [bags + 1] int64.
        bags: [F][ranks] bags of each feature and rank.
    """
    ranks = torch.arange(len(bags[0]) if bags else 0, dtype=torch.int32)
    of_bags = ranks.repeat(len(bags)).repeat_interleave(torch.tensor(bags).flatten().long())
    return of_bags.repeat_interleave(offsets.diff())
