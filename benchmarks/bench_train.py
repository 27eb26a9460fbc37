"""Training end to end against TorchRec: DistributedModelParallel, TrainPipelineSparseDist, gloo ranks.

    python benchmarks/bench_train.py [--rounds 7] [--world 2 1] [--only train-10hot] [--plans row_wise]

Dynamic tables get raw 64-bit ids, all of which have rows. Static tables get row numbers. Managed collision
(MCH) gets the raw ids and has admitted all of them. The two models of one line exist at the same time and
take turns. Wall time: the slowest rank. CPU time: sum over ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axes import TRAIN, Workload, tiny
from interleaved import finish, measure, options, ratio, summary
from torch import multiprocessing
from train_sides import (
    MCH_INTERVAL,
    PLANS,
    Head,
    clicks,
    sharded,
    show_all_ids,
    trainer,
)

HEADING = (
    f"{'workload':13} {'ranks':>5} {'plan':12} {'against':8} {'ours ms':>8} {'other ms':>8} "
    f"{'dense':>6}  {'ratio [quartiles]':22} of CPU time"
)


def dense_part(workload: Workload) -> Callable[[], None]:
    """Returns a function that runs the head alone, forward and backward."""
    head = Head(workload.tables * workload.dim)
    pooled = torch.rand(workload.batch, workload.tables * workload.dim, requires_grad=True)
    labels = torch.zeros(workload.batch)

    def run() -> None:
        pooled.grad = None
        head(pooled, labels).backward()

    return run


def duel(workload: Workload, plan: str, other: str, rounds: int) -> dict[str, Any]:
    """Trains the dynamic side and the side `other` in turn; returns one line of the table. Collective."""
    # Managed collision: one eviction per round. Otherwise: rounds of some tenths of a second.
    steps = MCH_INTERVAL if other == "managed" or workload.bag == 1 else 4
    losses: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}

    def in_turn(name: str) -> Callable[[int], None]:
        model = sharded(name, workload, plan)
        if name != "static":
            show_all_ids(model, workload)
        train = trainer(model, clicks(workload, raw=name != "static"))
        losses[name], processor[name] = [], []

        def turn(_: int) -> None:
            begin = time.process_time()
            losses[name].extend(train() for _ in range(steps))
            processor[name].append(time.process_time() - begin)
            dist.barrier()

        return turn

    sides = {name: in_turn(name) for name in ("dynamic", other)}
    seconds = measure(sides, rounds)
    # Equal losses prove that both sides did the same work; otherwise the times cannot be compared.
    torch.testing.assert_close(
        torch.tensor(losses["dynamic"]), torch.tensor(losses[other]), rtol=1e-3, atol=1e-4
    )
    for name, values in processor.items():
        total = torch.tensor(values[-rounds:])
        dist.all_reduce(total)
        processor[name] = total.tolist()
    head = dense_part(workload)
    dense = measure({"head": lambda _: [head() for _ in range(steps)] and None}, rounds)
    numbers = summary({**seconds, **dense}, steps)
    median, low, high = ratio(seconds, other, "dynamic")
    return {
        "workload": workload.name,
        "ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "plan": plan,
        "against": other,
        "ratio": median,
        "ratio_quartiles": [low, high],
        "cpu_ratio": ratio(processor, other, "dynamic")[0],
        "ns_per_step": numbers,
        "dense_share": numbers["head"]["median_ns"] / numbers["dynamic"]["median_ns"],
    }


def as_text(line: dict[str, Any], other: str) -> str:
    """Formats one line of the table."""
    numbers = line["ns_per_step"]
    low, high = line["ratio_quartiles"]
    quartiles = f"{line['ratio']:.2f}x [{low:.2f}, {high:.2f}]"
    return (
        f"{line['workload']:13} {line['ranks']:5} {line['plan']:12} {line['against']:8} "
        f"{numbers['dynamic']['median_ns'] / 1e6:8.1f} {numbers[other]['median_ns'] / 1e6:8.1f} "
        f"{line['dense_share']:6.0%}  {quartiles:22} {line['cpu_ratio']:.2f}x"
    )


def work(rank: int, world: int, arguments: argparse.Namespace, folder: str) -> None:
    """Runs one rank: measures all lines; rank 0 prints them and writes them to the folder."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(world))
    for chatty in ("torchrec", "torch.fx"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(
        arguments.threads[0] if arguments.threads else max(1, (os.cpu_count() or 1) // world)
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world
    )
    lines = []
    for workload in [tiny(one) if arguments.quick else one for one in TRAIN]:
        # On one rank all plans are the same: ids and rows stay on it.
        plans = PLANS if world > 1 else PLANS[:1]
        duels = [(plan, "static") for plan in plans] + [("row_wise", "managed")] * (world > 1)
        for plan, other in duels:
            if plan in arguments.plans and workload.name in arguments.only:
                if other not in arguments.against:
                    continue
                lines.append(duel(workload, plan, other, arguments.rounds))
                gc.collect()  # free these large models before the next ones are built
                if rank == 0:
                    print(as_text(lines[-1], other), flush=True)
    if rank == 0:
        Path(folder, f"lines{world}").write_text(json.dumps(lines))
    gc.collect()  # references to the group keep gloo's threads alive; they must end before the interpreter
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the ranks, prints one table and writes it."""
    parser = options(__doc__, threads=[])  # by default cores // ranks
    names = [workload.name for workload in TRAIN]
    parser.add_argument("--world", type=int, nargs="+", default=[2, 1], help="numbers of ranks")
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--plans", nargs="+", default=PLANS, choices=PLANS)
    sides = ["static", "managed"]
    parser.add_argument("--against", nargs="+", default=sides, choices=sides)
    arguments = parser.parse_args(argv)
    print(HEADING, flush=True)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in arguments.world:
            multiprocessing.spawn(work, (world, arguments, folder), nprocs=world)
            lines += json.loads(Path(folder, f"lines{world}").read_text())
    finish("train", lines, arguments)


if __name__ == "__main__":
    main()
