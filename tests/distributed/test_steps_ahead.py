"""Steps that a prefetching pipeline takes ahead are kept with their batch, in its context."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from pipeline_runs import prefetched_steps
from processed_training import processed, shard_processed
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, collection_of, shard
from table_cases import same_state
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ParameterSharding

import torchrec_dyn as dyn
from torchrec_dyn.distributed.resharding import _check_at_rest

LIFE = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())


class Batches:
    """A sharded collection and this rank's batches on their way."""

    def __init__(self, case: Case, form: str) -> None:
        self.case, collection = case, collection_of(case)
        if form:
            self.model = shard_processed(case, processed(case, collection, form))
            self.module = self.model.module.collection
            self.collection = self.module._embedding_bag_collection
        else:
            self.model = shard(case, collection)
            self.module = self.collection = self.model.module.collection
        self.shards = [
            shard
            for table in case.tables
            for shard in self.collection._shards.table(table.name).shards
        ]

    def features(self, step: int) -> KeyedJaggedTensor:
        return batches(self.case, step)[0][dist.get_rank()]

    def sent(self, step: int) -> tuple[Any, Any]:
        """Returns the context of a batch and its ids that arrived."""
        ctx = self.module.create_context()
        return ctx, self.module.input_dist(ctx, self.features(step)).wait().wait()

    def look_up(self, ctx: Any, arrived: Any) -> None:
        output = self.module.compute_and_output_dist(ctx, arrived).wait()
        parts = output.values()
        parts = [parts] if isinstance(parts, torch.Tensor) else [one.values() for one in parts]
        sum(part.sum() for part in parts).backward()

    def check_steps(self, steps: int) -> None:
        """Asserts how many steps each table has taken."""
        assert self.shards and {shard.stats()["step"] for shard in self.shards} == {steps}


def check_one_batch_after_the_other(case: Case, form: str) -> None:
    one = Batches(case, form)
    ctx, arrived = one.sent(0)
    one.module.prefetch(arrived, None, ctx)
    one.check_steps(0)  # on the CPU the forward takes the step
    with prefetched_steps():
        one.module.prefetch(arrived)  # no context: nothing would keep the step
        one.check_steps(0)
        one.module.prefetch(arrived, None, ctx)
        one.module.prefetch(arrived, None, ctx)  # once a batch
        one.check_steps(1)
        later, arrived_later = one.sent(1)
        one.module.prefetch(arrived_later, None, later)
        one.check_steps(2)
        with pytest.raises(ValueError, match="expected no batch on its way, got 2 whose ids"):
            _check_at_rest(one.collection._shards)
        one.model.eval()
        evaluated = one.sent(2)
        one.module.prefetch(evaluated[1], None, evaluated[0])
        with torch.no_grad():
            one.module.compute_and_output_dist(*evaluated).wait()
        one.model.train()
        one.check_steps(2)
        one.look_up(ctx, arrived)
        one.look_up(later, arrived_later)
        one.check_steps(2)
        assert not ctx.prefetched_steps and not later.prefetched_steps
        one.look_up(ctx, arrived)  # a second forward of the batch is a step of its own
        one.check_steps(3)
        _check_at_rest(one.collection._shards)
    plain = Batches(case, form)
    for step in (0, 1, 0):
        plain.look_up(*plain.sent(step))
    for got, expected in zip(one.shards, plain.shards, strict=True):
        for name, part in expected.export_state().items():
            assert torch.equal(got.export_state()[name], part), name


TABLE = Table("t", ["a"], usual_plan("row_wise", 8, 2, 2), config=LIFE)
CASES = {
    "pooled": Case([TABLE]),
    "without a policy": Case([Table("t", ["a"], usual_plan("row_wise", 8, 2, 2))]),
    "processed": Case([TABLE], weighted=True),
    "sequences": Case(
        [Table("t", ["a"], usual_plan("column_wise", 8, 2, 2), config=LIFE)],
        pooled=False,
        dedup=True,
    ),
}


@pytest.mark.parametrize(
    "name, form", [("pooled", ""), ("processed", "collection"), ("sequences", "")]
)
def test_a_step_is_taken_once_and_used_by_its_batch(name: str, form: str) -> None:
    workers.run(check_one_batch_after_the_other, CASES[name], form, world_size=2)


ALONE, BESIDE = shard_by_hand("column_wise", [([0], 0, 8)]), usual_plan("column_wise", 8, 2, 2)


def two_tables(of_b: ParameterSharding) -> Case:
    """Returns a case of a table A, column-wise on two ranks, and a table B with the plan `of_b`."""
    tables = [
        Table("A", ["a"], usual_plan("column_wise", 8, 2, 2), config=LIFE),
        Table("B", ["b"], of_b, config=LIFE),
    ]
    return Case(tables)


def change_between(case: Case, change: str) -> list[Any]:
    """Trains two batches; between the step and the forward of the first A is unfrozen, or B is loaded.

    Returns the states of A, on the columns of this rank, and of a plain loop that changes the tables before
    (a load) or after (`unfreeze`) the first batch.
    """
    found = []
    for is_ahead in (True, False):
        one = Batches(case, "")
        handle = one.collection.table("A")
        if change == "unfreeze":
            handle.freeze()
        with prefetched_steps():
            ctx, arrived = one.sent(0)
            if is_ahead:
                one.module.prefetch(arrived, None, ctx)
            elif change == "unfreeze":
                one.look_up(ctx, arrived)
            if change == "unfreeze":
                handle.unfreeze()
            else:
                for shard in one.collection._shards.table("B").shards:
                    shard.load_state(shard.export_state())
            if is_ahead or change == "load":
                one.look_up(ctx, arrived)
            one.look_up(*one.sent(1))
        [mine] = one.collection._shards.table("A").shards
        found.append(mine.export_state())
    return found


@pytest.mark.parametrize("change", ["unfreeze", "load"])
@pytest.mark.parametrize("of_b", [ALONE, BESIDE], ids=["B on one rank", "B on both ranks"])
def test_a_change_between_holds_alike_on_all_column_shards(
    of_b: ParameterSharding, change: str
) -> None:
    """Whatever other tables a rank has, and as in a plain loop."""
    results = workers.run(change_between, two_tables(of_b), change, world_size=2)
    for got, plain in results:
        assert got["step"] == plain["step"] == (1 if change == "unfreeze" else 2)
        assert same_state(got, plain)
    (first, _), (second, _) = results
    for name in ("ids", "last_seen", "count"):
        assert torch.equal(first[name], second[name]), name


def prefetch_with_deferred_updates(case: Case) -> Any:
    """Returns the ids of A on the columns of this rank after a prefetch that takes no step."""
    one = Batches(case, "")
    with prefetched_steps():
        ctx, arrived = one.sent(0)
        one.module.prefetch(arrived, None, ctx)
    [mine] = one.collection._shards.table("A").shards
    return mine.export_state()["ids"]


@pytest.mark.parametrize(
    "config",
    [LIFE, dyn.DynamicTableConfig(features=(dyn.FeatureUse("b", inserts=False),))],
    ids=["a policy", "a feature that does not insert"],
)
def test_a_prefetch_inserts_alike_on_all_column_shards(config: dyn.DynamicTableConfig) -> None:
    """B decides in its steps which ids get rows, and is on one rank only."""
    tables = [Table("A", ["a"], BESIDE), Table("B", ["b"], ALONE, config=config)]
    case = Case(tables, fused_params={**FUSED_PARAMS, "defer_updates": True})
    first, second = workers.run(prefetch_with_deferred_updates, case, world_size=2)
    assert len(first) > 0 and torch.equal(first, second)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a context, other than those of our steps, which the forward records."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, KeyedJaggedTensor):
        names = ("_values", "_weights", "_lengths", "_offsets")
        return tensors_in([getattr(value, name) for name in names])
    if dataclasses.is_dataclass(value):
        return tensors_in(vars(value))
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [one for part in value for one in tensors_in(part)]
        if isinstance(value, (list, tuple))
        else []
    )


def record(case: Case) -> list[str]:
    """Asserts that a context records all its tensors on a stream; returns the names of its parts."""
    one, recorded = Batches(case, ""), set[int]()
    ctx, _ = one.sent(0)

    def note(tensor: torch.Tensor, stream: Any) -> None:
        recorded.add(tensor.untyped_storage().data_ptr())

    with mock.patch.object(torch.Tensor, "record_stream", note):
        ctx.record_stream(mock.sentinel.stream)
    parts = {name: tensors_in(part) for name, part in vars(ctx).items()}
    for name, tensors in parts.items():
        for tensor in tensors:
            assert tensor.untyped_storage().data_ptr() in recorded or not tensor.numel(), name
    return sorted(name for name, tensors in parts.items() if tensors)


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("name", ["pooled", "sequences"])
def test_contexts_record_their_tensors(name: str, variable: bool) -> None:
    """A pipeline hands contexts from the stream that sends ids to the streams of lookups."""
    table = dataclasses.replace(CASES[name].tables[0], pooling="MEAN")
    case = dataclasses.replace(CASES[name], tables=[table], variable=variable)
    expected = {
        "pooled": {"divisor", *(["inverse_indices"] if variable else [])},
        "sequences": {"expansions", "sharding_contexts", *(["restoration"] if variable else [])},
    }[name]
    for parts in workers.run(record, case, world_size=2):
        assert expected <= {*parts}


def check_fail_between(case: Case) -> None:
    one = Batches(case, "")
    with prefetched_steps():
        ctx, arrived = one.sent(0)
        one.module.prefetch(arrived, None, ctx)
        for lookup in one.collection._lookups:
            lookup.register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            one.module.compute_and_output_dist(ctx, arrived)
        assert not ctx.prefetched_steps
        assert all(len(shard.forwards) == 0 for shard in one.shards)
        for lookup in one.collection._lookups:
            lookup._forward_pre_hooks.clear()
        one.look_up(*one.sent(1))  # of another size: it must not use the step
        one.check_steps(2)


def fail(*arguments: Any) -> None:
    raise KeyError


def test_a_step_of_a_forward_that_failed_is_not_used() -> None:
    workers.run(check_fail_between, CASES["pooled"], world_size=2)
