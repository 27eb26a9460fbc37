"""Trains, saves, builds int8 tables, serves them, trains more, and applies a delta to the served tables.

    python examples/serve.py

Takes a few seconds on one core.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import checkpoint, serving

TABLES = [
    EmbeddingBagConfig(name="user", embedding_dim=32, num_embeddings=1 << 20, feature_names=["user"]),
    EmbeddingBagConfig(name="item", embedding_dim=32, num_embeddings=1 << 20, feature_names=["item", "seen"]),
]  # fmt: skip
FEATURES = ["user", "item", "seen"]


def batch(size: int, draw: torch.Generator) -> KeyedJaggedTensor:
    """Returns bags of up to 8 ids with a skewed distribution."""
    lengths = torch.randint(0, 9, (len(FEATURES) * size,), generator=draw)
    skewed = torch.rand(int(lengths.sum()), generator=draw) ** 4
    ids = (skewed * 50_000).long() * 0x9E3779B1  # any int64 is an id
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


def train(ebc: dyn.DynamicEmbeddingBagCollection, steps: int, draw: torch.Generator) -> None:
    """Trains the collection: the targets of all pooled values are 1."""
    ebc.train()
    for _ in range(steps):
        ((ebc(batch(256, draw)).values() - 1.0) ** 2).mean().backward()
    ebc.eval()


def megabytes(folder: Path) -> float:
    """Returns the disk space of a folder, in MB."""
    return sum(path.stat().st_blocks for path in folder.rglob("*")) * 512 / 1e6


def furthest(served: torch.nn.Module, ebc: torch.nn.Module, features: KeyedJaggedTensor) -> float:
    """Returns the largest difference between served and trained outputs."""
    with torch.no_grad():
        return float((served(features).values() - ebc(features).values()).abs().max())


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args(argv).steps
    warnings.filterwarnings("ignore", "torch.distributed is")
    draw = torch.Generator().manual_seed(0)
    ebc = dyn.DynamicEmbeddingBagCollection(
        TABLES, fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    asked = batch(64, draw)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(ebc, steps, draw)
        dcp.save({"model": ebc.state_dict()}, checkpoint_id=folder / "checkpoint")
        rows = {one.name: ebc.table(one.name).num_rows for one in TABLES}
        print(
            f"trained {steps} steps: rows {rows}, checkpoint {megabytes(folder / 'checkpoint'):.1f} MB"
        )

        serving.build(folder / "checkpoint", folder / "served", rows=torch.int8)
        begin = time.perf_counter()
        served = serving.ServingEmbeddingBagCollection(folder / "served", TABLES)
        started = (time.perf_counter() - begin) * 1e3
        print(
            f"built int8: {megabytes(folder / 'served'):.1f} MB, starts in {started:.1f} ms, "
            f"largest difference {furthest(served, ebc, asked):.4f}"
        )

        program = serving.export_program(served, asked)
        same = torch.equal(program.module()(asked).values(), served(asked).values())
        print(f"exported: {len(program.graph.nodes)} nodes, the same outputs: {same}")

        since = checkpoint.mark(ebc)
        train(ebc, steps // 4, draw)
        checkpoint.export_delta(ebc, folder / "delta", since)
        print(
            f"trained {steps // 4} steps more, delta {megabytes(folder / 'delta'):.1f} MB: "
            f"largest difference {furthest(served, ebc, asked):.4f}"
        )
        serving.apply_delta(folder / "served", folder / "delta")
        served.refresh()
        print(
            f"applied: generation {served.generation}, "
            f"largest difference {furthest(served, ebc, asked):.4f}"
        )


if __name__ == "__main__":
    main()
