"""Compares ways to give rows to ids that come and go, on one stream.

    python examples/compare.py --plot compare.png              # a generated stream
    python examples/compare.py --parquet clicks.parquet        # yours

One click model is trained on the same batches once with each kind of table. The initial dense part and the
optimizers are the same, too:

1. `modulo`: ids modulo a number of rows, in static tables.
2. `MCH`: TorchRec's managed collision in static tables of as many rows. It admits and evicts ids every step
   or every ten steps; until then a new id has no row of its own.
3. `vocabulary`: static tables with a row for each id of the whole stream, numbered before the training
   starts. Nobody can do so in production, where the ids of tomorrow are not known: it is the ideal.
4. `dynamic`: dynamic tables without policies.
5. `dynamic, policies`: dynamic tables with `AdmitAfter(2)` and `LeastRecentlyUsed()`, in at most as many
   rows as the modulo.

The printed columns:

- AUC: each batch is predicted before it is learned; over the second half of the stream.
- rows, bytes: at the end, of all tables with optimizer state, map of ids and counters. A static table has
  all its rows from the start.
- ms a step: median over the second half, of forward, backward and optimizers on the CPU, with the map of ids
  to rows. The contestants take turns, batch by batch, so that other work on the machine slows all of them.
- ids that shared a row, lookups of shared rows: distinct ids that read a row which another id read, too, and
  the share of all reads that were of such rows. In MCH ids without a row share the last row of the table.
- lookups without a row: reads of ids that admission refused. They are zeros and train no row.

The generated stream (parts/drifting_stream.py) has users and items that are popular for a while, by Zipf's
law, and then never occur again; one id in five of a batch occurs only once. The hidden values of both ids,
and nothing else, decide the probability of a click, so rows matter more than in most models. Try your own
stream before you choose.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parts.compare_report import as_text, draw
from parts.drifting_stream import FEATURES, DriftingStream
from parts.fixed_rows import ManagedCollision, Modulo, StaticRows, Vocabulary, measure_sharing
from parts.metrics import auc
from parts.options import (
    add_sizes,
    file,
    hide_notes_to_developers,
    new_file,
    positive,
    seed,
    set_sizes,
)
from parts.parquet_clicks import WHAT_IT_HAS, read_clicks
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_dyn as dyn

GENEROUS = 100_000_000  # a limit that no run reaches; it reserves no memory
LEARNING_RATE = 0.2  # of the rows (row-wise Adagrad)
INITIAL = 0.01  # rows start uniform in [-INITIAL, INITIAL]
WINDOWS = 25  # parts of the stream, for the picture
SIZES = {  # option: default, default with --quick, meaning
    "steps": (1500, 150, "batches; of a Parquet file: all"),
    "batch_size": (1024, 128, "clicks of a batch"),
    "rows": (
        8_000,
        500,
        "of a table: of the modulo and of MCH, and the limit where ids are evicted",
    ),
    "living": (10_000, 600, "generated stream: users, and items, that live at a time"),
    "lifetime": (150, 40, "generated stream: batches that an id keeps its place in the popularity"),
}


@dataclass(frozen=True)
class Stream:
    """All batches.

    Attributes:
        names: of the F features.
        ids: [steps, F, B] int64.
        labels: [steps, B] float32, 0 or 1.
        best: [steps, B], predictions that no model can beat; None if nobody knows.
    """

    names: list[str]
    ids: np.ndarray
    labels: np.ndarray
    best: np.ndarray | None

    def features(self, step: int) -> KeyedJaggedTensor:
        """Returns the ids of a batch, one id per bag."""
        values = torch.from_numpy(self.ids[step].reshape(-1))
        return KeyedJaggedTensor(
            self.names, values, lengths=torch.ones(values.numel(), dtype=torch.int32)
        )


def make_stream(options: argparse.Namespace) -> Stream:
    """Returns the generated stream, or that of the file."""
    if options.parquet:
        return Stream(*read_clicks(options.parquet, options.batch_size, options.steps), None)
    stream = DriftingStream(options.seed, options.batch_size, options.living, options.lifetime)
    batches = [stream.batch(number) for number in range(options.steps)]
    ids, labels, best = (
        np.stack([getattr(views, name) for views in batches])
        for name in ("ids", "labels", "probabilities")
    )
    return Stream(list(FEATURES), ids, labels, best)


class DynamicRows(nn.Module):
    """Dynamic tables: the raw ids are the input."""

    def __init__(self, tables: list[EmbeddingBagConfig], life: dyn.DynamicTableConfig) -> None:
        super().__init__()
        self._names = [table.name for table in tables]
        learning = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": LEARNING_RATE,
            "eps": 1e-8,
        }
        self.ebc = dyn.DynamicEmbeddingBagCollection(tables, dynamic=life, fused_params=learning)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the pooled rows, [B, F * dim]."""
        return self.ebc(features).values()

    def sum_of(self, count: str) -> int:
        """Returns the sum of a count over the tables."""
        return sum(int(dyn.read_stats(self.ebc, name)[count]) for name in self._names)

    def num_bytes(self) -> int:
        """Returns the bytes of rows, optimizer state, map and counters."""
        return self.sum_of("bytes")

    def rows_with_several_ids(self) -> int:
        """Returns the number of rows less the number of their distinct ids: 0, or the table is broken."""
        ids = [dyn.read_ids(self.ebc, name) for name in self._names]
        return self.sum_of("rows") - sum(of_table.unique().numel() for of_table in ids)


class Contestant:
    """The click model over tables of one kind, and what is measured of it.

    Attributes:
        rows: the tables.
        logits: [B] of each batch, before the model learned from it.
        seconds: of each step.
        num_bytes: of the tables, at the end of each window.
        rows_read: [F, B] of each batch, of static tables.
    """

    def __init__(
        self, rows: StaticRows | DynamicRows, num_features: int, options: argparse.Namespace
    ) -> None:
        self.rows = rows
        torch.manual_seed(options.seed)  # the same dense part for all
        width = num_features * options.dim
        self._dense = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))
        self._adam = torch.optim.Adam(self._dense.parameters(), lr=0.01)
        self.logits: list[np.ndarray] = []
        self.seconds: list[float] = []
        self.num_bytes: list[int] = []
        self.rows_read: list[np.ndarray] = []

    def step(self, features: KeyedJaggedTensor, labels: torch.Tensor) -> None:
        """Predicts a batch, then learns from it."""
        begin = time.perf_counter()
        logits = self._dense(self.rows(features)).squeeze(1)
        self._adam.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()  # this updates the rows
        self._adam.step()
        self.seconds.append(time.perf_counter() - begin)
        self.logits.append(logits.detach().numpy())
        if isinstance(self.rows, StaticRows):
            self.rows_read.append(self.rows.rows_read())

    def result(self, stream: Stream, windows: list[np.ndarray]) -> dict[str, Any]:
        """Returns the figures of the report."""
        logits, half = np.stack(self.logits), len(self.logits) // 2
        result = {
            "auc": auc(stream.labels[half:].reshape(-1), logits[half:].reshape(-1)),
            "bytes": self.num_bytes[-1],
            "step": 1e3 * float(np.median(self.seconds[half:])),
            "auc_of_windows": [
                auc(stream.labels[steps].reshape(-1), logits[steps].reshape(-1))
                for steps in windows
            ],
            "bytes_of_windows": self.num_bytes,
        }
        if isinstance(self.rows, DynamicRows):
            return result | {
                "rows": self.rows.sum_of("rows"),
                "sharing": self.rows.rows_with_several_ids(),
                "in_shared": 0.0,
                "without": self.rows.sum_of("refused") / self.rows.sum_of("ids_seen"),
            }
        rows = np.stack(self.rows_read)
        measured = [
            measure_sharing(stream.ids[:, table].reshape(-1), rows[:, table].reshape(-1))
            for table in range(len(stream.names))
        ]
        return result | {
            "rows": self.rows.num_rows,
            "sharing": sum(int(of_table["ids"]) for of_table in measured),
            "in_shared": float(np.mean([of_table["of_views"] for of_table in measured])),
            "without": 0.0,
        }


def make_contestants(options: argparse.Namespace, stream: Stream) -> dict[str, Contestant]:
    """Returns the contestants by their names in the report."""

    def tables(rows: list[int]) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=options.dim,
                num_embeddings=limit,
                feature_names=[name],
                weight_init_min=-INITIAL,
                weight_init_max=INITIAL,
            )
            for name, limit in zip(stream.names, rows, strict=True)
        ]

    few = tables([options.rows] * len(stream.names))
    many = tables([GENEROUS] * len(stream.names))
    vocabulary = Vocabulary(np.swapaxes(stream.ids, 0, 1).reshape(len(stream.names), -1))
    start = {"initializer": dyn.Uniform(-INITIAL, INITIAL), "seed": options.seed}
    policies = {"admission": dyn.AdmitAfter(count=2), "eviction": dyn.LeastRecentlyUsed()}
    torch.manual_seed(options.seed)
    kinds: dict[str, StaticRows | DynamicRows] = {
        "modulo": StaticRows(few, Modulo(options.rows), LEARNING_RATE),
        "MCH every step": StaticRows(few, ManagedCollision(few, 1), LEARNING_RATE),
        "MCH every 10 steps": StaticRows(few, ManagedCollision(few, 10), LEARNING_RATE),
        "vocabulary": StaticRows(tables(vocabulary.sizes), vocabulary, LEARNING_RATE),
        "dynamic": DynamicRows(many, dyn.DynamicTableConfig(**start)),
        "dynamic, policies": DynamicRows(few, dyn.DynamicTableConfig(**start, **policies)),
    }
    return {name: Contestant(rows, len(stream.names), options) for name, rows in kinds.items()}


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of the command line. Wrong options end the program with a usage message."""
    parser = argparse.ArgumentParser(
        prog="compare.py", description="Compares ways to give rows to ids, on one stream."
    )
    parser.add_argument("--parquet", type=file, metavar="FILE", help=f"clicks: {WHAT_IT_HAS}")
    add_sizes(parser, SIZES)
    parser.add_argument("--dim", type=positive, default=16, help="columns of a row (default: 16)")
    parser.add_argument("--seed", type=seed, default=0, help="of stream and model (default: 0)")
    parser.add_argument("--plot", type=new_file, metavar="OUT", help="draw AUC and bytes over time")
    options = parser.parse_args(arguments)
    asked_steps = options.steps
    set_sizes(options, SIZES)
    if options.parquet:
        options.steps = asked_steps
    if options.steps == 1:
        parser.error("--steps: expected at least 2, half of them to measure, got 1.")
    if options.dim % 4:
        parser.error(
            f"--dim: expected a multiple of 4, got {options.dim}. FBGEMM's tables need it."
        )
    if options.rows < options.batch_size:
        parser.error(
            f"--rows: expected at least --batch-size ({options.batch_size}), got {options.rows}. "
            "The ids of one batch must have room together."
        )
    for option, package in (("plot", "matplotlib"), ("parquet", "pyarrow")):
        if getattr(options, option) and importlib.util.find_spec(package) is None:
            parser.error(f"--{option}: expected {package}, got none. Run pip install {package}.")
    return options


def main() -> None:
    """Trains all contestants, and prints the report."""
    options = parse_options(sys.argv[1:])
    hide_notes_to_developers()
    try:
        stream = make_stream(options)
    except ValueError as error:
        sys.exit(f"compare.py: {error}")
    contestants = make_contestants(options, stream)
    steps = len(stream.labels)
    windows = np.array_split(np.arange(steps), min(WINDOWS, steps))
    for window in windows:
        for step in window:
            features, labels = stream.features(step), torch.from_numpy(stream.labels[step])
            for contestant in contestants.values():
                contestant.step(features, labels)
        for contestant in contestants.values():
            contestant.num_bytes.append(contestant.rows.num_bytes())
    results = {name: one.result(stream, windows) for name, one in contestants.items()}
    print(as_text(results))
    num_ids = sum(len(np.unique(stream.ids[:, table])) for table in range(len(stream.names)))
    print(f"{steps:,} steps of {options.batch_size:,} clicks, {num_ids:,} ids, dim {options.dim}.")
    if stream.best is not None:
        best = auc(*(of[steps // 2 :].reshape(-1) for of in (stream.labels, stream.best)))
        print(f"One who knows the hidden values of all ids has an AUC of {best:.4f}.")
    if options.plot:
        where = options.parquet.name if options.parquet else "generated stream"
        title = (
            f"{where}: {num_ids:,} ids in {steps:,} steps of {options.batch_size:,} clicks\n"
            f"modulo, MCH, and dynamic with policies: {options.rows:,} rows a table"
        )
        draw(results, [int(window[-1]) + 1 for window in windows], title, options.plot)


if __name__ == "__main__":
    main()
