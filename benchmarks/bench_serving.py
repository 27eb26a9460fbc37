"""Serving: latency of a request, bytes per row, start-up time and shared memory of two processes.

    python benchmarks/bench_serving.py [--rounds 9] [--threads 1]

Measures served tables in float32, float16, int8 and int4, the training module in evaluation, and TorchRec's
quantized static collections (int8 and int4), which get row numbers: their ids are already mapped. Each
request is a new KeyedJaggedTensor.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from axes import SERVING, SERVING_BATCHES, SHARED_ROWS, Workload, ranks, raw_ids, tiny
from interleaved import finish, measure, options, ratio, result, spread, summary
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import serving

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
    "int4": torch.int4,
}
STATIC = {"static int8": torch.qint8, "static int4": torch.quint4x2}
REQUESTS = 16
CALLS = {1: 200, 32: 100, 512: 10}


def configs(workload: Workload) -> list[EmbeddingBagConfig]:
    """Returns the configs of the tables, one feature each."""
    return [
        EmbeddingBagConfig(
            name=f"t{t}",
            embedding_dim=workload.dim,
            num_embeddings=workload.rows,
            feature_names=[f"f{t}"],
        )
        for t in range(workload.tables)
    ]


def trained(workload: Workload) -> dyn.DynamicEmbeddingBagCollection:
    """Returns the training module with every row, in evaluation mode."""
    module = dyn.DynamicEmbeddingBagCollection(configs(workload))
    ids = raw_ids(torch.arange(workload.rows))
    for t in range(workload.tables):
        module.table(f"t{t}").assign(ids, torch.randn(workload.rows, workload.dim) * 0.05)
    return module.eval()


def static(workload: Workload, dtype: torch.dtype) -> nn.Module:
    """Returns TorchRec's quantized collection; `dtype` is the one of its rows in TorchRec's words."""
    module = EmbeddingBagCollection(tables=configs(workload))
    quiet = torch.ao.quantization.PlaceholderObserver
    module.qconfig = torch.ao.quantization.QConfig(
        activation=quiet.with_args(dtype=torch.float), weight=quiet.with_args(dtype=dtype)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return QuantEmbeddingBagCollection.from_float(module)


def save(module: nn.Module, path: Path) -> Path:
    """Saves the module's tables without a process group; returns the path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": module.state_dict()}, checkpoint_id=path, no_dist=True)
    return path


def requests_of(
    module: nn.Module, workload: Workload, batches: Sequence[Tensor], calls: int
) -> Callable[[int], None]:
    """Returns a contestant: `calls` requests, each a new KeyedJaggedTensor."""
    keys = [f"f{t}" for t in range(workload.tables)]
    lengths = torch.full((workload.tables * workload.batch,), workload.bag)

    def ask(turn: int) -> None:
        with torch.inference_mode():
            for call in range(calls):
                values = batches[(turn + call) % len(batches)]
                module(KeyedJaggedTensor(keys, values, lengths=lengths)).values()

    return ask


def bytes_a_row(folder: Path, workload: Workload) -> float:
    """Returns the bytes per row of served tables on disk; holes of sparse files count nothing."""
    blocks = sum(path.stat().st_blocks for path in folder.rglob("*"))
    return blocks * 512 / (workload.tables * workload.rows)


def latency(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures requests of all sizes on all sides; prints and returns the results."""
    shape = tiny(SERVING[0]) if arguments.quick else SERVING[0]
    sides: dict[str, nn.Module] = {"training": trained(shape)}
    checkpoint = save(sides["training"], folder / "checkpoint")
    rows: list[dict[str, Any]] = []
    for name, dtype in DTYPES.items():
        serving.build(checkpoint, folder / name, rows=dtype)
        sides[name] = serving.ServingEmbeddingBagCollection(folder / name, configs(shape))
        held = bytes_a_row(folder / name, shape)
        print(f"{name:10} {held:8.1f} bytes a row")
        rows.append({"workload": shape.name, "what": "bytes a row", "side": name, "bytes": held})
    for name, dtype in STATIC.items():
        sides[name] = static(shape, dtype)
    for workload in SERVING:
        for size in SERVING_BATCHES:
            asked = replace(shape, name=workload.name, zipf=workload.zipf, batch=size)
            mapped = ranks(asked, REQUESTS, seed=0)
            raw = [raw_ids(batch) for batch in mapped]
            calls = 2 if arguments.quick else CALLS[size]
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                contestants = {
                    name: requests_of(module, asked, mapped if name in STATIC else raw, calls)
                    for name, module in sides.items()
                }
                seconds = measure(contestants, arguments.rounds, clock=arguments.clock)
                numbers = summary(seconds, calls)
                line = "".join(f" {n['median_ns'] / 1e3:9.1f}" for n in numbers.values())
                seen = ratio(seconds, "static int8", "int8")
                print(f"{workload.name:18} {threads} {size:5}{line}  {spread(seen)}")
                rows.append(
                    result(
                        workload.name, threads, f"request of {size}", "static int8", seen,
                        ns_per_request=numbers,
                    )
                )  # fmt: skip
                others = {"training": "int8", "static int4": "int4", "int8": "int4"}
                for other, ours in others.items():
                    rows.append(
                        result(
                            workload.name, threads, f"request of {size}, {ours}", other,
                            ratio(seconds, other, ours), in_mean=False,
                        )
                    )  # fmt: skip
    return rows


STARTED = """
import sys, time
import torch
from pathlib import Path
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_dyn import serving
from torchrec_dyn.ops import mix64
folder, rows, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = EmbeddingBagConfig(name="t0", embedding_dim=dim, num_embeddings=rows, feature_names=["f0"])
begin = time.perf_counter()
module = serving.ServingEmbeddingBagCollection(folder, [config])
started = time.perf_counter() - begin
module(KeyedJaggedTensor(["f0"], mix64(torch.arange(10)), lengths=torch.tensor([10])))
first = time.perf_counter() - begin
for part in torch.arange(rows).split(1 << 16):  # every row and most of the map
    module(KeyedJaggedTensor(["f0"], mix64(part), lengths=torch.ones(len(part)).long()))
print("read", flush=True)
sys.stdin.readline()
held, name = {"Rss": 0, "Pss": 0}, ""
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.split()[0]:
        name = line.split()[-1]
    elif folder in name and line.split(":")[0] in held:
        held[line.split(":")[0]] += int(line.split()[1]) * 1024
print(started, first, held["Rss"], held["Pss"], flush=True)
sys.stdin.readline()
"""


def shared(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Starts two processes on one directory, lets both read every row, and measures the memory they hold."""
    shape = replace(SERVING[0], tables=1, rows=1000 if arguments.quick else SHARED_ROWS)
    module = trained(shape)
    save(module, folder / "large")
    del module
    serving.build(folder / "large", folder / "shared")
    command = [
        sys.executable,
        "-c",
        STARTED,
        str(folder / "shared"),
        str(shape.rows),
        str(shape.dim),
    ]
    two = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines: list[dict[str, Any]] = []
    for step in ("read", "held"):  # both have read all rows before memory is measured
        for number, process in enumerate(two):
            assert process.stdin is not None and process.stdout is not None
            words = process.stdout.readline().split()
            if step == "held":
                started, first, rss, pss = map(float, words)
                print(
                    f"process {number}: started in {started * 1e3:.1f} ms, first request after "
                    f"{first * 1e3:.1f} ms; maps {rss / 1e6:.0f} MB, its share {pss / 1e6:.0f} MB"
                )
                lines.append(
                    {"workload": "shared", "what": "process", "rows": shape.rows, "started_s": started,
                     "first_request_s": first, "rss": rss, "pss": pss}
                )  # fmt: skip
        for process in two if step == "read" else ():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    for process in two:
        process.communicate("\n", timeout=60)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints one table."""
    parser = options(__doc__, (1,))
    parser.add_argument("--folder", type=Path, help="where to put checkpoint and served tables")
    arguments = parser.parse_args(argv)
    names = ["training", *DTYPES, *STATIC]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        print(f"{'workload':18} threads batch, us a request of " + ", ".join(names))
        rows = latency(arguments, Path(name))
        if sys.platform == "linux":
            rows += shared(arguments, Path(name))
    finish("serving", rows, arguments)


if __name__ == "__main__":
    main()
