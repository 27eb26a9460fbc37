"""Tables with a life under each policy, and a table side by side with a model of its life."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import torch
from life_model import LifeModel, TooFew
from oracle import canonical_order, chance, draw_of, unmix64
from policy_cases import ByTime, Dense, Often
from table_cases import ids_of, make_group, make_table, same_state, without_probes
from torch import Tensor

import torchrec_dyn as dyn
from torchrec_dyn.initializers import Normal, table_key
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.table.shard import TableShard

LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
STEPS, TIME = dyn.ExpireAfter(steps=4), dyn.ExpireAfter(time=10)
EVICTIONS = {
    "none": None,
    "lru": LRU,
    "lfu": LFU,
    "steps": STEPS,
    "time": TIME,
    "steps, lru": (STEPS, LRU),
    "steps, lfu": (STEPS, LFU),
    "time, lru": (TIME, LRU),
    "time, lfu": (TIME, LFU),
    "half, lfu": dyn.LeastFrequentlyUsed(half_life_steps=3),
    "own": Dense(),
    "steps, own by time": (STEPS, ByTime()),
    "half by time, lfu": (dyn.ExpireAfter(steps=9), dyn.LeastFrequentlyUsed(half_life_time=7)),
}
ADMISSIONS = {
    "all": None,
    "count": dyn.AdmitAfter(2),
    "count, few counters": dyn.AdmitAfter(3, counters=3),
    "own": Often(3, counters=4),
    "chance": dyn.AdmitWithProbability(0.4),
    "never": dyn.Never(),
}
EVERY_LIFE = list(itertools.product(EVICTIONS, ADMISSIONS))
RATE = 0.1
# Counts of the model that a table's `stats()` has too.
COUNTS = (
    "ids_seen", "hits", "unseen", "refused", "inserted", "evicted_expired", "evicted_full",
    "erased", "counters_dropped", "counters_expired",
)  # fmt: skip
# Counts that depend on the columns of a shard, on the time when a graph is dropped, or on the order of ids
# in a line.
NOT_OF_THE_STREAM = {"bytes", "withheld", "late_grads", "probe_length_mean", "probe_length_max"}
NOT_OF_THE_STREAM |= {"rows_loaded", "rows_written_back"}


def living_table(eviction=None, admission=None, limit=1000, **options) -> TableShard:
    """Returns a table; by default of 4 columns, with normal initial rows and Adagrad."""
    kind = options.pop("kind", OptimizerKind.EXACT_ADAGRAD)
    config = {"initializer": Normal(0.0, 1.0), "seed": 5, "unseen": "zeros"}
    config |= {name: options.pop(name) for name in config if name in options}
    return TableShard(
        config=dyn.DynamicTableConfig(**config, admission=admission, eviction=eviction),
        **{
            "name": "t",
            "num_embeddings": limit,
            "embedding_dim": 4,
            "optimizer": RowOptimizer(kind=kind, learning_rate=RATE),
            **options,
        },
    )


def model_of(table: TableShard) -> LifeModel:
    """Returns the model of an empty table."""
    key = table_key(table.config.seed, table.name, "admission")

    def is_drawn(number: int, occurrences: int, step: int) -> bool:
        return draw_of(key, step, number) < chance(table.config.admission.p, occurrences)

    return LifeModel(table.config, table.row_limit, is_drawn)


class InitialRows:
    """Initial rows by id, read from a table without a life."""

    def __init__(self, table: TableShard) -> None:
        config = {"seed": table.config.seed, "initializer": table.config.initializer}
        self._table = make_table(name=table.name, num_embeddings=1 << 20, **config)

    def __call__(self, number: int) -> Tensor:
        self._table.find_or_insert(ids_of(number))
        return self._table.lookup(ids_of(number))[0][0]


class Held:
    """Contents of one row: weights [4] of float64, and Adagrad's sum of squares."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.squares = weight.double(), 0.0

    def learn(self, grad: float) -> None:
        self.squares += grad * grad
        self.weight = self.weight - RATE * grad / (math.sqrt(self.squares) + 1e-8)


class SideBySide:
    """A table, the model of its life, and the expected contents of each row.

    `born`, the number of rows inserted before a row, identifies it. The caller numbers the forwards.
    """

    def __init__(self, table: TableShard) -> None:
        self.table, self.model = table, model_of(table)
        self.initial = InitialRows(table)
        self.held: dict[int, Held] = {}
        self.left: list[set[int]] = []  # forwards that were open when an id lost its row
        self.late_grads = 0

    def fits(self, ids: list[int]) -> bool:
        try:
            self.model.check(ids)
        except TooFew:
            return False
        return True

    def change(self, do, open_forwards=()):
        before = {row.born for row in self.model.rows.values()}
        result = do(self.model)
        after = {row.born: number for number, row in self.model.rows.items()}
        self.left += [set(open_forwards) for _ in before - after.keys()]
        for born in after.keys() - before:
            self.held[born] = Held(self.initial(after[born]))
        return result

    def learn(self, births: list[int | None], grad: float) -> None:
        """Updates the expected contents by a backward with one gradient for all columns and occurrences."""
        live = {row.born for row in self.model.rows.values()}
        for born, times in Counter(births).items():
            if born is not None:
                self.late_grads += times * (born not in live)
                self.held[born].learn(grad * times)

    def reading(self, number: int) -> Tensor:
        """Returns the expected numbers that an occurrence of an id reads, [4]."""
        if number in self.model.rows:
            return self.held[self.model.rows[number].born].weight
        is_zero = self.table.config.unseen == "zeros"
        return torch.zeros(4).double() if is_zero else self.initial(number).double()

    def assert_same_life(self, also: list[int]) -> None:
        """Asserts that table and model agree; `also`: further ids to look up."""
        table, model = self.table, self.model
        known = canonical_order(list(model.rows))
        waiting = canonical_order(list(model.waiting))
        assert table.ids().tolist() == known and table.num_rows == len(known)
        table.id_map.check_invariants()
        stats = table.stats()
        assert {name: stats[name] for name in COUNTS} == {n: model.causes[n] for n in COUNTS}
        assert (stats["rows"], stats["step"]) == (len(known), model.step)
        assert (stats["limit"], stats["waiting"]) == (model.limit, len(waiting))
        if not model.has_life:
            return
        asked = list(dict.fromkeys([*known, *waiting, *also]))
        assert table.last_seen(ids_of(*asked)).tolist() == [model.last_seen(n) for n in asked]
        assert table.count(ids_of(*asked)).tolist() == [model.count(n) for n in asked]
        state = table.export_state()
        assert state["last_seen"].tolist() == [model.rows[n].last_seen for n in known]
        assert state["count"].tolist() == [model.rows[n].count for n in known]
        counted = [(n, model.waiting[n].last_seen, model.waiting[n].count) for n in waiting]
        assert ("waiting" in state) == model.counts_first
        if model.counts_first:
            assert state["waiting"].shape == (3, len(counted))
            assert state["waiting"].T.tolist() == [list(one) for one in counted]

    def assert_same_rows(self) -> None:
        """Asserts that rows have the expected contents; an id that got a new row has no old contents."""
        state = self.table.export_state()
        held = [self.held[self.model.rows[n].born] for n in state["ids"].tolist()]
        if held:
            weight = torch.stack([one.weight for one in held])
            torch.testing.assert_close(state["weight"].double(), weight, rtol=1e-5, atol=1e-6)
            squares = torch.tensor([one.squares for one in held])
            assert torch.equal(state["momentum1"], squares[:, None].expand(-1, 4))

    def assert_rows_apart(self, open_forwards: dict[int, dict[int | None, int]]) -> None:
        """Asserts that no two ids share a row and that no row that an open forward may hold was reused."""
        births = {row.born: number for number, row in self.model.rows.items()}
        rows = self.table.id_map.lookup(ids_of(*births.values())).tolist()
        row_of = dict(zip(births, rows, strict=True))
        assert len(set(rows)) == len(rows) and min(rows, default=0) >= 0
        for born_rows in open_forwards.values():
            for born, row in born_rows.items():
                if born in row_of:
                    assert row_of[born] == row, "a row moved"
                elif born is not None:
                    assert row not in rows, "a row was reused too early"
        stats = self.table.stats()
        assert stats["withheld"] == sum(bool(were & open_forwards.keys()) for were in self.left)
        assert stats["late_grads"] == self.late_grads


class Stream:
    """One table that is trained on one batch after another."""

    def __init__(self, eviction=None, admission=None, limit=1000, **options) -> None:
        self.table = living_table(eviction, admission, limit, **options)
        self.group = make_group(self.table)

    def step(self, *ids: int) -> set[int]:
        """Trains on one bag; returns the ids that have a row after it."""
        self.group(ids_of(*ids), torch.tensor([0, len(ids)]), training=True).sum().backward()
        return self.ids()

    def steps(self, *batches) -> set[int]:
        """Trains on bags in turn, each a list of ids; returns the ids that have a row after them."""
        for ids in batches:
            self.step(*ids)
        return self.ids()

    def ids(self) -> set[int]:
        self.table.id_map.check_invariants()
        return set(self.table.ids().tolist())

    def counts(self, *ids: int) -> list[int]:
        return self.table.count(ids_of(*ids)).tolist()

    def last_seen(self, *ids: int) -> list[int]:
        return self.table.last_seen(ids_of(*ids)).tolist()

    def stat(self, name: str) -> int:
        return self.table.stats()[name]

    def weights(self, *ids: int) -> list[float]:
        return self.table.lookup(ids_of(*ids))[0][:, 0].tolist()

    def waiting(self) -> list[list[int]]:
        """Returns [id, last seen, count] of each waiting id, in order of ids."""
        return sorted(self.table.export_state()["waiting"].T.tolist())


def mixed(*words: int) -> list[int]:
    """Returns the ids of these mixed ids."""
    return [unmix64(word) for word in words]


def seen(tables) -> list:
    return [(table.export_state(), without_probes(table.stats())) for table in tables]


def assert_seen(tables, before: list) -> None:
    """Asserts that states and stats equal `before`, byte for byte.

    All but the probe lengths: an id that came and went may have passed others of its home.
    """
    for table, (state, stats) in zip(tables, before, strict=True):
        assert same_state(table.export_state(), state)
        assert without_probes(table.stats()) == stats
        table.id_map.check_invariants()


def stream_stats(table: TableShard) -> dict[str, int | float]:
    """Returns the counts of a table that depend only on the stream of ids."""
    return {key: count for key, count in table.stats().items() if key not in NOT_OF_THE_STREAM}
