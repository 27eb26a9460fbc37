"""The start of a program: imports, then making 1,000 tables and their first forward.

    python benchmarks/bench_first.py [--rounds 9] [--tables 1000] [--rows 40000]

The tables have 16 columns and room for --rows rows each, and a batch has 64 ids of each table. A round makes
the collection and calls it once, in training: dynamic tables, and TorchRec's, whose rows exist at once.
Memory is what the process has more after the first call: later ones may get freed memory of the heap.
Imports take CPU time of new processes.
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


def first_forward(
    kind: Callable[..., nn.Module], configs: list[EmbeddingBagConfig], ids: torch.Tensor
) -> nn.Module:
    """Returns a new collection that was called once; ids [tables * IDS] int64 are the batch."""
    collection = kind(configs)
    keys = [config.feature_names[0] for config in configs]
    collection(KeyedJaggedTensor(keys, ids, lengths=torch.full((len(ids),), 1)))
    return collection


def megabytes_of(make: Callable[[], nn.Module]) -> float:
    """Returns what the process has more after a call."""
    gc.collect()
    before = resident("VmRSS")
    made = make()
    after = resident("VmRSS")
    del made
    return (after - before) / MB


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
    configs = [
        EmbeddingBagConfig(arguments.rows, COLUMNS, name=f"t{t}", feature_names=[f"f{t}"])
        for t in range(arguments.tables)
    ]
    dynamic = partial(dyn.DynamicEmbeddingBagCollection, fused_params={"learning_rate": 0.1})
    sides = {
        "dynamic": partial(first_forward, dynamic, configs, raw_ids(ids)),
        "static": partial(first_forward, EmbeddingBagCollection, configs, ids),
    }
    torch.set_num_threads(arguments.threads[0])
    megabytes = {name: megabytes_of(make) for name, make in sides.items()}

    def taking(make: Callable[[], nn.Module]) -> Callable[[int], None]:
        def turn(_: int) -> None:
            make()

        return turn

    def collect(_: int) -> None:
        gc.collect()  # cycles may hold the collection of the turn before

    turns = {name: taking(make) for name, make in sides.items()}
    lines = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        seconds = measure(turns, arguments.rounds, 1, arguments.clock, before=collect)
        seen = ratio(seconds, "dynamic", "static")
        numbers = summary(seconds, 1)
        for name in sides:
            print(f"{name:8} {numbers[name]['median_ns'] / 1e6:9.0f} ms {megabytes[name]:8.0f} MB")
        print(f"dynamic / static: {spread(seen)}")
        lines.append(
            result(
                f"{arguments.tables:,} tables", threads, "making and first forward", "static", seen,
                ns_per_step=numbers, megabytes=megabytes,
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
