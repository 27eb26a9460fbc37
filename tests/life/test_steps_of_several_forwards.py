"""Several forwards of one step, as with deferred updates, against a model of the life of rows."""

from __future__ import annotations

import random

import pytest
import torch
from device_twins import on_host
from life_cases import ADMISSIONS, COUNTS, EVERY_LIFE, EVICTIONS, living_table, model_of
from life_model import TooFew
from mock_device import CUDA, MockDevice
from shards import deep_but
from table_cases import ids_of, make_group, same_state

import torchrec_dyn as dyn
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.table.shard import TableShard

IN_TIME = dyn.LeastFrequentlyUsed(half_life_time=10)
DEFERS = RowOptimizer(OptimizerKind.EXACT_SGD, learning_rate=0.1, defer_updates=True)


class Accumulating:
    """A table with deferred updates, and the model of its life."""

    def __init__(self, table: TableShard) -> None:
        self.table, self.model, self.group = table, model_of(table), make_group(table)

    def forward(self, *ids: int) -> None:
        """Runs a forward of the present step on the table and on the model."""
        offsets = torch.tensor([0, len(ids)])
        try:
            self.model.check(list(ids))
        except TooFew:
            with pytest.raises(RuntimeError, match="at most"):
                self.group(ids_of(*ids), offsets, training=True)
            return
        self.group(ids_of(*ids), offsets, training=True).sum().backward()
        self.model.train(list(ids))
        self.model.is_open = True

    def end_step(self) -> None:
        self.group.write_updates()
        self.model.is_open = False

    def set_time(self, time: int) -> None:
        self.table.set_time(time)
        self.model.set_time(time)

    def compare(self) -> None:
        """Asserts that table and model agree."""
        table, model = self.table, self.model
        assert set(table.ids().tolist()) == set(model.rows)
        table.id_map.check_invariants()
        state = table.export_state()
        ids = [*model.rows, *model.waiting]
        assert table.count(ids_of(*ids)).tolist() == [model.count(number) for number in ids]
        held = zip(state["ids"].tolist(), state["last_seen"].tolist(), strict=True)
        assert dict(held) == {number: row.last_seen for number, row in model.rows.items()}
        if model.counts_first:
            table.life.waiting.id_map.check_invariants()
            waiting = {number: [one.last_seen, one.count] for number, one in model.waiting.items()}
            assert {one[0]: one[1:] for one in state["waiting"].T.tolist()} == waiting
        stats = table.stats()
        assert {name: stats[name] for name in COUNTS} == {n: model.causes[n] for n in COUNTS}


EVERYDAY = [
    ("lru", "count, few counters"),
    ("half by time, lfu", "all"),
    ("time, lru", "count"),
    ("steps, lfu", "all"),
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("eviction", "admission"), deep_but(EVERYDAY, EVERY_LIFE[1:]))
def test_a_table_lives_as_the_model_whatever_a_step_is(eviction, admission):
    """A full table evicts 2 rows at once; a list has 16."""
    draw = random.Random(f"{eviction}, {admission}")
    both = Accumulating(
        living_table(EVICTIONS[eviction], ADMISSIONS[admission], limit=128, optimizer=DEFERS)
    )
    newest = time = 0
    for _ in range(16):
        for _ in range(draw.randrange(1, 5)):
            if draw.random() < 0.5:
                both.set_time(time := time + draw.randrange(4))
            fresh = range(newest, newest + (2 if newest > 120 else 60))
            newest = fresh.stop
            seen = [draw.randrange(max(0, newest - 140), newest) for _ in range(8)]
            both.forward(*fresh, *fresh[:1], *seen)
            if draw.random() < 0.2:
                some = draw.sample([*both.model.rows, *both.model.waiting, -1], 1)
                both.table.erase(ids_of(*some))
                both.model.erase(some)
            if draw.random() < 0.2 and len(both.model.rows) < 128:
                some = [draw.randrange(max(0, newest - 140), newest)]
                both.table.assign(ids_of(*some), torch.zeros(1, 4))
                both.model.assign(some)
        both.compare()
        both.end_step()
    assert both.table.step == both.model.step


# New ids of each forward. The first surplus has counters of the step itself.
SIZES = (645, 10, 10, 10)


def waiting_table(**options):
    """Returns a table with few counters; a list has 80."""
    return living_table(
        None, dyn.AdmitAfter(3, counters=640), limit=2000, optimizer=DEFERS, **options
    )


def test_counters_of_the_present_step_are_not_listed():
    both, newest = Accumulating(waiting_table()), 0
    for _ in range(2):
        for new in SIZES:
            both.forward(*range(newest, newest + new), *range(newest - 30, newest - 20))
            both.compare()
            newest += new
        both.end_step()


def test_a_gpu_drops_the_counters_that_the_cpu_drops():
    with MockDevice() as device:
        tables, newest = [waiting_table(), waiting_table(device=CUDA)], 0
        groups = [make_group(table) for table in tables]
        for new in SIZES:
            ids, offsets = torch.arange(newest, newest + new), torch.tensor([0, new])
            newest += new
            groups[0](ids, offsets, training=True)
            groups[1](ids.to(CUDA), offsets.to(CUDA), training=True)
            tables[1].life.waiting.id_map.check_invariants()
        one, two = (table.export_state() for table in tables)
        assert same_state(one, on_host(two)) and one["waiting"].shape == (3, 635)
        assert device.mixed == []


def test_a_half_life_may_begin_twice_in_a_step():
    """Both begin at the same step. The candidates listed in the first do not outlive it."""
    both = Accumulating(living_table(IN_TIME, limit=128, optimizer=DEFERS))
    often = range(8, 128)
    both.set_time(5)
    both.forward(*range(8), *[*often] * 8)
    both.end_step()
    both.set_time(15)
    # The full table lists candidates: `often` has counts of 4, the other ids 3.
    both.forward(*[*range(8)] * 2, 1000)
    both.set_time(25)
    both.forward(*[1000] * 50)  # now `often` has 2, and the others still 3
    both.end_step()
    for newest in range(2000, 2008):
        both.forward(*[newest] * 9)
        both.end_step()
        both.compare()


def test_rows_that_the_step_has_not_scored_are_not_needed():
    """Rows assigned within a step may be evicted by it, so a batch may take their place."""
    both = Accumulating(living_table(EVICTIONS["lru"], limit=4, optimizer=DEFERS))
    both.forward(1, 2)
    both.table.assign(ids_of(7, 8), torch.zeros(2, 4))
    both.model.assign([7, 8])
    both.forward(3, 4, 3, 4, 3)
    both.compare()
    assert both.table.ids().sort().values.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("held", [False, True])
def test_zero_grad_asks_for_the_order_of_calls_not_for_graphs(held):
    """A skipped batch ends its step although its graph is held; a step whose backward is next goes on."""
    table = living_table(EVICTIONS["lru"], optimizer=DEFERS)
    group, graphs = make_group(table), []

    def forward(*ids):
        output = group(ids_of(*ids), torch.tensor([0, len(ids)]), training=True)
        graphs.append(output if held else None)
        return output.sum()

    for skipped in (1, 2, 3):
        group.drop_updates()
        forward(skipped)
    assert table.step == 3
    group.drop_updates()
    waits, ahead = forward(4), forward(5)
    assert table.step == 4
    group.drop_updates()
    waits.backward()
    forward(6).backward()
    assert table.step == 4
    group.drop_updates()
    group(ids_of(7), torch.tensor([0, 1]), training=False)  # no forward of a step
    ahead.backward()
    forward(8).backward()
    assert table.step == 4
    group.write_updates()
    waits = forward(9)
    assert table.step == 5
    group.drop_updates()
    (waits + forward(10)).backward()
    assert table.step == 6
    before, _ = table.lookup(ids_of(9, 10))
    group.write_updates()
    assert torch.allclose(table.lookup(ids_of(9, 10))[0], before - 0.1)


def test_a_time_behind_zero_grad_is_not_the_time_of_a_skipped_step():
    """GradScaler skips `step()` of a batch that had its backward; rows expire after 10."""
    table = living_table(EVICTIONS["time"], optimizer=DEFERS)
    group = make_group(table)
    for time, number in ((100, 1), (108, 2), (111, 3)):
        group.drop_updates()
        table.set_time(time)
        group(ids_of(number), torch.tensor([0, 1]), training=True).sum().backward()
    assert table.step == 3
    assert sorted(table.ids().tolist()) == [2, 3]


ADAM = RowOptimizer(OptimizerKind.ADAM, learning_rate=0.1, defer_updates=True)


class TwoTables:
    """Tables a and b with deferred updates, in one group or in two. Rows expire after one step."""

    def __init__(self, together, device="cpu"):
        life = {"eviction": (dyn.ExpireAfter(steps=1), dyn.LeastRecentlyUsed())}
        of_both = [{"name": name, "optimizer": ADAM, "limit": 8, "device": device} for name in "ab"]
        self.a, self.b = self.tables = [living_table(**life, **one) for one in of_both]
        of_groups = [self.tables] if together else [[self.a], [self.b]]
        self.groups = [make_group(*tables) for tables in of_groups]
        self.device = torch.device(device)

    def forward(self, *ids):
        for group in self.groups:
            of_tables, size = ids_of(*ids * len(group.tables)), len(ids)
            offsets = torch.arange(len(group.tables) + 1) * size
            output = group(of_tables.to(self.device), offsets.to(self.device), training=True)
            if self.device.type == "cpu" and output.requires_grad:
                output.sum().backward()

    def end_step(self):
        for group in self.groups:
            group.write_updates()


def states_of(both, of_steps):
    """Trains tables; returns the states after each step. `of_steps`: if a is frozen in each forward."""
    newest, states = 0, []
    for of_forwards in of_steps:
        for both.a.is_frozen in map(bool, of_forwards):
            newest += 1
            both.forward(newest, newest, max(0, newest - 2))
        both.end_step()
        states.append([on_host(table.export_state()) for table in both.tables])
    return states


def test_a_table_unfrozen_within_a_step_begins_it_in_a_group_as_alone():
    of_steps = ([1, 0], [0, 0], [0, 1, 0], [1], [1, 1, 0], [1, 0, 1], [0])
    both, apart = TwoTables(together=True), TwoTables(together=False)
    for one, other in zip(states_of(both, of_steps), states_of(apart, of_steps), strict=True):
        assert all(map(same_state, one, other))
    assert [table.step for table in both.tables] == [6, 7]


def test_a_gpu_looks_at_the_step_of_tables_unfrozen_within_it():
    with MockDevice():
        for_cuda = TwoTables(together=True, device=CUDA)
        seen_there = states_of(for_cuda, [[0], [1, 0]])
    here = TwoTables(together=True)
    for there, states in zip(seen_there, states_of(here, [[0], [1, 0]]), strict=True):
        for one, other in zip(there, states, strict=True):
            assert torch.equal(one["ids"], other["ids"])
            assert torch.equal(one["last_seen"], other["last_seen"])


def test_a_failed_forward_counts_no_step_of_a_table_unfrozen_within_it():
    both = TwoTables(together=True)
    both.a.is_frozen = True
    both.forward(1)
    both.a.is_frozen = False
    with pytest.raises(RuntimeError, match="at most 8 rows"):
        both.forward(*range(9))
    assert [table.step for table in both.tables] == [0, 1]
    both.forward(2), both.forward(3)
    assert [table.step for table in both.tables] == [1, 1]
