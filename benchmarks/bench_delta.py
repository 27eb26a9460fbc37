"""Cost of deltas: an export by the size of the table, and a training step while a marker is held.

    python benchmarks/bench_delta.py [--threads 1] [--rows 250000 1000000 4000000] [--clock thread]

Tables of 16 columns with row-wise Adagrad. Before each export 10,000 rows change; exports of all sizes take
turns, so the result is the ratio of the largest table to the smallest. A second marker beside the first one
is measured, too. Then steps of a table of a million rows of 64 columns take turns with those of a table
without a marker: long after the marker was made, when few rows change for the first time, and as the first
step after it, when all rows of the batch do.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from axes import DELTA, DELTA_CHANGED, DELTA_ROWS, DELTA_ZIPF, Workload, offsets, ranks, raw_ids
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from interleaved import finish, measure, options, quartiles, ratio, result, spread, summary
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Marker, export_delta, mark

FED = 1 << 17
BATCHES = 32
WARM_UP = 2
STEPS = 40  # of each side

Lines = Iterator[dict[str, Any]]


def collection(rows: int, dim: int) -> dyn.DynamicEmbeddingBagCollection:
    """Returns a collection of one table with the ids of the numbers [0, rows)."""
    config = EmbeddingBagConfig(
        name="table", embedding_dim=dim, num_embeddings=rows, feature_names=["f"]
    )
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02}
    made = dyn.DynamicEmbeddingBagCollection([config], fused_params=fused)
    with torch.no_grad():
        for numbers in torch.arange(rows).split(FED):
            made(one_a_bag(numbers))
    return made


def one_a_bag(numbers: Tensor) -> KeyedJaggedTensor:
    """Returns a batch of the ids of numbers [M] int64, one a bag."""
    lengths = torch.ones(numbers.numel(), dtype=torch.int64)
    return KeyedJaggedTensor(["f"], raw_ids(numbers), lengths=lengths)


class Exported:
    """A table from which deltas are exported."""

    def __init__(self, rows: int, changed: int, folder: Path) -> None:
        self._rows, self._changed, self._folder = rows, changed, folder
        self._model = collection(rows, 16)
        self._marker = mark(self._model)
        self._number = 0

    def change(self) -> None:
        """Trains rows drawn at random, each once."""
        numbers = torch.randperm(self._rows)[: self._changed]
        self._model(one_a_bag(numbers)).values().sum().backward()

    def mark(self) -> Marker:
        """Makes a second marker."""
        return mark(self._model)

    def export(self) -> None:
        """Exports a delta since the last one, and removes the file of the last."""
        self._number += 1
        path = self._folder / f"{self._rows}-{self._number}"
        self._marker = export_delta(self._model, path, self._marker)
        shutil.rmtree(self._folder / f"{self._rows}-{self._number - 1}", ignore_errors=True)


def run_exports(sizes: Sequence[int], changed: int, rounds: int, clock: str) -> Lines:
    """Measures exports, and markers beside another one, of tables of several sizes."""
    with tempfile.TemporaryDirectory() as folder:
        tables = {f"{rows:,} rows": Exported(rows, changed, Path(folder)) for rows in sizes}
        for what in ("export", "mark"):
            contestants = {
                name: lambda turn, table=table, what=what: getattr(table, what)()
                for name, table in tables.items()
            }

            def change(turn: int) -> None:
                for table in tables.values():
                    table.change()

            seconds = measure(contestants, rounds, WARM_UP, clock, before=change)
            least, *_, most = seconds
            seen = ratio(seconds, most, least)
            for name, taken in seconds.items():
                median, low, high = (1e3 * one for one in quartiles(taken))
                print(f"{what}, {name:16} {median:8.1f} ms [{low:.1f}, {high:.1f}]")
            print(f"{what}, {most} / {least}: {spread(seen)}")
            yield result(
                f"{changed:,} changed", torch.get_num_threads(), what, "the smallest table", seen,
                in_mean=False, milliseconds={n: quartiles(t)[0] * 1e3 for n, t in seconds.items()},
            )  # fmt: skip


class Stepped:
    """A table that trains."""

    def __init__(self, workload: Workload) -> None:
        self.model = collection(workload.rows, workload.dim)
        self._offsets = offsets(workload)
        self._grad = torch.randn(workload.batch, workload.dim) * 1e-3
        self.marker: Marker | None = None

    def step(self, ids: Tensor) -> None:
        """Trains on one batch of ids."""
        batch = KeyedJaggedTensor(["f"], ids, offsets=self._offsets)
        self.model(batch).values().backward(self._grad)


def run_steps(workloads: Sequence[Workload], clock: str) -> Lines:
    """Measures steps of a table with a marker against those of one without."""
    marked, plain = Stepped(workloads[0]), Stepped(workloads[0])
    for workload in workloads:
        batches = [raw_ids(batch) for batch in ranks(workload, BATCHES, seed=0)]

        def taking(table: Stepped, batches: list[Tensor] = batches) -> Any:
            return lambda turn: table.step(batches[turn % BATCHES])

        def renew(turn: int) -> None:
            marked.marker = mark(marked.model)

        sides = {"marker": taking(marked), "no marker": taking(plain)}
        for what, before in (("long after the marker", None), ("the first step", renew)):
            renew(0)
            for ids in batches if before is None else ():
                marked.step(ids)
                plain.step(ids)
            seconds = measure(sides, STEPS, WARM_UP, clock, before=before)
            seen = ratio(seconds, "marker", "no marker")
            numbers = summary(seconds, workload.ids_per_step)
            print(f"{workload.name:14} {what:22} {spread(seen)} of a step without a marker")
            yield result(
                workload.name, torch.get_num_threads(), what, "no marker", seen,
                in_mean=False, ns_per_id=numbers,
            )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs exports and steps for each number of threads, and prints one line per measurement."""
    parser = options(__doc__, (1,))
    parser.add_argument("--rows", type=int, nargs="+", default=list(DELTA_ROWS))
    arguments = parser.parse_args(argv)
    sizes, changed = list(arguments.rows), DELTA_CHANGED
    workloads = [
        replace(DELTA, name=f"zipf{zipf:g}" if zipf else "uniform", zipf=zipf)
        for zipf in DELTA_ZIPF
    ]
    if arguments.quick:
        sizes, changed = [500, 2000], 50
        workloads = [replace(one, rows=500, batch=16, bag=3) for one in workloads]
    lines: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        lines += run_exports(sizes, changed, arguments.rounds, arguments.clock)
        gc.collect()
        lines += run_steps(workloads, arguments.clock)
    finish("delta", lines, arguments)


if __name__ == "__main__":
    main()
