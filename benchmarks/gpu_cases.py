"""Cases of bench_gpu.py: ours and other sides, measured in turn on one card."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from interleaved import measure, ratio, result, spread

Case = dict[str, Any]


def compared(
    what: str,
    sides: Mapping[str, Callable[[int], object]],
    batch: int,
    arguments: argparse.Namespace,
    before: Callable[[int], object] | None = None,
    clock: str = "",
    workload: str = "",
    **case: Any,
) -> Iterator[Case]:
    """Measures ours and the other sides in turn; prints and yields a line of results for each other side.

    Without another side it yields a line without a ratio.

    Args:
        what: the measured quantity.
        sides: "ours" and the others: functions of the round's number.
        batch: number of ids of one round.
        arguments: the parsed options.
        before: runs before each turn, not measured.
        clock: a name of interleaved.CLOCKS; empty: that of the options.
        workload: name of the workload; empty: the entries of the case.
        case: further entries that identify the case.
    """
    seconds = measure(sides, arguments.rounds, clock=clock or arguments.clock, before=before)
    name = ", ".join([workload] * bool(workload) + [f"{key} {case[key]}" for key in case])
    ours = statistics.median(seconds["ours"])
    print(f"{what} {name}: {ours * 1e3:.3f} ms, {batch / ours / 1e9:.3f} G ids/s", flush=True)
    line = {**case, "batch": batch, "milliseconds": ours * 1e3}
    line["billions_a_second"] = batch / ours / 1e9
    others = [side for side in sides if side != "ours"]
    if not others:
        yield {"workload": workload or name, "what": what, **line}
    for side in others:
        seen, other = ratio(seconds, "ours", side), statistics.median(seconds[side]) * 1e3
        print(f"    {spread(seen)} of {side} ({other:.3f} ms)", flush=True)
        more = {**line, "other_milliseconds": other}
        yield result(workload or name, 1, what, side, seen, **more)
