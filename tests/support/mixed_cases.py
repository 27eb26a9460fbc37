"""Tables, batches and plain torch formulas for block and quotient-remainder embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import torchrec_dyn as dyn

IDS = [0, 1, -1, 2**63 - 1, -(2**63), 10**15, -(10**12), 2**32, 2**31, *range(50, 80)]
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}

FEATURES = ["h", "g", "f"]  # not in the order of the tables
OUTPUTS = [("a", "g"), ("a", "f"), ("b", "g"), ("c", "h")]


def options_of(pooling: str) -> dict[str, Any]:
    """Returns the options of collections whose tables are pooled by "SUM", "MEAN" or "MAX"."""
    return {"dynamic": dyn.DynamicTableConfig(pooling="max")} if pooling == "MAX" else {}


def tables(pooling: str = "SUM") -> list[EmbeddingBagConfig]:
    """Returns three tables of two widths; one table has two features, and one feature has two tables."""
    kind = PoolingType.MEAN if pooling == "MEAN" else PoolingType.SUM
    return [
        EmbeddingBagConfig(1000, width, name, feature_names=features, pooling=kind)
        for name, width, features in (("a", 8, ["g", "f"]), ("b", 12, ["g"]), ("c", 8, ["h"]))
    ]


def batch(step: int = 0, bags: int = 6, weighted: bool = False, longest: int = 4) -> Any:
    """Returns bags of ids that repeat, extreme ids among them."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(longest + 1, (len(FEATURES) * bags,), generator=generator)
    ids = torch.tensor(IDS)[torch.randint(len(IDS), (int(lengths.sum()),), generator=generator)]
    weights = torch.rand(ids.numel(), generator=generator) * 4 - 2
    return KeyedJaggedTensor(
        FEATURES, ids, weights=weights.requires_grad_() if weighted else None, lengths=lengths,
        stride=bags,
    )  # fmt: skip


def leaf_rows(table: Any, ids: Tensor) -> Tensor:
    """Returns the present rows of a table as a leaf tensor that gathers a gradient."""
    rows, found = table.lookup(ids)
    assert bool(found.all())
    return rows.clone().requires_grad_()


def pooled_by_hand(
    features: KeyedJaggedTensor, pooling: str, row_of: Callable[[str, str], Tensor]
) -> list[Tensor]:
    """Pools bag by bag in plain torch, "SUM", "MEAN" or "MAX"; returns each output, [bags, columns]."""
    outputs = []
    for table, feature in OUTPUTS:
        jagged = features[feature]
        rows = row_of(table, feature)
        if jagged.weights_or_none() is not None:
            rows = rows * jagged.weights()[:, None]
        bags = []
        for bag in torch.split(rows, jagged.lengths().tolist()):
            if pooling == "MAX" and len(bag):
                bags.append(bag.max(0).values)
            else:
                bags.append(bag.sum(0) / (max(1, len(bag)) if pooling == "MEAN" else 1))
        outputs.append(torch.stack(bags) if bags else rows.new_zeros(0, rows.shape[1]))
    return outputs


def some_grad(output: Tensor) -> Tensor:
    """Returns a gradient whose numbers all differ."""
    return torch.linspace(-1, 1, output.numel()).reshape(output.shape) + 0.1 * output.detach()


def varied_batch() -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Returns a batch with a batch size per feature, and the same batch with every bag expanded."""
    sizes, samples = {"h": 3, "g": 1, "f": 2}, 5
    generator = torch.Generator().manual_seed(3)
    lengths = {name: torch.randint(1, 4, (n,), generator=generator) for name, n in sizes.items()}
    bags = {
        name: [torch.randint(-60, 60, (int(n),), generator=generator) for n in of]
        for name, of in lengths.items()
    }
    inverse = {name: torch.arange(samples) % n for name, n in sizes.items()}
    varied = KeyedJaggedTensor(
        FEATURES,
        torch.cat([torch.cat(bags[name]) for name in FEATURES]),
        lengths=torch.cat([lengths[name] for name in FEATURES]),
        stride_per_key_per_rank=[[sizes[name]] for name in FEATURES],
        inverse_indices=(FEATURES, torch.stack([inverse[name] for name in FEATURES])),
    )
    plain = KeyedJaggedTensor(
        FEATURES,
        torch.cat([bags[name][i] for name in FEATURES for i in inverse[name]]),
        lengths=torch.cat([lengths[name][inverse[name]] for name in FEATURES]),
    )
    return varied, plain
