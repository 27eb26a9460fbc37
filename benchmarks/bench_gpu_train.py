"""Training end to end on GPUs against TorchRec: DistributedModelParallel and its train pipelines.

    python benchmarks/bench_gpu_train.py [--world 1] [--only gpu-train-10hot-uniform] [--device cpu --quick]

As bench_train.py, whose sides and floor these are, with one process a GPU, nccl for rows and gloo for
agreements. Batches are in pinned memory of the host; a pipeline copies them. Sides: dynamic tables, dynamic
tables with LeastRecentlyUsed (no id is evicted), stock tables (FBGEMM's TBE), managed collision (MCH), and
the floor. Pipelines: TrainPipelineSparseDist and PrefetchTrainPipelineSparseDist. Wall time ends when the
GPU has run all work of a turn; CPU time is the host's.

`--device cpu` tests that the benchmark runs: it measures CPUs and writes to results/tmp.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axes import GPU_TRAIN, Workload, tiny
from bench_train import HEADING, as_text, contest, families
from interleaved import RESULTS, finish, options, write_results
from summary import gpu_train_goals, print_goals
from torch import multiprocessing
from train_sides import MCH_INTERVAL, PIPELINES, PLANS, Setting

STEPS = 2 * MCH_INTERVAL  # of one turn: a turn of managed collision has two evictions
# Our side and the other, and whether a pipeline prefetches for both. MCH has no prefetch.
CONTESTS = (
    ("dynamic", "static", tuple(PIPELINES)),
    ("policies", "static", tuple(PIPELINES)),
    ("dynamic", "managed", ("sparse_dist",)),
)


def contests(
    family: Sequence[Workload], world: int, arguments: argparse.Namespace
) -> Iterator[tuple[str, tuple[str, str], str]]:
    """Yields plan, sides and pipeline of each contest of a family of workloads."""
    plans = ("table_wise",) if world == 1 else PLANS  # on one rank all plans are the same
    for ours, other, pipelines in CONTESTS:
        for pipeline in pipelines:
            if pipeline not in arguments.pipelines or other not in arguments.against:
                continue
            if other == "managed" and not family[0].pooled:
                continue
            for plan in ("row_wise",) if other == "managed" else plans:
                yield plan, (ours, other), pipeline


def work(rank: int, world: int, arguments: argparse.Namespace, folder: str) -> None:
    """Runs one rank: measures all lines; rank 0 prints them and writes them to the folder. Collective."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(world))
    for chatty in ("torchrec", "torch.fx"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    device, backend = torch.device("cpu"), "gloo"
    if arguments.device == "cuda":
        device, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    place = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=world)
    steps = 2 if arguments.quick else STEPS
    workloads = [tiny(one) if arguments.quick else one for one in GPU_TRAIN]
    chosen = [one for one in workloads if one.name in arguments.only]
    lines: list[dict[str, Any]] = []
    for family in families(chosen):
        for plan, sides, pipeline in contests(family, world, arguments):
            setting = Setting(plan, device, pipeline)
            some = family[:1] if sides[1] == "managed" else family
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                for line in contest(some, setting, sides, steps, arguments.rounds):
                    lines.append({**line, "pipeline": pipeline})
                    if rank == 0:
                        print(f"{pipeline:11} {sides[0]:8} {as_text(line)}", flush=True)
                        # A later contest may fail.
                        write_results("gpu_train", lines, arguments.results or RESULTS / "tmp")
            gc.collect()  # free these large models before the next ones are built
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if rank == 0:
        Path(folder, "lines").write_text(json.dumps(lines))
    gc.collect()  # references to the group keep gloo's threads alive; they must end before the interpreter
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the ranks, prints one table, the goals beside what was seen, and writes the table."""
    parser = options(__doc__, threads=[1])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    names = [workload.name for workload in GPU_TRAIN]
    parser.add_argument("--world", type=int, default=1, help="ranks, one a GPU")
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument(
        "--pipelines", nargs="+", choices=PIPELINES, help="default: all; on a CPU sparse_dist"
    )
    others = list(dict.fromkeys(other for _, other, _ in CONTESTS))
    parser.add_argument("--against", nargs="+", default=others, choices=others)
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.world:
        raise SystemExit(
            f"bench_gpu_train: expected a GPU for each of {arguments.world} ranks, got "
            f"{torch.cuda.device_count()}. --device cpu tests that it runs."
        )
    if arguments.device == "cpu" and arguments.results is None:
        arguments.results = RESULTS / "tmp" / "cpu"
    if arguments.pipelines is None:  # PrefetchTrainPipelineSparseDist wants CUDA's streams
        arguments.pipelines = list(PIPELINES) if arguments.device == "cuda" else ["sparse_dist"]
    print(f"{'pipeline':11} {'ours':8} {HEADING}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.world == 1:
            work(0, 1, arguments, folder)
        else:
            task = (arguments.world, arguments, folder)
            multiprocessing.spawn(work, task, nprocs=arguments.world)
        lines = json.loads(Path(folder, "lines").read_text())
    if arguments.device == "cuda":
        print_goals(gpu_train_goals(), {"gpu_train": lines})
    else:
        print("The goals are those of a GPU. Nothing here was measured on one.")
    finish("gpu_train", lines, arguments)


if __name__ == "__main__":
    main()
