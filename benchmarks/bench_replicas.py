"""Cost of a sync of replicas, against an all-reduce of whole tables: bytes sent, and time of the CPU.

    python benchmarks/bench_replicas.py [--rows 200000] [--replicas 2 4] [--clock thread]

Replicas of one table of 64 columns with row-wise Adagrad, all in one process: what they send is handed over
and counted. Between two syncs each replica trains the same number of rows drawn at random, so the union of
changed ids is larger. The other side averages whole tables, as static tables would be, without a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from bench_delta import FED, collection, one_a_bag
from interleaved import finish, measure, options, quartiles, ratio, result, spread

from torchrec_dyn.replicas.merging import Merged, Merging
from torchrec_dyn.replicas.side import Side
from torchrec_dyn.whole_model import tables_of

ROWS, DIM = 200_000, 64
CHANGED = (0.001, 0.01, 0.1)  # shares of the rows that each replica trains


class Replicated:
    """Replicas of a table of the same rows."""

    def __init__(self, rows: int, replicas: int) -> None:
        self.rows = rows
        self.models = [collection(rows, DIM) for _ in range(replicas)]
        self.sides = [Side(tables_of(model, "bench")[0]) for model in self.models]
        self.sent = self.ids = 0
        self._has_changed = False

    def train(self, changed: int) -> None:
        """Trains rows drawn at random in each replica, each once; once between two syncs."""
        if self._has_changed:
            return
        self._has_changed = True
        for model in self.models:
            for numbers in torch.randperm(self.rows)[:changed].split(FED):
                model(one_a_bag(numbers)).values().sum().backward()

    def sync(self) -> None:
        """Merges the replicas; notes the bytes that one of them sends on average."""
        count = len(self.sides)
        mergings = [Merging([side], place, count) for place, side in enumerate(self.sides)]
        runs = [merging.run() for merging in mergings]
        sent: list[list[list[torch.Tensor]]] = []
        merged: list[Merged] = []
        self.sent = 0
        while not merged:
            arrived = [list(parts) for parts in zip(*sent, strict=True)]
            sent = []
            for place, run in enumerate(runs):
                try:
                    sent.append(run.send(arrived[place]) if arrived else next(run))
                except StopIteration as end:
                    merged += end.value
            self.sent += sum(
                tensor.nbytes
                for place, parts in enumerate(sent)
                for to, part in enumerate(parts)
                for tensor in part
                if to != place
            )
        for side, contents in zip(self.sides, merged, strict=True):
            side.prepare(*contents)()
        self._has_changed = False
        self.sent, self.ids = self.sent // count, merged[0][0].numel()


def run_syncs(rows: int, replicas: int, rounds: int, clock: str) -> Iterator[dict[str, Any]]:
    """Measures syncs after several numbers of changed rows."""
    model = Replicated(rows, replicas)
    whole = [torch.randn(rows, DIM + 1) for _ in range(replicas)]
    row_bytes = 4 * (DIM + 1)
    all_reduced = 2 * rows * row_bytes * (replicas - 1) / replicas
    for share in CHANGED:
        changed = max(1, int(share * rows))
        sides = {
            "sync": lambda turn: model.sync(),
            "whole tables": lambda turn: torch.stack(whole).mean(0),
        }
        seconds = measure(sides, rounds, 1, clock, before=lambda turn: model.train(changed))  # noqa: B023
        # One mean of whole tables is the work of all parts of an all-reduce together.
        milliseconds = {name: 1e3 * quartiles(taken)[0] for name, taken in seconds.items()}
        least = 2 * model.ids * row_bytes * (replicas - 1) / replicas
        print(
            f"{replicas} replicas, {changed:,} rows each, union {model.ids:,}: {model.sent:,} bytes sent, "
            f"{model.sent / least:.3f} of 2 K b (R - 1) / R, {model.sent / all_reduced:.4f} of an all-reduce"
        )
        seen = ratio(seconds, "sync", "whole tables")
        print(
            f"{'':12} sync of all replicas {milliseconds['sync']:.1f} ms, mean of whole tables "
            f"{milliseconds['whole tables']:.1f} ms: {spread(seen)}"
        )
        yield result(
            f"{share:g} of the rows", torch.get_num_threads(), f"{replicas} replicas", "whole tables", seen,
            in_mean=False, milliseconds=milliseconds, sent_bytes=model.sent, union=model.ids,
            all_reduce_bytes=all_reduced,
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs syncs for each number of replicas, and prints one line per measurement."""
    parser = options(__doc__, (1,))
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args(argv)
    rows, replicas = arguments.rows, list(arguments.replicas)
    if arguments.quick:
        rows, replicas = 2_000, [2]
    lines: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for count in replicas:
            lines += run_syncs(rows, count, arguments.rounds, arguments.clock)
    finish("replicas", lines, arguments)


if __name__ == "__main__":
    main()
