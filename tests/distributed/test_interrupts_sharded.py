"""After an exception at any place of a step of a sharded model, the next step works and nothing is lost."""

import itertools
from unittest import mock

import pytest
import torch
import workers
from interrupt_cases import LIVES, Training, check_every_place, check_steps, check_whole, tables_of
from sharded_cases import usual_plan
from table_cases import ids_of
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.distributed import resharding
from torchrec_dyn.state_dict import TableLoad

TW, RW = "table_wise", "row_wise"


class ShardedTraining(Training):
    """The same training under DistributedModelParallel on one rank."""

    def __init__(self, options, kind):
        super().__init__(options)
        self.kind = kind

    def empty(self):
        collection = super().empty()
        plans = {
            config.name: usual_plan(self.kind, 4, 1, 1, rows=config.num_embeddings)
            for config in collection.embedding_bag_configs()
        }
        return DistributedModelParallel(
            collection,
            env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
            sharders=[dyn.DynamicEmbeddingBagCollectionSharder()],
            plan=ShardingPlan({"": EmbeddingModuleShardingPlan(plans)}),
        )


def run_steps(life, kind, steps, every):
    return check_steps(ShardedTraining(LIVES[life], kind), steps, every)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("every", [499, pytest.param(3, marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    ("life", "kind", "steps"),
    [("plain", "table_wise", 0), ("all", "column_wise", 7), ("all", "row_wise", 3)],
)
def test_a_step(life, kind, steps, every):
    ((runs, seen),) = workers.run(run_steps, life, kind, steps, every, world_size=1, timeout=900)
    assert runs > 2 and 0 in seen


EDITS = {
    "erase": lambda table: table.erase(ids_of(15, 16, 999)),
    "assign": lambda table: table.assign(ids_of(15, 999, 998), torch.ones(3, 4)),
}


def run_edit(edit, every):
    training = ShardedTraining(LIVES["all"], "column_wise")

    def check(model):
        check_whole(model)
        left, right = (shard for name, shard in tables_of(model).items() if name.startswith("t0"))
        assert torch.equal(left.ids(), right.ids())
        training.step(model, 3)
        assert torch.equal(left.ids(), right.ids())

    def call(model):
        EDITS[edit](model.module.table("t0"))

    return check_every_place(lambda: training.after(3), call, check, every)


@pytest.mark.parametrize("every", [151, pytest.param(3, marks=pytest.mark.deep)])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_all_column_shards_or_none(edit, every):
    (runs,) = workers.run(run_edit, edit, every, world_size=1, timeout=900)
    assert runs > 3


def run_freeze(every):
    """All places on one model: each check undoes what the call before has done."""
    model = ShardedTraining(LIVES["all"], "column_wise").after(1)
    table, seen = model.module.table("t0"), set()

    def check(_):
        left, right = table.whole.shards
        assert left.is_frozen == right.is_frozen == table.is_frozen
        seen.add(table.is_frozen)
        table.unfreeze()

    runs = check_every_place(lambda: None, lambda _: table.freeze(), check, every)
    table.whole.shards[1].step += 1  # of the same rank
    with pytest.raises(ValueError, match=r"same training step, got {0: \[1, 2\]} by rank"):
        table.freeze()
    return runs, seen


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.deep)])
def test_a_freeze_is_of_all_column_shards_or_none(every):
    ((runs, seen),) = workers.run(run_freeze, every, world_size=1)
    assert runs > 50 and seen == {False, True}


def run_load(every):
    training = ShardedTraining(LIVES["plain"], "column_wise")
    saved = training.save(training.after(4))

    def check(model):
        check_whole(model)
        left, right = (shard for name, shard in tables_of(model).items() if name.startswith("t0"))
        assert torch.equal(left.ids(), right.ids())

    def call(model):
        training.load(model, *saved)

    return check_every_place(lambda: training.after(2), call, check, every)


@pytest.mark.parametrize("every", [1201, pytest.param(41, marks=pytest.mark.deep)])
def test_a_load_changes_all_column_shards_or_none(every):
    (runs,) = workers.run(run_load, every, world_size=1, timeout=900)
    assert runs > 3


def run_commit(every):
    """Interrupts only the commit of loaded optimizer state."""
    training = ShardedTraining(LIVES["plain"], "column_wise")
    rows, optimizer = training.save(training.after(4))
    commit = TableLoad.commit

    def loaded():
        model, waiting = training.after(2), []
        model.load_state_dict(rows)
        with mock.patch.object(TableLoad, "commit", lambda loaded: waiting.append(loaded)):
            model.fused_optimizer.load_state_dict(optimizer)
        return model, waiting[0]

    def check(both):
        left, right = (shard for name, shard in tables_of(both[0]).items() if name.startswith("t0"))
        momenta = [shard.export_state()["momentum1"].any() for shard in (left, right)]
        assert left.step == right.step and momenta == [left.step > 0] * 2

    return check_every_place(loaded, lambda both: commit(both[1]), check, every)


@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.deep)])
def test_a_load_of_optimizer_state_changes_all_column_shards_or_none(every):
    (runs,) = workers.run(run_commit, every, world_size=1, timeout=900)
    assert runs > 3


def run_last_step_of_reshard(every):
    """All places on one model, which moves on each time."""
    training = ShardedTraining(LIVES["plain"], "table_wise")
    model = training.after(2)
    collection, steps = model.module, itertools.count(2)
    table, seen = collection.table("t0"), set()

    def prepared():
        """Returns the arguments of the last step of a move to the other plan."""
        here = collection.module_sharding_plan["t0"].sharding_type
        plan = usual_plan(TW if here == RW else RW, 4, 1, 1, rows=100_000)
        with mock.patch.object(resharding, "_replace_attributes") as last_step:
            model.sharders[0].reshard(collection, {"t0": plan}, model._env, model.device)
        return here, last_step.call_args.args

    def call(made):
        resharding._replace_attributes(*made[1])

    def check(made):
        here = collection.module_sharding_plan["t0"].sharding_type
        seen.add(here == made[0])
        kernels = [kernel for lookup in collection._lookups for kernel in lookup._emb_modules]
        shards = [shard for kernel in kernels for shard in kernel.tables if shard.name == "t0"]
        assert shards == collection._shards.table("t0").shards == list(table.whole.shards)
        assert table.whole.layout.rows_are_spread == (here == RW)
        model.fused_optimizer.param_groups[0]["lr"] = rate = 1 / next(steps)
        assert {kernel.group.learning_rate for kernel in kernels} == {rate}

    return check_every_place(prepared, call, check, every), seen


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.deep)])
def test_the_last_step_of_a_reshard_changes_all_or_nothing(every):
    ((runs, seen),) = workers.run(run_last_step_of_reshard, every, world_size=1, timeout=900)
    assert runs > 5 and seen == {False, True}
