"""Id maps and rows on a GPU: find, new ids, growth and gather, beside floors of plain torch on the same card.

    python benchmarks/bench_gpu.py [--rounds 9] [--device cpu --quick]

Floors, measured in turn with ours:

- random lines: torch.take of one word of the home line of every id.
- random pairs: index_copy_ of an id and a row to random places, and for new ids of their rows.
- fill and copy: zeros for the grown slots, and a copy of the old ones.
- bare gather: torch.index_select of the same rows.

Times are those of CUDA events, so launches and waits of the host are in them. `--device cpu` tests that the
benchmark runs: it calls the kernels for CPUs and writes to results/tmp.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from axes import Workload, ranks, raw_ids
from interleaved import RESULTS, finish, measure, options, ratio, result, spread
from torch import Tensor

from torchrec_dyn import ops

IDS = (1_000_000, 10_000_000, 100_000_000)
ZIPF = (0.0, 1.05)
BATCH = 2_621_440  # ids of a step: 8 tables, 32,768 bags of 10 ids
LOAD = 0.625
WIDTHS = (32, 64, 128, 256)
GATHERED_ROWS = 1 << 23
DTYPES = (torch.float32, torch.float16)
# Bounds on ours with the most ids (IDS): 10^9 ids a second, or milliseconds.
GOALS = {"find": ("at_least", 5.0), "new ids": ("at_least", 0.8), "growth": ("at_most", 5.0)}
I64 = torch.int64
NORMAL = [-1.0, 1.0, 0.0, 0.01, 0.0, 1.0]


def offsets_of(ids: Tensor) -> Tensor:
    """Returns the table offsets of the ids of one table, on the CPU."""
    return torch.tensor([0, ids.numel()])


def filled_slots(ids: Tensor, more: int = 0) -> Tensor:
    """Returns slots with ids in rows 0, 1, 2, ..., and room: `more` ids lead to a load of LOAD."""
    capacity = (int((ids.numel() + more) / LOAD) // 4 + 1) * 4  # whole lines
    slots = ops.new_slots(ids.new_empty(0, 2), capacity)
    rows = torch.arange(ids.numel(), device=ids.device)
    ops.insert(ids, rows, offsets_of(ids), [slots], torch.tensor([-1]))
    return slots


def home_words(ids: Tensor, slots: Tensor) -> Tensor:
    """Returns the place of one word for each id, in a random line; equal ids have the same line."""
    return (ops.mix64(ids) & (2**62 - 1)) % (slots.shape[0] // 4) * 8


Case = dict[str, Any]


def compared(
    what: str, against: str, ours: Callable[[], object], floor: Callable[[], object],
    arguments: argparse.Namespace, before: Callable[[int], None] | None = None, **workload: Any
) -> Case:  # fmt: skip
    """Measures ours and its floor in turn; returns the line of results, and prints it."""
    seconds = measure(
        {"ours": lambda _: ours(), "floor": lambda _: floor()},
        arguments.rounds,
        clock=arguments.clock,
        before=before,
    )
    ours_seconds = statistics.median(seconds["ours"])
    name = ", ".join(f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"
                     for key, value in workload.items())  # fmt: skip
    seen = ratio(seconds, "ours", "floor")
    rate = workload["batch"] / ours_seconds / 1e9
    print(
        f"{what:8} {name}: {ours_seconds * 1e3:.3f} ms, {rate:.3f} G/s; {against} x {spread(seen)}"
    )
    return result(
        name, 1, what, against, seen, **workload,
        milliseconds=ours_seconds * 1e3, billions_a_second=rate,
    )  # fmt: skip


def finds(count: int, batch: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures lookups of known ids."""
    device = arguments.device
    slots, moved = filled_slots(raw_ids(torch.arange(count, device=device))), torch.tensor([-1])

    def one(zipf: float) -> Case:
        drawn = ranks(Workload("", tables=1, rows=count, batch=batch, bag=1, zipf=zipf), 1, seed=0)
        ids = raw_ids(drawn[0].to(device))
        offsets, words, flat = offsets_of(ids), home_words(ids, slots), slots.view(-1)
        return compared(
            "find", "random lines",
            lambda: ops.lookup(ids, offsets, [slots], moved), lambda: torch.take(flat, words),
            arguments, ids=count, batch=batch, zipf=zipf,
        )  # fmt: skip

    yield from map(one, ZIPF)


def new_ids(count: int, batch: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures a step that sees `batch` new ids, with rows of 64 numbers; and the insertion in it alone."""
    device, moved = arguments.device, torch.tensor([-1])
    batch = min(batch, count)
    kept = filled_slots(raw_ids(torch.arange(count, device=device)), batch)
    slots, pairs = kept.clone(), torch.ones(batch, 2, dtype=I64, device=device)
    ids = raw_ids(torch.arange(count, count + batch, device=device))
    rows, offsets = torch.arange(batch, device=device), offsets_of(ids)
    places = home_words(ids, slots) // 2
    shift = (batch - 1).bit_length()
    block = torch.empty(1 << shift, 64, device=device)
    values = torch.ones(batch, 64, device=device)

    def step() -> None:
        found, _ = ops.lookup(ids, offsets, [slots], moved)
        new, _, new_offsets, new_index = ops.collect_new(ids, found, offsets)
        ops.init_rows_(new, rows, [block], shift, 64, 0, 2, NORMAL, 1)
        ops.insert(new, rows, new_offsets, [slots], moved)
        ops.fill_new_(found, new_index, rows)

    def write_pairs_and_rows() -> None:
        slots.index_copy_(0, places, pairs)
        block.index_copy_(0, rows, values)

    def restore(turn: int) -> None:
        slots.copy_(kept)

    yield compared(
        "insert", "random pairs",
        lambda: ops.insert(ids, rows, offsets, [slots], moved),
        lambda: slots.index_copy_(0, places, pairs),
        arguments, restore, ids=count, batch=batch,
    )  # fmt: skip
    yield compared(
        "new ids", "random pairs and rows", step, write_pairs_and_rows,
        arguments, restore, ids=count, batch=batch,
    )  # fmt: skip


def growth(count: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures the growth of a map by a quarter: new slots, and all ids moved."""
    kept = filled_slots(raw_ids(torch.arange(count, device=arguments.device)))
    slots, capacity = kept.clone(), kept.shape[0]
    grown = capacity // 16 * 5 * 4  # whole lines

    def fill_and_copy() -> None:
        slots.new_zeros(grown, 2)[:capacity] = slots

    yield compared(
        "growth", "fill and copy",
        lambda: ops.move_slots(slots, ops.new_slots(slots, grown), 0, capacity), fill_and_copy,
        arguments, lambda turn: slots.copy_(kept), ids=count, batch=count,
    )  # fmt: skip


def gathers(count: int, batch: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures copies of rows: `count` rows, a power of two, in one block."""
    shift = count.bit_length() - 1
    rows = torch.randint(0, count, (batch,), device=arguments.device)

    def one(dtype: torch.dtype, width: int) -> Case:
        block = torch.zeros(count, width, dtype=dtype, device=arguments.device)
        return compared(
            "gather", "bare gather",
            lambda: ops.gather_rows(rows, [block], shift, width, dtype),
            lambda: torch.index_select(block, 0, rows),
            arguments, rows=count, batch=batch, width=width, dtype=str(dtype).split(".")[1],
        )  # fmt: skip

    yield from (one(dtype, width) for dtype in DTYPES for width in WIDTHS)


def judged(rows: list[Case], most: int) -> list[str]:
    """Returns a line for each goal, with the slowest measurement of the largest map."""
    lines = []
    for what, (kind, bound) in GOALS.items():
        seen = [row for row in rows if row["what"] == what and row["ids"] == most]
        if kind == "at_least":
            number = min(row["billions_a_second"] for row in seen)
            met, text = number >= bound, f">= {bound} G ids/s, got {number:.3f}"
        else:
            number = max(row["milliseconds"] for row in seen)
            met, text = number <= bound, f"<= {bound} ms, got {number:.3f}"
        lines.append(f"{what}: goal {text}: {'met' if met else 'MISSED'}")
    return lines


def main(words: list[str] | None = None) -> None:
    """Runs all cases."""
    parser = options(__doc__, [1])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ids", type=int, nargs="+", default=list(IDS))
    arguments = parser.parse_args(words)
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                "bench_gpu: expected a GPU, got none. --device cpu tests that it runs."
            )
        arguments.clock = "cuda"
    elif arguments.results is None:
        arguments.results = RESULTS / "tmp" / "cpu"
    sizes = [1_000] if arguments.quick else sorted(arguments.ids)
    batch = 500 if arguments.quick else BATCH
    rows: list[Case] = []
    for count in sizes:
        rows += finds(count, batch, arguments)
        rows += new_ids(count, batch, arguments)
        rows += growth(count, arguments)
    rows += gathers(1 << 9 if arguments.quick else GATHERED_ROWS, batch, arguments)
    if sizes[-1] == IDS[-1]:
        print("\n".join(judged(rows, sizes[-1])))
    finish("gpu", rows, arguments)


if __name__ == "__main__":
    main()
