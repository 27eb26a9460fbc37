"""Saving and loading: dynamic tables against TorchRec's static tables and torch.save of the same bytes.

    python benchmarks/bench_checkpoint.py [--rows 4000000] [--world 1 2] [--folder /tmp]
    python benchmarks/bench_checkpoint.py --only memory --bytes 5e9 --world 1

One row-wise table, 64 columns of float32, row-wise Adagrad. Every save writes to a fresh folder. The disk
is synced before each turn, so no side writes out data of another side. DCP syncs its files and torch.save
does not, so saves are measured with and without syncing, on all sides. Loads are measured from the page
cache (warm) and from the disk (cold). Sides take turns. Wall time: the slowest rank. CPU time: sum over
ranks. Then peak memory, part by part.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interleaved import finish, measure, options, quartiles, ratio, result, spread, summary
from peak_memory import measure_memory
from saved_sides import SIDES, Parts, Side, Spent
from torch import multiprocessing

ROWS = 4_000_000  # 1.1 GB
GB = 1e9


def drop_from_cache(folder: Path) -> None:
    """Drops a folder's files from the page cache, so that the next read is from the disk.

    The files must be synced.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Turns:
    """One function per side for `measure`, and the times of its parts.

    Args:
        sides: sides by name.
        folder: folder that the ranks save to.
    """

    def __init__(self, sides: dict[str, Side], folder: Path) -> None:
        self.sides = sides
        self.folder = folder
        self.parts: dict[str, list[Parts]] = {name: [] for name in sides}

    def of(self, act: Callable[[str], Parts]) -> dict[str, Callable[[int], object]]:
        """Returns the functions by the name of the side.

        Args:
            act: runs the measured work of a side, given its name; returns the times of its parts.
        """
        self.parts = {name: [] for name in self.sides}

        def turn(name: str) -> Callable[[int], object]:
            return lambda _: self.parts[name].append(act(name))

        return {name: turn(name) for name in self.sides}

    def seconds(self, rounds: int, clock: str) -> dict[str, list[float]]:
        """Returns the seconds of each measured round, summed over the parts. `clock`: "wall" or "cpu"."""
        return {
            name: [sum(getattr(one, clock) for one in parts.values()) for parts in seen[-rounds:]]
            for name, seen in self.parts.items()
        }

    def medians(self, rounds: int) -> dict[str, dict[str, list[float]]]:
        """Returns the median wall and CPU seconds of each part."""
        return {
            name: {
                part: [
                    statistics.median(getattr(one[part], clock) for one in seen[-rounds:])
                    for clock in Spent._fields
                ]
                for part in seen[-1]
            }
            for name, seen in self.parts.items()
        }


def in_turn(
    turns: Turns, what: str, act: Callable[[str], Parts], ready: Callable[[], None], rounds: int
) -> list[dict[str, Any]]:
    """Measures one operation on all sides; returns its result lines and prints them on rank 0. Collective.

    Args:
        turns: the sides.
        what: name of the operation.
        act: runs the operation for a side, given its name; returns the times of its parts.
        ready: runs on rank 0 before each turn.
        rounds: measured rounds.
    """

    def before(_: int) -> None:
        if dist.get_rank() == 0:
            ready()
            os.sync()
        dist.barrier()

    measure(turns.of(act), rounds, 1, before=before)
    wall, cpu = turns.seconds(rounds, "wall"), turns.seconds(rounds, "cpu")
    medians = turns.medians(rounds)
    speeds = {
        name: quartiles([side.bytes / GB / one for one in wall[name]])
        for name, side in turns.sides.items()
    }
    lines = []
    for other in [name for name in turns.sides if name != "dynamic"]:
        seen, of_cpu = ratio(wall, "dynamic", other), ratio(cpu, "dynamic", other)
        workload = f"row_wise {turns.sides['dynamic'].bytes / GB:.2f} GB"
        lines.append(
            result(
                workload, torch.get_num_threads(), what, other, seen, ranks=dist.get_world_size(),
                cpu_ratio=of_cpu, gb_per_second=speeds, seconds=medians, ns_per_step=summary(wall, 1),
            )
        )  # fmt: skip
    if dist.get_rank() == 0:
        print(as_text(lines, medians, speeds), flush=True)
    return lines


def as_text(
    lines: list[dict[str, Any]],
    medians: dict[str, dict[str, list[float]]],
    speeds: dict[str, tuple[float, float, float]],
) -> str:
    """Formats the results of one operation."""
    start = f"{lines[0]['ranks']} ranks  {lines[0]['what']:16}"
    shown = []
    for name, (median, low, high) in speeds.items():
        parts = ", ".join(
            f"{part} {wall * 1e3:.0f} ({cpu * 1e3:.0f})"
            for part, (wall, cpu) in medians[name].items()
        )
        shown.append(
            f"{start} {name:10} {median:5.2f} GB/s [{low:.2f}, {high:.2f}]  ms (CPU): {parts}"
        )
    shown += [
        f"{start} dynamic / {line['against']}: {spread((line['ratio'], *line['ratio_quartiles']))} of its "
        f"time, {spread(line['cpu_ratio'])} of its CPU time"
        for line in lines
    ]
    return "\n".join(shown)


def run(rows: int, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Measures saves and loads of all sides. Collective."""
    turns = Turns({name: make(rows) for name, make in SIDES.items()}, folder)
    saved = folder / "saved"
    lines = []

    def clear() -> None:
        shutil.rmtree(saved, ignore_errors=True)

    def save(name: str, is_synced: bool) -> Parts:
        return turns.sides[name].save(saved, is_synced)

    def load(name: str) -> Parts:
        return turns.sides[name].load(folder / name)

    lines += in_turn(turns, "save, synced", partial(save, is_synced=True), clear, rounds)
    lines += in_turn(turns, "save, not synced", partial(save, is_synced=False), clear, rounds)
    for name, side in turns.sides.items():
        side.save(folder / name, is_synced=True)
    lines += in_turn(turns, "load, warm", load, clear, rounds)
    lines += in_turn(turns, "load, cold", load, lambda: drop_from_cache(folder), rounds)
    return lines


def join(rank: int, world: int, arguments: argparse.Namespace, folder: str) -> None:
    """Joins the gloo process group as one rank."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(world))
    for chatty in ("torchrec", "torch.fx"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads[0] if arguments.threads else 1)
    store = f"file://{folder}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)


def work(rank: int, world: int, arguments: argparse.Namespace, folder: str) -> None:
    """Runs one rank; rank 0 writes the result lines to the folder."""
    join(rank, world, arguments, folder)
    lines = []
    if "speed" in arguments.only:
        lines += run(20_000 if arguments.quick else arguments.rows, Path(folder), arguments.rounds)
        gc.collect()
    if "memory" in arguments.only:
        lines += measure_memory(
            30_000_000 if arguments.quick else int(arguments.bytes), Path(folder)
        )
    if rank == 0:
        Path(folder, "lines").write_text(json.dumps(lines))
    gc.collect()  # references to the group keep gloo's threads alive; they must end before the interpreter
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the ranks, prints one line per measurement and writes the results."""
    parser = options(__doc__, threads=[])  # by default one thread per rank
    parser.set_defaults(rounds=5)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: /tmp)")
    both = ["speed", "memory"]
    parser.add_argument("--only", nargs="+", default=both, choices=both)
    parser.add_argument("--bytes", type=float, default=1e9, help="table whose memory is measured")
    arguments = parser.parse_args(argv)
    lines: list[dict[str, Any]] = []
    for world in arguments.world:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            multiprocessing.spawn(work, (world, arguments, folder), nprocs=world)
            lines += json.loads(Path(folder, "lines").read_text())
    finish("checkpoint", lines, arguments)


if __name__ == "__main__":
    main()
