"""Steps of a table in mapped files, whose memory is limited to a part of the table.

    python benchmarks/bench_mapped.py --directory /mnt/nvme [--limits 256 512 0] [--only zipf]

One table of 2 million rows of 128 float32 columns (1 GiB) under row-wise Adagrad. Batches of 2,048 bags of 5
ids: Zipf 1.05, and the same with a head that drifts by 500 ids a step. Each limit (in MiB; 0: none) is
that of a control group: page cache, id map and what a step allocates; torch itself is loaded before. Between
forward and backward there is a dense part of some 20 ms of one core. Three sides take turns in one process, a
few steps each: no row is asked for ("off"), those of the batch in its forward ("batch"), and also those of
the next batch before that ("next"). Printed: milliseconds of a step, its processor time, pages read and
written.

The rows lie as after a load ("canonical": anywhere) or by their last occurrence in 200 earlier batches
("recency", with the last limit): what a reordering of rows would gain at its best, right after it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from axes import raw_ids
from contestants import OPTIMIZER
from interleaved import finish, options
from layouts import TableGroup, TableShard
from memory_groups import NoLimitError, enter, limited_group
from torch import Tensor

import torchrec_dyn as dyn
from torchrec_dyn.storage import RowStore

PAGE = 4096
BAG = 5
DRIFT = 500
EARLIER = 200  # batches by whose ids "recency" orders the rows
SIDES = ("off", "batch", "next")


@dataclass(frozen=True)
class Case:
    """One process: a table, a stream of ids and a limit.

    Attributes:
        stream: "zipf" or "drift".
        order: of the rows, "canonical" or "recency".
        limit: MiB of memory, 0 for none.
        rows, columns, batch: sizes of the table and of a batch, in bags.
        turns: of each side; steps: of a turn, of which the first is not counted.
        directory: of the mapped files; "" for rows in memory.
    """

    stream: str
    order: str
    limit: int
    rows: int
    columns: int
    batch: int
    turns: int
    steps: int
    directory: str


class Stream:
    """Batches of numbers of ids in [0, rows)."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self._case = case
        self._random = np.random.default_rng(seed)
        mass = np.arange(1, case.rows + 1, dtype=np.float64) ** -1.05
        self._cumulative = np.cumsum(mass) / mass.sum()
        self._shuffle = self._random.permutation(case.rows)

    def batch(self, step: int) -> np.ndarray[Any, Any]:
        """Returns the batch of a step; steps before the first have negative numbers."""
        uniform = self._random.random(self._case.batch * BAG)
        popularity = np.minimum(np.searchsorted(self._cumulative, uniform), self._case.rows - 1)
        moved = DRIFT * step if self._case.stream == "drift" else 0
        return self._shuffle[(popularity + moved) % self._case.rows]

    def in_order(self, order: str) -> np.ndarray[Any, Any]:
        """Returns all numbers in the order in which the rows are to lie."""
        if order == "canonical":
            return self._random.permutation(self._case.rows)
        last = np.full(self._case.rows, -EARLIER - 1)
        for step in range(-EARLIER, 0):
            last[self.batch(step)] = step
        return np.lexsort((self._random.random(self._case.rows), -last))


def pages_moved() -> tuple[int, int]:
    """Returns the pages that this process has read from disks, and made dirty, so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) // PAGE, int(lines["write_bytes"]) // PAGE


def run(case: Case) -> list[dict[str, Any]]:
    """Fills the table of a case, trains, and returns a line for each side."""
    stream = Stream(case)
    storage = dyn.MappedFiles(case.directory) if case.directory else None
    table = TableShard(
        name="table",
        num_embeddings=case.rows,
        embedding_dim=case.columns,
        optimizer=OPTIMIZER,
        config=dyn.DynamicTableConfig(storage=storage),
    )
    group = TableGroup([table], [1], "sum")
    for some in np.array_split(stream.in_order(case.order), max(1, case.rows // 50_000)):
        table.find_or_insert(raw_ids(torch.from_numpy(some)))
    dense = torch.randn(512, 512)
    offsets = torch.arange(0, case.batch * BAG + 1, BAG)
    grad = torch.randn(case.batch, case.columns) * 1e-3
    measured: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    step, ids = 0, raw_ids(torch.from_numpy(stream.batch(0)))
    asks = RowStore.ask_for
    majors = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    try:
        for turn in range(case.turns + 1):  # the first warms the page cache
            for side in SIDES if case.directory else SIDES[:1]:
                RowStore.ask_for = _asks_nothing if side == "off" else asks  # type: ignore[method-assign]
                for number in range(case.steps):
                    step += 1
                    following = raw_ids(torch.from_numpy(stream.batch(step)))
                    numbers = _measured_step(
                        group, ids, following if side == "next" else None, offsets, dense, grad
                    )
                    ids = following
                    if turn and number:
                        for name, value in numbers.items():
                            measured[side].setdefault(name, []).append(value)
    finally:
        RowStore.ask_for = asks  # type: ignore[method-assign]
    lines = []
    for side, numbers_of_side in measured.items():
        if not numbers_of_side:
            continue
        line = {**asdict(case), "side": side}
        for name, values in numbers_of_side.items():
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
            line[name] = [statistics.median(values), low, high]
        for name in ("read", "written"):
            line[f"mean_{name}"] = statistics.mean(numbers_of_side[name])
        line["distinct"] = len(torch.unique(ids))
        line["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - majors
        lines.append(line)
    return lines


def _asks_nothing(store: RowStore, rows: Tensor) -> None:
    """Stands for `RowStore.ask_for`."""


def _measured_step(
    group: TableGroup,
    ids: Tensor,
    following: Tensor | None,
    offsets: Tensor,
    dense: Tensor,
    grad: Tensor,
) -> dict[str, float]:
    """Runs a step; asks before for the rows of the following batch, if it is given."""
    read, written = pages_moved()
    cpu, own, begin = time.process_time(), time.thread_time(), time.perf_counter()
    if following is not None:
        group.ask_ahead({0: following}, True)
    output = group(ids, offsets, training=True)
    looked_up = time.perf_counter()
    dense @ dense @ dense
    computed = time.perf_counter()
    output.backward(grad)
    end = time.perf_counter()
    read_after, written_after = pages_moved()
    return {
        "ms": (end - begin) * 1e3,
        "forward_ms": (looked_up - begin) * 1e3,
        "backward_ms": (end - computed) * 1e3,
        "cpu_ms": (time.process_time() - cpu) * 1e3,
        "thread_ms": (time.thread_time() - own) * 1e3,
        "read": read_after - read,
        "written": written_after - written,
    }


def in_group(case: Case) -> list[dict[str, Any]]:
    """Runs a case in a process of its own, under its limit."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", json.dumps(asdict(case))]
    with limited_group(case.limit << 20) as group:
        done = subprocess.run(
            [*command, "--group", str(group)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{case}: exit status {done.returncode}. {done.stderr[-2000:]}")
    lines: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return lines


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yields the cases; for each stream also one with rows in memory, without a limit."""
    sizes = (2_000_000, 128, 2048, 3, 11)
    if arguments.quick:
        sizes = (5_000, 16, 64, 1, 3)
    for stream in ("zipf", "drift"):
        if stream not in arguments.only:
            continue
        yield Case(stream, "canonical", 0, *sizes, "")
        limits = [0] if arguments.quick else arguments.limits
        for limit in limits:
            yield Case(stream, "canonical", limit, *sizes, str(arguments.directory))
        yield Case(stream, "recency", limits[-1], *sizes, str(arguments.directory))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all cases and prints a line for each side."""
    parser = options(__doc__, (1,))
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--limits", type=int, nargs="+", default=[0, 512, 256])
    parser.add_argument("--only", nargs="+", default=["zipf", "drift"])
    parser.add_argument("--case", help="of a process of its own")
    parser.add_argument("--group", type=Path, help="its control group")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads[0])
    if arguments.case:
        enter(arguments.group)
        print(json.dumps(run(Case(**json.loads(arguments.case)))))
        return
    lines = []
    print(
        f"{'stream':6} {'rows lie':10} {'limit MiB':>9} {'side':>6} {'ms a step':>20} {'forward':>8} "
        f"{'backward':>9} {'cpu ms':>7} {'thread':>7} {'pages read':>11} {'written':>8}"
    )
    for case in cases(arguments):
        try:
            of_case = in_group(case) if case.limit else run(case)
        except NoLimitError as error:
            print(f"limit {case.limit}: {error}")
            continue
        for line in of_case:
            median, low, high = line["ms"]
            side = line["side"] if case.directory else "memory"
            print(
                f"{case.stream:6} {case.order:10} {case.limit or '-':>9} {side:>6} "
                f"{median:8.1f} [{low:.1f}, {high:.1f}] {line['forward_ms'][0]:8.1f} "
                f"{line['backward_ms'][0]:9.1f} {line['cpu_ms'][0]:7.1f} "
                f"{line['thread_ms'][0]:7.1f} {line['mean_read']:11.0f} "
                f"{line['mean_written']:8.0f}",
                flush=True,
            )
        lines += of_case
    finish("mapped", lines, arguments)


if __name__ == "__main__":
    main()
