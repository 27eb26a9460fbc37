"""Training end to end against TorchRec: DistributedModelParallel, TrainPipelineSparseDist, gloo ranks.

    python benchmarks/bench_train.py [--full] [--world 2 1] [--plans row_wise] [--only train-10hot-uniform]

Dynamic tables get raw 64-bit ids, all of which have rows. Static tables get row numbers. Managed collision
(MCH) gets the raw ids and has admitted all of them. The floor is the static side with lookups of no cost, so
a step minus the floor is the time of the tables. The models of one line exist at the same time and take
turns. Wall time: the slowest rank. CPU time: sum over ranks.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axes import TRAIN, Workload, tiny
from interleaved import finish, measure, options, quartiles, ratio, summary
from torch import Tensor, multiprocessing
from train_sides import MCH_INTERVAL, PLANS, Setting, Stream, clicks, sharded, trainer

HEADING = (
    f"{'workload':23} {'ranks':>5} {'plan':12} {'other':8} {'ours ms':>8} {'other ms':>8} {'floor ms':>8}  "
    f"{'other / ours':18} {'above the floor':18} CPU"
)
# Without --full: ranks and plans of these workloads, and no others.
SHORT = {
    "train-10hot": [(2, "row_wise")],
    "train-onehot": [(2, "row_wise"), (2, "column_wise"), (1, "table_wise")],
    "train-sequence": [(2, "row_wise")],
}


def families(workloads: Sequence[Workload]) -> list[list[Workload]]:
    """Returns the workloads, those of equal tables together."""
    found: dict[Workload, list[Workload]] = {}
    for workload in workloads:
        found.setdefault(replace(workload, name="", zipf=0.0), []).append(workload)
    return list(found.values())


def above_floor(
    seconds: dict[str, list[float]], side: str, other: str
) -> tuple[float, float, float]:
    """Returns the time of the tables of a side / that of another side, and its quartiles.

    Differences are taken round by round; the quartiles are those of `side`.
    """
    above = {
        name: [time - floor for time, floor in zip(seconds[name], seconds["floor"], strict=True)]
        for name in (side, other)
    }
    whole = quartiles(above[other])[0]
    median, low, high = (time / whole for time in quartiles(above[side]))
    return median, low, high


def contest(
    workloads: Sequence[Workload],
    setting: Setting,
    sides: tuple[str, str],
    steps: int,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Trains our side, the other side and the floor in turn; yields the lines of the table.

    Collective. The workloads have equal tables, so one model of each side is enough.

    Args:
        workloads: the workloads.
        setting: plan, device and pipeline of all sides.
        sides: our side and the other.
        steps: steps of one turn.
        rounds: measured rounds.
    """
    names = (*sides, "floor")
    models = {name: sharded(name, workloads[0], setting) for name in names}
    streams = {name: Stream() for name in names}
    trainers = {name: trainer(models[name], streams[name], setting) for name in names}
    for workload in workloads:
        yield _line(workload, setting, sides, steps, rounds, streams, trainers)


def _line(
    workload: Workload,
    setting: Setting,
    sides: tuple[str, str],
    steps: int,
    rounds: int,
    streams: dict[str, Stream],
    trainers: dict[str, Callable[[], Tensor]],
) -> dict[str, Any]:
    ours, other = sides
    losses: dict[str, list[float]] = {name: [] for name in streams}
    processor: dict[str, list[float]] = {name: [] for name in streams}

    def in_turn(name: str) -> Callable[[int], None]:
        streams[name].batches = clicks(workload, name, setting.device)

        def turn(_: int) -> None:
            begin = time.process_time()
            # All steps are launched before the host reads a loss: reading waits for the GPU.
            trained = [trainers[name]() for _ in range(steps)]
            losses[name].extend(map(float, trained))
            if setting.device.type == "cuda":
                torch.cuda.synchronize(setting.device)  # the backward of the last step
            processor[name].append(time.process_time() - begin)
            dist.barrier()

        return turn

    seconds = measure({name: in_turn(name) for name in streams}, rounds, warm_up=1)
    # Equal losses prove that both sides did the same work; otherwise the times cannot be compared.
    torch.testing.assert_close(
        torch.tensor(losses[ours]), torch.tensor(losses[other]), rtol=1e-3, atol=1e-4
    )
    for name, values in processor.items():
        total = torch.tensor(values[-rounds:])
        dist.all_reduce(total)
        processor[name] = total.tolist()
    median, low, high = ratio(seconds, other, ours)
    share = above_floor(seconds, ours, other)
    return {
        "workload": workload.name,
        "ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "plan": setting.plan,
        "side": ours,
        "against": other,
        "ratio": median,
        "ratio_quartiles": [low, high],
        "above_floor": share[0],
        "above_floor_quartiles": share[1:],
        "cpu_ratio": ratio(processor, other, ours)[0],
        "cpu_above_floor": above_floor(processor, ours, other)[0],
        "ns_per_step": summary(seconds, steps),
    }


def as_text(line: dict[str, Any]) -> str:
    """Formats one line of the table."""
    other = line["against"]
    ours, theirs, floor = (
        line["ns_per_step"][name]["median_ns"] / 1e6 for name in (line["side"], other, "floor")
    )

    def shown(name: str) -> str:
        low, high = line[f"{name}_quartiles"]
        return f"{line[name]:.2f} [{low:.2f}, {high:.2f}]"

    return (
        f"{line['workload']:23} {line['ranks']:5} {line['plan']:12} {other:8} {ours:8.1f} "
        f"{theirs:8.1f} {floor:8.1f}  {shown('ratio'):18} {shown('above_floor'):18} "
        f"{line['cpu_ratio']:.2f}, {line['cpu_above_floor']:.2f}"
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
    workloads = [
        tiny(one) if arguments.quick else one for one in TRAIN if one.name in arguments.only
    ]
    for family in families(workloads):
        # On one rank all plans are the same: ids and rows stay on it.
        plans = PLANS if world > 1 else PLANS[:1]
        contests = [(plan, "static") for plan in plans]
        if world > 1 and family[0].pooled:
            contests.append(("row_wise", "managed"))
        for plan, other in contests:
            is_short = (world, plan) in SHORT[family[0].name.rpartition("-")[0]]
            if not (is_short or arguments.full):
                continue
            if plan not in arguments.plans or other not in arguments.against:
                continue
            chosen = family if other == "static" else family[:1]
            # Managed collision: one eviction per round, so rounds are long.
            steps, rounds = 4, arguments.rounds
            if other == "managed":
                steps, rounds = MCH_INTERVAL, min(rounds, 2)
            for line in contest(chosen, Setting(plan), ("dynamic", other), steps, rounds):
                lines.append(line)
                if rank == 0:
                    print(as_text(line), flush=True)
            gc.collect()  # free these large models before the next ones are built
    if rank == 0:
        Path(folder, f"lines{world}").write_text(json.dumps(lines))
    gc.collect()  # references to the group keep gloo's threads alive; they must end before the interpreter
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the ranks, prints one table and writes it."""
    parser = options(__doc__, threads=[])  # by default cores // ranks
    parser.set_defaults(rounds=5)
    parser.add_argument("--full", action="store_true", help="all workloads under all plans")
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
