"""Valid arguments of the ops of forward and backward, drawn for the fuzzer."""

from __future__ import annotations

import collections
import itertools
import random
from typing import NamedTuple

import torch
from op_cases import (
    FLOATS,
    I64,
    Arguments,
    a_shift,
    a_width,
    cuts,
    draw_key,
    draw_maps,
    numbers_of,
    size,
    some_ids,
    whole,
    with_short_last,
)
from raw_maps import a_map
from torch import Tensor
from update_rules import NUMBERS, hyper_of, state_blocks


class Layout(NamedTuple):
    """One line of `layout`."""

    first: int
    blocks: int
    shift: int
    columns: int


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


# Handles of the tables of the last calls: a handle in arguments is a copy, which does not keep its tables.
_handles: collections.deque[Tensor] = collections.deque(maxlen=64)


def draw_tables(rng: random.Random, given: Arguments) -> tuple[Arguments, list[list[int]]]:
    """Returns the arguments of prepare_tables for rows of some update, and the ids of each map."""
    maps, ids = draw_maps(rng, len(given["layout"]))
    names = ("weights", "states", "layout", "optimizer", "on_nonfinite", "nonfinite")
    initial = draw_initial(rng, given)
    return {**maps, **{name: given[name] for name in names}, **initial}, ids


def draw_initial(rng: random.Random, given: Arguments) -> Arguments:
    """Draws the initial rows of tables, or none."""
    if not given["weights"] or rng.random() < 0.3:
        return {}
    tables, states = len(given["layout"]), len(given["states"]) // len(given["weights"])
    lines = [
        [rng.randrange(3), draw_key(rng), rng.choice((0, 3, 64)), rng.randrange(2)]
        for _ in range(tables)
    ]
    numbers = [-1.0, 1.0, 0.0, rng.choice((0.01, 1.0)), 0.125, 0.75]
    return {
        "initial": torch.tensor(lines, dtype=I64),
        "parameters": torch.tensor([numbers] * tables, dtype=torch.float64),
        "initial_states": [0.5] * states,
    }


def draw_initial_ids(rng: random.Random, rows: Tensor) -> Tensor | None:
    return rng.choice((None, whole(*some_ids(rng, len(rows)))))


def draw_handle(rng: random.Random, given: Arguments) -> tuple[Tensor, list[list[int]]]:
    tables, ids = draw_tables(rng, given)
    _handles.append(torch.ops.torchrec_dyn.prepare_tables(**tables))
    return _handles[-1].clone(), ids


def draw_prepare_tables(rng: random.Random) -> Arguments:
    return draw_tables(rng, draw_update_rows_(rng))[0]


def draw_find_and_pool(rng: random.Random) -> Arguments:
    columns = a_width(rng)
    tables = [Layout(t, 1, 4, columns) for t in range(rng.randint(1, 3))]
    given = {
        "weights": [numbers_of(rng, (16, columns), torch.float32) for _ in tables],
        "layout": torch.tensor(tables, dtype=I64),
        **{"states": [], "optimizer": 0, "on_nonfinite": [], "nonfinite": []},
    }
    maps = [a_map(whole(*range(16)), whole(*range(16)), False, 1.7, draw_key(rng)) for _ in tables]
    given["slots"] = [one[0][0] for one in maps]
    given["moved"] = torch.cat([one[1] for one in maps])
    _handles.append(torch.ops.torchrec_dyn.prepare_tables(**given))
    batch, most = rng.randrange(5), 4
    lengths = [rng.randrange(most) for _ in range(batch * len(tables))]
    offsets = [0, *itertools.accumulate(lengths)]
    dtype, width = rng.choice((torch.int32, I64)), columns * len(tables)
    segments = [[t, t * batch, batch, t * columns, width] for t in range(len(tables))]
    forms = rng.choice(((True, False), (False, True), (True, True)))
    return {
        "ids": whole(*(rng.randrange(18) for _ in range(offsets[-1]))),
        "lengths": torch.tensor(lengths, dtype=dtype) if forms[0] else None,
        "offsets": torch.tensor(offsets, dtype=dtype) if forms[1] else None,
        "bag_weights": rng.choice((None, numbers_of(rng, (offsets[-1],), torch.float32))),
        "first_bags": torch.arange(len(tables) + 1) * batch,
        "first_features": torch.arange(len(tables) + 1),
        "segments": rng.choice((None, torch.tensor(segments, dtype=I64))),
        "tables": _handles[-1].clone(),
        "mean": rng.random() < 0.5,
        "pools": rng.choice((0, 2)),
        "elements": batch * width,
        "dtype": rng.choice(FLOATS),
    }


def draw_pool_prepared_(rng: random.Random) -> Arguments:
    update, given = draw_update_rows_(rng), {}
    given["tables"], _ = draw_handle(rng, update)
    few = [rng.choice((-1, -1, -1, rng.randrange(2**40))) for _ in update["rows"]]
    names = ("rows", "offsets", "bag_weights", "segments", "mean")
    return {
        "out": update["grad"].to(rng.choice(FLOATS)),
        "new_index": rng.choice((None, whole(*few))),
        "initial_ids": draw_initial_ids(rng, update["rows"]),
        **{name: update[name] for name in names},
        **given,
    }


def draw_weights_grad_prepared(rng: random.Random) -> Arguments:
    update = draw_update_rows_(rng)
    names = ("grad", "rows", "offsets", "segments", "mean")
    own = {"initial_ids": draw_initial_ids(rng, update["rows"])}
    return {**{name: update[name] for name in names}, **own, "tables": draw_handle(rng, update)[0]}


def draw_update_prepared_(rng: random.Random) -> Arguments:
    update = draw_update_rows_(rng)
    tables, left_out = draw_handle(rng, update)[0], ("weights", "states", "layout", "optimizer")
    left_out += ("on_nonfinite", "nonfinite")
    return {**{k: v for k, v in update.items() if k not in left_out}, "tables": tables}
