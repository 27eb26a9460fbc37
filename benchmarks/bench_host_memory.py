"""Tables in host memory on a GPU: copies over the link, bits, and steps with room for some of the rows.

    python benchmarks/bench_host_memory.py [--only copies bits steps] [--device cpu --quick]
    python benchmarks/bench_host_memory.py --device mock

Ten minutes of a card at most. **Never run on one.** Parts:

- copies: gather and scatter of random rows in host memory, alone and at once on two streams, in turn with
  copies of as many bytes of pinned memory, which torch makes without a kernel. A turn is CALLS calls.
- bits: a table with room for a tenth of its rows in the GPU's memory, beside one on the CPU. Ids drift, so
  rows leave and come back. Each output is equal, and at the end ids, rows and optimizer state are.
- steps (host_memory_steps.py): one table of 64 float32 columns under row-wise Adagrad, 65,536 ids a step of
  1 million. Sides in turn: all rows in the GPU's memory without HostMemory ("in GPU"), and HostMemory with
  room for all rows, a quarter and a tenth. Loops: "plain", an unsharded collection that gets a gradient;
  "sparse_dist" and "prefetch", TorchRec's TrainPipelineSparseDist and PrefetchTrainPipelineSparseDist over
  DistributedModelParallel at world size 1, with batches in pinned memory.

Steps begin with an empty table and 160 steps that are not measured, as the simulation does whose bytes an id
are shown beside; with 10 rounds, the default, 40 are measured, as there. Their time is wall time until the
GPU has run all work of a turn. At 65,536 ids the host may take most of it, so the time of kernels and copies
alone, by torch's profiler in a turn of its own, is shown too. More ids of as many more rows have the same
bytes an id: `--rows 16000000 --ids 1048576` needs 20 GB of host memory, and minutes to draw ids.

`--device mock` is a mock GPU (tests/support/mock_device.py): bits and counts at full size, no times.
`--device cpu` tests that the benchmark runs; HostMemory has no effect there. Both write to results/tmp.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from axes import HOST_COPY_BYTES, HOST_COPY_ROWS, HOST_MEMORY, HOST_MEMORY_PARTS, ranks, tiny
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from gpu_cases import Case
from host_memory_steps import LOOPS, Place, collection_of, lookups, steps
from interleaved import RESULTS, finish, measure, options, ratio, result, spread, write_results
from summary import host_memory_goals, print_goals
from torch import Tensor
from train_sides import raw_ids

from torchrec_dyn.storage.row_store import RowStore, block_shift

CALLS = 10  # of one turn of copies
COPIED_TABLE = 1 << 22  # rows, so that random ones are far apart
BITS_ROWS, BITS_BATCH, BITS_STEPS, BITS_PART = 100_000, 1024, 60, 10
PARTS = ("copies", "bits", "steps")


@contextmanager
def place_of(name: str) -> Iterator[Place]:
    """Enters the device "cuda", "cpu" or "mock"."""
    if name != "mock":
        device = torch.device(name, 0) if name == "cuda" else torch.device(name)
        yield Place(name, device, lambda tensor: tensor.to(device))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from mock_device import CUDA, MockDevice, run_lookups_backward

    with MockDevice() as mock:
        # Autograd's engine wants a real device.
        yield Place(
            name, CUDA, mock.of, lambda output, grad: run_lookups_backward(output, grad=grad)
        )


def in_turn(run: Callable[[], object], place: Place) -> Callable[[int], None]:
    """Returns a function of a round that makes CALLS calls and waits for the GPU."""

    def turn(_: int) -> None:
        for _ in range(CALLS):
            run()
        place.wait()

    return turn


def copied(
    row_bytes: int, counts: Sequence[int], table: int, place: Place, rounds: int
) -> Iterator[Case]:
    """Measures gathers and scatters of rows of one size, and copies of as many bytes."""
    columns, is_gpu = row_bytes // 4, place.is_gpu
    shift = block_shift(table, row_bytes)
    store = RowStore(columns, shift, torch.float32, place.device, on_host=is_gpu)
    store.reserve(table)
    order = place.send(torch.randperm(table, generator=torch.Generator().manual_seed(0)))
    streams = [torch.cuda.Stream() for _ in range(2)] if is_gpu else []

    def at_once(*runs: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for one, stream in zip(runs, streams or [None, None], strict=True):
                with torch.cuda.stream(stream):  # without a stream it does nothing
                    one()

        return run

    for count in counts:
        read, written = order[:count], order[-count:]
        values = torch.ones(count, columns, device=place.device)
        into = torch.empty_like(values)
        pinned = [torch.ones(count, columns, pin_memory=is_gpu) for _ in range(2)]
        place.wait()  # before other streams use these
        ways = {
            "gather": lambda read=read: store.read(read),
            "scatter": lambda rows=written, values=values: store.write(rows, values),
            "copy in": lambda into=into, pinned=pinned: into.copy_(pinned[0], non_blocking=True),
            "copy out": lambda values=values, pinned=pinned: pinned[1].copy_(
                values, non_blocking=True
            ),
        }
        ways["both"] = at_once(ways["gather"], ways["scatter"])
        ways["copy both"] = at_once(ways["copy in"], ways["copy out"])
        seconds = measure({name: in_turn(run, place) for name, run in ways.items()}, rounds)
        speeds = {}
        for name, times in seconds.items():
            moved = CALLS * count * row_bytes * (2 if "both" in name else 1)
            speeds[name] = moved / statistics.median(times) / 1e9
        text = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
        print(f"{count:9,} rows of {row_bytes} bytes, GB/s: {text}", flush=True)
        for ours, other in (("gather", "copy in"), ("scatter", "copy out"), ("both", "copy both")):
            seen = ratio(seconds, other, ours)  # of speeds
            print(f"    {ours}: {spread(seen)} of {other}", flush=True)
            yield result(
                f"{count} rows of {row_bytes} bytes", 1, ours, other, seen, in_mean=False,
                gigabytes_a_second=speeds[ours], other_gigabytes_a_second=speeds[other],
            )  # fmt: skip


def copies(place: Place, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures copies of rows over the link."""
    counts, table = HOST_COPY_ROWS, COPIED_TABLE
    if arguments.quick:
        counts, table = (10, 100), 1000
    for row_bytes in HOST_COPY_BYTES:
        yield from copied(row_bytes, counts, table, place, arguments.rounds)


def bits(place: Place, arguments: argparse.Namespace) -> Iterator[Case]:
    """Trains a table on the device and one on the CPU; yields how many tensors differ."""
    drift = next(one for one in HOST_MEMORY if one.drift)
    workload = replace(drift, rows=BITS_ROWS, batch=BITS_BATCH)
    count = BITS_STEPS
    if arguments.quick:
        workload, count = replace(tiny(drift), tables=1), 5
    batches = ranks(workload, count, seed=1)
    host = Place("cpu", torch.device("cpu"), lambda tensor: tensor, place.backward)
    draw = torch.Generator().manual_seed(1)
    for optimizer in (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM):
        models = [
            collection_of(workload, part, where, optimizer)
            for part, where in ((None, host), (BITS_PART, place))
        ]
        different = 0
        for numbers in batches:
            grad = torch.randn(workload.batch, workload.dim, generator=draw)
            outputs = [
                lookups(model, where.send(raw_ids(numbers)), workload, where)
                for model, where in zip(models, (host, place), strict=True)
            ]
            here, there = (output.values().detach().cpu() for output in outputs)
            different += not torch.equal(here, there)
            for output in outputs:
                place.backward(output, grad)
        states = [
            {**model.state_dict(), **_flat(model.fused_optimizer.state_dict()["state"])}
            for model in models
        ]
        names = states[0].keys() | states[1].keys()
        different += sum(not _equal(*(state.get(name) for state in states)) for name in names)
        stats = models[1].table("t0").stats()
        seen = {name: stats[name] for name in ("rows", "rows_loaded", "rows_written_back")}
        print(
            f"bits, {optimizer.value}: {different} of {count + len(names)} tensors differ; {seen}"
        )
        yield {
            "workload": f"bits, {optimizer.value}", "what": "bits", "different": different, **seen
        }  # fmt: skip


def _flat(states: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{key}: {name}": one for key, value in states.items() for name, one in value.items()}


def _equal(here: Tensor | None, there: Tensor | None) -> bool:
    return here is not None and there is not None and torch.equal(here.cpu(), there.cpu())


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the parts, prints a line per measurement and the goals, and writes them."""
    parser = options(__doc__, threads=[1])
    parser.set_defaults(rounds=10)
    parser.add_argument("--device", choices=("cuda", "cpu", "mock"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all; mock has no copies")
    names = [workload.name for workload in HOST_MEMORY]
    parser.add_argument("--streams", nargs="+", default=names, choices=names)
    parser.add_argument(
        "--parts", nargs="+", type=int, default=list(HOST_MEMORY_PARTS),
        help="HostMemory(rows / part)",
    )  # fmt: skip
    parser.add_argument(
        "--loops",
        nargs="+",
        choices=LOOPS,
        help="default: all; cpu has no prefetch, mock only plain",
    )
    parser.add_argument("--rows", type=int, default=HOST_MEMORY[0].rows, help="ids of a stream")
    parser.add_argument("--ids", type=int, default=HOST_MEMORY[0].ids_per_step, help="of a step")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "bench_host_memory: expected a GPU, got none. --device mock counts rows, --device cpu "
            "tests that it runs."
        )
    if arguments.device != "cuda" and arguments.results is None:
        arguments.results = RESULTS / "tmp" / arguments.device
    can = {"cuda": LOOPS, "cpu": LOOPS[:2], "mock": LOOPS[:1]}[arguments.device]
    arguments.loops = [one for one in arguments.loops or can if one in can]
    parts = arguments.only or PARTS[arguments.device == "mock" :]
    lines: list[Case] = []
    with place_of(arguments.device) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for part in parts:
            for line in {"copies": copies, "bits": bits, "steps": steps}[part](place, arguments):
                lines.append(line)
                # A later part may fail.
                write_results("host_memory", lines, arguments.results or RESULTS / "tmp")
            gc.collect()
    if place.is_gpu:
        print_goals(host_memory_goals(), {"host_memory": lines})
    else:
        print("The goals are those of a GPU. No time here was measured on one.")
    finish("host_memory", lines, arguments)
    if any(line.get("different") for line in lines):
        raise SystemExit("bench_host_memory: expected the bits of the CPU, got others.")


if __name__ == "__main__":
    main()
