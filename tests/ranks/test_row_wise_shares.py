"""Ranks that share a limit keep the ids that one table would keep.

docs/guide/ids/policies.md makes this claim for row-wise plans.
"""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.ranks.routing import owners, row_limit

LEARNING = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
LIMIT, RANKS, STEPS, BATCH = 640, 3, 150, 96


def table(limit: int) -> dyn.DynamicEmbeddingBagCollection:
    config = EmbeddingBagConfig(limit, 2, "t", feature_names=["f"])
    life = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    return dyn.DynamicEmbeddingBagCollection([config], dynamic=life, fused_params=LEARNING)


def train(collection: dyn.DynamicEmbeddingBagCollection, ids: torch.Tensor) -> set[int]:
    collection(KeyedJaggedTensor(["f"], values=ids, lengths=torch.tensor([ids.numel()])))
    return set(collection.table("t").ids().tolist())


def test_ranks_that_share_a_limit_keep_what_one_table_would_keep_and_a_little_more():
    share = row_limit(LIMIT, RANKS)
    one, shared = table(LIMIT), [table(share) for _ in range(RANKS)]
    random = torch.Generator().manual_seed(0)
    more = []
    for step in range(STEPS):
        # Skewed, and drifting: the lower numbers are common, and all numbers move on.
        ids = (2000 * torch.rand(BATCH, generator=random) ** 3).long() + 5 * step
        parts = owners(ids, RANKS)
        kept = train(one, ids)
        kept_by_ranks = [train(part, ids[parts == rank]) for rank, part in enumerate(shared)]
        together = set.union(*kept_by_ranks)
        assert kept <= together
        more.append(len(together) - len(kept))
    assert one.table("t").stats()["evicted_full"] > 5 * LIMIT
    assert 0 < more[-1] <= RANKS * share - (LIMIT - LIMIT // 64)
