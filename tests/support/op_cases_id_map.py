"""The ops of id maps and canonical order: csrc/storage/id_map.h says what a map is."""

from __future__ import annotations

import itertools
import random
from typing import Any

import oracle
import torch
from op_cases import (
    I64,
    Arguments,
    Unjudged,
    check_offsets,
    cuts,
    equal,
    need,
    numbers,
    register,
    size,
    some_ids,
    whole,
)
from raw_maps import a_map
from torch import Tensor

from torchrec_dyn import ops

LINE = 4  # slots of a cache line


# Id maps


def draw_map(rng: random.Random) -> tuple[list[Tensor], Tensor, list[int]]:
    """Returns (slots, moved, ids): the slots of a map, then its outgoing slots if it grows."""
    ids = [*dict.fromkeys(some_ids(rng, size(rng)))]
    rows = rng.sample(range(2 * len(ids)), len(ids))
    grows, room = rng.random() < 0.4, rng.choice((1.1, 1.7))
    slots, moved = a_map(whole(*ids), whole(*rows), grows, room, draw_key(rng))
    return slots, moved, ids


def draw_key(rng: random.Random) -> int:
    return rng.choice((0, rng.getrandbits(62), -rng.getrandbits(63)))


def draw_maps(rng: random.Random, count: int) -> tuple[Arguments, list[list[int]]]:
    """Returns the arguments `slots` and `moved` of several maps, and the ids of each."""
    maps = [draw_map(rng) for _ in range(count)]
    slots = [*(m[0][0] for m in maps), *(m[0][1] for m in maps if len(m[0]) == 2)]
    moved = torch.cat([torch.empty(0, 2, dtype=I64), *(m[1] for m in maps)])
    return {"slots": slots, "moved": some_form(rng, moved)}, [m[2] for m in maps]


def some_form(rng: random.Random, moved: Tensor) -> Tensor:
    """Returns `moved` [T, 2], sometimes without its keys if all are 0."""
    without = not moved[:, 1].any() and rng.random() < 0.5
    return moved[:, 0].clone() if without else moved


class Slots:
    """The slots of one array that are not empty: {slot: (id, place)}."""

    def __init__(self, array: Tensor, key: int) -> None:
        self.key = key
        need(array.dtype == I64 and array.dim() == 2 and array.shape[1] == 2, "slots [C, 2]")
        need(len(array) % LINE == 0, "whole lines of slots")
        self.capacity = len(array)
        used = array[:, 1].nonzero().flatten()
        self.held = dict(zip(used.tolist(), map(tuple, array[used].tolist()), strict=True))

    @property
    def has_gaps(self) -> bool:
        """True if an empty slot lies between the home of an id and the id, though a lookup finds it."""
        homes = {
            slot: oracle.home_slot(number, self.capacity, self.key)
            for slot, (number, _) in self.held.items()
        }
        return any(
            (home + i) % self.capacity not in self.held
            for slot, home in homes.items()
            for i in range((slot - home) % self.capacity)
        )

    def find(self, number: int) -> int:
        """Returns the row of an id, -1 if it is absent."""
        home = oracle.home_slot(number, self.capacity, self.key)
        for probe in range(0, self.capacity, LINE):
            line = [self.held.get((home + probe + i) % self.capacity) for i in range(LINE)]
            for slot in line:
                if slot is not None and slot[0] == number:
                    return slot[1] - 1
            if None in line:
                return -1
        return -1


class Map:
    """One map, read slot by slot. `arrays`: its slots, and its outgoing slots if it grows."""

    def __init__(self, arrays: list[Tensor], moved: int, key: int) -> None:
        self.moved, self.key = moved, key
        self.arrays = [Slots(array, key) for array in arrays]
        if len(self.arrays) == 2:
            outgoing = self.arrays[1].capacity
            need(0 <= moved < outgoing and moved % LINE == 0, "moved in the outgoing slots")
            if self.arrays[0].capacity < outgoing:
                raise Unjudged("a map that grows into fewer slots")
        held = [slot for array in self.arrays for slot in array.held.values()]
        self.rows = {key: place - 1 for key, place in held}
        self.is_sound = (
            len(self.rows) == len(held)
            and all(place > 0 for _, place in held)
            and all(self.find(key) == row for key, row in self.rows.items())
            and not any(array.has_gaps for array in self.arrays)
        )

    def find(self, number: int) -> int:
        if len(self.arrays) == 1:
            return self.arrays[0].find(number)
        frontier = -(-(self.moved << 64) // self.arrays[1].capacity)
        return self.arrays[int(oracle.slot_hash(number, self.key) >= frontier)].find(number)


def read_maps(slots: list[Tensor], moved: Tensor, count: int | None = None) -> list[Map]:
    need(moved.dim() in (1, 2), "moved of one or two dimensions")
    if moved.dim() == 2:
        need(moved.shape[1] == 2, "moved [T, 2]")
        done, keys = numbers(moved[:, 0], "moved"), moved[:, 1].tolist()
    else:
        done = numbers(moved, "moved")
        keys = [0] * len(done)
    growing = [m for m in done if m != -1]
    need(len(slots) == len(done) + len(growing), "slots of each map")
    need(count is None or len(done) == count, "one map")
    outgoing = iter(slots[len(done) :])
    maps = [
        Map([array] if m == -1 else [array, next(outgoing)], m, key)
        for array, m, key in zip(slots, done, keys, strict=False)
    ]
    if not all(m.is_sound for m in maps):
        raise Unjudged("a damaged map")
    return maps


def after_call(after: Arguments) -> list[Map]:
    try:
        return read_maps(after["slots"], after["moved"])
    except Unjudged:
        raise AssertionError("an id in the map is not found") from None


def draw_mix64(rng: random.Random) -> Arguments:
    return {"ids": whole(*some_ids(rng, size(rng)))}


def check_mix64(before: Arguments, _: Arguments, result: Tensor) -> None:
    ids = numbers(before["ids"], "ids")
    equal(result, whole(*(oracle.signed(oracle.mix64(i)) for i in ids)))


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


def check_lookup(before: Arguments, _: Arguments, result: Any) -> None:
    ids = numbers(before["ids"], "ids")
    maps = read_maps(before["slots"], before["moved"])
    offsets = check_offsets(before["table_offsets"], len(maps), len(ids))
    rows = [
        [m.find(i) for i in ids[a:b]]
        for m, a, b in zip(maps, offsets, offsets[1:], strict=False)
    ]  # fmt: skip
    equal(result[0], whole(*(row for table in rows for row in table)), "rows")
    equal(result[1], whole(*(table.count(-1) for table in rows)), "absent")


def draw_collect_new(rng: random.Random) -> Arguments:
    count, tables = size(rng), rng.randint(1, 3)
    return {
        "ids": whole(*some_ids(rng, count)),
        "rows": whole(*(rng.choice((-1, -1, 0, 7, 2**40)) for _ in range(count))),
        "table_offsets": whole(*cuts(rng, count, tables)),
    }


def check_collect_new(before: Arguments, _: Arguments, result: Any) -> None:
    ids, rows = numbers(before["ids"], "ids"), numbers(before["rows"], "rows")
    need(len(ids) == len(rows), "as many rows as ids")
    tables = before["table_offsets"].numel() - 1
    offsets = check_offsets(before["table_offsets"], tables, len(ids))
    new_ids, counts, new_offsets, index = [], [], [0], [-1] * len(ids)
    for begin, end in itertools.pairwise(offsets):
        seen: dict[int, int] = {}
        for i in range(begin, end):
            if rows[i] != -1:
                continue
            if ids[i] not in seen:
                seen[ids[i]] = len(new_ids)
                new_ids.append(ids[i])
                counts.append(0)
            index[i] = seen[ids[i]]
            counts[index[i]] += 1
        new_offsets.append(len(new_ids))
    expected = (new_ids, counts, new_offsets, index)
    for got, listed in zip(result, expected, strict=True):
        equal(got, whole(*listed))


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


def check_insert(before: Arguments, after: Arguments, _: None) -> None:
    ids, rows = numbers(before["new_ids"], "new_ids"), numbers(before["new_rows"], "new_rows")
    need(len(ids) == len(rows), "as many rows as ids")
    maps = read_maps(before["slots"], before["moved"])
    offsets = check_offsets(before["new_offsets"], len(maps), len(ids))
    need(all(row >= 0 for row in rows), "rows >= 0")
    if any(row == 2**63 - 1 for row in rows):
        raise Unjudged("row + 1 does not fit")
    for m, begin, end in zip(maps, offsets, offsets[1:], strict=False):
        if len({*ids[begin:end]}) < end - begin or {*ids[begin:end]} & m.rows.keys():
            raise Unjudged("a repeated id")
        m.rows |= dict(zip(ids[begin:end], rows[begin:end], strict=True))
    for m, now in zip(maps, after_call(after), strict=True):
        assert m.rows == now.rows


def draw_fill_new_(rng: random.Random) -> Arguments:
    count, fresh = size(rng), rng.randint(0, 9)
    index = [rng.choice((-1, rng.randrange(fresh) if fresh else -1)) for _ in range(count)]
    return {
        "rows": whole(*(rng.randrange(9) for _ in range(count))),
        "new_index": whole(*index),
        "new_rows": whole(*(rng.randrange(100) for _ in range(fresh))),
    }


def check_fill_new_(before: Arguments, after: Arguments, _: None) -> None:
    rows, index = numbers(before["rows"], "rows"), numbers(before["new_index"], "new_index")
    fresh = numbers(before["new_rows"], "new_rows")
    need(len(rows) == len(index), "as many numbers as rows")
    need(all(i < len(fresh) for i in index), "new_index inside new_rows")
    filled = [row if i < 0 else fresh[i] for row, i in zip(rows, index, strict=True)]
    equal(after["rows"], whole(*filled), "rows")


def draw_one_map(rng: random.Random) -> tuple[Arguments, list[int]]:
    slots, moved, ids = draw_map(rng)
    return {"slots": slots, "moved": some_form(rng, moved)}, ids


def draw_erase(rng: random.Random) -> Arguments:
    maps, ids = draw_one_map(rng)
    erased = [*rng.choices(ids, k=size(rng)), *some_ids(rng, 3)] if ids else some_ids(rng, 3)
    return {"ids": whole(*rng.sample(erased, len(erased))), **maps}


def check_erase(before: Arguments, after: Arguments, result: Tensor) -> None:
    ids = numbers(before["ids"], "ids")
    (held,) = read_maps(before["slots"], before["moved"], 1)
    equal(result, whole(*(held.rows.pop(i, -1) for i in ids)))
    assert after_call(after)[0].rows == held.rows


def draw_new_slots(rng: random.Random) -> Arguments:
    capacity = LINE * rng.choice((1, 2, 3, 5, 100, 2**15, 2**15 + 1))
    return {"slots": torch.zeros(rng.choice((0, 4)), 2, dtype=I64), "capacity": capacity}


def check_new_slots(before: Arguments, _: Arguments, result: Tensor) -> None:
    capacity = before["capacity"]
    need(LINE <= capacity < 2**48 and capacity % LINE == 0, "a capacity of whole lines")
    assert result.shape == (capacity, 2) and result.is_contiguous()
    some = result if capacity <= 2**20 else result[:: capacity // 64]
    assert not some.any(), "slots that are not empty"


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


def check_move_slots(before: Arguments, after: Arguments, result: Tensor) -> None:
    outgoing, slots, moved = before["outgoing"], before["slots"], before["moved"]
    need(0 <= moved <= len(outgoing) and moved % LINE == 0, "moved in the outgoing slots")
    need(len(outgoing) <= len(slots), "as many slots as outgoing slots")

    def one_map(given: Arguments, moved: int) -> list[Map]:
        if moved == len(outgoing):
            return read_maps([given["slots"]], torch.tensor([[-1, before["key"]]]))
        arrays = [given["slots"], given["outgoing"]]
        return read_maps(arrays, torch.tensor([[moved, before["key"]]]))

    if moved == len(outgoing) and outgoing[:, 1].any():
        raise Unjudged("all slots have moved, and yet hold ids")
    (held,) = one_map(before, moved)
    now = result.item()
    until = min(before["until"], len(outgoing))
    assert now == moved if until <= moved else until <= now <= len(outgoing), f"moved {now}"
    (kept,) = one_map(after, now)
    assert kept.rows == held.rows
    if now == len(outgoing):
        assert not after["outgoing"][:, 1].any(), "slots that did not move"


def draw_probe_lengths(rng: random.Random) -> Arguments:
    slots, moved, _ = draw_map(rng)
    return {"slots": slots[0], "every": rng.choice((1, 2, 3, 2**40)), "key": moved[0, 1].item()}


def check_probe_lengths(before: Arguments, _: Arguments, result: Tensor) -> None:
    slots = before["slots"]
    key = before["key"]
    (held,) = read_maps([slots], torch.tensor([[-1, key]]))
    every = before["every"]
    need(every >= 1, "every >= 1")
    lengths = [
        n
        for slot, n in enumerate(oracle.probe_lengths(slots, key))
        if n and slot // 4096 % every == 0
    ]
    assert every > 1 or len(lengths) == len(held.rows)
    equal(result, whole(len(lengths), sum(lengths), max(lengths, default=0)))


def draw_used_slots(rng: random.Random) -> Arguments:
    maps, _ = draw_one_map(rng)
    return {"slots": maps["slots"][0]}


def check_used_slots(before: Arguments, _: Arguments, result: Any) -> None:
    slots = before["slots"]
    need(slots.dtype == I64 and slots.dim() == 2 and slots.shape[1] == 2, "slots [C, 2]")
    need(len(slots) % LINE == 0, "whole lines")
    ids, places = slots[slots[:, 1] != 0].unbind(1)
    equal(result[0], ids, "ids")
    equal(result[1], places - 1, "rows")


def draw_ids_of_rows(rng: random.Random) -> Arguments:
    maps, ids = draw_one_map(rng)
    first, last = sorted(rng.randrange(2 * len(ids) + 2) for _ in range(2))
    return {**maps, "first": first, "last": last}


def check_ids_of_rows(before: Arguments, _: Arguments, result: Any) -> None:
    first, last = before["first"], before["last"]
    (held,) = read_maps(before["slots"], before["moved"], 1)
    need(0 <= first <= last, "0 <= first <= last")
    of_rows = {row: i for i, row in held.rows.items()}
    equal(result[0], whole(*(of_rows.get(row, 0) for row in range(first, last))), "ids")
    equal(result[1], torch.tensor([row in of_rows for row in range(first, last)]).bool(), "has_id")


def draw_count_cells(rng: random.Random) -> Arguments:
    maps, _ = draw_one_map(rng)
    return {**maps, "bits": rng.choice((0, 1, 3, 8, 16))}


def check_count_cells(before: Arguments, _: Arguments, result: Tensor) -> None:
    bits = before["bits"]
    (held,) = read_maps(before["slots"], before["moved"], 1)
    need(0 <= bits <= 16, "bits in [0, 16]")
    counts = torch.zeros(2**bits, dtype=I64)
    for key in held.rows:
        counts[oracle.mix64(key) >> (64 - bits) if bits else 0] += 1
    equal(result, counts)


def draw_ids_between(rng: random.Random) -> Arguments:
    maps, _ = draw_one_map(rng)
    ends = sorted(rng.choice((0, 2**64 - 1, rng.randrange(2**64))) for _ in range(2))
    first, last = ends if rng.random() < 0.9 else ends[::-1]
    return {**maps, "first": oracle.signed(first), "last": oracle.signed(last)}


def check_ids_between(before: Arguments, _: Arguments, result: Any) -> None:
    (held,) = read_maps(before["slots"], before["moved"], 1)
    first, last = (before[name] % oracle.WORD for name in ("first", "last"))
    ids = oracle.canonical_order([i for i in held.rows if first <= oracle.mix64(i) <= last])
    equal(result[0], whole(*ids), "ids")
    equal(result[1], whole(*(held.rows[i] for i in ids)), "rows")


register(globals())
