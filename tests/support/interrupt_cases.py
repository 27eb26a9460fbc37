"""Tables that are interrupted at every place of a call, and the rules that hold afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import sharded_training
import torch
from garbage import keep_what_exists
from interrupts import interrupted
from sharded_cases import Case, Table, usual_plan
from table_cases import same_state
from torch import Tensor
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.policies import replacement_of
from torchrec_dyn.table import TableShard

State = tuple[dict[str, Tensor], dict[str, Any]]
# Numbers of `stats` that tell how the contents are kept, not what they are.
_KEPT = ("slots", "load", "bytes", "probe_length_mean", "probe_length_max", "withheld")


def batch_of(*ids: Sequence[int]) -> KeyedJaggedTensor:
    """Returns one bag for each feature f0, f1, ..."""
    return KeyedJaggedTensor.from_lengths_sync(
        [f"f{n}" for n in range(len(ids))],
        torch.tensor([number for bag in ids for number in bag], dtype=torch.int64),
        torch.tensor([len(bag) for bag in ids]),
    )


PLAIN = dyn.DynamicTableConfig()
LIVES = {
    "plain": (PLAIN, PLAIN),
    "lru": (dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed()), PLAIN),
    "lfu": (dyn.DynamicTableConfig(eviction=dyn.LeastFrequentlyUsed()),),
    "half": (dyn.DynamicTableConfig(eviction=dyn.LeastFrequentlyUsed(half_life_steps=2)),),
    "steps": (dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(steps=3)),),
    "time": (dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=3)),),
    "count": (dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2, counters=20)),),
    "all": (
        dyn.DynamicTableConfig(
            admission=dyn.AdmitAfter(2, counters=20),
            eviction=(dyn.ExpireAfter(steps=3), dyn.LeastRecentlyUsed()),
        ),
        dyn.DynamicTableConfig(admission=dyn.AdmitWithProbability(0.7), eviction=dyn.LeastFrequentlyUsed()),
    ),
}  # fmt: skip
LIMIT = 70  # more than the 40 ids of the first slots, so that maps grow before tables are full


def collection_of(*options: dyn.DynamicTableConfig, kind: str = "ADAM") -> Any:
    """Returns a collection with a table of 4 columns for each of the options."""
    whole = usual_plan("table_wise", 4, 1, 1)
    tables = [
        Table(f"t{n}", [f"f{n}"], whole, 4, rows=LIMIT if _replaces(one) else 100_000, config=one)
        for n, one in enumerate(options)
    ]
    return sharded_training.collection_of(
        Case(tables), fused_params={"optimizer": kind, "learning_rate": 0.1}
    )


def _replaces(options: dyn.DynamicTableConfig) -> bool:
    return replacement_of(options.eviction) is not None


def contents(model: Any) -> dict[str, State]:
    """Returns the saved form and the counters of each table of a collection, sharded or not."""
    return {
        name: (
            table.export_state(),
            {key: value for key, value in table.stats().items() if key not in _KEPT},
        )
        for name, table in tables_of(model).items()
    }


def tables_of(model: Any) -> dict[str, TableShard]:
    """Returns the tables of a collection, also in DistributedModelParallel; column shards by first column."""
    module = getattr(model, "module", model)
    if isinstance(module, dyn.DynamicEmbeddingBagCollection):
        return module.local_tables()
    return {
        f"{shard.name}:{shard.first_column}": shard for shard in sharded_training.tables_of(module)
    }


def is_same(one: State, other: State) -> bool:
    return same_state(one[0], other[0]) and one[1] == other[1]


def check_whole(model: Any) -> None:
    """Checks that every row is in use once or free, and that scores and counters are of rows in use."""
    gc.collect()
    for table in tables_of(model).values():
        table.id_map.check_invariants()
        assert table.stats()["withheld"] == 0
        high, life = table.row_numbers.high_water_mark, table.life
        in_use = torch.zeros(high, dtype=torch.bool)
        in_use[table.id_map.contents()[1]] = True
        if life is not None:
            assert torch.equal(life.scores.read(torch.arange(high))[0] >= 0, in_use)
        if life is not None and life.waiting is not None:
            life.waiting.id_map.check_invariants()
            assert not torch.isin(life.waiting.id_map.contents()[0], table.ids()).any()
        free = table.row_numbers.prepare(high - table.num_rows)
        assert free.high_water_mark == high, "a row is lost"
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *free.reused])
        assert not in_use[rows].any() and rows.unique().numel() == rows.numel()


def check_every_place(
    make: Callable[[], Any],
    call: Callable[[Any], Any],
    check: Callable[[Any], Any],
    every: int = 1,
) -> int:
    """Interrupts a call on a fresh model at every place, or at one in `every`, and checks the model then."""
    keep_what_exists()  # each check collects garbage
    at, runs = 1, 0
    while True:
        model = make()
        hit = interrupted(lambda model=model: call(model), at)
        try:
            check(model)
        except Exception as error:
            error.add_note(f"interrupted at place {at}")
            raise
        if not hit:
            return runs
        at, runs = at + every, runs + 1


class Training:
    """A collection in training: step n sees some old ids and some new ids."""

    def __init__(self, options):
        self.options = options
        self.is_timed = any(_is_timed(one) for one in options)

    def empty(self):
        return collection_of(*self.options)

    def batch(self, step):
        """Some ids of the steps before, some of them twice, and new ids; ids return after 4 steps."""
        ids = [
            *range(10 * step - 5, 10 * step + 12),
            10 * step,
            *range(10 * step - 40, 10 * step - 34),
        ]
        return batch_of(*([ids] * len(self.options)))

    def forward(self, model, step):
        if self.is_timed:
            getattr(model, "module", model).set_time(step)
        return model(self.batch(step)).values()

    def step(self, model, step):
        output = self.forward(model, step)
        (output * output).sum().backward()
        return output.detach()

    def after(self, steps):
        model = self.empty()
        for step in range(steps):
            self.step(model, step)
        make_tables(model)
        return model

    def save(self, model):
        return model.state_dict(), model.fused_optimizer.state_dict()

    def load(self, model, saved, saved_optimizer):
        model.load_state_dict(saved)
        model.fused_optimizer.load_state_dict(saved_optimizer)


def _is_timed(options):
    policies = options.eviction if isinstance(options.eviction, tuple) else (options.eviction,)
    return any(isinstance(one, dyn.ExpireAfter) and one.time is not None for one in policies)


class Stages:
    """The contents that a training may have after an interrupted step: before it, or after a part of it."""

    def __init__(self, training, steps):
        self.training, self.steps = training, steps
        before = training.after(steps)
        if training.is_timed:
            timed = training.after(steps)
            getattr(timed, "module", timed).set_time(steps)
        model = training.after(steps)
        output = training.forward(model, steps)
        forward = contents(model)
        (output * output).sum().backward()
        self.stages = [contents(before), forward, contents(model)]
        if training.is_timed:
            self.stages.append(contents(timed))
        self.later = {}

    def check(self, model):
        """Checks the contents, that they can be saved and loaded, and that training goes on as it should."""
        make_tables(model)
        check_whole(model)
        now = contents(model)
        found = [
            number
            for number, stage in enumerate(self.stages)
            if all(is_same(now[name], stage[name]) for name in stage)
        ]
        assert found, "neither the contents before the step nor after it"
        saved = self.training.save(model)
        if found[0] not in self.later:
            loaded = self.training.empty()
            self.training.load(loaded, *saved)
            self.later[found[0]] = self.train_on(loaded)
        outputs, states = self.train_on(model)
        wanted, wanted_states = self.later[found[0]]
        assert all(torch.equal(*both) for both in zip(outputs, wanted, strict=True))
        assert all(is_same((states[name], {}), (wanted_states[name], {})) for name in states)
        check_whole(model)
        return found[0]

    def train_on(self, model):
        outputs = [self.training.step(model, self.steps + more) for more in range(3)]
        return outputs, {name: state for name, (state, _) in contents(model).items()}


def make_tables(model):
    """Makes the tables of an unsharded collection, which are made at first use."""
    if isinstance(model, dyn.DynamicEmbeddingBagCollection):
        for name in model.embedding_bags:
            model.table(name).ids()


def check_steps(training, steps, every=1):
    stages, seen = Stages(training, steps), set()
    runs = check_every_place(
        lambda: training.after(steps) if steps else training.empty(),
        lambda model: training.step(model, steps),
        lambda model: seen.add(stages.check(model)),
        every,
    )
    return runs, seen
