"""Trains on a stream of ever-changing ids, with eviction, without, and in a fixed number of rows.

    python examples/drifting_ids.py --plot drifting_ids.png
    python examples/drifting_ids.py --world-size 2 --plan column_wise

Each run trains the same small model on the same stream (drifting_stream.py). Runs differ only in the limit
and the DynamicTableConfig of their tables; two runs turn ids into a fixed number of rows first, as one does
without dynamic tables: by a modulo, and by TorchRec's managed collision (fixed_rows.py). Each batch is
predicted before the model is trained on it, so its loss is the loss on unseen views. Rows and hit rates are
from `stats()` of the tables.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parts.drifting_report import draw, runs_as_text
from parts.drifting_stream import FEATURES, DriftingStream
from parts.fixed_rows import FixedRows, ManagedCollision, Modulo
from parts.metrics import log_loss
from parts.options import (
    add_sizes,
    agreed_world_size,
    hide_notes_to_developers,
    new_file,
    positive,
    seed,
    set_sizes,
    start_processes,
)
from parts.plans import CHOICES, make_plan
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_dyn as dyn

CPU = torch.device("cpu")
LOOKS = 50  # readings of the tables in each run
GENEROUS = 100_000_000  # a limit that no run reaches; it reserves no memory
LEARNING = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.2}
SUMMED = ("rows", "bytes", "ids_seen", "hits", "refused", "evicted_full", "evicted_expired")
SIZES = {  # option: default, default with --quick, meaning
    "steps": (1500, 150, "batches of each run"),
    "batch_size": (1024, 128, "views of a batch, over all processes"),
    "living": (10_000, 600, "users, and items, that live at a time"),
    "lifetime": (150, 40, "batches that an id keeps its place in the popularity"),
    "limit": (8_000, 500, "on the rows of a table, where ids are evicted"),
}


def ways_to_live(options: argparse.Namespace) -> dict[str, tuple[int, dyn.DynamicTableConfig]]:
    """Returns the limit and the options of the tables for each run: the only differences of the runs."""
    expire = dyn.ExpireAfter(steps=max(options.lifetime // 10, 1))
    start = {"initializer": dyn.Uniform(-0.01, 0.01), "seed": options.seed}
    return {
        "no eviction": (GENEROUS, dyn.DynamicTableConfig(**start)),
        "LeastRecentlyUsed": (
            options.limit,
            dyn.DynamicTableConfig(**start, eviction=dyn.LeastRecentlyUsed()),
        ),
        "AdmitAfter(2), LeastRecentlyUsed": (
            options.limit,
            dyn.DynamicTableConfig(
                **start, admission=dyn.AdmitAfter(count=2), eviction=dyn.LeastRecentlyUsed()
            ),
        ),
        f"ExpireAfter({expire.steps}), LeastRecentlyUsed": (
            options.limit,
            dyn.DynamicTableConfig(**start, eviction=(expire, dyn.LeastRecentlyUsed())),
        ),
    }


def ways_to_share(options: argparse.Namespace) -> dict[str, FixedRows]:
    """Returns what turns ids into rows of the same limit, for each run without dynamic ids."""
    ways: dict[str, FixedRows] = {f"modulo {options.limit:,}": Modulo(options.limit)}
    if options.world_size == 1:
        ways["TorchRec's MCH, LRU"] = ManagedCollision(
            options.limit, tables_of(options, options.limit)
        )
    return ways


class ClickModel(nn.Module):
    """A model that predicts a click from the rows of the two ids of a view.

    Args:
        rows: the collection of the tables.
        dim: columns of a row.
        fixed: turns ids into row numbers first; None: ids are the raw ids.
    """

    def __init__(
        self, rows: dyn.DynamicEmbeddingBagCollection, dim: int, fixed: FixedRows | None
    ) -> None:
        super().__init__()
        self.rows, self.fixed = rows, fixed
        self.tables = rows.embedding_bag_configs()  # a sharded collection has no such method
        self.over = nn.Sequential(nn.Linear(len(FEATURES) * dim, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, features: KeyedJaggedTensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss, []."""
        if self.fixed is not None:
            features = self.fixed(features)
            self.fixed.reset_evicted(self.rows)
        logits = self.over(self.rows(features).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def tables_of(options: argparse.Namespace, limit: int) -> list[EmbeddingBagConfig]:
    """Returns the configs of the tables."""
    return [
        EmbeddingBagConfig(
            name=name, embedding_dim=options.dim, num_embeddings=limit, feature_names=[name]
        )
        for name in FEATURES
    ]


def make_model(
    options: argparse.Namespace,
    limit: int,
    life: dyn.DynamicTableConfig,
    fixed: FixedRows | None = None,
) -> nn.Module:
    """Returns the model, sharded if there are several processes."""
    torch.manual_seed(options.seed)
    rows = dyn.DynamicEmbeddingBagCollection(
        tables_of(options, limit), dynamic=life, fused_params=LEARNING
    )
    model = ClickModel(rows, options.dim, fixed)
    if options.world_size == 1:
        return model
    sharders = [dyn.DynamicEmbeddingBagCollectionSharder(fused_params=LEARNING)]
    share = max(options.batch_size // options.world_size, 1)
    plan = make_plan(options.plan, model, sharders, list(FEATURES), options.dim, share)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def look_at(model: nn.Module) -> dict[str, float]:
    """Returns the sums of the counts of both tables, over all ranks. Collective."""
    inner = model.module if isinstance(model, DistributedModelParallel) else model
    stats = [dyn.read_stats(inner.rows, table) for table in FEATURES]
    sums = {key: sum(of_table[key] for of_table in stats) for key in SUMMED}
    if inner.fixed is not None:
        sums |= inner.fixed.counts(inner.tables)
    return sums


def train(
    options: argparse.Namespace, stream: DriftingStream, model: nn.Module
) -> list[dict[str, float]]:
    """Trains the model on the stream.

    Returns:
        The readings of the tables. Hit rate and loss are means since the previous reading.
    """
    rank = dist.get_rank() if options.world_size > 1 else 0
    dense = [weight for _, weight in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.Adam(dense, lr=0.01)
    looks: list[dict[str, float]] = []
    before = {"step": 0, "hits": 0, "ids_seen": 0}
    losses = torch.zeros(())
    for step in range(1, options.steps + 1):
        views = stream.batch(step - 1).part(rank, options.world_size)
        loss = model(views.features(), torch.from_numpy(views.labels))
        optimizer.zero_grad()
        loss.backward()  # this updates the rows
        optimizer.step()
        losses += loss.detach()
        if step * LOOKS // options.steps == (step - 1) * LOOKS // options.steps:
            continue
        if options.world_size > 1:
            dist.all_reduce(losses)
        now = {"step": step, **look_at(model)}
        now["loss"] = float(losses) / options.world_size / (step - before["step"])
        now["hit_rate"] = (now["hits"] - before["hits"]) / (now["ids_seen"] - before["ids_seen"])
        looks.append(now)
        before, losses = now, torch.zeros(())
    return looks


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of the command line. Wrong options end the program with a usage message."""
    parser = argparse.ArgumentParser(
        prog="drifting_ids.py",
        description="Trains on ids that come and go, with and without admission and eviction.",
    )
    add_sizes(parser, SIZES)
    parser.add_argument("--dim", type=positive, default=8, help="columns of a row (default: 8)")
    parser.add_argument("--seed", type=seed, default=0, help="of stream and model (default: 0)")
    parser.add_argument("--world-size", type=positive, help="processes (default: 1)")
    parser.add_argument(
        "--plan", choices=CHOICES, default="row_wise", help="with several processes"
    )
    parser.add_argument("--plot", type=new_file, metavar="OUT", help="draw the runs over time")
    parser.add_argument("--json", type=new_file, metavar="OUT", help="write down all looks")
    options = parser.parse_args(arguments)
    options.world_size = agreed_world_size(parser, options.world_size, default=1)
    set_sizes(options, SIZES)
    if options.steps < LOOKS:
        parser.error(f"--steps: expected at least {LOOKS}, one for each look, got {options.steps}.")
    if options.limit < options.batch_size:
        parser.error(
            f"--limit: expected at least --batch-size ({options.batch_size}), got {options.limit}. "
            "The ids of one batch must have room together."
        )
    if options.batch_size < options.world_size:
        parser.error(
            f"--batch-size: expected at least --world-size ({options.world_size}), got "
            f"{options.batch_size}. Each process takes its share of a batch."
        )
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: expected matplotlib, got none. Run make build, which installs it.")
    return options


def work(options: argparse.Namespace) -> None:
    """Does all runs, one after another, and prints the report on rank 0."""
    stream = DriftingStream(options.seed, options.batch_size, options.living, options.lifetime)
    runs = {}
    ways = ways_to_live(options)
    for name, (limit, life) in ways.items():
        runs[name] = train(options, stream, make_model(options, limit, life))
    for name, fixed in ways_to_share(options).items():
        runs[name] = train(options, stream, make_model(options, *ways["no eviction"], fixed))
    if options.world_size > 1 and dist.get_rank() != 0:
        return
    late = [stream.batch(number) for number in range(options.steps // 2, options.steps)]
    labels, truth = (
        np.concatenate([getattr(views, name) for views in late])
        for name in ("labels", "probabilities")
    )
    bounds = {
        "loss_of_constant": log_loss(labels, np.full(len(labels), labels.mean())),
        "loss_of_truth": log_loss(labels, truth),
    }
    print(runs_as_text(runs))
    print(
        f"Hit rate and loss: second half of {options.steps} steps. Loss of a constant "
        f"{bounds['loss_of_constant']:.4f}, of one who knows all traits {bounds['loss_of_truth']:.4f}."
    )
    if options.json:
        options.json.write_text(json.dumps({"runs": runs, **bounds}, indent=1) + "\n")
    if options.plot:
        title = (
            f"{options.living:,} users and {options.living:,} items live at a time, each for "
            f"{options.lifetime} steps of {options.batch_size} views; seed {options.seed}\n"
            f"limit where ids are evicted: {options.limit:,} rows a table"
        )
        draw(runs, title, options.plot)


def main() -> int:
    """Does the runs in this process, or starts several processes. Returns the exit status."""
    options = parse_options(sys.argv[1:])
    if options.world_size > 1 and "RANK" not in os.environ:
        return start_processes(__file__, sys.argv[1:], options.world_size)
    hide_notes_to_developers()
    if options.world_size > 1:
        dist.init_process_group("gloo")
    work(options)
    if options.world_size > 1:
        gc.collect()  # as in train_dlrm.py: no object may hold the process groups when they end
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
