"""Valid arguments of the ops of forward and backward, drawn for the fuzzer."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import torch
from op_cases import (
    FLOATS,
    I64,
    Arguments,
    ScoredTable,
    a_shift,
    a_width,
    cuts,
    draw_key,
    draw_maps,
    draw_scored_table,
    draw_scores,
    numbers_of,
    of_scored,
    size,
    some_ids,
    whole,
    with_short_last,
)
from op_samples import prepared, prepared_on_a_device, small, tables_in
from torch import Tensor
from update_rules import NUMBERS, hyper_of, state_blocks, state_widths

from torchrec_dyn import ops


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


def draw_cache(rng: random.Random, rows: int, frames: int, call: int) -> list[Tensor]:
    """Returns the tensors of a cache: as calls leave them, or with any numbers."""
    if rng.random() < 0.6:
        return draw_any_cache(rng, rows, frames)
    used = rng.randint(0, frames)
    of_rows = rng.sample(range(rows), min(rows, rng.randint(0, used)))
    in_use = rng.sample(range(used), len(of_rows))
    places, owners = [0] * rows, [-1] * frames
    for row, frame in zip(of_rows, in_use, strict=True):
        places[row], owners[frame] = frame + 1, row
    free = [frame for frame in range(used) if owners[frame] < 0]
    count = len(free)
    rng.shuffle(free)
    ages = [call - rng.choice((1, 2, 3, 200, 70_000, 2**31)) for _ in range(frames)]
    signed = [(one + 2**31) % 2**32 - 2**31 for one in ages]
    free += [0] * (frames - count)
    return [small(*places), whole(*owners), small(*signed), small(*free), whole(count, used, 0, 0)]


def draw_any_cache(rng: random.Random, rows: int, frames: int) -> list[Tensor]:
    far = rng.choice((0.0, 0.1, 0.5))

    def some(count: int, most: int, wild: tuple[int, ...]) -> list[int]:
        most = max(1, most)
        return [
            rng.choice(wild) if rng.random() < far else rng.randrange(-1, most)
            for _ in range(count)
        ]

    small_ends = (-(2**31), 2**31 - 1, -2, frames, frames + 1)
    ends = (-(2**63), 2**63 - 1, -2, rows, 2**32, frames, frames + 1)
    return [
        small(*some(rows, frames + 1, small_ends)),
        whole(*some(frames, rows, ends)),
        small(*some(frames, 20, small_ends)),
        small(*some(frames, frames, small_ends)),
        whole(*(rng.choice((*ends, 0, rng.randint(0, frames))) for _ in range(4))),
    ]


def draw_cached_batch(rng: random.Random, room: list[int]) -> Arguments:
    """Returns a batch of tables with room for so many rows, of which some have caches."""
    caches: list[Tensor] = []
    lines, rows, offsets = [], [], [0]
    for table, most in enumerate(room):
        base = rng.randint(0, most)
        count, frames = rng.choice((base, rng.randint(0, base))), rng.randint(0, most - base)
        if rng.random() < 0.7:
            call = rng.choice((1, 3, 130, 2**31, 2**32 - 1))
            caches += draw_cache(rng, count, frames, call)
            lines.append([table, call, base])
        wild = (-1, -(2**63), 2**63 - 1, base, most)
        rows += [
            rng.choice(wild) if rng.random() < 0.1 else rng.randrange(-1, max(1, count))
            for _ in range(size(rng, 600))
        ]
        offsets.append(len(rows))
    cache_layout = torch.tensor(lines, dtype=I64).reshape(-1, 3)
    return {
        "rows": whole(*rows), "table_offsets": whole(*offsets), "caches": caches,
        "cache_layout": cache_layout,
    }  # fmt: skip


def draw_cache_rows_(rng: random.Random) -> Arguments:
    given = draw_update_rows_(rng)
    room = [
        sum(len(block) for block in given["weights"][first : first + count])
        for first, count, _, _ in given["layout"].tolist()
    ]
    own = {**draw_cached_batch(rng, room), "loads": rng.random() < 0.7}
    return prepared_on_a_device(given, **own)


def draw_row_places(rng: random.Random) -> Arguments:
    return draw_cached_batch(rng, [rng.randrange(300) for _ in range(rng.randrange(4))])


def draw_prepare_tables(rng: random.Random) -> Arguments:
    given = draw_update_rows_(rng)
    return tables_in({**given, **draw_maps(rng, len(given["layout"]))[0]})


def draw_initial(rng: random.Random, tables: int, states: int) -> Arguments:
    """Draws the initial rows of tables, and the numbers of their states."""
    ends = [
        sorted((rng.random(), rng.random())) if rng.random() < 0.5 else [0.0, 1.0]
        for _ in range(tables)
    ]
    numbers = [
        [-rng.random(), rng.random(), rng.random() - 0.5, rng.random(), *one] for one in ends
    ]
    initial = [
        [rng.randrange(3), rng.randrange(-(2**63), 2**63), rng.choice((0, 1, 3, 16)), 1]
        for _ in ends
    ]
    return {
        "initial": torch.tensor(initial, dtype=I64).reshape(-1, 4),
        "parameters": torch.tensor(numbers, dtype=torch.float64).reshape(-1, 6),
        "initial_states": [rng.choice((0.0, 0.5, 3.0)) for _ in range(states)],
    }


def draw_row_scores(rng: random.Random, layout: list[list[int]]) -> Arguments:
    """Draws scores of the rows of all tables, or of some, or none at all."""
    if rng.random() < 0.2:
        return {}
    scores: list[Tensor] = []
    lines = []
    for _, blocks, shift, _ in layout:
        count = rng.choice((blocks, blocks, 0))
        lines.append([len(scores), count, shift, 1])
        scores += [draw_scores(rng, 1 << shift) for _ in range(count)]
    return {"scores": scores, "score_layout": torch.tensor(lines, dtype=I64).reshape(-1, 4)}


def draw_fills(rng: random.Random, count: int) -> Arguments:
    """Draws a batch of which `count` absent ids, or some of its absent ids, get rows; or none."""
    if rng.random() < 0.3:
        return {"rows": None, "new_index": None, "places": None}
    absent = count + rng.choice((0, 1, 5))
    places = sorted(rng.sample(range(absent), count))
    index = [rng.choice((-1, rng.randrange(absent) if absent else -1)) for _ in range(20)]
    return {
        "rows": whole(*(-1 if place >= 0 else 3 for place in index)),
        "new_index": whole(*index),
        "places": whole(*places) if absent > count or rng.random() < 0.5 else None,
    }


def draw_added(rng: random.Random) -> tuple[Arguments, Arguments]:
    """Returns tables, and new ids for them; a second call may add the same ids again."""
    given = draw_update_rows_(rng)
    layout = given["layout"].tolist()
    offsets, reused, firsts, slots = [0], [0], [], []
    again: list[int] = []
    ids: list[int] = []
    places: list[int] = []
    for _, blocks, shift, _ in layout:
        rows = max(0, (blocks << shift) - (1 << shift) + 1)  # the last block may be short
        first = rng.randint(0, rows)
        again += rng.sample(range(first), rng.randint(0, min(first, 3)))
        fresh = rng.randint(0, min(rows - first, 9))
        count = len(again) - reused[-1] + fresh
        places += rng.sample(range(rows), count)
        own = [*dict.fromkeys(some_ids(rng, count + 3))]
        ids += [*own, *(2**50 + i for i in range(count))][:count]
        firsts.append(first)
        reused.append(len(again))
        offsets.append(len(ids))
        slots.append(torch.zeros(4 * rng.randint(count, 12 + count), 2, dtype=I64))
    steps = [rng.choice((0, 7, 2**32 - 2)) for _ in layout]
    counts = whole(*(rng.choice((-1, 0, 1, 2**32 - 1, 2**40)) for _ in ids))
    own = {
        "new_rows": whole(*[-7] * len(ids)),
        "new_ids": whole(*ids),
        "new_offsets": offsets,
        "first_rows": firsts,
        "reused": whole(*again),
        "reused_offsets": reused,
        "steps": steps,
        "counts": rng.choice((None, counts)),
        **draw_fills(rng, len(ids)),
        "initial_places": rng.choice((None, whole(*places))),
    }
    moved = torch.tensor([[-1, draw_key(rng)] for _ in layout], dtype=I64).reshape(-1, 2)
    initial = draw_initial(rng, len(layout), len(state_widths(given["optimizer"], 1)))
    return {**given, "slots": slots, "moved": moved, **initial, **draw_row_scores(rng, layout)}, own


def draw_add_rows_(rng: random.Random) -> Arguments:
    tables, own = draw_added(rng)
    return {**own, "tables": prepared(tables)["tables"]}


def draw_step(rng: random.Random) -> tuple[Arguments, list[ScoredTable], Arguments]:
    """Returns tables, counters, and what a step does to both: ids lose rows, rows are seen, ids get rows."""
    tables, added = draw_added(rng)
    while "scores" not in tables:
        tables |= draw_row_scores(rng, tables["layout"].tolist())
    removed: list[tuple[int, int]] = []
    seen: list[int] = []
    ends, seen_ends = [0], [0]
    for t, (begin, end) in enumerate(itertools.pairwise(added["reused_offsets"])):
        again = added["reused"].tolist()[begin:end]
        rows = [row for row in range(added["first_rows"][t]) if row not in again]
        gone = [(2**52 + row, row) for row in rng.sample(rows, min(len(rows), 3))]
        slots = torch.zeros(len(tables["slots"][t]) + 16, 2, dtype=I64)
        tables["slots"][t] = slots
        ids, of_ids = (
            (whole(*own) for own in zip(*gone, strict=True)) if gone else (whole(), whole())
        )
        ops.insert(ids, of_ids, whole(0, len(gone)), [slots], tables["moved"][t : t + 1])
        removed += gone
        seen += rng.choices(
            [-1, *(row for row in rows if row not in of_ids.tolist())], k=rng.randrange(5)
        )
        ends.append(len(removed))
        seen_ends.append(len(seen))
    names = {"steps": "new_steps"}
    own = {
        **{names.get(name, name): value for name, value in added.items()},
        "removed_ids": whole(*(number for number, _ in removed)),
        "removed_rows": whole(*(row for _, row in removed)), "removed_offsets": ends,
        "seen_rows": whole(*seen), "table_offsets": whole(*seen_ends),
        "steps": whole(*(rng.randrange(9) for _ in ends[1:])), "times": None,
    }  # fmt: skip
    counters = [draw_scored_table(rng) for _ in range(rng.randint(1, 3))]
    return tables, counters, {**own, **draw_waiting(rng, counters)}


def draw_waiting(rng: random.Random, counters: list[ScoredTable]) -> Arguments:
    """Draws what a step does to counters: some are dropped, others go up, and one of a table begins."""
    gone: list[tuple[int, int]] = []
    up: list[int] = []
    firsts: list[int] = []
    begun: list[int] = []
    ends, up_ends, begun_ends = [0], [0], [0]
    for table in counters:
        some = rng.sample([*table.known.items()], rng.randint(0, len(table.known)))
        half = len(some) // 2
        gone += some[:half]
        up += [row for _, row in some[half:]]
        firsts.append(max(table.known.values(), default=-1) + 1)
        has_room = all((array[:, 1] == 0).any() for array in table.slots)
        begun += [2**53] if has_room and firsts[-1] < table.capacity else []
        ends.append(len(gone))
        up_ends.append(len(up))
        begun_ends.append(len(begun))
    return {
        "dropped_ids": whole(*(number for number, _ in gone)),
        "dropped_rows": whole(*(row for _, row in gone)), "dropped_offsets": ends,
        "waiting_rows": whole(*up), "waiting_offsets": whole(*up_ends),
        "waiting_steps": whole(*(rng.randrange(9) for _ in counters)),
        "waiting_times": whole(*(rng.choice((1, 2, 2**32 - 1)) for _ in up)),
        "begun_rows": whole(*[-7] * len(begun)), "begun_ids": whole(*begun), "begun_offsets": begun_ends,
        "begun_first_rows": firsts, "begun_reused": whole(), "begun_reused_offsets": [0] * len(ends),
        "begun_steps": [7 for _ in counters], "begun_counts": whole(*[2 for _ in begun]),
        "begun_fills": None, "begun_index": None, "begun_places": None, "begun_initial_places": None,
    }  # fmt: skip


def draw_commit_step_(rng: random.Random) -> Arguments:
    tables, counters, own = draw_step(rng)
    handles = {"tables": prepared(tables)["tables"], "counters": of_scored(counters)["tables"]}
    return {**own, **handles}


def draw_find(rng: random.Random) -> tuple[Arguments, Arguments, Tensor]:
    """Returns tables, a batch for find_and_pool, and its offsets."""
    count, is_sequence = rng.randint(1, 3), rng.random() < 0.3
    maps, known = draw_maps(rng, count)
    widths = [a_width(rng)] * count if is_sequence else [a_width(rng) for _ in known]
    dtype, layout, weights = rng.choice(FLOATS), [], []
    for ids_of_map, width in zip(known, widths, strict=True):
        blocks = len(ids_of_map) * 2 // 64 + 1  # rows are below twice the number of ids
        layout.append([len(weights), blocks, 6, width])
        weights += [numbers_of(rng, (64, width), dtype) for _ in range(blocks)]
    features = [rng.randint(0, 3) for _ in known]
    tables = [t for t, own in enumerate(features) for _ in range(own)]
    many = 400 if rng.random() < 0.05 else 0  # threads share the work
    batch_sizes = [many or rng.randrange(5)] * len(tables)
    if rng.random() < 0.3:
        batch_sizes = [rng.randrange(5) for _ in tables]
    new, lengths, ids = rng.choice((0.0, 0.3, 1.0)), [], []
    for t, bags in zip(tables, batch_sizes, strict=True):
        lengths += rng.choices((0, 1, 2, 9) if known[t] or new else (0,), k=bags)
        ids += [rng.choice(known[t]) if known[t] and rng.random() >= new else i
                for i in some_ids(rng, sum(lengths[len(lengths) - bags :]))]  # fmt: skip
    first_bags, offsets = ([0, *itertools.accumulate(n)] for n in (batch_sizes, lengths))
    is_beside, stride = len({*batch_sizes}) == 1, sum(widths[t] for t in tables)
    segments, place = [], 0
    for t, first, bags in zip(tables, first_bags, batch_sizes, strict=False):
        segments.append([t, first, bags, place, stride if is_beside else widths[t]])
        place += widths[t] * (1 if is_beside else bags)
    integers, form = rng.choice((torch.int32, I64)), rng.choice((1, 2, 3))
    batch = {
        "ids": whole(*ids),
        "lengths": torch.tensor(lengths, dtype=integers) if form & 1 else None,
        "offsets": torch.tensor(offsets, dtype=integers) if form & 2 else None,
        "bag_weights": rng.choice((None, numbers_of(rng, (len(ids),), torch.float32))),
        "first_bags": whole(*first_bags),
        "first_features": whole(0, *itertools.accumulate(features)),
        "segments": None if is_sequence else torch.tensor(segments, dtype=I64).view(-1, 5),
        "mean": rng.random() < 0.5,
        "output_rows": batch_sizes[0] if is_beside and place else place,
        "columns": place if is_beside else 0,
        "dtype": rng.choice(FLOATS),
    }
    return {**maps, "weights": weights, "layout": torch.tensor(layout)}, batch, whole(*offsets)


def draw_find_and_pool(rng: random.Random) -> Arguments:
    tables, batch, _ = draw_find(rng)
    return prepared({**tables, **batch}, pools=rng.choice((0, 2)), collects=rng.randrange(3))


def draw_initial_ids(rng: random.Random, rows: Tensor) -> Tensor | None:
    return rng.choice((None, whole(*some_ids(rng, len(rows)))))


def draw_pool_prepared_(rng: random.Random) -> Arguments:
    given = draw_gather_pool(rng)
    out = torch.full((given.pop("elements"),), 7.0, dtype=given.pop("dtype"))
    fresh = whole(*(rng.choice((-1, -1, -1, rng.randrange(2**40))) for _ in given["rows"]))
    initial = draw_initial_ids(rng, given["rows"])
    return prepared(given, out=out, new_index=rng.choice((None, fresh)), initial_ids=initial)


def draw_weights_grad_prepared(rng: random.Random) -> Arguments:
    batch = draw_batch(rng)
    grad, initial = (
        numbers_of(rng, (batch.elements,), torch.float32),
        draw_initial_ids(rng, batch.given["rows"]),
    )
    return prepared(batch.given, grad=grad, initial_ids=initial)


def draw_update_prepared_(rng: random.Random) -> Arguments:
    return prepared(draw_update_rows_(rng))
