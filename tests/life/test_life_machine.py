"""Tables with a life against a plain model of it, under all operations in any order."""

import copy
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from life_cases import (
    ADMISSIONS,
    COUNTS,
    EVERY_LIFE,
    EVICTIONS,
    SideBySide,
    assert_seen,
    living_table,
    seen,
)
from life_model import TooFew
from oracle import EXTREME_IDS
from table_cases import CROWDED_IDS, ids_of, make_group, same_state

LIMIT = 5
POOL = [*EXTREME_IDS[:3], *EXTREME_IDS[-2:], 3, 4, 5, *CROWDED_IDS[:4]]
numbers = st.sampled_from(POOL) | st.sampled_from(POOL[5:8]) | st.integers(-(2**63), 2**63 - 1)
batches = st.lists(numbers, max_size=6)
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda group: pickle.loads(pickle.dumps(group)),
}


class LifeMachine(RuleBasedStateMachine):
    """Tables of one group, each with its model. `lives`: eviction and admission of each table."""

    lives = (("none", "all"),)

    def __init__(self) -> None:
        super().__init__()
        unseen = ("zeros", "initial")
        tables = [
            living_table(
                EVICTIONS[one], ADMISSIONS[other], LIMIT, name=f"t{n}", unseen=unseen[n % 2]
            )
            for n, (one, other) in enumerate(self.lives)
        ]
        self.sides = [SideBySide(table) for table in tables]
        self.group = make_group(*tables, pooling="none")
        # By number of the forward: output, and for each table the rows it reads, by `born`.
        self.open: dict[int, tuple] = {}
        self.forwards = 0
        self.asked = set(POOL)

    @property
    def tables(self):
        return self.group.tables

    def batch(self, data):
        """Draws a batch; returns the ids of each table, and the arguments of a call."""
        return self.as_batch([data.draw(batches) for _ in self.tables])

    def as_batch(self, lists):
        self.asked |= {number for ids in lists for number in ids}
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        return lists, (ids_of(*(number for ids in lists for number in ids)), offsets)

    def side(self, data) -> SideBySide:
        return data.draw(st.sampled_from(self.sides))

    def assert_reads(self, output, lists) -> None:
        wanted = [
            side.reading(number)
            for side, ids in zip(self.sides, lists, strict=True)
            for number in ids
        ]
        if wanted:
            read = output.detach().double()
            torch.testing.assert_close(read, torch.stack(wanted), rtol=1e-5, atol=1e-6)

    # Training.

    @rule(data=st.data(), then=st.sampled_from(["open", "open", "learn", "drop", "no_grad"]))
    def train(self, data, then) -> None:
        lists, batch = self.batch(data)
        both = list(zip(self.sides, lists, strict=True))
        crowded = [(side, ids) for side, ids in both if not side.fits(ids)]
        if crowded:
            self.assert_refuses(batch, *crowded[0])
            return
        with torch.set_grad_enabled(then != "no_grad"):
            output = self.group(*batch, training=True)
        births, rows = [], []
        for side, ids in both:
            births.append(side.change(lambda model, ids=ids: model.train(ids), self.open))
            now = side.table.id_map.lookup(ids_of(*ids)).tolist()
            rows.append(dict(zip(births[-1], now, strict=True)))
        self.assert_reads(output, lists)
        self.forwards += 1
        if then in ("open", "learn"):
            self.open[self.forwards] = (output, births, rows)
        if then == "learn":
            self.run_backward(self.forwards, 1.0)

    def assert_refuses(self, batch, side, ids) -> None:
        before = seen(self.tables)
        with pytest.raises(RuntimeError) as error:
            self.group(*batch, training=True)
        with pytest.raises(TooFew) as need:
            side.model.check(ids)
        told = str(error.value)
        assert repr(side.table.name) in told and f"at most {LIMIT} rows" in told
        kept, new = need.value.args
        needs = (
            f"got {kept + new} distinct ids" if side.model.makes_room else f"{kept} and {new} new"
        )
        assert needs in told
        assert_seen(self.tables, before)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), grad=st.sampled_from([-1.0, 1.0, 2.0]))
    def backward(self, data, grad) -> None:
        self.run_backward(data.draw(st.sampled_from(sorted(self.open))), grad)

    def run_backward(self, forward: int, grad: float) -> None:
        output, births, _ = self.open.pop(forward)
        output.backward(torch.full_like(output, grad))
        for side, born in zip(self.sides, births, strict=True):
            side.learn(born, grad)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def drop(self, data) -> None:
        del self.open[data.draw(st.sampled_from(sorted(self.open)))]

    @rule(data=st.data())
    def evaluate(self, data) -> None:
        lists, batch = self.batch(data)
        before = seen(self.tables)
        self.assert_reads(self.group(*batch, training=False), lists)
        assert_seen(self.tables, before)

    @rule(data=st.data())
    def prefetch(self, data) -> None:
        """Gives no rows to ids of tables with a life; those of the others are in no such batch here."""
        lists = [data.draw(batches) if side.model.has_life else [] for side in self.sides]
        before = seen(self.tables)
        self.group.prefetch(*self.as_batch(lists)[1])
        assert_seen(self.tables, before)

    # Calls by the user.

    @rule(data=st.data(), ids=batches)
    def erase(self, data, ids) -> None:
        side = self.side(data)
        had = len(set(ids) & side.model.rows.keys())
        assert side.table.erase(ids_of(*ids)) == had
        side.change(lambda model: model.erase(ids), self.open)
        self.asked |= set(ids)

    @rule(data=st.data(), ids=batches)
    def assign(self, data, ids) -> None:
        side = self.side(data)
        rows = torch.arange(4.0 * len(ids)).reshape(-1, 4) + side.model.births
        try:
            side.change(lambda model: model.assign(ids))
        except TooFew:
            before = seen(self.tables)
            with pytest.raises(RuntimeError, match=rf"{side.table.name}.*at most {LIMIT} rows"):
                side.table.assign(ids_of(*ids), rows)
            assert_seen(self.tables, before)
            return
        side.table.assign(ids_of(*ids), rows)
        for number, row in zip(ids, rows, strict=True):
            side.held[side.model.rows[number].born].weight = row.double()
        self.asked |= set(ids)

    @precondition(lambda self: any(side.model.is_timed for side in self.sides))
    @rule(hours=st.sampled_from([0, 1, 9, 10, 11]))
    def set_time(self, hours) -> None:
        for side in self.sides:
            if not side.model.is_timed:
                continue
            clock = side.model.clock or 0
            before = seen(self.tables)
            with pytest.raises(ValueError, match=side.table.name):
                side.table.set_time(clock - 1)
            assert_seen(self.tables, before)
            side.model.set_time(clock + hours)
            side.table.set_time(clock + hours)

    # Operations that rebuild a table. Forwards opened before cannot run their backward then.

    def rebuilt(self) -> None:
        self.open.clear()
        for side, table in zip(self.sides, self.tables, strict=True):
            side.table, side.left = table, []

    def assert_open_forwards_are_refused(self) -> None:
        if self.open:
            before = seen(self.tables)
            with pytest.raises(RuntimeError, match="loaded or converted"):
                next(iter(self.open.values()))[0].sum().backward()
            assert_seen(self.tables, before)

    @rule()
    def load_own_state(self) -> None:
        for table in self.tables:
            state = table.export_state()
            table.load_state(state)
            assert same_state(table.export_state(), state)
        self.assert_open_forwards_are_refused()
        self.rebuilt()

    @rule(seed=st.integers(0, 9))
    def load_into_a_new_table(self, seed) -> None:
        """Loads the saved rows in another order."""
        tables = []
        for side in self.sides:
            config, state = side.table.config, side.table.export_state()
            twin = living_table(
                config.eviction, config.admission, LIMIT, name=side.table.name, unseen=config.unseen
            )
            draw = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(state["ids"]), generator=draw)
            by_row = {"ids", "weight", "momentum1", "last_seen", "count"}
            twin.load_state({k: v[order] if k in by_row else v for k, v in state.items()})
            assert same_state(twin.export_state(), state)
            tables.append(twin)
            side.model.reload()
            side.late_grads = 0
        self.group = make_group(*tables, pooling="none")
        self.rebuilt()

    @rule(how=st.sampled_from(sorted(COPIES)))
    def copy(self, how) -> None:
        before = seen(self.tables)
        self.group = COPIES[how](self.group)
        for table, (state, stats) in zip(self.tables, before, strict=True):
            assert same_state(table.export_state(), state)
            assert all(table.stats()[name] == stats[name] for name in COUNTS)
        self.rebuilt()

    @rule(dtype=st.sampled_from([torch.bfloat16, torch.float16]))
    def convert_and_back(self, dtype) -> None:
        for side in self.sides:
            side.table.convert(dtype)
            side.table.convert(torch.float32)
            for number, row in side.model.rows.items():
                held = side.held[row.born]
                now = side.table.lookup(ids_of(number))[0][0].double()
                torch.testing.assert_close(now, held.weight, rtol=1e-2, atol=1e-2)
                held.weight = now
        self.assert_open_forwards_are_refused()
        self.rebuilt()

    @invariant()
    def nothing_differs(self) -> None:
        for t, side in enumerate(self.sides):
            side.assert_same_life(sorted(self.asked))
            side.assert_same_rows()
            side.assert_rows_apart({forward: one[2][t] for forward, one in self.open.items()})


def check_lives(lives, share: int) -> None:
    """Runs the machine with a share of the profile's examples: there are many such tests."""
    machine = type("LifeMachine", (LifeMachine,), {"lives": lives})
    examples = max(1, settings.default.max_examples // share)
    few = settings(settings.default, max_examples=examples, stateful_step_count=30)
    with pytest.MonkeyPatch.context() as patch:
        # So the default number of counters follows the rows: 2, 4 and 5, for 0, 1 and more rows.
        patch.setattr("torchrec_dyn.knobs.LEAST_COUNTERS", 2)
        run_state_machine_as_test(machine, settings=few)


@pytest.mark.everyday(12)
@pytest.mark.hypothesis  # it marks its own tests only
@pytest.mark.parametrize(("eviction", "admission"), EVERY_LIFE)
def test_every_life(eviction, admission):
    check_lives([(eviction, admission)], share=16)


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    "lives",
    [
        [("lru", "count"), ("none", "all"), ("steps, lfu", "chance")],
        [("none", "all"), ("time", "count, few counters"), ("lfu", "all")],
    ],
)
def test_tables_of_one_call_live_each_by_its_own(lives):
    """If one table has no room for its ids, no table changes."""
    check_lives(lives, share=8)
