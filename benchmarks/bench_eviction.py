"""Cost of the life of rows: eviction from a full table, expiry, scores, statistics.

    python benchmarks/bench_eviction.py [--threads 2] [--rows 1000000 10000000]

A full table of 64 columns, batches of 4,096 bags of 10 ids. Steps (forward, backward, row-wise Adagrad)
with one new id in ten take turns with steps of known ids in the same table. Eviction is amortised, so the
result is the ratio of the means over several evictions; the median and the worst step are printed too.
Then: steps under LRU against steps without a policy, rows that expire in every step, steps of a collection
that logs its statistics, steps of a table with a marker, and the bytes per row besides weights and
optimizer state.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from axes import (
    EVICTION_ROWS,
    FULL_ZIPF,
    LOGGED,
    LOGGED_EVERY,
    THREADS,
    Workload,
    full_table,
    offsets,
    ranks,
    raw_ids,
    tiny,
)
from bench_growth import bytes_beside, touch_memory
from floor import BitFloor, NoFloorError, WordFloor
from full_tables import LEAST_RECENT, NO_POLICY, Stepped, cases, expiring, steps_of
from interleaved import finish, measure, options, quartiles, ratio, result, spread, summary
from layouts import begin_version
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn

BATCHES = 32
WARM_UP = 2
KNOWN_STEPS = 40  # steps of each side, in measurements without evictions from a full table

Known = dict[float, list[Tensor]]
Lines = Iterator[dict[str, Any]]


def known_batches(workloads: Sequence[Workload]) -> Known:
    """Draws batches of known ids for each exponent of the workloads' distributions."""
    return {
        workload.zipf: [raw_ids(batch) for batch in ranks(workload, BATCHES, seed=0)]
        for workload in workloads
    }


def amortised(seconds: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Returns the ratios of the means and medians, and each side's worst step / the mean of `below`."""
    new, known = seconds[above], seconds[below]
    return {
        "mean": sum(new) / sum(known) * len(known) / len(new),
        "median": statistics.median(new) / statistics.median(known),
        "worst": max(new) / statistics.mean(known),
        "worst_known": max(known) / statistics.mean(known),
    }


def compared(
    workload: Workload, policy: str, what: str, seconds: dict[str, list[float]], **more: Any
) -> dict[str, Any]:
    """Prints and returns the result line that compares "new" with "known"."""
    seen = amortised(seconds, "new", "known")
    _, low, high = ratio(seconds, "new", "known")
    numbers = summary(seconds, workload.ids_per_step)
    means = {
        side: statistics.mean(taken) / workload.ids_per_step * 1e9
        for side, taken in seconds.items()
    }
    print(
        f"{workload.name:26} {policy:20} {what:12} {means['new']:7.1f} {means['known']:7.1f}"
        f"  {seen['mean']:.2f}x mean, {seen['median']:.2f}x median, worst {seen['worst']:.1f}x"
        f" (known: {seen['worst_known']:.1f}x), {len(seconds['new'])} steps {more or ''}"
    )
    return result(
        workload.name, torch.get_num_threads(), what, "known ids", (seen["mean"], low, high),
        policy=policy, amortised=seen, mean_ns=means, ns_per_id=numbers, **more,
    )  # fmt: skip


def run_full(full: Stepped, workloads: Sequence[Workload], known: Known, clock: str) -> Lines:
    """Measures steps with and without new ids in one full table."""
    for workload in workloads:
        before = full.table.stats()
        a_step = full.new_ids_a_step(workload.batch)
        steps = steps_of(full.table.row_limit, a_step)
        old = known[workload.zipf]
        new = full.with_new(old, WARM_UP + steps, workload.bag)
        contestants = {
            "new": lambda turn, new=new: full.step(new[turn]),
            "known": lambda turn, old=old: full.step(old[(turn + 7) % BATCHES]),
        }
        seconds = measure(contestants, steps, WARM_UP, clock)
        after = full.table.stats()
        # No known id was evicted, so "known" steps inserted no row.
        assert after["inserted"] - before["inserted"] == a_step * (WARM_UP + steps)
        evicted = after["evicted_full"] - before["evicted_full"]
        yield compared(workload, full.case.name, "10% new ids", seconds, evicted=evicted)


def run_scores(
    full: Stepped, workloads: Sequence[Workload], known: Known, arguments: argparse.Namespace
) -> Lines:
    """Measures steps of known ids under LRU against steps of a table without a policy.

    Also measures the floor of what scores cost: such a step and one read and write of a random word an id.
    """
    plain = Stepped(workloads[0], NO_POLICY, full.table.row_limit).fill(workloads[0].rows)
    for workload in workloads:
        batches = known[workload.zipf]
        contestants = stepping({"LRU": full, "no policy": plain}, batches) | with_floor(
            WordFloor, full, plain, batches
        )
        seconds = measure(contestants, KNOWN_STEPS, WARM_UP, arguments.clock)
        sides = {"LRU": "LRU", "floor": "one word an id"}
        yield from against(workload, sides, "no policy", seconds)


def stepping(tables: dict[str, Stepped], batches: list[Tensor]) -> dict[str, Any]:
    """Returns contestants: a step of each table, in turn with each of the batches."""
    return {
        side: lambda turn, table=table: table.step(batches[turn % BATCHES])
        for side, table in tables.items()
    }


def with_floor(
    kind: type[WordFloor | BitFloor], full: Stepped, plain: Stepped, batches: list[Tensor]
) -> dict[str, Any]:
    """Returns a contestant "floor": a step of `plain`, then the floor of its ids. None without a compiler."""
    try:
        floor = kind(full.table, batches)
    except NoFloorError as error:
        print(error, file=sys.stderr)
        return {}
    return {"floor": lambda turn: (plain.step(batches[turn % BATCHES]), floor(turn))}


def against(
    workload: Workload, sides: dict[str, str], base: str, seconds: dict[str, list[float]]
) -> Lines:
    """Prints and returns the result lines of sides, by the names of their lines, against `base`."""
    for side, policy in sides.items():
        if side not in seconds:
            continue
        seen = ratio(seconds, side, base)
        print(f"{workload.name:26} {policy:20} known ids: {spread(seen)} of {base}")
        yield result(
            workload.name, torch.get_num_threads(), "known ids", base, seen,
            policy=policy, in_mean=False, ns_per_id=summary(seconds, workload.ids_per_step),
        )  # fmt: skip


def run_markers(limit: int, workloads: Sequence[Workload], known: Known, clock: str) -> Lines:
    """Measures steps of a table that records its changes since a marker, against one that records none.

    Also measures the floor of what markers cost: a step that records none, and one random bit an id.
    """
    marked, plain = (
        Stepped(workloads[0], NO_POLICY, limit).fill(workloads[0].rows) for _ in range(2)
    )
    version = begin_version(marked.table)
    for workload in workloads:
        batches = known[workload.zipf]
        contestants = stepping({"marker": marked, "no marker": plain}, batches) | with_floor(
            BitFloor, marked, plain, batches
        )
        seconds = measure(contestants, KNOWN_STEPS, WARM_UP, clock)
        sides = {"marker": "marker", "floor": "one bit an id"}
        yield from against(workload, sides, "no marker", seconds)
    assert version.log is marked.table.changes


def run_statistics(full: Stepped, clock: str) -> Lines:
    """Measures one call of stats()."""
    seconds = measure({"stats": lambda turn: full.table.stats()}, 5, 1, clock)["stats"]
    rows, milliseconds = full.table.num_rows, quartiles(seconds)[0] * 1e3
    print(f"stats() at {rows:,} rows: {milliseconds:.2f} ms")
    yield {"what": "stats()", "rows": rows, "milliseconds": milliseconds}


def memory(full: Stepped) -> Lines:
    """Counts the bytes per row of a full table, besides weights and optimizer state."""
    rows = full.table.num_rows
    size = bytes_beside(full.table) / rows
    print(f"{full.case.name}, {rows:,} rows: {size:.1f} bytes a row beside weights and state")
    yield {"what": "bytes a row", "policy": full.case.name, "rows": rows, "bytes": size}


def run_expiring(limit: int, workload: Workload, clock: str) -> Lines:
    """Measures steps in which as many rows expire as are inserted, against a table without expired rows."""
    for unit in ("steps", "time"):
        ageing, still, walk = expiring(limit, workload, unit)
        new = ageing.with_new(walk, WARM_UP + KNOWN_STEPS, workload.bag)
        before = ageing.table.stats()["evicted_expired"]
        contestants = {
            "new": lambda turn, new=new, table=ageing: table.step(new[turn]),
            "known": lambda turn, walk=walk, table=still: table.step(walk[turn % len(walk)]),
        }
        seconds = measure(contestants, KNOWN_STEPS, WARM_UP, clock)
        expired = ageing.table.stats()["evicted_expired"] - before
        assert expired == workload.batch * (WARM_UP + KNOWN_STEPS), f"{expired} rows expired"
        assert still.table.stats()["evicted_expired"] == 0
        yield compared(workload, f"ExpireAfter({unit}=)", "10% expire", seconds)


def run_size(limit: int, arguments: argparse.Namespace) -> Lines:
    """Runs all measurements of tables of one size."""
    workloads = [full_table(limit, zipf) for zipf in FULL_ZIPF]
    if arguments.quick:
        workloads = [replace(tiny(one), tables=1, rows=limit // 2) for one in workloads]
    known = known_batches(workloads)
    for case in cases(limit):
        full = Stepped(workloads[0], case, limit).fill(workloads[0].rows)
        yield from memory(full)
        if case is LEAST_RECENT:
            yield from run_scores(full, workloads, known, arguments)
            yield from run_statistics(full, arguments.clock)
        yield from run_full(full, workloads, known, arguments.clock)
        del full
        gc.collect()  # the next table needs the memory
    yield from run_expiring(limit, workloads[0], arguments.clock)
    if arguments.quick or limit == EVICTION_ROWS[0]:
        yield from run_markers(limit, workloads, known, arguments.clock)


def run_logging(workload: Workload, arguments: argparse.Namespace) -> Lines:
    """Measures steps of a collection with and without logging its statistics at intervals."""
    every = 5 if arguments.quick else LOGGED_EVERY
    names = [f"table{t}" for t in range(workload.tables)]
    collection = dyn.DynamicEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                num_embeddings=workload.rows, embedding_dim=workload.dim,
                name=name, feature_names=[name],
            )
            for name in names
        ],
        dynamic=LEAST_RECENT.config,
        fused_params={"learning_rate": 0.02},
    )  # fmt: skip
    everyone = raw_ids(torch.arange(workload.rows))
    with torch.no_grad():
        lengths = torch.full((workload.tables,), workload.rows)
        collection(KeyedJaggedTensor(names, everyone.repeat(workload.tables), lengths=lengths))
    batches = [
        KeyedJaggedTensor(names, raw_ids(batch), offsets=offsets(workload))
        for batch in ranks(workload, BATCHES // workload.tables, seed=0)
    ]
    grad = torch.randn(workload.batch, workload.tables * workload.dim) * 1e-3
    logged: dict[str, Any] = {}

    def steps(turn: int) -> None:
        for step in range(every):
            collection(batches[step % len(batches)]).values().backward(grad)

    def logging(turn: int) -> None:
        hook = dyn.add_stats_hook(collection, logged, every=every)
        steps(turn)
        hook.remove()

    seconds = measure({"logging": logging, "silent": steps}, arguments.rounds, 1, arguments.clock)
    assert logged, "nothing was logged"
    seen = ratio(seconds, "logging", "silent")
    print(f"{workload.name}: {every} steps, one of which is logged: {spread(seen)} of none logged")
    yield result(
        workload.name, torch.get_num_threads(), f"logged every {LOGGED_EVERY}", "not logged", seen,
        in_mean=False, ns_per_id=summary(seconds, every * workload.ids_per_step),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the sizes for each number of threads and prints one line per measurement."""
    parser = options(__doc__, THREADS[:1])
    parser.add_argument("--rows", type=int, nargs="+", default=list(EVICTION_ROWS))
    arguments = parser.parse_args(argv)
    sizes = [6_000] if arguments.quick else arguments.rows
    lines: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        touch_memory(2 * max(sizes) * 320)  # two tables at a time
        print(f"{threads} threads; ns an id, means: with new ids, known ids alone")
        for limit in sizes:
            lines += run_size(limit, arguments)
        lines += run_logging(tiny(LOGGED) if arguments.quick else LOGGED, arguments)
    finish("eviction", lines, arguments)


if __name__ == "__main__":
    main()
