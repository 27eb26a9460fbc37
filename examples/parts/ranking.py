"""HR@10 and NDCG@10 of one relevant item, for a model, for popular items and for a random order.

Legend: T questions, N candidates.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DEPTH = 10
MISSED = float("inf")  # rank of an item that is no candidate
_GAINS = 1.0 / np.log2(np.arange(2, DEPTH + 2))  # of ranks 1 to DEPTH


def ranks_by_score(scores: Tensor, places: Tensor) -> Tensor:
    """Returns the rank of one candidate a question, from 1 on; of equal scores the worst.

    Args:
        scores: [T, N].
        places: [T], the column of the candidate; -1 if it is none, then the rank is MISSED.

    Returns:
        [T] float64.
    """
    own = scores.gather(1, places.clamp(min=0)[:, None])
    ranks = (scores >= own).sum(1).double()
    return ranks.masked_fill(places < 0, MISSED)


def ranks_by_popularity(counts: np.ndarray, places: Tensor) -> Tensor:
    """Returns the ranks if all questions get the same answer: the candidates by their counts [N]."""
    rank_of = torch.empty(len(counts), dtype=torch.float64)
    order = torch.from_numpy(np.argsort(-counts, kind="stable"))
    rank_of[order] = torch.arange(1, len(counts) + 1, dtype=torch.float64)
    return rank_of[places.clamp(min=0)].masked_fill(places < 0, MISSED)


def sums_of(ranks: Tensor) -> Tensor:
    """Returns the sums of HR@10 and of NDCG@10 over questions, [2] float64.

    With one relevant item the ideal DCG is 1, so NDCG is 1 / log2(1 + rank). Source: He et al., "Neural
    Collaborative Filtering", 2017, section 4.1.
    """
    hits = ranks[ranks <= DEPTH]
    gains = 1.0 / torch.log2(1.0 + hits)
    return torch.stack([torch.tensor(float(hits.numel()), dtype=torch.float64), gains.sum()])


def sums_of_random(places: Tensor, candidates: int) -> Tensor:
    """Returns the expected sums of HR@10 and NDCG@10 of a random order, [2] float64."""
    deep = min(DEPTH, candidates)
    asked = int((places >= 0).sum())
    return torch.tensor([deep, _GAINS[:deep].sum()], dtype=torch.float64) * asked / candidates
