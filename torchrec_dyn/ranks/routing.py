"""Row-wise routing: the owner of an id among the ranks that share a table's rows, and the row limit of each.

Each of S ranks owns one contiguous range of the mixed ids. With B = (2**64 - 1) // S the owner of an id is
`mix64(id) // B` (unsigned). The owner of the last mixed ids, from B*S on (at most S ids), is `mixed % S`.
`ops.sort_by_owner` computes this; the input dists call it (sharding/input_dists.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.policies import AdmitAfter


def ids_per_rank(ranks: int) -> int:
    """Returns the number of mixed ids that each of `ranks` ranks owns; 0 stands for all 2**64."""
    return 0 if ranks == 1 else (2**64 - 1) // ranks


def mixed_ranges(part: int, ranks: int) -> list[range]:
    """Returns the mixed ids, unsigned, that one of `ranks` ranks owns."""
    if ranks == 1:
        return [range(1 << 64)]
    block = ids_per_rank(ranks)
    last = range(ranks * block, 1 << 64)
    own = [range(mixed, mixed + 1) for mixed in last if mixed % ranks == part]
    return [range(part * block, (part + 1) * block), *own]


def row_limit(num_embeddings: int, ranks: int) -> int:
    """Returns the row limit of one of `ranks` ranks that share `num_embeddings` rows.

    Ids do not split evenly: the number of ids on a rank is binomial, with a standard deviation below
    sqrt(N/S). The limit is N/S plus eight times sqrt(N/S), and at most N.
    """
    share = num_embeddings / ranks
    if ranks == 1:
        return num_embeddings
    return min(num_embeddings, math.ceil(share + 8 * math.sqrt(share)))


def config_of_share(config: DynamicTableConfig, ranks: int) -> DynamicTableConfig:
    """Returns the options of one of `ranks` ranks that share a table, with its share of the counters."""
    admission = config.admission
    if not isinstance(admission, AdmitAfter) or admission.counters is None:
        return config
    share = replace(admission, counters=row_limit(admission.counters, ranks))
    return replace(config, admission=share)


def owners(ids: Tensor, ranks: int) -> Tensor:
    """Returns the owner of each of ids [N] int64, in [0, ranks), computed by the op that routes batches."""
    lengths = torch.tensor([ids.numel()], device=ids.device)
    _, per_owner, _, where = ops.sort_by_owner(ids, lengths, None, ranks, positions=True)
    return torch.bucketize(where, per_owner.cumsum(0), right=True)
