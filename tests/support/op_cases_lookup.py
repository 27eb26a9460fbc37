"""The ops of forward and backward: pooling, the gradient of the bag weights, the update of rows."""

from __future__ import annotations

import functools
import itertools
import operator
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from op_cases import (
    FLOATS,
    I64,
    Arguments,
    Layout,
    Unjudged,
    a_shift,
    a_width,
    bits_of_tables,
    cuts,
    equal,
    need,
    numbers,
    numbers_of,
    read_layout,
    register,
    rows_of_blocks,
    size,
    some_ids,
    whole,
    with_short_last,
)
from torch import Tensor
from update_rules import (
    KINDS,
    NUMBERS,
    blocks_of_state,
    hyper_of,
    state_blocks,
    state_widths,
    update,
)

from torchrec_dyn.optimizers import RULES, OptimizerKind

# Valid arguments


class Batch(NamedTuple):
    """The common arguments of the three ops, and the tables that they describe."""

    given: Arguments
    tables: list[Layout]
    elements: int
    ids: int


def draw_batch(rng: random.Random) -> Batch:
    dtype, is_wide = rng.choice(FLOATS), rng.random() < 0.05
    tables, weights, room = [], [], []
    for _ in range(rng.choice((1, 1, 2, 3))):
        shift, columns, count = a_shift(rng), a_width(rng), rng.randrange(4)
        tables.append(Layout(len(weights), count, shift, columns))
        own = [numbers_of(rng, (1 << shift, columns), dtype) for _ in range(count)]
        weights += with_short_last(rng, own)
        room.append(sum(map(len, own)))
    if is_wide:  # a table without rows costs nothing, however wide
        tables.append(Layout(len(weights), 0, 0, rng.choice((2**24, 2**30, 2**31 - 1))))
        room.append(0)
    usable = [t for t, table in enumerate(tables) if table.columns < 2**20]
    ids = size(rng, 600 if max(tables[t].columns for t in usable) > 40 else 6000)
    is_sequence = rng.random() < 0.3
    bags = ids if is_sequence else rng.choice((0, 1, ids, rng.randint(0, ids + 3)))
    offsets = sorted(rng.randint(0, ids) for _ in range(bags + 1))
    if not is_sequence and rng.random() < 0.8:
        offsets = cuts(rng, ids, bags)
    segments, elements = draw_segments(rng, bags, [(t, tables[t].columns) for t in usable])
    if is_wide and rng.random() < 0.5:
        segments.append([len(tables) - 1, bags, 0, 0, tables[-1].columns])
    rows = [-1] * ids
    for table, first, count, _, _ in segments:
        begin, end = (
            (first, first + count) if is_sequence else (offsets[first], offsets[first + count])
        )
        rows[begin:end] = [rng.randrange(-1, room[table]) for _ in range(end - begin)]
    given = {
        "rows": whole(*rows),
        "offsets": None if is_sequence else whole(*offsets),
        "weights": weights,
        "layout": torch.tensor(tables, dtype=I64),
        "segments": torch.tensor(segments, dtype=I64).reshape(-1, 5),
        "mean": rng.random() < 0.4,
    }
    return Batch(given, tables, elements, ids)


def draw_segments(
    rng: random.Random, bags: int, tables: list[tuple[int, int]]
) -> tuple[list[list[int]], int]:
    """Returns segments of all bags in any order, and the elements of their outputs, which have no hole.

    Segments of equal numbers of bags stand beside each other, as pooled features do, or one after another.
    """
    if bags % 2 == 0 and rng.random() < 0.5:
        counts = [bags // 2] * 2
    else:
        ends = cuts(rng, bags, rng.randint(1, 4))
        counts = [b - a for a, b in itertools.pairwise(ends)]
    drawn = [(count, *rng.choice(tables)) for count in counts]
    beside = len({*counts}) == 1 and rng.random() < 0.6
    stride = sum(columns for _, _, columns in drawn)
    segments, first, place = [], 0, 0
    for count, table, columns in drawn:
        segments.append([table, first, count, place, stride if beside else columns])
        first += count
        place += columns if beside else count * columns
    rng.shuffle(segments)
    return segments, place * counts[0] if beside else place


def draw_bag_weights(rng: random.Random, batch: Batch) -> Tensor | None:
    return rng.choice((None, numbers_of(rng, (batch.ids,), torch.float32)))


def draw_gather_pool(rng: random.Random) -> Arguments:
    batch = draw_batch(rng)
    return {
        "rows": batch.given["rows"],
        "offsets": batch.given["offsets"],
        "bag_weights": draw_bag_weights(rng, batch),
        **{name: batch.given[name] for name in ("weights", "layout", "segments", "mean")},
        "elements": batch.elements,
        "dtype": rng.choice(FLOATS),
    }


def draw_pool_into_(rng: random.Random) -> Arguments:
    given = draw_gather_pool(rng)
    out = numbers_of(rng, (given.pop("elements"),), torch.float32).to(given.pop("dtype"))
    few = [rng.choice((-1, -1, -1, rng.randrange(2**40))) for _ in given["rows"]]
    return {"out": out, "new_index": rng.choice((None, whole(*few))), **given}


def draw_bag_weights_grad(rng: random.Random) -> Arguments:
    batch = draw_batch(rng)
    return {"grad": numbers_of(rng, (batch.elements,), torch.float32), **batch.given}


def draw_update_rows_(rng: random.Random) -> Arguments:
    batch = draw_batch(rng)
    optimizer = rng.choice(NUMBERS)

    def draw_state(*shape: int) -> Tensor:
        return numbers_of(rng, shape, torch.float32).abs()

    tables = len(batch.tables)
    streams = [(rng.randrange(-(2**63), 2**63), rng.choice((0, 3, 64)), rng.choice((1, 2, 9, 2**31)))
               for _ in range(tables)]  # fmt: skip
    senders = torch.tensor([rng.randrange(-1, 4) for _ in range(batch.ids)], dtype=torch.int32)
    options = {
        "weight_decay": rng.choice((0.0, 0.01)),
        "weight_decay_mode": rng.randrange(3),
        "max_norm": rng.choice((0.0, 0.0, 1.0)),
        "l1": rng.choice((0.0, 0.5)),
        "l2": rng.choice((0.0, 0.1)),
    }
    return {
        "grad": numbers_of(rng, (batch.elements,), torch.float32),
        "ids": whole(*some_ids(rng, batch.ids)),
        **{name: batch.given[name] for name in ("rows", "offsets")},
        "bag_weights": draw_bag_weights(rng, batch),
        "weights": batch.given["weights"],
        "states": state_blocks(optimizer, batch.given["weights"], draw_state),
        **{name: batch.given[name] for name in ("layout", "segments")},
        "streams": torch.tensor(streams, dtype=I64).reshape(-1, 3),
        "mean": batch.given["mean"],
        "optimizer": optimizer,
        "hyper": hyper_of(optimizer, **options),
        "grad_scales": [rng.choice((1.0, 2.0, 0.3)) for _ in range(tables)],
        "senders": rng.choice((None, senders)),
        **draw_marks(rng, batch),
        **rng.choice(({"on_nonfinite": [], "nonfinite": []}, draw_refusals(rng, tables))),
    }


def draw_refusals(rng: random.Random, tables: int) -> Arguments:
    """Draws what becomes of rows that would not be finite, by table."""
    counts = [whole(rng.randrange(9)) for _ in range(tables)]
    return {"on_nonfinite": [rng.randrange(2) for _ in range(tables)], "nonfinite": counts}


def draw_marks(rng: random.Random, batch: Batch) -> Arguments:
    """Draws bits of some tables, set or not, or no marks at all."""
    marks: list[Tensor] = []
    layout = []
    for table in batch.tables:
        shift, rows = rng.randint(6, 8), table.blocks << table.shift
        count = rng.choice((0, -(-rows // (8 << shift))))
        layout.append([len(marks), count, shift, 1])
        marks += [torch.tensor(list(rng.randbytes(1 << shift))).byte() for _ in range(count)]
    mark_layout = torch.tensor(layout, dtype=I64).reshape(-1, 4)
    return {"marks": marks, "mark_layout": rng.choice((None, mark_layout))}


# The rules, and the plain formulas


class Segment(NamedTuple):
    """One line of `segments`."""

    table: int
    first: int
    bags: int
    place: int
    stride: int


class Bags(NamedTuple):
    """The bags of a call: one line each, (table, begin, end, place of its output), in order."""

    lines: list[tuple[int, int, int, int]]
    tables: list[Layout]
    weights: list[Tensor | None]  # the rows of each table in float32
    rows: list[int]

    def read(self, table: int, row: int) -> np.ndarray | None:
        """Returns the weights of a row in float32; None for an absent row."""
        weights = self.weights[table]
        return None if row < 0 or weights is None else weights[row].numpy()


def read_bags(given: Arguments, elements: int) -> Bags:
    rows = numbers(given["rows"], "rows")
    tables = read_layout(given["layout"], len(given["weights"]))
    dtype = given["weights"][0].dtype if given["weights"] else torch.float32
    need(dtype in FLOATS, "weights of floats")
    weights = [
        rows_of_blocks(given["weights"][t.first : t.first + t.blocks], t.shift, t.columns, dtype)
        for t in tables
    ]
    room = [0 if own is None else len(own) for own in weights]
    offsets = [*range(len(rows) + 1)]
    if given["offsets"] is not None:
        offsets = numbers(given["offsets"], "offsets")
        need(bool(offsets) and sorted(offsets) == offsets, "ascending offsets")
        need(offsets[0] >= 0 and offsets[-1] <= len(rows), "offsets inside the ids")
    lines = given["segments"]
    need(lines.dtype == I64 and lines.dim() == 2 and lines.shape[1] == 5, "segments [S, 5]")
    owner = [-1] * (len(offsets) - 1)
    written = np.zeros(elements, bool)
    bags = []
    for line in lines.tolist():
        segment = Segment(*line)
        need(0 <= segment.table < len(tables), "a segment of a table")
        need(min(segment.first, segment.bags) >= 0, "bags >= 0")
        need(segment.first + segment.bags <= len(owner), "a segment inside the bags")
        columns = tables[segment.table].columns
        for i in range(segment.bags):
            bag, place = segment.first + i, segment.place + i * segment.stride
            need(owner[bag] == -1, "a bag in one segment")
            need(place >= 0 and place + columns <= elements, "outputs inside the elements")
            need(not written[place : place + columns].any(), "outputs that do not overlap")
            owner[bag], written[place : place + columns] = segment.table, True
            bags.append((segment.table, offsets[bag], offsets[bag + 1], place, bag))
    need(-1 not in owner, "every bag in a segment")
    need(bool(written.all()), "outputs without a hole")
    for table, begin, end, _, _ in bags:
        need(all(-1 <= row < room[table] for row in rows[begin:end]), "rows of the table")
    bags.sort(key=lambda bag: bag[4])
    exact = [None if table is None else table.float() for table in weights]
    return Bags([bag[:4] for bag in bags], tables, exact, rows)


def weights_of_ids(given: Arguments, ids: int) -> np.ndarray | None:
    if given["bag_weights"] is None:
        return None
    need(given["bag_weights"].dtype == torch.float32, "bag_weights of dtype float32")
    need(given["bag_weights"].numel() == ids, "a weight for each id")
    return given["bag_weights"].flatten().numpy()


def check_gather_pool(before: Arguments, _: Arguments, result: Tensor) -> None:
    need(before["elements"] >= 0 and before["dtype"] in FLOATS, "elements and dtype")
    if before["elements"] > 10**7:
        raise Unjudged("too large")
    bags = read_bags(before, before["elements"])
    equal(result, torch.from_numpy(pooled(before, bags, before["elements"])).to(before["dtype"]))


def check_pool_into_(before: Arguments, after: Arguments, _: None) -> None:
    out, fresh = before["out"], before["new_index"]
    need(out.dtype in FLOATS, "an output of floats")
    bags = read_bags(before, out.numel())
    chosen = [True] * len(bags.rows)
    if fresh is not None:
        chosen = [number >= 0 for number in numbers(fresh, "new_index")]
        need(len(chosen) == len(bags.rows), "a number for each id")
    all_bags = torch.from_numpy(pooled(before, bags, out.numel())).to(out.dtype)
    expected = out.flatten().clone()
    for table, begin, end, place in bags.lines:
        if fresh is None or any(chosen[begin:end]):
            here = slice(place, place + bags.tables[table].columns)
            expected[here] = all_bags[here]
    equal(after["out"].flatten(), expected, "out")


def pooled(given: Arguments, bags: Bags, elements: int) -> np.ndarray:
    """Returns the pooled rows of all bags, [elements] float32."""
    of_ids = weights_of_ids(given, len(bags.rows))
    out = np.zeros(elements, np.float32)
    with np.errstate(all="ignore"):
        for table, begin, end, place in bags.lines:
            total = out[place : place + bags.tables[table].columns]  # a view
            for i in range(begin, end):
                value = bags.read(table, bags.rows[i])
                if value is not None:
                    total += value if of_ids is None else of_ids[i] * value
            if given["mean"] and end > begin:
                total /= np.float32(end - begin)
    return out


def grad_of(given: Arguments) -> np.ndarray:
    need(given["grad"].dtype == torch.float32, "grad of dtype float32")
    return given["grad"].flatten().numpy()


def check_bag_weights_grad(before: Arguments, _: Arguments, result: Tensor) -> None:
    grad = grad_of(before)
    bags = read_bags(before, len(grad))
    out = np.zeros(len(bags.rows), np.float32)
    with np.errstate(all="ignore"):
        for table, begin, end, place in bags.lines:
            bag_grad = grad[place : place + bags.tables[table].columns].astype(np.float64)
            for i in range(begin, end):
                value = bags.read(table, bags.rows[i])
                if value is not None:
                    dot = np.cumsum(bag_grad * value)[-1] + 0.0
                    out[i] = dot / (end - begin) if before["mean"] else dot
    equal(result, torch.from_numpy(out))


def check_update_rows_(before: Arguments, after: Arguments, _: None) -> None:
    grad, ids = grad_of(before), numbers(before["ids"], "ids")
    bags = read_bags(before, len(grad))
    need(len(ids) == len(bags.rows), "as many rows as ids")
    of_ids = weights_of_ids(before, len(ids))
    streams = numbers(before["streams"], "streams")
    need(len(streams) == 3 * len(bags.tables), "streams [T, 3]")
    need(before["optimizer"] in NUMBERS, "an optimizer")
    kind = KINDS[before["optimizer"]]
    names = ("learning_rate", *RULES[kind].hyper)
    need(len(before["hyper"]) == len(names), "the hyper-parameters of the optimizer")
    hyper = dict(zip(names, map(np.float32, before["hyper"]), strict=True))
    if "weight_decay_mode" in hyper:
        need(before["hyper"][3] in (0.0, 1.0, 2.0), "a weight decay mode")
    need(kind != OptimizerKind.FTRL or hyper["learning_rate"] > 0, "a learning rate above 0")
    need(len(before["grad_scales"]) == len(bags.tables), "a scale for each table")
    senders = before["senders"]
    if senders is not None:
        need(senders.dtype == torch.int32 and senders.numel() == len(ids), "int32 senders")
        senders = senders.flatten().tolist()
        need(all(-1 <= s < 2**20 for s in senders), "senders in [-1, 2^20)")
    count = len(state_widths(before["optimizer"], 1))
    need(len(before["states"]) == count * len(before["weights"]), "blocks of states")
    states = [
        [
            rows_of_blocks(
                blocks_of_state(before, which)[t.first : t.first + t.blocks],
                t.shift,
                state_widths(before["optimizer"], t.columns)[which],
                torch.float32,
            )
            for t in bags.tables
        ]
        for which in range(count)
    ]
    for state in states:
        for own, weight in zip(state, bags.weights, strict=True):
            need(own is None or len(own) == len(weight), "state for each row of weights")
    refusals, counts = before["on_nonfinite"], before["nonfinite"]
    if refusals or counts:
        need(len(refusals) == len(counts) == len(bags.tables), "refusals of each table")
        need(all(0 <= what <= 2 for what in refusals), "refusals in [0, 2]")
        need(all(len(numbers(count, "nonfinite")) == 1 for count in counts), "a count for each")
    marks = bits_of_tables(before["marks"], before["mark_layout"])
    need(not marks or len(marks) == len(bags.tables), "marks of each table")
    refused: list[tuple[int, int]] = []
    with np.errstate(all="ignore"):
        rows = sum_gradients(before, bags, grad, of_ids, senders)
        for (table, row), total in rows.items():  # the arrays are views of the tables: written
            weight = bags.weights[table][row].numpy()
            own = [state[table][row].numpy() for state in states]
            step = streams[3 * table + 2]
            if step < 1:
                raise Unjudged("a step below 1")
            after_row = update(kind, hyper, step, mean_square, sum_square, (total, weight, *own))
            if refusals and refusals[table]:
                stored = np.abs(after_row[0]).max(initial=0)
                if before["weights"][0].dtype == torch.float16 and 65504 <= stored < np.inf:
                    raise Unjudged("a number that is infinite by chance")
                if not all(np.isfinite(numbers).all() for numbers in after_row):
                    refused.append((table, row))
                    continue
            for into, new in zip((weight, *own), after_row, strict=True):
                into[:] = new
    need(all(refusals[table] != 2 for table, _ in refused), "finite numbers")
    for table, count in enumerate(counts):
        more = sum(of == table for of, _ in refused)
        assert after["nonfinite"][table].item() == count.item() + more
    updated = [row for row in rows if row not in refused]
    for table, row in updated:
        if marks and marks[table]:
            need(row < len(marks[table]), "rows of the table's marks")
            marks[table][row] = 1
    assert bits_of_tables(after["marks"], after["mark_layout"]) == marks
    for t, table in enumerate(bags.tables):
        own = slice(table.first, table.first + table.blocks)
        if bags.weights[t] is None:
            continue
        got = torch.cat([block.reshape(-1, table.columns) for block in after["weights"][own]])
        if got.dtype == torch.float32:
            equal(got, bags.weights[t], "weights")
        else:  # rounded up or down, by chance
            check_rounded(got, bags.weights[t], [row for of, row in updated if of == t])
        for which, state in enumerate(states):
            of_table = [block.flatten() for block in blocks_of_state(after, which)[own]]
            equal(torch.cat(of_table), state[t], f"state {which}")


def sum_gradients(
    given: Arguments, bags: Bags, grad: np.ndarray, of_ids: np.ndarray | None, senders: Any
) -> dict[tuple[int, int], np.ndarray]:
    """Returns the summed gradient of each row, by (table, row): pieces of 256 ids in order, each in order."""
    pieces: dict[tuple[int, int], list[np.ndarray]] = {}
    counts: dict[tuple[int, int], int] = {}
    sent: dict[tuple[int, int], set[int]] = {}
    one = np.float32(1)
    for table, begin, end, place in bags.lines:
        bag_grad = grad[place : place + bags.tables[table].columns]
        for i in range(begin, end):
            key = (table, bags.rows[i])
            if bags.rows[i] < 0:
                continue
            scale = one if of_ids is None else of_ids[i]
            scale = scale * (one / np.float32(end - begin)) if given["mean"] else scale
            part = scale * bag_grad
            counts[key] = counts.get(key, 0) + 1
            if counts[key] % 256 == 1:
                pieces.setdefault(key, []).append(part)
            else:
                pieces[key][-1] = pieces[key][-1] + part
            sent.setdefault(key, set()).add(senders[i] if senders else -1)
    totals = {key: functools.reduce(operator.add, sums) for key, sums in pieces.items()}
    for key in totals:
        scale = np.float32(given["grad_scales"][key[0]])
        scale = scale / np.float32(len(sent[key])) if senders is not None else scale
        totals[key] = totals[key] * scale if scale != 1 else totals[key]
    return totals


def mean_square(values: np.ndarray) -> np.float32:
    """Returns the mean square, as csrc/lookup/row_update.h computes it."""
    return sum_square(values) / np.float32(len(values))


def sum_square(values: np.ndarray) -> np.float32:
    """Returns the sum of squares, added up in 16 lanes as csrc/lookup/row_update.h does."""
    lanes = np.zeros(16, np.float32)
    for begin in range(0, len(values), 16):
        part = values[begin : begin + 16]
        lanes[: len(part)] += part * part
    four = (lanes[:4] + lanes[8:12]) + (lanes[4:8] + lanes[12:])
    return (four[0] + four[2]) + (four[1] + four[3])


def check_rounded(got: Tensor, exact: Tensor, updated: list[int]) -> None:
    """Asserts that updated rows of a short dtype are near `exact`, in float32, and others equal."""
    others = torch.ones(len(got), dtype=torch.bool)
    others[updated] = False
    equal(got[others].float(), exact[others], "other rows")
    gap = torch.finfo(got.dtype)
    near, want = got[updated].double(), exact[updated].double()
    ulp = (want.abs() * gap.eps).clamp(min=gap.tiny * gap.eps)
    fine = ((near - want).abs() <= 1.01 * ulp) | (near == want) | near.isnan() & want.isnan()
    fine |= want.abs() >= 0.99 * gap.max  # near the largest number: infinite or not
    assert fine.all(), "an updated row"


register(globals())
