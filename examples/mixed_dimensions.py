"""Compares memory and quality of a click model with full-width, narrow and quotient-remainder tables.

    python examples/mixed_dimensions.py

Trains TorchRec's DLRM on synthetic clicks once for each kind of table, in one process. Prints the rows and
bytes of the tables, and the model's metrics on held-out clicks. Takes about a minute on one core.

The ids of the stream are spread over 64 bits and share no quotients. So the quotient-remainder tables
get `id % (m * m)`: at most m quotients and m remainders. The kind `folded` has no pairs: ids share rows,
`id % (2 * m)`, with as many rows as a pair of tables has.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parts.click_source import StreamSource
from parts.clicks import CATEGORICAL_NAMES, NUM_INTEGERS, Clicks
from parts.metrics import auc, normalized_entropy
from parts.options import hide_notes_to_developers, positive, rate, seed
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain

import torchrec_dyn as dyn

KINDS = ("full", "block", "mult", "add", "concat", "folded")


def make_collection(kind: str, options: argparse.Namespace) -> nn.Module:
    """Returns a collection of one kind. The outputs of all kinds have `dim` columns."""
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=options.dim, num_embeddings=4_000_000, feature_names=[name]
        )
        for name in CATEGORICAL_NAMES
    ]
    rows = dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.05, 0.05), seed=options.seed)
    learning = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": options.lr,
    }
    if kind in ("full", "folded"):
        return dyn.DynamicEmbeddingBagCollection(tables, dynamic=rows, fused_params=learning)
    if kind == "block":
        return dyn.BlockEmbeddingBagCollection(
            tables, options.block_dim, dynamic=rows, fused_params=learning
        )
    return dyn.QuotientRemainderEmbeddingBagCollection(
        tables, options.buckets, kind, dynamic=rows, fused_params=learning
    )


def ids_for(kind: str, features: KeyedJaggedTensor, buckets: int) -> KeyedJaggedTensor:
    """Returns raw ids converted to the ids for tables of one kind."""
    if kind in ("full", "block"):
        return features
    ids = features.values() % (2 * buckets if kind == "folded" else buckets**2)
    return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


def held_by(collection: nn.Module) -> tuple[int, int]:
    """Returns the number of rows of all tables, and the bytes of tables and projections.

    The bytes of a table are its rows, optimizer state and id map; the bytes of a projection are its matrix.
    """
    numbers: dict[str, float] = {}
    dyn.log_stats(collection, numbers, step=0)
    rows, held = (
        int(sum(number for name, number in numbers.items() if name.endswith(f"/{what}")))
        for what in ("rows", "bytes")
    )
    dense = sum(
        one.numel() * one.element_size() for one in collection.parameters() if not one.is_meta
    )
    return rows, held + dense


def train_and_evaluate(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Trains one model. Returns the size of its tables and its metrics on held-out clicks."""
    torch.manual_seed(options.seed)
    collection = make_collection(kind, options)
    model = DLRMTrain(
        DLRM(
            collection,
            dense_in_features=NUM_INTEGERS,
            dense_arch_layer_sizes=[64, options.dim],
            over_arch_layer_sizes=[128, 64, 1],
        )
    ).to(options.device)
    dense = [one for one in model.parameters() if not one.is_meta]
    adam = torch.optim.Adam(dense, lr=options.dense_lr)
    source = StreamSource(
        seed=options.seed,
        batch_size=options.batch_size,
        steps=options.steps,
        held_out=options.held_out,
        rank=0,
        world_size=1,
    )

    def run(clicks: Clicks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = clicks.to_batch().to(options.device)
        batch.sparse_features = ids_for(kind, batch.sparse_features, options.buckets)
        loss, (_, logits, labels) = model(batch)
        return loss, logits, labels

    for clicks in source.training():
        adam.zero_grad()
        run(clicks)[0].backward()  # this updates the rows
        adam.step()
    model.eval()
    with torch.no_grad():
        held_out = [run(clicks)[1:] for clicks in source.evaluation()]
    logits, labels = (torch.cat(parts).cpu() for parts in zip(*held_out, strict=True))
    rows, held = held_by(collection)
    truth, said = labels.numpy().astype(np.int64), logits.sigmoid().numpy()
    return {
        "rows": rows,
        "bytes": held,
        "auc": auc(truth, said),
        "normalized_entropy": normalized_entropy(truth, said),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--batch-size", type=positive, default=1024)
    parser.add_argument("--held-out", type=positive, default=32768, help="clicks to evaluate on")
    parser.add_argument("--dim", type=positive, default=16, help="columns of an embedding")
    parser.add_argument("--block-dim", type=positive, default=4, help="columns of a narrow row")
    parser.add_argument("--buckets", type=positive, default=2048, help="m of the pairs")
    parser.add_argument("--lr", type=rate, default=0.1, help="learning rate of the rows")
    parser.add_argument("--dense-lr", type=rate, default=0.002, help="of the dense part (Adam)")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the models and prints a table of results."""
    options = parse(arguments)
    hide_notes_to_developers()
    print(f"{'tables':<8}{'rows':>12}{'MB':>9}{'AUC':>9}{'NE':>9}", flush=True)
    for kind in options.kinds:
        got = train_and_evaluate(kind, options)
        print(
            f"{kind:<8}{got['rows']:>12,}{got['bytes'] / 1e6:>9.1f}{got['auc']:>9.4f}"
            f"{got['normalized_entropy']:>9.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
