"""The goals and the latest results of each, and a line for README.md; make bench prints this at its end.

python benchmarks/summary.py [--results benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axes import (
    DELTA_ZIPF,
    EVICTION_ROWS,
    FULL_ZIPF,
    GPU_HOST,
    GPU_IDS,
    GPU_TRAIN,
    GPU_ZIPF,
    GROWTH_ROWS,
    HALF,
    HOST_PLANS,
    HOST_TABLES,
    LOGGED,
    LOGGED_EVERY,
    ONE_HOT,
    POOLED,
    SEQUENCE,
    TRAIN,
    full_table,
    gpu_step,
)
from full_tables import cases
from interleaved import RESULTS, spread


@dataclass(frozen=True)
class Goal:
    """A bound on a number in one line of results.

    Attributes:
        file: name of the results file, results/<file>.json.
        where: entries that identify the line.
        at_least: lower bound of the number, or None.
        at_most: upper bound of the number, or None.
        number: name of the number.
    """

    file: str
    where: dict[str, Any]
    at_least: float | None = None
    at_most: float | None = None
    number: str = field(default="ratio")

    @property
    def bound(self) -> str:
        """The goal as text."""
        return f">= {self.at_least:.3g}" if self.at_least is not None else f"<= {self.at_most:.3g}"

    def met(self, seen: float) -> bool:
        """Returns True if a number is within the bounds."""
        return seen >= self.at_least if self.at_least is not None else seen <= (self.at_most or 0.0)


def _lookup_goals() -> list[Goal]:
    goals = []

    def static(name: str, threads: int, forward: float, step: float) -> None:
        for what, bound in (("forward", forward), ("step", step)):
            where = {"workload": name, "threads": threads, "what": what, "against": "static"}
            goals.append(Goal("lookup", where, at_least=bound))

    uniform, skewed = (workload.name for workload in POOLED)
    static(uniform, 2, 1.8, 7.0)
    static(skewed, 2, 1.5, 6.0)
    for workload in POOLED:
        static(workload.name, 1, 1.0, 3.5)
    for workload in (*ONE_HOT, *SEQUENCE):
        static(workload.name, 2, 1.2, 3.0)
    for workload in (*POOLED, *ONE_HOT, *SEQUENCE):
        gather = "copy floor" if workload.copies else "read floor"
        for threads in (2, 1):

            def at_most(what: str, against: str, bound: float, threads: int = threads) -> None:
                where = {"workload": workload.name, "threads": threads, "what": what}  # noqa: B023
                goals.append(Goal("lookup", {**where, "against": against}, at_most=bound))

            at_most("forward", f"{gather} + probe", 2.0 if workload.dim == 16 else 1.4)
            at_most("update", "update floor", 1.4)
            at_most("forward", "static + probe", 1.0)
            at_most("step", "static + probe", 1.0)
    for workload in HALF:
        for dtype in ("float16", "bfloat16"):
            for what, bound in (("forward", 1.0), ("step", 0.95 if dtype == "float16" else 1.0)):
                name = f"{workload.name}-{dtype}"
                where = {"workload": name, "threads": 2, "what": what, "against": "float32"}
                goals.append(Goal("lookup", where, at_least=bound))
    return goals


def _growth_goals() -> list[Goal]:
    rows = f"growth to {GROWTH_ROWS // 40_960 * 40_960}"
    bounds = {"known ids": 4.0, "first tenth": 1.5, "median step": 5.0}
    goals = [
        Goal("growth", {"workload": rows, "what": what, "against": against}, at_most=bound)
        for what in ("forward", "forward - floor")  # the floor: memory written for the first time
        for against, bound in bounds.items()
    ]
    worst = {"what": "most bytes a row above 100k"}
    return [*goals, Goal("growth", worst, at_most=40.0, number="bytes")]


def _train_goals() -> list[Goal]:
    goals = []
    plans = [(2, plan) for plan in ("table_wise", "row_wise", "column_wise")]
    for workload in TRAIN:
        # What the tables add to the floor, against what static tables add to it.
        bound = 1.0 if workload.zipf else 0.75
        for ranks, plan in [*plans, (1, "table_wise")]:
            where = {"workload": workload.name, "ranks": ranks, "plan": plan, "against": "static"}
            goals.append(Goal("train", where, at_most=bound, number="above_floor"))
    where = {"ranks": 2, "plan": "row_wise", "against": "managed"}
    # Most of a one-hot step is the floor: there the bound is on the tables.
    return [
        *goals,
        Goal("train", {"workload": "train-10hot-uniform", **where}, at_least=3.0),
        Goal(
            "train",
            {"workload": "train-onehot-uniform", **where},
            at_most=0.33,
            number="above_floor",
        ),
    ]


def _eviction_goals() -> list[Goal]:
    goals = []
    for rows in EVICTION_ROWS:
        for case in cases(rows):
            for zipf in FULL_ZIPF:
                where = {"workload": full_table(rows, zipf).name, "what": "10% new ids"}
                where |= {"policy": case.name, "against": "known ids"}
                goals.append(Goal("eviction", where, at_most=2.0))
        held = {"what": "bytes a row", "policy": "LRU", "rows": rows}
        goals.append(Goal("eviction", held, at_most=40.0, number="bytes"))
    for zipf in FULL_ZIPF:
        where = {"workload": full_table(EVICTION_ROWS[0], zipf).name, "what": "known ids"}
        marker = {"against": "no marker", "policy": "marker"}
        goals.append(Goal("eviction", {**where, **marker}, at_most=1.03))
    logged = {"workload": LOGGED.name, "what": f"logged every {LOGGED_EVERY}"}
    return [*goals, Goal("eviction", {**logged, "against": "not logged"}, at_most=1.02)]


def _delta_goals() -> list[Goal]:
    export = {"what": "export", "against": "the smallest table"}
    goals = [Goal("delta", export, at_most=3.0)]
    for zipf in DELTA_ZIPF:
        name = f"zipf{zipf:g}" if zipf else "uniform"
        where = {"workload": name, "what": "long after the marker", "against": "no marker"}
        goals.append(Goal("delta", where, at_most=1.05))
    return goals


def _host_goals() -> list[Goal]:
    goals = []
    for tables in HOST_TABLES[1:]:
        for plan in HOST_PLANS:
            where = {"workload": f"host-{tables}-tables", "plan": plan}
            most = 1.0 if plan == "table_wise" else 1.05
            goals.append(Goal("host", {**where, "what": "step", "against": "static"}, at_most=most))
            policies = {**where, "what": "policies", "against": "dynamic"}
            goals.append(Goal("host", policies, at_most=1.15))
    making = {"workload": f"host-{HOST_TABLES[-1]}-tables", "what": "make and shard"}
    return [*goals, Goal("host", {**making, "against": "static"}, at_most=1.0)]


def _checkpoint_goals() -> list[Goal]:
    parts = ("state_dict", "dcp.save", "load into an empty table")
    same_bytes = {"against": "torch.save", "ranks": 1}
    return [
        # 0.7 of the speed of torch.save on the same bytes, and 0.5 of that of torch.load.
        Goal("checkpoint", {"what": "save, not synced", **same_bytes}, at_most=1 / 0.7),
        Goal("checkpoint", {"what": "load, warm", **same_bytes}, at_most=1 / 0.5),
        *(
            Goal(
                "checkpoint",
                {"what": f"peak of {part}", "ranks": 1},
                at_most=256,
                number="extra_mb",
            )
            for part in parts
        ),
    ]


def _follow_goals() -> list[Goal]:
    where = {
        "workload": "a hundredth of a million rows",
        "threads": 2,
        "what": "row trained to row served",
    }
    return [Goal("follow", where, at_most=1.0, number="seconds")]


def gpu_goals() -> list[Goal]:
    """Returns the goals of bench_gpu.py: ours / FBGEMM's TBE in time, and numbers of the largest map."""
    most = GPU_IDS[-1]
    found = [{"what": "find", "ids": most, "zipf": zipf} for zipf in GPU_ZIPF]
    goals = [Goal("gpu", where, at_least=5.0, number="billions_a_second") for where in found]
    new = {"what": "new ids", "ids": most}
    goals.append(Goal("gpu", new, at_least=0.8, number="billions_a_second"))
    for what, bound in (("growth", 5.0), ("eviction of a 64th", 10.0)):
        where = {"what": what, "ids": most}
        goals.append(Goal("gpu", where, at_most=bound, number="milliseconds"))
    bounds = [(64, "forward", "TBE", 1.35), (128, "forward", "TBE", 1.2)]
    bounds += [
        (64, what, against, bound)
        for what, against, bound in (
            ("update", "TBE", 1.1),
            ("update", "TBE, deterministic", 1.0),
            ("step", "TBE", 1.2),
        )
    ]
    for dim, what, against, bound in bounds:
        for zipf in GPU_ZIPF:
            where = {"workload": gpu_step(dim=dim, zipf=zipf).name, "dtype": "float32"}
            goals.append(Goal("gpu", {**where, "what": what, "against": against}, at_most=bound))
    held = {"what": "bytes a row", "workload": gpu_step().name, "dtype": "float32"}
    host = {"what": "host", "workload": GPU_HOST.name}
    return [
        *goals,
        Goal("gpu", held, at_most=32.0, number="bytes"),
        Goal("gpu", host, at_most=150.0, number="microseconds"),
    ]


def gpu_train_goals() -> list[Goal]:
    """Returns the goals of bench_gpu_train.py on one GPU: step of the other side / step of ours."""
    bounds = [  # our side, the other, pipeline
        ("dynamic", "static", "sparse_dist", 0.85),
        ("dynamic", "static", "prefetch", 0.9),
        ("policies", "static", "prefetch", 0.85),
    ]
    goals = []
    for workload in GPU_TRAIN:
        for ours, other, pipeline, bound in bounds:
            where = {"workload": workload.name, "side": ours, "against": other}
            where |= {"pipeline": pipeline, "ranks": 1}
            goals.append(Goal("gpu_train", where, at_least=bound))
    where = {"side": "dynamic", "against": "managed", "pipeline": "sparse_dist", "ranks": 1}
    pooled = [one for one in GPU_TRAIN if one.pooled and not one.zipf]
    more = [Goal("gpu_train", {"workload": one.name, **where}, at_least=1.0) for one in pooled]
    return [*goals, *more]


def host_memory_goals() -> list[Goal]:
    """Returns the goals of bench_host_memory.py: a step with a quarter of the rows in the GPU / with all."""
    where = {"workload": "zipf", "part": "1/4"}
    return [
        Goal("host_memory", {**where, "loop": loop, "what": "step"}, at_most=1.4, number=number)
        for loop, number in (("plain", "gpu_ratio"), ("plain", "ratio"), ("prefetch", "ratio"))
    ]


def _scale_goals() -> list[Goal]:
    """Returns the goals of bench_scale.py: a rank of 1,024 with 1,000 tables, and planning."""
    largest = {"ranks": 1024, "tables": 1000}
    return [
        Goal("scale", largest, at_most=60, number="cpu_s"),
        Goal("scale", largest, at_most=2000, number="peak_mb"),
        Goal("scale", {"workload": "planning", "against": "stock"}, at_most=1.2),
    ]


GPU_GOALS = {"gpu": gpu_goals, "gpu_train": gpu_train_goals, "host_memory": host_memory_goals}


def seen_of(
    goal: Goal, results: dict[str, list[dict[str, Any]]]
) -> tuple[float, float, float] | None:
    """Returns the goal's number in the first matching line, with its quartiles; None if no line matches."""
    for row in results.get(goal.file, []):
        if all(row.get(key) == value for key, value in goal.where.items()):
            number = row[goal.number]
            if isinstance(number, list):
                return number[0], number[1], number[2]
            low, high = row.get(f"{goal.number}_quartiles", (number, number))
            return number, low, high
    return None


def print_goals(goals: Sequence[Goal], results: dict[str, list[dict[str, Any]]]) -> None:
    """Prints one line per goal, and the number of goals that are met.

    Args:
        goals: the goals.
        results: lines of results by name of the file.
    """
    print(f"{'goal':74} {'bound':>7}  {'seen [quartiles]':24} met")
    met = missing = 0
    for goal in goals:
        name = " ".join(
            f"{value} ranks" if key == "ranks" else f"{value} threads" if key == "threads"
            else f"/ {value}" if key == "against" else str(value)
            for key, value in goal.where.items()
        )  # fmt: skip
        name += "" if goal.number == "ratio" else f", {goal.number}"
        seen = seen_of(goal, results)
        missing += seen is None
        is_met = seen is not None and goal.met(seen[0])
        met += is_met
        text, verdict = (spread(seen), "yes" if is_met else "NO") if seen else ("-", "not run")
        print(f"{goal.file + ': ' + name:74} {goal.bound:>7}  {text:24} {verdict}")
    print(f"summary: {met} of {len(goals)} goals met, {missing} not run")


def line_for_readme(file: dict[str, Any]) -> str:
    """Returns what README.md says under its picture about the processor of lookup.json."""
    uniform, skewed = (workload.name for workload in POOLED)
    numbers = []
    for workload, threads, what in ((uniform, 2, "step"), (skewed, 1, "forward")):
        where = {"workload": workload, "threads": threads, "what": what, "against": "static"}
        seen = seen_of(Goal("lookup", where, at_least=0.0), {"lookup": file["rows"]})
        numbers.append("not run" if seen is None else f"{seen[0]:.2f}")
    return (
        f"README.md: whole step, 2 threads, uniform ids: {numbers[0]}; forward, 1 thread, Zipf ids: "
        f"{numbers[1]}; {file['cpu']}, {file['date']}, {file['commit']}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each goal, how many are met, and what README.md says of this processor."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder: Path = parser.parse_args(argv).results
    results, readme = {}, ""
    for path in sorted(folder.glob("*.json")):
        file = json.loads(path.read_text())
        if path.stem in GPU_GOALS and file["gpu"] == "none":  # a try on a CPU
            continue
        results[path.stem] = file["rows"]
        if path.stem == "lookup":
            readme = line_for_readme(file)
        header = ("date", "commit", "cpu", "cores", "simd", "torch", "fbgemm", "clock")
        print(f"{path.stem}: " + ", ".join(f"{file[key]}" for key in header if key in file))
    goals = [
        *_lookup_goals(),
        *_growth_goals(),
        *_eviction_goals(),
        *_checkpoint_goals(),
        *_delta_goals(),
        *_follow_goals(),
        *_host_goals(),
        *_train_goals(),
        *_scale_goals(),
    ]
    for name, of_gpu in GPU_GOALS.items():
        goals += of_gpu() if name in results else []
    print_goals(goals, results)
    if readme:
        print(readme)


if __name__ == "__main__":
    main()
