"""Training on a GPU: steps beside FBGEMM's TBE, id maps beside floors of plain torch on the same card.

    python benchmarks/bench_gpu.py [--rounds 9] [--only maps steps host] [--device cpu --quick]

Steps (gpu_steps.py): forward, update (backward and row-wise Adagrad) and both, of an unsharded collection.
Maps and rows, one op or a few, with floors that are measured in turn with ours:

- random lines: torch.take of one word of the home line of every id.
- random pairs: index_copy_ of an id and a row to random places, and for new ids of their rows.
- fill and copy: zeros for the grown slots, and a copy of the old ones.
- read of slots and scores: sums over both.
- bare gather: torch.index_select of the same rows.

Times are those of CUDA events, so launches and waits of the host are in them. `--device cpu` tests that the
benchmark runs: it calls the kernels for CPUs and writes to results/tmp.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from axes import GPU_IDS, GPU_IDS_A_STEP, GPU_ZIPF, Workload, ranks, raw_ids
from gpu_cases import Case, compared
from gpu_steps import host_times, steps
from interleaved import RESULTS, finish, options, write_results
from summary import gpu_goals, print_goals
from torch import Tensor

from torchrec_dyn import ops

LOAD = 0.625
WIDTHS = (32, 64, 128, 256)
GATHERED_ROWS = 1 << 23
DTYPES = (torch.float32, torch.float16)
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


def finds(count: int, batch: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures lookups of known ids."""
    device = arguments.device
    slots, moved = filled_slots(raw_ids(torch.arange(count, device=device))), torch.tensor([-1])

    def one(zipf: float) -> Case:
        drawn = ranks(Workload("", tables=1, rows=count, batch=batch, bag=1, zipf=zipf), 1, seed=0)
        ids = raw_ids(drawn[0].to(device))
        offsets, words, flat = offsets_of(ids), home_words(ids, slots), slots.view(-1)
        sides = {
            "ours": lambda _: ops.lookup(ids, offsets, [slots], moved),
            "random lines": lambda _: torch.take(flat, words),
        }
        [case] = compared("find", sides, batch, arguments, ids=count, zipf=zipf)
        return case

    yield from map(one, GPU_ZIPF)


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

    layout, initial = torch.tensor([[0, 1, shift, 64]]), torch.tensor([[2, 1, 0, 0]])
    parameters = torch.tensor([NORMAL], dtype=torch.float64)
    tables = ops.prepare_tables(
        [slots], moved, [block], [], layout, 0, [], [], initial, parameters, [], [], None
    )
    lengths, one = torch.tensor([batch], device=device), torch.tensor([0, 1])

    def step() -> None:
        _, found, _, _, new, _, new_index = ops.find_and_pool(
            ids, lengths, None, None, one, one, None, tables, False, 0, 2, 0, 0, torch.float32
        )
        ops.add_rows_(
            torch.empty_like(new), new, [0, batch], [0], rows[:0], [0, 0], [0], None, found, new_index,
            None, tables,
        )  # fmt: skip

    def write_pairs_and_rows() -> None:
        slots.index_copy_(0, places, pairs)
        block.index_copy_(0, rows, values)

    def restore(turn: int) -> None:
        slots.copy_(kept)

    inserts = {
        "ours": lambda _: ops.insert(ids, rows, offsets, [slots], moved),
        "random pairs": lambda _: slots.index_copy_(0, places, pairs),
    }
    yield from compared("insert", inserts, batch, arguments, restore, ids=count)
    whole = {"ours": lambda _: step(), "random pairs and rows": lambda _: write_pairs_and_rows()}
    yield from compared("new ids", whole, batch, arguments, restore, ids=count)


def growth(count: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures the growth of a map by a quarter: new slots, and all ids moved."""
    kept = filled_slots(raw_ids(torch.arange(count, device=arguments.device)))
    slots, capacity = kept.clone(), kept.shape[0]
    grown = capacity // 16 * 5 * 4  # whole lines

    def restore(turn: int) -> None:
        slots.copy_(kept)

    def fill_and_copy(turn: int) -> None:
        slots.new_zeros(grown, 2)[:capacity] = slots

    sides = {
        "ours": lambda _: ops.grown_slots([slots], [grown], [0]),
        "fill and copy": fill_and_copy,
    }
    yield from compared("growth", sides, count, arguments, restore, ids=count)


def evictions(count: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures the search for the least recently used 64th of all ids, and their removal."""
    kept = filled_slots(raw_ids(torch.arange(count, device=arguments.device)))
    slots, moved, shift = kept.clone(), torch.tensor([-1]), (count - 1).bit_length()
    now = 1 << 20  # last_seen in the upper 32 bits, counts of 0 in the lower
    scores = torch.randint(1, now, (1 << shift, 1), device=arguments.device) << 32

    kept_scores = scores.clone()
    no_rows, of_scores = torch.tensor([[0, 0, 0, 1]]), torch.tensor([[0, 1, shift, 1]])
    tables = ops.prepare_tables(
        [slots], moved, [], [], no_rows, 0, [], [], None, None, [], [scores], of_scores
    )
    asked = torch.tensor([[0, count, 0, now, count // 64]])

    def restore(turn: int) -> None:
        slots.copy_(kept)
        scores.copy_(kept_scores)

    def evict(turn: int) -> None:
        ids, rows, _, ends = ops.lowest_rows(slots, asked, None, False, tables)
        ops.remove_rows_(ids, rows, ends.tolist(), tables)

    sides = {
        "ours": evict,
        "read of slots and scores": lambda _: (slots.sum(), scores[:count].sum()),
    }
    yield from compared("eviction of a 64th", sides, count // 64, arguments, restore, ids=count)


def gathers(count: int, batch: int, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures copies of rows: `count` rows, a power of two, in one block."""
    shift = count.bit_length() - 1
    rows = torch.randint(0, count, (batch,), device=arguments.device)

    def one(dtype: torch.dtype, width: int) -> Case:
        block = torch.zeros(count, width, dtype=dtype, device=arguments.device)
        sides = {
            "ours": lambda _: ops.gather_rows(rows, [block], shift, width, dtype),
            "bare gather": lambda _: torch.index_select(block, 0, rows),
        }
        kind = str(dtype).split(".")[1]
        [case] = compared("gather", sides, batch, arguments, rows=count, width=width, dtype=kind)
        return case

    yield from (one(dtype, width) for dtype in DTYPES for width in WIDTHS)


def maps(arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures ops of id maps and rows."""
    batch = 500 if arguments.quick else GPU_IDS_A_STEP
    for count in [1_000] if arguments.quick else sorted(arguments.ids):
        yield from finds(count, batch, arguments)
        yield from new_ids(count, batch, arguments)
        yield from growth(count, arguments)
        yield from evictions(count, arguments)
    yield from gathers(1 << 9 if arguments.quick else GATHERED_ROWS, batch, arguments)


PARTS = {"maps": maps, "steps": steps, "host": host_times}


def main(words: list[str] | None = None) -> None:
    """Runs all cases."""
    parser = options(__doc__, [1])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ids", type=int, nargs="+", default=list(GPU_IDS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args(words)
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                "bench_gpu: expected a GPU, got none. --device cpu tests that it runs."
            )
        arguments.clock = "cuda"
    elif arguments.results is None:
        arguments.results = RESULTS / "tmp" / "cpu"
    rows: list[Case] = []
    for part in arguments.only:
        rows += PARTS[part](arguments)
        write_results("gpu", rows, arguments.results or RESULTS / "tmp")  # a later part may fail
    if arguments.device == "cuda":
        print_goals(gpu_goals(), {"gpu": rows})
    else:
        print("The goals are those of a GPU. Nothing here was measured on one.")
    finish("gpu", rows, arguments)


if __name__ == "__main__":
    main()
