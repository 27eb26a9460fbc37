"""What a program waits for at its start: imports, then making 1,000 tables and their first forward.

    python benchmarks/bench_first.py [--rounds 9] [--tables 1000] [--rows 40000]

The tables have 16 columns and room for --rows rows each, and a batch has 64 ids of each table. A round makes
the collection and calls it once, in training: dynamic tables, and TorchRec's, whose rows exist at once.
Memory is what the process has more afterwards. Imports take CPU time of new processes.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from axes import raw_ids
from interleaved import finish, measure, options, ratio, result, spread, summary
from peak_memory import MB, resident
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn

COLUMNS, IDS = 16, 64
PACKAGES = ("torch", "torchrec", "torchrec_dyn")
IMPORTS = f"""
import importlib, json, time
seconds = []
for name in {PACKAGES}:
    begin = time.process_time()
    importlib.import_module(name)
    seconds.append(time.process_time() - begin)
print(json.dumps(seconds))
"""


class FirstForward:
    """One side: makes a collection and calls it.

    Attributes:
        megabytes: memory that the first collection had in use; later ones may get freed memory of the heap.
    """

    def __init__(
        self, kind: Callable[..., nn.Module], tables: int, rows: int, ids: torch.Tensor
    ) -> None:
        self._kind, self._ids, self.megabytes = kind, ids, 0.0
        self._configs = [
            EmbeddingBagConfig(rows, COLUMNS, name=f"t{t}", feature_names=[f"f{t}"])
            for t in range(tables)
        ]
        self.before = 0

    def start(self, _: int) -> None:
        """Notes the memory before the turn."""
        gc.collect()
        self.before = resident("VmRSS")

    def __call__(self, _: int) -> None:
        """Makes the collection and calls it."""
        collection = self._kind(self._configs)
        keys = [config.feature_names[0] for config in self._configs]
        lengths = torch.full((len(keys) * IDS,), 1)
        batch = KeyedJaggedTensor(keys, self._ids, lengths=lengths)
        collection(batch)
        self.megabytes = self.megabytes or (resident("VmRSS") - self.before) / MB


def import_seconds() -> list[float]:
    """Returns the CPU seconds of each import, in a new process."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, check=True)
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the forwards, then the imports, and prints one line per measurement."""
    parser = options(__doc__, (1,))
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=40_000, help="room of each table")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tables = 5
    ids = torch.randint(arguments.rows, (arguments.tables * IDS,))
    dynamic = partial(dyn.DynamicEmbeddingBagCollection, fused_params={"learning_rate": 0.1})
    lines = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        sides = {
            "dynamic": FirstForward(dynamic, arguments.tables, arguments.rows, raw_ids(ids)),
            "static": FirstForward(EmbeddingBagCollection, arguments.tables, arguments.rows, ids),
        }

        def start(turn: int, sides: dict[str, FirstForward] = sides) -> None:
            for side in sides.values():
                side.start(turn)

        seconds = measure(sides, arguments.rounds, 1, arguments.clock, before=start)
        seen = ratio(seconds, "dynamic", "static")
        numbers = summary(seconds, 1)
        for name, side in sides.items():
            print(f"{name:8} {numbers[name]['median_ns'] / 1e6:9.0f} ms {side.megabytes:8.0f} MB")
        print(f"dynamic / static: {spread(seen)}")
        lines.append(
            result(
                f"{arguments.tables:,} tables", threads, "making and first forward", "static", seen,
                ns_per_step=numbers, megabytes={name: one.megabytes for name, one in sides.items()},
            )
        )  # fmt: skip
    if not arguments.quick:
        rounds = [import_seconds() for _ in range(arguments.rounds)]
        imports = dict(
            zip(PACKAGES, map(statistics.median, zip(*rounds, strict=True)), strict=True)
        )
        print("imports, CPU seconds:", {name: round(one, 2) for name, one in imports.items()})
        lines.append({"workload": "imports", "cpu_seconds": imports})
    finish("first", lines, arguments)


if __name__ == "__main__":
    main()
