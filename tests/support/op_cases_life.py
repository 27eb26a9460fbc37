"""The ops of scores, eviction and admission."""

from __future__ import annotations

import random
from typing import Any

import oracle
from op_cases import (
    I64,
    Arguments,
    Unjudged,
    check_offsets,
    equal,
    need,
    numbers,
    register,
    rows_of_blocks,
    size,
    some_ids,
    whole,
    with_short_last,
)
from op_cases_id_map import draw_map, read_maps
from op_cases_storage import draw_words, words_of_tables
from torch import Tensor

FREE = 2**32 - 1  # last_seen of a row without an id
MOST_COUNT = 2**32 - 1


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
    drawn["scores"] = drawn.pop("blocks")
    return {**drawn, "steps": whole(*steps), "times": rng.choice((None, whole(*times)))}


def check_touch_scores_(before: Arguments, after: Arguments, _: None) -> None:
    rows = numbers(before["rows"], "rows")
    scores = words_of_tables(before["scores"], before["layout"], I64)
    steps = numbers(before["steps"], "steps")
    offsets = check_offsets(before["table_offsets"], len(scores), len(rows))
    times = [1] * len(rows) if before["times"] is None else numbers(before["times"], "times")
    need(len(times) == len(rows), "times of each row")
    need(all(1 <= t <= MOST_COUNT for t in times), "times in [1, 2^32)")
    need(len(steps) == len(scores), "a step for each table")
    need(all(0 <= step < FREE for step in steps), "steps in [0, 2^32 - 1)")
    for table, step, a, b in zip(scores, steps, offsets, offsets[1:], strict=False):
        need(not table or all(-1 <= row < len(table) for row in rows[a:b]), "rows of the scores")
        for row, often in zip(rows[a:b], times[a:b], strict=True):
            if table and row >= 0:
                count = min(table[row] % 2**32 + often, MOST_COUNT)
                table[row] = oracle.signed(step << 32 | count)
    assert words_of_tables(after["scores"], before["layout"], I64) == scores


def draw_one_table(rng: random.Random) -> Arguments:
    """Returns `scores` and `shift` of one table."""
    shift = rng.choice((0, 1, 3, 8))
    scores = [draw_scores(rng, 1 << shift) for _ in range(rng.randrange(4))]
    return {"scores": with_short_last(rng, scores), "shift": shift}


def words_of(given: Arguments) -> list[int]:
    """Returns the scores of one table as unsigned words."""
    joined = rows_of_blocks(given["scores"], given["shift"], 1, I64)
    return [] if joined is None else [word % oracle.WORD for word in joined.flatten().tolist()]


def draw_write_scores_(rng: random.Random) -> Arguments:
    table = draw_one_table(rng)
    capacity = sum(map(len, table["scores"]))
    rows = [rng.randrange(capacity) for _ in range(size(rng, 800))] if capacity else []
    return {
        "rows": whole(*rows),
        "last_seen": whole(*(rng.choice((-1, 0, 9, FREE - 1)) for _ in rows)),
        "counts": whole(*(rng.choice((0, 1, MOST_COUNT)) for _ in rows)),
        **table,
    }


def check_write_scores_(before: Arguments, after: Arguments, _: None) -> None:
    rows, seen = numbers(before["rows"], "rows"), numbers(before["last_seen"], "last_seen")
    counts, words = numbers(before["counts"], "counts"), words_of(before)
    need(len(rows) == len(seen) == len(counts), "a score for each row")
    for row, last_seen, count in zip(rows, seen, counts, strict=True):
        need(0 <= row < len(words), "rows in the blocks")
        need(-1 <= last_seen < FREE and 0 <= count <= MOST_COUNT, "last_seen and counts")
        words[row] = FREE << 32 if last_seen < 0 else last_seen << 32 | count
    assert words_of(after) == words


def draw_read_scores(rng: random.Random) -> Arguments:
    table = draw_one_table(rng)
    capacity = sum(map(len, table["scores"]))
    return {"rows": whole(*(rng.randrange(-1, capacity) for _ in range(size(rng)))), **table}


def check_read_scores(before: Arguments, _: Arguments, result: Any) -> None:
    rows, words = numbers(before["rows"], "rows"), words_of(before)
    need(all(-1 <= row < len(words) for row in rows), "rows in the blocks")
    read = [words[row] if row >= 0 else FREE << 32 for row in rows]
    free = [word >> 32 == FREE for word in read]
    seen = [-1 if f else word >> 32 for f, word in zip(free, read, strict=True)]
    equal(result[0], whole(*seen), "last_seen")
    counts = [0 if f else word % 2**32 for f, word in zip(free, read, strict=True)]
    equal(result[1], whole(*counts), "counts")


def draw_lowest_scores(rng: random.Random) -> Arguments:
    slots, moved, ids = draw_map(rng)
    shift = rng.choice((0, 3, 8, 11))
    highest = max((int(array[:, 1].max()) for array in slots if len(array)), default=0)
    blocks = -(-(highest + rng.randrange(9)) // (1 << shift))
    scores = whole(*[oracle.signed(FREE << 32)] * (blocks << shift))
    for array in slots:
        for place in array[:, 1].tolist():
            if place > 0:
                scores[place - 1] = a_score(rng)
    rows = rng.choice((blocks << shift, rng.randint(0, blocks << shift)))
    return {
        "slots": slots,
        "moved": moved.clone(),
        "scores": [*scores.reshape(-1, 1 << shift, 1).clone()] if blocks else [],
        "shift": shift,
        "rows": rows,
        "by_count": rng.random() < 0.5,
        "before": rng.choice((0, 5, 12, FREE, 2**62, -1)),
        "most": rng.choice((0, 1, 3, len(ids), 2**62)),
    }


def check_lowest_scores(before: Arguments, _: Arguments, result: Any) -> None:
    (held,) = read_maps(before["slots"], before["moved"], 1)
    words, rows, step = words_of(before), before["rows"], before["before"]
    need(0 <= rows <= len(words) and before["most"] >= 0, "rows in the blocks, most >= 0")
    if {r for r, w in enumerate(words[:rows]) if w >> 32 != FREE} - {*held.rows.values()}:
        raise Unjudged("a row without an id that is not free")
    if len({*held.rows.values()}) < len(held.rows):
        raise Unjudged("two ids of one row")
    able = []
    for key, row in held.rows.items():
        if not 0 <= row < rows:
            continue
        seen, count = words[row] >> 32, words[row] % 2**32
        if seen != FREE and (seen < step or (seen == step and count == 0)):
            able.append((count if before["by_count"] else seen, oracle.mix64(key), key))
    chosen = {key for _, _, key in sorted(able)[: before["most"]]}
    ids = [key for array in held.arrays for key, _ in array.held.values() if key in chosen]
    by_mixed_id = sorted(ids, key=oracle.mix64)
    if result[0].tolist() == by_mixed_id:  # the order on a GPU
        ids = by_mixed_id
    equal(result[0], whole(*ids), "ids")
    equal(result[1], whole(*(held.rows[key] for key in ids)), "rows")


def draw_oldest_first(rng: random.Random) -> Arguments:
    ids = some_ids(rng, size(rng))
    seen = [rng.choice((0, 1, 7, 2**32 - 1, rng.randrange(2**32))) for _ in ids]
    return {"ids": whole(*ids), "last_seen": whole(*seen)}


def check_oldest_first(before: Arguments, _: Arguments, result: Tensor) -> None:
    ids, seen = numbers(before["ids"], "ids"), numbers(before["last_seen"], "last_seen")
    need(len(ids) == len(seen), "last_seen of each id")
    need(all(0 <= s < 2**32 for s in seen), "last_seen in [0, 2^32)")
    keys = [(last_seen, oracle.mix64(number)) for last_seen, number in zip(seen, ids, strict=True)]
    equal(result.sort().values, whole(*range(len(ids))))
    assert [keys[place] for place in result.tolist()] == sorted(keys)


register(globals())
