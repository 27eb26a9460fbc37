"""The change log of a table, against copies of its earlier contents."""

import copy
import gc
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
from life_cases import ADMISSIONS, EVICTIONS, living_table
from mock_device import MockDevice
from oracle import EXTREME_IDS
from table_cases import CROWDED_IDS, ids_of, make_group, make_table, same_state

from torchrec_dyn.optimizers import OptimizerKind
from torchrec_dyn.storage import ChangeLog, IdMap
from torchrec_dyn.table import replace, with_same_contents

POOL = [*EXTREME_IDS[:3], *EXTREME_IDS[-2:], 3, 4, 5, *CROWDED_IDS[:4]]
batches = st.lists(st.sampled_from(POOL), max_size=5)


def contents(table) -> dict[int, bytes]:
    """Returns the row, the state and the score of each id as text."""
    state = table.export_state()
    by_row = [state[n] for n in ("weight", "momentum1", "last_seen", "count") if n in state]
    rows = zip(*(one.tolist() for one in by_row), strict=True)
    return dict(zip(state["ids"].tolist(), map(repr, rows), strict=True))


def limit_of(eviction: str) -> int:
    """Returns a small limit for tables that evict when full, else room for all ids."""
    return 5 if eviction.endswith(("lru", "lfu")) else 100


class Side:
    """One table with the versions recorded of it.

    Attributes:
        held: for each version, the version, the contents at it, and the ids touched since then.
    """

    def __init__(self, table) -> None:
        self.table = table
        self.held: list[tuple] = []

    def touch(self, ids) -> None:
        for _, _, touched in self.held:
            touched |= set(ids)

    def check(self) -> None:
        now = contents(self.table)
        for version, before, touched in self.held:
            ids, rows = version.log.changed_rows(version, self.table.id_map)
            assert torch.equal(self.table.id_map.lookup(ids), rows)
            differ = {one for one, has in now.items() if before.get(one) != has}
            assert differ <= set(ids.tolist()) <= touched and torch.unique(ids).numel() == len(ids)
            gone = version.log.removed_ids(version, self.table.id_map).tolist()
            assert sorted(gone) == sorted(before.keys() - now.keys())


class Changes(RuleBasedStateMachine):
    """Tables of one group. `lives`: eviction and admission of each table."""

    lives = (("none", "all"),)

    def __init__(self) -> None:
        super().__init__()
        tables = [
            living_table(EVICTIONS[one], ADMISSIONS[other], limit_of(one), name=f"t{n}")
            for n, (one, other) in enumerate(self.lives)
        ]
        self.group = make_group(*tables, pooling="none")
        self.sides = [Side(table) for table in tables]
        self.open: list[tuple] = []

    def side(self, data) -> Side:
        return data.draw(st.sampled_from(self.sides))

    @rule(data=st.data())
    def hold(self, data) -> None:
        side = self.side(data)
        side.held.append((side.table.version(), contents(side.table), set()))

    @rule(data=st.data(), which=st.integers(0, 3))
    def drop(self, data, which) -> None:
        held = self.side(data).held
        del held[which : which + 1]

    @rule(data=st.data(), then=st.sampled_from(["open", "learn", "learn"]))
    def train(self, data, then) -> None:
        lists = [data.draw(batches) for _ in self.sides]
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        together = ids_of(*(number for ids in lists for number in ids))
        try:
            output = self.group(together, offsets, training=True)
        except RuntimeError as full:
            assert "rows" in str(full)
            return
        for side, ids in zip(self.sides, lists, strict=True):
            side.touch(ids)
        self.open.append((output, lists))
        if then == "learn":
            self.learn(-1)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3))
    def learn(self, which) -> None:
        output, lists = self.open.pop(which % len(self.open))
        output.sum().backward()
        for side, ids in zip(self.sides, lists, strict=True):
            side.touch(ids)

    @rule(data=st.data(), ids=batches)
    def evaluate(self, data, ids) -> None:
        offsets = torch.tensor([0, *[len(ids)] * len(self.sides)])
        self.group(ids_of(*ids), offsets, training=False)

    @rule(data=st.data(), ids=batches)
    def erase(self, data, ids) -> None:
        self.side(data).table.erase(ids_of(*ids))

    @rule(data=st.data(), ids=batches)
    def assign(self, data, ids) -> None:
        side = self.side(data)
        try:
            side.table.assign(ids_of(*ids), torch.arange(4.0 * len(ids)).reshape(-1, 4))
        except RuntimeError as full:
            assert "rows" in str(full)
            return
        side.touch(ids)

    @rule(data=st.data(), ids=batches)
    def load(self, data, ids) -> None:
        side = self.side(data)
        twin = living_table(limit=100, name=side.table.name)
        twin.find_or_insert(ids_of(*ids))
        side.table.load_state(twin.export_state())
        self.open.clear()
        side.touch(ids)

    @rule(data=st.data())
    def convert_and_back(self, data) -> None:
        side = self.side(data)
        side.table.convert(torch.bfloat16)
        side.table.convert(torch.float32)
        self.open.clear()
        side.touch(side.table.ids().tolist())

    @invariant()
    def every_change_is_told(self) -> None:
        for side in self.sides:
            side.check()
            assert (side.table.change_log is not None) == bool(side.held)


@pytest.mark.everyday(2)
@pytest.mark.hypothesis  # it marks its own tests only
@pytest.mark.parametrize(
    "lives",
    [
        [("none", "all")],
        [("lru", "count")],
        [("steps, lfu", "chance")],
        [("lru", "count, few counters"), ("none", "all"), ("steps", "all")],
        [("none", "all"), ("lfu", "count")],
    ],
)
def test_every_change_is_told(lives):
    machine = type("Changes", (Changes,), {"lives": lives})
    examples = max(1, settings.default.max_examples // 4)
    few = settings(settings.default, max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=few)


def bytes_of_removed(log: ChangeLog) -> int:
    """Returns the bytes of the removed ids and of the marks that do not change."""
    return log.bytes - log.touched.bytes


def test_what_nobody_asks_for_is_not_kept():
    """Ids inserted and erased after the last version are not kept; without a version nothing is kept.

    Of the list of touched ids at most some thousand are, until they are sifted.
    """
    table = make_table(num_embeddings=100_000)
    table.find_or_insert(torch.arange(10))
    assert table.changes is None
    plain = table.stats()["bytes"]
    version = table.version()
    assert table.stats()["bytes"] == plain + version.log.bytes > plain
    before, bits = bytes_of_removed(version.log), version.log.touched.bytes
    for first in range(1000, 50_000, 1000):
        fresh = torch.arange(first, first + 1000)
        table.find_or_insert(fresh)
        table.erase(fresh)
        assert version.log.touched.bytes <= bits + 8 * 7000
    assert bytes_of_removed(version.log) == before
    table.erase(torch.arange(4))
    assert bytes_of_removed(version.log) == before + 4 * (8 + 4)
    later = table.version()
    del version
    gc.collect()
    table.erase(ids_of(9))
    assert bytes_of_removed(later.log) == before + 8 + 4, (
        "the four are before the one version that is held"
    )
    del later
    gc.collect()
    table.assign(ids_of(1), torch.ones(1, 4))
    assert table.changes is None


def test_erased_ids_are_kept_while_a_version_asks_for_them():
    """Also those without a row; each erasure keeps those before it."""
    table = make_table()
    table.find_or_insert(torch.arange(3))
    version = table.version(keeps_erased=True)
    table.erase(ids_of(1, 77))
    table.version()
    table.erase(ids_of(2))
    assert table.changes.erased_ids(version).tolist() == [1, 2, 77]


def test_what_nobody_asks_for_is_rarely_sifted_out_on_a_device():
    """The host waits for the number of ids to keep: once in 12,500 removed ids, an eighth of the limit."""
    with MockDevice() as device:
        table = make_table(num_embeddings=100_000, device="cuda")
        table.find_or_insert(device.of(torch.arange(10)))
        version = table.version()
        before = version.log.bytes
        for first in range(1000, 50_000, 1000):
            fresh = device.of(torch.arange(first, first + 1000))
            table.find_or_insert(fresh)
            rows, device.reads[:] = table.id_map.lookup(fresh), []
            table.remove(fresh, rows, "erased")
            assert len(device.reads) == (first // 1000 % 13 == 0) or not device.is_mock
            assert version.log.bytes <= before + 13_000 * (8 + 4)
        table.erase(device.of(torch.arange(4)))
        removed = version.log.removed_ids(version, table.id_map)
        assert sorted(removed.cpu().tolist()) == [0, 1, 2, 3]


def test_rows_of_an_update_are_changed(threads):
    """Blocks of many rows, on threads that share the rows of one table; exactly the rows of each backward."""
    threads(2)
    table = make_table(num_embeddings=1 << 19)
    group = make_group(table, pooling="none")
    everyone = torch.arange(270_000)
    table.find_or_insert(everyone)
    versions, expected = [table.version()], [torch.zeros(len(everyone), dtype=torch.bool)]
    for step in range(2):
        ids = everyone[torch.randperm(len(everyone), generator=torch.Generator().manual_seed(step))]
        ids = ids[: 5000 * (step + 1)]
        group(ids, torch.tensor([0, len(ids)]), training=True).sum().backward()
        for one in expected:
            one[ids] = True
        for version, changed in zip(versions, expected, strict=True):
            listed, _ = version.log.changed_rows(version, table.id_map)
            assert torch.equal(listed.sort().values, changed.nonzero().flatten())
        versions.append(table.version())
        expected.append(torch.zeros_like(expected[0]))


def test_one_step_after_another_leaves_few_pieces():
    table = make_table(num_embeddings=100_000)
    table.find_or_insert(torch.arange(4096))
    version = table.version()
    for number in range(512):
        table.erase(ids_of(number))
    assert len(version.log.removed) <= 10
    assert version.log.removed_ids(version, table.id_map).numel() == 512


def test_a_load_that_fails_is_not_noted(monkeypatch):
    table = make_table()
    table.find_or_insert(torch.arange(20))
    version = table.version()
    table.erase(ids_of(3))
    state, log = table.export_state(), table.changes

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(ChangeLog, "replaced", fail)
    with pytest.raises(MemoryError):
        table.load_state({"ids": ids_of(77), "weight": torch.ones(1, 4)})
    assert table.changes is log and same_state(table.export_state(), state)
    assert log.changed_rows(version, table.id_map)[0].numel() == 0
    assert log.removed_ids(version, table.id_map).tolist() == [3]


def test_a_copy_of_a_table_is_asked_by_nobody():
    table = make_table()
    version = table.version()
    table.find_or_insert(torch.arange(20))
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert twin.changes is None
        twin.erase(twin.ids())
    assert version.log.changed_rows(version, table.id_map)[0].numel() == 20


def test_new_optimizer_state_changes_every_row():
    table = make_table(OptimizerKind.EXACT_ADAGRAD)
    table.find_or_insert(torch.arange(20))
    version = table.version()
    replace(table, with_same_contents(table))()
    assert version.log.changed_rows(version, table.id_map)[0].numel() == 20
    assert version.log.removed_ids(version, table.id_map).numel() == 0


def test_rows_of_new_contents_have_marks():
    """A checkpoint's rows are swapped in without `reserve`, and may be more than the former rows."""
    log, new, nothing = ChangeLog(1000, torch.device("cpu")), IdMap(), ids_of()
    new.reserve(600)
    new.insert(torch.arange(600), torch.arange(600))
    version = log.version(IdMap(), nothing)
    vars(log).update(log.replaced(nothing, nothing, 600, torch.device("cpu")))
    assert torch.equal(log.changed_rows(version, new)[0].sort().values, torch.arange(600))
