"""A step asks no table of its group one by one, and every table still has its own numbers."""

import random
import sys

import pytest
import torch
from life_cases import living_table, model_of
from table_cases import ids_of, make_group, make_table

import torchrec_dyn as dyn
from torchrec_dyn.storage import TABLES
from torchrec_dyn.table import set_clocks

POLICIES = {
    "plain": {},
    "policies": {"admission": dyn.AdmitAfter(2), "eviction": dyn.LeastRecentlyUsed()},
    "ages": {"admission": dyn.AdmitAfter(2), "eviction": dyn.ExpireAfter(steps=99)},
    "ages by time": {"eviction": (dyn.ExpireAfter(time=99), dyn.LeastRecentlyUsed())},
}


def batch(tables, *ids):
    """Returns the same ids as the only bag of each table."""
    return ids_of(*(list(ids) * tables)), torch.arange(tables + 1) * len(ids)


def calls_of_a_step(policies, tables, frozen):
    """Returns the number of Python and C functions that a step of known ids calls."""
    group = make_group(*(make_table(name=f"t{t}", **policies) for t in range(tables)))
    for table in group.tables[:frozen]:
        table.is_frozen = True
    set_clocks(group.tables, 1)
    ids, offsets = batch(tables, 1, 2, 3)
    for _ in range(5):
        group(ids, offsets, training=True).sum().backward()
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    group(ids, offsets, training=True).sum().backward()
    sys.setprofile(before)
    assert {table.step for table in group.tables[frozen:]} == {6}
    return count


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_of_known_ids_calls_no_function_for_each_table(policy, frozen):
    few, many = (calls_of_a_step(POLICIES[policy], tables, frozen) for tables in (2, 62))
    assert 0 < many <= few + 6  # less than one call for ten tables


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_table_counts_its_own_steps(policy, seed):
    """Tables are frozen, loaded, and looked up by two groups in turn, with backwards at any later time."""
    draw = random.Random(seed)
    tables = [make_table(name=f"t{t}", **POLICIES[policy]) for t in range(4)]
    groups = [make_group(*tables), make_group(*tables[1:3])]
    expected = [dict.fromkeys(("step", "forwards", "ids_seen"), 0) for _ in tables]
    edits, outputs = [table.edits for table in tables], []
    for _ in range(40):
        action = draw.choice(("step", "step", "step", "freeze", "load", "backward", "erase"))
        chosen = draw.randrange(4)
        if action == "step":
            group = groups[draw.randrange(2)]
            output = group(*batch(len(group.tables), 1, 1, draw.randrange(9)), training=True)
            trained = [
                t for t, table in enumerate(tables) if not table.is_frozen and table in group.tables
            ]
            for t in trained:
                expected[t] = {
                    name: value + (3 if name == "ids_seen" else 1)
                    for name, value in expected[t].items()
                }
            if output.requires_grad:
                outputs.append((output, trained, [table.generation for table in tables], group))
        elif action == "freeze":
            tables[chosen].is_frozen = not tables[chosen].is_frozen
        elif action == "load":
            tables[chosen].load_state(tables[chosen].export_state())
        elif action == "erase":
            tables[chosen].erase(ids_of(draw.randrange(9)))
            edits[chosen] += 1
        elif outputs:
            output, trained, generations, group = outputs.pop(draw.randrange(len(outputs)))
            before = [table.edits for table in tables]
            if any(table.generation != generations[tables.index(table)] for table in group.tables):
                with pytest.raises(RuntimeError, match="loaded or converted in between"):
                    output.sum().backward()
                trained = []
            else:
                output.sum().backward()
            assert [table.edits - b for table, b in zip(tables, before, strict=True)] == [
                int(t in trained) for t in range(4)
            ]
        for table, numbers in zip(tables, expected, strict=True):
            stats = table.stats()
            assert {name: stats[name] for name in numbers} == numbers
            assert stats["ids_seen"] == stats["hits"] + stats["unseen"]
            assert table.step == numbers["step"]


AGES = [{"steps": 1}, {"steps": 3}, {"steps": 20}, {"time": 2}, {"time": 20}]


@pytest.mark.parametrize("seed, admission", [(0, None), (1, dyn.AdmitAfter(2))])
def test_every_table_loses_its_own_expired_rows(seed, admission):
    """Tables of other ages step together. Some are frozen, loaded, erased from, or join later."""
    draw = random.Random(seed)
    tables = [living_table(dyn.ExpireAfter(**age), admission, name=str(age)) for age in AGES]
    models, now = [model_of(table) for table in tables], 0
    groups = [make_group(*tables), make_group(*tables[1:4])]
    for _ in range(120):
        action = draw.choice(("step",) * 12 + ("time",) * 3 + ("freeze", "load", "erase"))
        chosen, ids = draw.randrange(len(tables)), [draw.randrange(3), draw.randrange(40)]
        if action == "step":
            group = groups[draw.random() < 0.1]
            group(*batch(len(group.tables), *ids), training=True)
            for table, model in zip(tables, models, strict=True):
                if table in group.tables and not table.is_frozen:
                    model.train(ids)
        elif action == "time":
            now += draw.choice((0, 1, 1, 5))
            set_clocks(tables, now)
            for model in models:
                if model.is_timed:
                    model.set_time(now)
        elif action == "freeze":
            freezes = not any(table.is_frozen for table in tables)
            for table in tables:
                table.is_frozen = freezes and table is tables[chosen]
        elif action == "load":
            tables[chosen].load_state(tables[chosen].export_state())
        else:
            tables[chosen].erase(ids_of(*ids))
            models[chosen].erase(ids)
        for table, model in zip(tables, models, strict=True):
            assert set(table.ids().tolist()) == set(model.rows)
            assert table.num_waiting == len(model.waiting)
    assert all(table.stats()["evicted_expired"] for table in tables)


def test_a_full_table_evicts_in_a_step_of_known_ids():
    """Rows assigned above the limit go at the next step, which has known ids only."""
    options = {"eviction": dyn.LeastRecentlyUsed(), "num_embeddings": 8}
    tables = [make_table(name=f"t{t}", **options) for t in range(3)]
    group, known = make_group(*tables), batch(3, 1, 2)
    for _ in range(3):
        group(*known, training=True)
    tables[1].assign(torch.arange(10, 20), torch.ones(10, 4))
    assert tables[1].num_rows == 12
    group(*known, training=True)
    assert [table.num_rows for table in tables] == [2, 8, 2]
    assert tables[1].lookup(ids_of(1, 2))[1].all()


def test_a_graph_of_one_group_holds_rows_from_another():
    """A table lists the open forwards of all its groups."""
    table = make_table()
    first, second = make_group(table), make_group(table)
    output = first(*batch(1, 1, 2), training=True)
    second(*batch(1, 3), training=True)
    table.erase(ids_of(1))
    assert len(table.forwards) == 1 and table.stats()["withheld"] == 1
    del output
    assert len(table.forwards) == 0 and table.stats()["withheld"] == 0


def test_a_table_that_is_frozen_while_another_thread_lists_the_tables_stays_frozen(monkeypatch):
    """`is_frozen` is set without the lock, so a forward may list the tables just before."""
    group = make_group(make_table(name="t0"), make_table(name="t1"))
    group(*batch(2, 1), training=True)

    def renew_and_list():
        monkeypatch.undo()
        TABLES.renew()
        group(*batch(2, 1), training=True)  # as the other thread

    monkeypatch.setattr(TABLES, "renew", renew_and_list)
    group.tables[0].is_frozen = True
    group(*batch(2, 2), training=True)
    assert [table.stats()["forwards"] for table in group.tables] == [2, 3]
    assert [table.num_rows for table in group.tables] == [1, 2]


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("number", ["step", "edits"])
def test_a_number_read_without_the_lock_is_right_while_the_table_moves_to_other_shared_counters(
    number, at
):
    tables = [make_table(name="t0"), make_table(name="t1")]
    groups = [make_group(*tables), make_group(tables[0])]
    for _ in range(3):
        groups[0](*batch(2, 1), training=True).sum().backward()
    expected, seen = getattr(tables[0], number), 0

    def reading(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_name != number:
            return None
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        if event == "opcode" and seen == at:  # as an evaluation on another thread
            groups[1](*batch(1, 1), training=False)
        return reading

    before = sys.gettrace()
    sys.settrace(reading)
    got = getattr(tables[0], number)
    sys.settrace(before)
    assert seen >= at and got == expected > 0
