"""Valid arguments of ops, drawn for the fuzzer: `draw_<op>` returns new ones."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import oracle
import torch
from op_samples import scored
from oracle import EXTREME_IDS, ids_at_home
from raw_maps import a_map
from torch import Tensor

from torchrec_dyn import ops

I64 = torch.int64
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LINE = 4  # slots of a cache line
FREE = 2**32 - 1  # last_seen of a row without an id
MOST_COUNT = 2**32 - 1
Arguments = dict[str, Any]


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=I64)


def size(rng: random.Random, most: int = 6000) -> int:
    """Returns a number of ids or rows: small, or above the grain at which threads share the work."""
    few = rng.choice((0, 1, 2, 3, 5, 8, 13, 40, 40, 120))
    return min(most, few if rng.random() < 0.95 else rng.randint(600, 6000))


def some_ids(rng: random.Random, count: int) -> list[int]:
    """Returns ids: extreme, small, any, or with one home."""
    crowd = ids_at_home(rng.choice((0, 4, 8)), rng.choice((8, 12, 16)), 12)
    kinds = (
        lambda: rng.choice(EXTREME_IDS),
        lambda: rng.randrange(60),
        lambda: rng.randrange(-(2**63), 2**63),
        lambda: rng.choice(crowd),
    )
    return [rng.choice(kinds)() for _ in range(count)]


def cuts(rng: random.Random, count: int, parts: int) -> list[int]:
    """Returns [parts + 1] ascending numbers from 0 to `count`; [0] without parts, which requires 0."""
    if parts == 0:
        return [0]
    return [0, *sorted(rng.randint(0, count) for _ in range(parts - 1)), count]


def numbers_of(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns floats, some of them NaN, infinite, or zero with either sign."""
    draw = torch.Generator().manual_seed(rng.getrandbits(40))
    drawn = torch.randn(shape, generator=draw)
    odd = torch.tensor([0.0, -0.0, 1.0, 1e-40, 3e38, float("inf"), float("-inf"), float("nan")])
    if rng.random() < 0.2 and drawn.numel():
        for _ in range(rng.randint(1, 4)):
            drawn.view(-1)[rng.randrange(drawn.numel())] = odd[rng.randrange(len(odd))]
    return drawn.to(dtype)


def a_shift(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 2, 3, 5))


def with_short_last(rng: random.Random, blocks: list[Tensor]) -> list[Tensor]:
    """Returns the blocks; in some calls the last block has fewer rows."""
    if blocks and rng.random() < 0.3:
        blocks[-1] = blocks[-1][: rng.randint(1, len(blocks[-1]))]
    return blocks


def a_width(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 4, 7, 15, 16, 17, 33, 64, 130))


# Id maps and canonical order


def draw_map(rng: random.Random) -> tuple[list[Tensor], Tensor, list[int]]:
    """Returns (slots, moved, ids): the slots of a map, then its outgoing slots if it grows."""
    ids = [*dict.fromkeys(some_ids(rng, size(rng)))]
    rows = rng.sample(range(2 * len(ids)), len(ids))
    grows, room = rng.random() < 0.4, rng.choice((1.1, 1.7))
    slots, moved = a_map(whole(*ids), whole(*rows), grows, room, draw_key(rng))
    return slots, moved, ids


def draw_key(rng: random.Random) -> int:
    return rng.choice((0, rng.getrandbits(62), -rng.getrandbits(63)))


def joined_maps(maps: list[tuple[list[Tensor], Tensor, list[int]]]) -> Arguments:
    """Returns the arguments `slots` and `moved` of several maps."""
    slots = [*(m[0][0] for m in maps), *(m[0][1] for m in maps if len(m[0]) == 2)]
    return {
        "slots": slots,
        "moved": torch.cat([torch.empty(0, 2, dtype=I64), *(m[1] for m in maps)]),
    }


def draw_maps(rng: random.Random, count: int) -> tuple[Arguments, list[list[int]]]:
    """Returns the arguments `slots` and `moved` of several maps, and the ids of each."""
    maps = [draw_map(rng) for _ in range(count)]
    joined = joined_maps(maps)
    return {**joined, "moved": some_form(rng, joined["moved"])}, [m[2] for m in maps]


def some_form(rng: random.Random, moved: Tensor) -> Tensor:
    """Returns `moved` [T, 2], sometimes without its keys if all are 0."""
    without = not moved[:, 1].any() and rng.random() < 0.5
    return moved[:, 0].clone() if without else moved


def draw_mix64(rng: random.Random) -> Arguments:
    return {"ids": whole(*some_ids(rng, size(rng)))}


def in_table_order(rng: random.Random, of_tables: list[list[int]]) -> Arguments:
    """Returns `ids` and `table_offsets`: ids of the maps, and absent ids."""
    ids: list[int] = []
    offsets = [0]
    for known in of_tables:
        wanted = size(rng)
        ids += [rng.choice(known) if known and rng.random() < 0.7 else n
                for n in some_ids(rng, wanted)]  # fmt: skip
        offsets.append(len(ids))
    return {"ids": whole(*ids), "table_offsets": whole(*offsets)}


def draw_lookup(rng: random.Random) -> Arguments:
    maps, of_tables = draw_maps(rng, rng.randrange(4))
    return {**in_table_order(rng, of_tables), **maps}


def draw_collect_new(rng: random.Random) -> Arguments:
    count, tables = size(rng), rng.randint(1, 3)
    return {
        "ids": whole(*some_ids(rng, count)),
        "rows": whole(*(rng.choice((-1, -1, 0, 7, 2**40)) for _ in range(count))),
        "table_offsets": whole(*cuts(rng, count, tables)),
    }


def draw_insert(rng: random.Random) -> Arguments:
    maps, of_tables = draw_maps(rng, rng.randrange(4))
    ids: list[int] = []
    offsets = [0]
    outgoing = iter(maps["slots"][len(of_tables) :])
    done = maps["moved"].view(len(of_tables), -1)[:, 0].tolist() if of_tables else []
    for slots, moved, known in zip(maps["slots"], done, of_tables, strict=False):
        arrays = [slots] if moved == -1 else [slots, next(outgoing)]
        room = min(int((array[:, 1] == 0).sum()) for array in arrays)
        fresh = [*dict.fromkeys(i for i in some_ids(rng, size(rng)) if i not in {*known}).keys()]
        ids += fresh[:room]
        offsets.append(len(ids))
    rows = [rng.choice((0, 1, 5, 2**31, 2**62)) for _ in ids]
    return {
        "new_ids": whole(*ids),
        "new_rows": whole(*rows),
        "new_offsets": whole(*offsets),
        **maps,
    }


def draw_one_map(rng: random.Random) -> tuple[Arguments, list[int]]:
    slots, moved, ids = draw_map(rng)
    return {"slots": slots, "moved": some_form(rng, moved)}, ids


def draw_erase(rng: random.Random) -> Arguments:
    maps, ids = draw_one_map(rng)
    erased = [*rng.choices(ids, k=size(rng)), *some_ids(rng, 3)] if ids else some_ids(rng, 3)
    return {"ids": whole(*rng.sample(erased, len(erased))), **maps}


def draw_new_slots(rng: random.Random) -> Arguments:
    capacity = LINE * rng.choice((1, 2, 3, 5, 100, 2**15, 2**15 + 1))
    return {"slots": torch.zeros(rng.choice((0, 4)), 2, dtype=I64), "capacity": capacity}


def draw_grown_slots(rng: random.Random) -> Arguments:
    maps = [draw_map(rng) for _ in range(rng.randint(1, 4))]
    whole_maps = [(slots[0], moved) for slots, moved, _ in maps if len(slots) == 1]
    whole_maps = whole_maps or [(torch.zeros(0, 2, dtype=I64), whole(-1, 5))]
    return {
        "slots": [slots for slots, _ in whole_maps],
        "capacities": [len(slots) + LINE * rng.choice((1, 3, 50)) for slots, _ in whole_maps],
        "keys": [moved.flatten().tolist()[-1] for _, moved in whole_maps],
    }


def draw_move_slots(rng: random.Random) -> Arguments:
    ids = [*dict.fromkeys(some_ids(rng, size(rng)))]
    rows, key = whole(*rng.sample(range(2 * len(ids)), len(ids))), draw_key(rng)
    (outgoing,), whole_map = a_map(whole(*ids), rows, key=key)
    if rng.random() < 0.1:  # of more than a huge page, which is given back
        outgoing = ops.new_slots(outgoing, 2**18 + 2**16)
        ops.insert(whole(*ids), torch.arange(len(ids)), whole(0, len(ids)), [outgoing], whole_map)
    slots = ops.new_slots(outgoing, len(outgoing) + LINE * rng.choice((0, 1, 7)))
    moved = 0
    if rng.random() < 0.5:
        moved = ops.move_slots(outgoing, slots, 0, rng.randint(0, len(outgoing)), key).item()
    until = rng.choice((0, rng.randint(0, len(outgoing)), len(outgoing), 2**62))
    return {"outgoing": outgoing, "slots": slots, "moved": moved, "until": until, "key": key}


def draw_probe_lengths(rng: random.Random) -> Arguments:
    slots, moved, _ = draw_map(rng)
    return {"slots": slots[0], "every": rng.choice((1, 2, 3, 2**40)), "key": moved[0, 1].item()}


def draw_used_slots(rng: random.Random) -> Arguments:
    maps, _ = draw_one_map(rng)
    return {"slots": maps["slots"][0]}


def draw_ids_of_rows(rng: random.Random) -> Arguments:
    maps, ids = draw_one_map(rng)
    first, last = sorted(rng.randrange(2 * len(ids) + 2) for _ in range(2))
    return {**maps, "first": first, "last": last}


def draw_count_cells(rng: random.Random) -> Arguments:
    maps, _ = draw_one_map(rng)
    return {**maps, "bits": rng.choice((0, 1, 3, 8, 16))}


def draw_ids_between(rng: random.Random) -> Arguments:
    maps, _ = draw_one_map(rng)
    ends = sorted(rng.choice((0, 2**64 - 1, rng.randrange(2**64))) for _ in range(2))
    first, last = ends if rng.random() < 0.9 else ends[::-1]
    return {**maps, "first": oracle.signed(first), "last": oracle.signed(last)}


# Content sums, rows and marks


def draw_content_sum(rng: random.Random) -> Arguments:
    count, columns = size(rng), rng.choice((0, 1, 2, 3, 16, 40))
    dtype = rng.choice((*FLOATS, I64))
    values = numbers_of(rng, (count, columns), torch.float32)
    return {
        "ids": whole(*some_ids(rng, count)),
        "values": values.nan_to_num(7, 3, -3).to(dtype) if dtype == I64 else values.to(dtype),
        "first_column": rng.choice((0, 1, 5, 2**31 - 1)),
        "key": rng.randrange(-(2**63), 2**63),
    }


def draw_blocks(rng: random.Random) -> Arguments:
    """Returns `blocks`, `shift` and `columns` of one table."""
    shift, columns, dtype = a_shift(rng), a_width(rng), rng.choice(FLOATS)
    count = rng.randrange(4)
    blocks = [numbers_of(rng, (1 << shift, columns), dtype) for _ in range(count)]
    blocks = with_short_last(rng, blocks)
    if not blocks and rng.random() < 0.5:
        columns = rng.choice((2**20, 2**30, 2**31 - 1))
    return {"blocks": blocks, "shift": shift, "columns": columns}


def draw_rows(rng: random.Random, blocks: Arguments, lowest: int = 0) -> list[int]:
    """Returns rows inside the blocks."""
    capacity = sum(map(len, blocks["blocks"]))
    if capacity == 0 and (lowest == 0 or blocks["columns"] > 2**12):
        return []
    return [rng.randrange(lowest, capacity) for _ in range(size(rng, 800))]


def draw_raise_errors(rng: random.Random) -> Arguments:
    return {"like": torch.ones(rng.choice((0, 1, 7)))}


def draw_grow_block(rng: random.Random) -> Arguments:
    """Half of the blocks are in a range already, of the same limit or a smaller one."""
    rows, columns = rng.choice((0, 1, 5, 600)), a_width(rng)
    limit = rows + rng.choice((1, 7, 5000))
    block = numbers_of(rng, (rows, columns), rng.choice(FLOATS))
    if rows and rng.random() < 0.5:
        block = ops.grow_block(block, rows, rng.randint(rows, limit))
    longer = rng.randint(max(1, rows), limit)
    return {"block": block, "rows": longer, "limit": limit, "on_host": rng.random() < 0.5}


def draw_init_rows_(rng: random.Random) -> Arguments:
    blocks = draw_blocks(rng)
    rows = [*dict.fromkeys(draw_rows(rng, blocks))]  # fresh rows: each once
    probabilities = sorted((rng.random(), rng.random())) if rng.random() < 0.5 else [0.0, 1.0]
    return {
        "ids": whole(*some_ids(rng, len(rows))),
        "rows": whole(*rows),
        **blocks,
        "first_column": rng.choice((0, 1, 3, 16, 40)),
        "kind": rng.randrange(3),
        "parameters": [
            -rng.random(),
            rng.random(),
            rng.random() - 0.5,
            rng.random(),
            *probabilities,
        ],
        "key": rng.randrange(-(2**63), 2**63),
    }


def draw_ask_for_rows(rng: random.Random) -> Arguments:
    blocks = draw_blocks(rng)
    return {"rows": whole(*draw_rows(rng, blocks, -1)), **blocks}


def draw_gather_rows(rng: random.Random) -> Arguments:
    blocks = draw_blocks(rng)
    dtype = blocks["blocks"][0].dtype if blocks["blocks"] else rng.choice(FLOATS)
    return {"rows": whole(*draw_rows(rng, blocks, -1)), **blocks, "dtype": dtype}


def draw_scatter_rows_(rng: random.Random) -> Arguments:
    blocks = draw_blocks(rng)
    rows = draw_rows(rng, blocks)
    dtype = blocks["blocks"][0].dtype if blocks["blocks"] else torch.float32
    values = numbers_of(rng, (len(rows), blocks["columns"] if rows else 1), dtype)
    return {"rows": whole(*rows), "values": values, **blocks}


def draw_words(rng: random.Random, make: Any) -> Arguments:
    """Returns `rows`, `table_offsets`, `blocks` and `layout` of tables that keep one word a row."""
    blocks: list[Tensor] = []
    layout, rows, offsets = [], [], [0]
    for _ in range(rng.randrange(4)):
        shift, count = a_shift(rng), rng.randrange(4)
        layout.append([len(blocks), count, shift, rng.choice((1, 1, 5))])
        own = with_short_last(rng, [make(1 << shift) for _ in range(count)])
        blocks += own
        capacity = sum(map(len, own))
        rows += [rng.randrange(-1, capacity) for _ in range(size(rng))]
        offsets.append(len(rows))
    return {
        "rows": whole(*rows),
        "table_offsets": whole(*offsets),
        "blocks": blocks,
        "layout": torch.tensor(layout, dtype=I64).reshape(-1, 4),
    }


def draw_mark_rows_(rng: random.Random) -> Arguments:
    drawn = draw_words(rng, lambda rows: torch.arange(rows, dtype=torch.int32).reshape(-1, 1))
    versions = [rng.choice((0, 5, 2**31 - 1)) for _ in range(len(drawn["layout"]))]
    drawn["marks"] = drawn.pop("blocks")
    return {**drawn, "versions": whole(*versions)}


def draw_mark_new_(rng: random.Random) -> Arguments:
    marks: list[Tensor] = []
    layout, rows, offsets = [], [], [0]
    for _ in range(rng.randrange(4)):
        shift, count = rng.randint(6, 8), rng.randrange(3)
        layout.append([len(marks), count, shift, rng.choice((1, 1, 5))])
        density = rng.choice((0, 255, rng.randrange(256)))
        marks += [
            torch.tensor([byte & density for byte in rng.randbytes(1 << shift)]).byte()
            for _ in range(count)
        ]
        most = rng.choice((8, count * 8 << shift)) if count else 9
        rows += [rng.randrange(-1, most) for _ in range(size(rng))]
        offsets.append(len(rows))
    return {
        "rows": whole(*rows),
        "table_offsets": whole(*offsets),
        "marks": marks,
        "layout": torch.tensor(layout, dtype=I64).reshape(-1, 4),
    }


# Scores, eviction and admission


def a_score(rng: random.Random) -> int:
    if rng.random() < 0.2:
        return oracle.signed(FREE << 32)
    last_seen = rng.choice((rng.randrange(12), FREE - 1))
    return oracle.signed(last_seen << 32 | rng.choice((0, 1, 2, MOST_COUNT)))


def draw_scores(rng: random.Random, rows: int) -> Tensor:
    return whole(*(a_score(rng) for _ in range(rows))).reshape(-1, 1)


def draw_touch_scores_(rng: random.Random) -> Arguments:
    drawn = draw_words(rng, lambda rows: draw_scores(rng, rows))
    steps = [rng.choice((0, 7, FREE - 1)) for _ in range(len(drawn["layout"]))]
    times = [rng.choice((1, 2, MOST_COUNT)) for _ in range(len(drawn["rows"]))]
    scores, layout = drawn.pop("blocks"), drawn.pop("layout")
    own = {**drawn, "steps": whole(*steps), "times": rng.choice((None, whole(*times)))}
    return scored(scores, layout, **own)


def draw_some_scores(rng: random.Random) -> Arguments:
    """Returns `rows` and `table_offsets` of tables, and the tables, which have scores and no ids."""
    drawn = draw_words(rng, lambda rows: draw_scores(rng, rows))
    return scored(drawn.pop("blocks"), drawn.pop("layout"), **drawn)


def draw_read_scores(rng: random.Random) -> Arguments:
    return draw_some_scores(rng)


def draw_write_scores_(rng: random.Random) -> Arguments:
    """Equal rows get equal scores."""
    drawn = draw_some_scores(rng)
    rows, offsets = drawn["rows"].tolist(), drawn["table_offsets"].tolist()
    of_rows = {
        (table, row): (rng.choice((-1, 0, 9, FREE - 1)), rng.choice((0, 1, MOST_COUNT)))
        for table, (begin, end) in enumerate(itertools.pairwise(offsets))
        for row in rows[begin:end]
    }
    tables = [
        t for t, (begin, end) in enumerate(itertools.pairwise(offsets)) for _ in range(begin, end)
    ]
    written = [of_rows[place] for place in zip(tables, rows, strict=True)]
    last_seen, counts = whole(*(one for one, _ in written)), whole(*(one for _, one in written))
    return {**drawn, "last_seen": last_seen, "counts": counts}


class ScoredTable(NamedTuple):
    """A map and the scores of its rows; all other rows are free.

    Attributes:
        known: {id: row}.
        scores: blocks of 2^shift words.
    """

    slots: list[Tensor]
    moved: Tensor
    known: dict[int, int]
    scores: list[Tensor]
    shift: int

    @property
    def capacity(self) -> int:
        return len(self.scores) << self.shift


def draw_scored_table(rng: random.Random) -> ScoredTable:
    slots, moved, _ = draw_map(rng)
    shift = rng.choice((0, 3, 8, 11))
    known = {number: place - 1 for array in slots for number, place in array.tolist() if place > 0}
    blocks = -(-(max(known.values(), default=-1) + 1 + rng.randrange(9)) // (1 << shift))
    words = whole(*[oracle.signed(FREE << 32)] * (blocks << shift))
    for row in known.values():
        words[row] = a_score(rng)
    scores = [*words.reshape(-1, 1 << shift, 1).clone()] if blocks else []
    return ScoredTable(slots, moved, known, scores, shift)


def of_scored(tables: list[ScoredTable], **own: Any) -> Arguments:
    """Returns the arguments of an op: its own, and tables that have maps and scores only."""
    scores = [block for table in tables for block in table.scores]
    first, layout = 0, []
    for table in tables:
        layout.append([first, len(table.scores), table.shift, 1])
        first += len(table.scores)
    maps = joined_maps([(table.slots, table.moved, []) for table in tables])
    return scored(scores, torch.tensor(layout, dtype=I64).reshape(-1, 4), **maps, **own)


def a_before(rng: random.Random) -> int:
    return rng.choice((0, 5, 12, FREE, 2**62, -1))


def draw_half_lives(rng: random.Random) -> list[int]:
    """Returns the first steps of half-lives, or none."""
    if rng.random() < 0.3:
        return [-1] * 40
    return sorted(rng.choice((0, rng.randrange(12), rng.randrange(FREE))) for _ in range(40))


def draw_kept(rng: random.Random, tables: list[ScoredTable]) -> Arguments:
    """Draws rows that are not chosen, or none."""
    if rng.random() < 0.4:
        return {"kept": None, "kept_offsets": None}
    rows: list[int] = []
    offsets = [0]
    for table in tables:
        rows += rng.choices([-1, *table.known.values()], k=rng.randrange(2 * len(table.known) + 1))
        offsets.append(len(rows))
    return {"kept": whole(*rows), "kept_offsets": whole(*offsets)}


def draw_lowest_rows(rng: random.Random) -> Arguments:
    tables = [draw_scored_table(rng) for _ in range(rng.randint(1, 3))]
    questions = []
    for _ in range(rng.randrange(4)):
        t = rng.randrange(len(tables))
        capacity = tables[t].capacity
        rows = rng.choice((capacity, rng.randint(0, capacity)))
        most = rng.choice((0, 1, 3, len(tables[t].known), 2**62))
        questions.append([t, rows, rng.randrange(2), a_before(rng), most])
    half_lives = [draw_half_lives(rng) for _ in questions]
    return of_scored(
        tables,
        like=torch.ones(rng.choice((0, 3))),
        questions=torch.tensor(questions, dtype=I64).reshape(-1, 5),
        half_lives=rng.choice((None, torch.tensor(half_lives, dtype=I64).reshape(-1, 40))),
        in_order=rng.random() < 0.5,
        **draw_kept(rng, tables),
    )


def draw_choose_listed(rng: random.Random) -> Arguments:
    """Lists have rows of the table, some of which were seen since, and rows outside of it."""
    tables = [draw_scored_table(rng) for _ in range(rng.randint(1, 3))]
    listed, spans = [], []
    for _ in range(rng.randrange(4)):
        t = rng.randrange(len(tables))
        words = torch.cat([torch.empty(0, 1, dtype=I64), *tables[t].scores]).flatten().tolist()
        entries = []
        for number, row in tables[t].known.items():
            last_seen = words[row] >> 32 & FREE
            entries.append([number, row, rng.choice((last_seen, last_seen, last_seen, 3))])
        wild = (-(2**63), -1, tables[t].capacity, 2**63 - 1)
        entries += [[7, rng.choice(wild), FREE] for _ in range(rng.randrange(3))]
        rng.shuffle(entries)
        begin, end = sorted(rng.randint(0, len(entries)) for _ in range(2))
        listed.append(torch.tensor(entries, dtype=I64).reshape(-1, 3).T.contiguous())
        spans.append([t, begin, end, rng.choice((0, 1, 5, end - begin, 2**62))])
    spans_of_lists = torch.tensor(spans, dtype=I64).reshape(-1, 4)
    return of_scored(tables, listed=listed, spans=spans_of_lists, **draw_kept(rng, tables))


def draw_rule(rng: random.Random, has_counters: bool) -> tuple[list[int], list[float]]:
    """Returns a rule of admission, and the powers of its chance of refusal."""
    kind, powers = rng.randrange(4), [1.0] * 33
    if kind == 2:
        powers[0] = rng.choice((0.0, 0.5, rng.random(), 1.0 - 1e-9, 1.0))
        for bit in range(1, 33):
            powers[bit] = powers[bit - 1] ** 2
        return [2, rng.randrange(-(2**63), 2**63), rng.choice((1, 2, 7, 33)), 0], powers
    number = rng.choice((0, 1, 2, 9, MOST_COUNT, 2**40))
    return [kind, number, 0, int(has_counters and rng.random() < 0.8)], powers


def draw_admit(rng: random.Random) -> Arguments:
    tables = [draw_scored_table(rng) for _ in range(rng.randint(1, 3))]
    has_counters = rng.random() < 0.7
    ids: list[int] = []
    offsets, rules, squares = [0], [], []
    for table in tables:
        waiting = rng.sample([*table.known], rng.randint(0, len(table.known)))
        ids += dict.fromkeys([*waiting, *some_ids(rng, size(rng, 600))])
        offsets.append(len(ids))
        rule, powers = draw_rule(rng, has_counters)
        rules.append(rule)
        squares.append(powers)
    times = (1, 1, 2, 9, MOST_COUNT)
    given = of_scored(
        tables,
        new_ids=whole(*ids),
        occurrences=whole(*(rng.choice(times) for _ in ids)),
        new_offsets=whole(*offsets),
        asks=rng.choice((None, torch.tensor([rng.random() < 0.7 for _ in ids], dtype=torch.bool))),
        counted=rng.choice((None, whole(*(rng.choice((0, *times)) for _ in ids)))),
        rules=torch.tensor(rules, dtype=I64).reshape(-1, 4),
        squares=torch.tensor(squares, dtype=torch.float64).reshape(-1, 33),
        sums=rng.random() < 0.5,
    )
    counters = given.pop("tables")
    return {**given, "counters": counters if has_counters else torch.empty(0, dtype=I64)}


def draw_remove_rows_(rng: random.Random) -> Arguments:
    tables = [draw_scored_table(rng) for _ in range(rng.randrange(4))]
    gone: list[tuple[int, int]] = []
    offsets = [0]
    for table in tables:
        gone += rng.sample([*table.known.items()], rng.randint(0, len(table.known)))
        offsets.append(len(gone))
    return of_scored(
        tables,
        ids=whole(*(number for number, _ in gone)),
        rows=whole(*(row for _, row in gone)),
        offsets=offsets,
    )


# Owners


def ids_at_ends(rng: random.Random, ranks: int) -> list[int]:
    """Returns ids beside the ends of the owners' ranges, and those with the last mixed ids."""
    block = (oracle.WORD - 1) // ranks
    ends = [rng.randint(0, ranks) * block + rng.randint(-2, 2) for _ in range(6)]
    return [oracle.unmix64(word % oracle.WORD) for word in ends]


def draw_sort_by_owner(rng: random.Random) -> Arguments:
    count, ranks = size(rng), rng.choice((1, 2, 3, 5, 8, 48, 1000))
    if rng.random() < 0.02:
        count = 20_000  # several pieces
    ids = some_ids(rng, min(count, 300)) + ids_at_ends(rng, ranks)
    bags = rng.choice((1, 2, count, 3 * count)) if count else rng.choice((0, 1, 7))
    if bags * ranks > 10**6:
        ranks = 3
    ends = cuts(rng, count, bags)
    lengths = torch.tensor(ends).diff().to(rng.choice((I64, torch.int32)))
    weights = (
        numbers_of(rng, (count,), rng.choice((*FLOATS, torch.float64)))
        if rng.random() < 0.5
        else None
    )
    return {
        "ids": whole(*(rng.choice(ids) for _ in range(count))), "lengths": lengths,
        "weights": weights, "ranks": ranks, "positions": rng.random() < 0.5,
    }  # fmt: skip
