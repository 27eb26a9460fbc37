"""Rows listed before their eviction: small evictions take rows from the list, without a search."""

import random

import pytest
import torch
from life_cases import EVICTIONS, living_table, model_of
from table_cases import ids_of, make_group

import torchrec_dyn as dyn
from torchrec_dyn import ops

LIMIT, SHARE = 640, 10  # a list has 80 rows
LISTS = ["lru", "steps, lru", "time, lru", "lfu", "steps, lfu"]


def noted_searches(monkeypatch):
    """Returns a list that gets the number of rows asked for of each later search."""
    searches, search = [], ops.lowest_rows

    def noted(like, questions, *given):
        searches.extend(questions[:, 4].tolist())
        return search(like, questions, *given)

    monkeypatch.setattr(ops, "lowest_rows", noted)
    return searches


@pytest.mark.everyday(2)
@pytest.mark.parametrize("eviction", [*LISTS, "half, lfu"])
def test_the_list_gives_what_a_search_would(eviction, monkeypatch):
    """Listed rows are seen, erased, assigned or reused before their turn; most evictions do not search."""
    table = living_table(EVICTIONS[eviction], None, LIMIT)
    model, group, draw = model_of(table), make_group(table), random.Random(eviction)
    searches = noted_searches(monkeypatch)
    newest = 0
    for step in range(220):
        if model.is_timed:
            time = step // 3
            table.set_time(time)
            model.set_time(time)
        fresh = range(newest, newest + (SHARE if step > 60 else 11))
        newest = fresh.stop
        ids = [*fresh, *(draw.randrange(max(0, newest - 700), newest) for _ in range(6))]
        group(ids_of(*ids), torch.tensor([0, len(ids)]), training=True)
        model.train(ids)
        held = list(model.rows)
        if step % 7 == 3:
            some = draw.sample(held, 4)
            table.erase(ids_of(*some))
            model.erase(some)
        if step % 5 == 1:  # known, absent (perhaps listed before) and new ids
            some = [*draw.sample(held, 2), draw.randrange(newest), -step]
            some = list(dict.fromkeys(some))
            table.assign(ids_of(*some), torch.zeros(len(some), 4))
            model.assign(some)
        assert set(table.ids().tolist()) == set(model.rows)
    evictions = table.stats()["evicted_full"] / SHARE
    if eviction == "lru":
        assert evictions > 100 and sum(most == 8 * SHARE for most in searches) < evictions / 4


def test_counters_are_dropped_from_the_list(monkeypatch):
    """Listed counters are counted again, erased or become rows before their turn; few steps search."""
    admission = dyn.AdmitAfter(3, counters=LIMIT)
    table = living_table(EVICTIONS["lru"], admission, LIMIT)
    model, group, draw = model_of(table), make_group(table), random.Random(3)
    searches = noted_searches(monkeypatch)
    newest = 0
    for step in range(250):
        fresh = range(newest, newest + SHARE - 1)
        newest = fresh.stop
        ids = [*fresh, *(draw.randrange(max(0, newest - 700), newest) for _ in range(6))]
        group(ids_of(*ids), torch.tensor([0, len(ids)]), training=True)
        model.train(ids)
        if step % 7 == 3:
            some = draw.sample(sorted(model.waiting), 4)
            table.erase(ids_of(*some))
            model.erase(some)
        assert set(table.life.waiting.export()[0].tolist()) == set(model.waiting)
    drops = table.stats()["counters_dropped"] / SHARE
    assert drops > 100 and len(searches) < drops / 4


def test_counts_of_listed_rows_change_before_their_turn():
    """Listed ids are seen some times, and erased and assigned again."""
    table = living_table(EVICTIONS["lfu"], None, LIMIT)
    model, group, draw = model_of(table), make_group(table), random.Random(7)
    newest = 0
    for step in range(200):
        newest += SHARE
        often = [draw.randrange(20, 25) for _ in range(SHARE)]
        ids = [number for n, count in enumerate(often) for number in count * [newest - SHARE + n]]
        ids += draw.choices(sorted(model.rows) or [0], k=20)
        group(ids_of(*ids), torch.tensor([0, len(ids)]), training=True)
        model.train(ids)
        if step % 9 == 0:
            erased = draw.sample(sorted(model.rows), 6)
            table.erase(ids_of(*erased))
            model.erase(erased)
            table.assign(ids_of(*erased[:4]), torch.zeros(4, 4))
            model.assign(erased[:4])
        assert set(table.ids().tolist()) == set(model.rows)
