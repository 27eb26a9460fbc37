"""A table that moves while the model goes on trains as one that was loaded elsewhere, or stayed."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import (
    LOCAL_SIZES,
    OPTIMIZERS,
    Setup,
    batch,
    held,
    kinds_on,
    load,
    new,
    plan_of,
    quietly,
    run_on,
    same_bits,
    save,
    train,
)
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import shard_by_hand
from sharded_training import Holder, collection_of, shard
from shards import deep_but
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import apply_delta, export_delta, mark
from torchrec_dyn.distributed import resharding
from torchrec_dyn.state_dict import live_rows

# Probe lengths depend on the order of insertion; bytes and slots depend on the shards.
NOT_CARRIED = (
    "bytes", "limit", "slots", "load", "probe_length_mean", "probe_length_max", "withheld",
)  # fmt: skip


def plans(
    setup: Setup, kinds: Sequence[str], shift: int = 0, names: Collection[str] | None = None
) -> dict[str, ParameterSharding]:
    """Returns a plan for each table of a setup: the kinds in turn, with ranks shifted by `shift`."""
    local = LOCAL_SIZES[setup.world]
    return {
        table.name: plan_of(
            kinds[turn % len(kinds)], setup.world, local, turn + shift, setup.pooled, setup.rows
        )
        for turn, table in enumerate(setup.case().tables)
        if names is None or table.name in names
    }


def move(model: Any, changed: dict[str, ParameterSharding]) -> None:
    """Moves tables by the sharder's `reshard`, as DistributedModelParallel.reshard does."""
    collection = model.module.collection
    with mock.patch.object(knobs, "CHUNK_BYTES", 4000):  # many chunks, many rounds
        same = model.sharders[0].reshard(collection, changed, model._env, model.device)
    assert same is collection


def counts_of(model: Any, setup: Setup) -> dict[str, dict[str, int | float]]:
    """Returns the counts of each table over all ranks."""
    return {
        table.name: {
            name: count
            for name, count in dyn.read_stats(model.module.collection, table.name).items()
            if name not in NOT_CARRIED
        }
        for table in setup.case().tables
    }


def check_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bits(got[name], value), f"rank {dist.get_rank()}, {name}: {got[name]} {value}"


def check_closed_up(model: Any, names: Collection[str]) -> None:
    """Asserts that rows of other ranks take no memory after the move; a small table is read whole."""
    for name in names:
        for one in model.module.collection._shards.table(name).shards:
            assert one.row_numbers.high_water_mark <= one.num_rows + one.num_rows // 8


def loaded_elsewhere(
    model: Any, setup: Setup, changed: dict[str, ParameterSharding], path: str
) -> Any:
    """Returns the oracle: the same model, saved and loaded into a model under the other plan."""
    save(model, path)
    dist.barrier()
    case = setup.case()
    tables = [replace(one, plan=changed.get(one.name, one.plan)) for one in case.tables]
    case = replace(case, tables=tables)
    return load(shard(case, collection_of(case)), path)


def check_goes_on(
    setup: Setup, kinds: Sequence[str], shift: int, folder: str, names: Collection[str] | None
) -> list[int]:
    """Trains, moves, trains again, beside a model that is moved by a checkpoint; returns rows per table."""
    model = new(setup)
    train(model, setup, range(2))
    changed = plans(setup, kinds, shift, names)
    other = loaded_elsewhere(model, setup, changed, f"{folder}/before")
    before = counts_of(model, setup)
    move(model, changed)
    assert counts_of(model, setup) == before
    check_same(held(model), held(other))
    for one in (model, other):
        check_closed_up(one, changed)
    # Time 15: ids of step 0, at time 0, expire.
    got, expected = train(model, setup, (2, 5)), train(other, setup, (2, 5))
    for one, another in zip(got, expected, strict=True):
        assert same_bits(one, another)
    check_same(held(model), held(other))
    collection = model.module.collection
    return [collection.table(table.name).num_rows for table in setup.case().tables]


TW, RW, CW, THREE = "table_wise", "row_wise", "column_wise", "three_columns"
BY_NODE = ("table_row_wise", "grid_shard", "table_column_wise", RW, TW)
CASES = {
    "pooled": (Setup(2, (TW, RW, CW, THREE, RW), optimizer="ADAM"), (RW, CW, THREE, TW, TW), 0),
    "back and on": (Setup(2, (RW, CW, THREE, TW, CW), optimizer="ADAM"), (CW, TW, TW, TW, RW), 1),
    "sequences": (Setup(2, (TW, RW, CW), pooled=False), (RW, CW, TW), 1),
    "row-wise state": (
        Setup(2, (THREE, CW, TW, RW, THREE), optimizer="EXACT_ROWWISE_ADAGRAD"),
        (CW, THREE, CW, TW, TW), 0,
    ),
    "two nodes": (
        Setup(4, (TW, "grid_shard", RW, "table_row_wise", CW), optimizer="PARTIAL_ROWWISE_ADAM"),
        BY_NODE, 1,
    ),
    "two nodes, sequences": (Setup(4, (TW, CW, RW), pooled=False, optimizer="EXACT_SGD"), (CW, RW, TW), 1),
}  # fmt: skip


@pytest.mark.parametrize("case", deep_but(["two nodes"], CASES))
def test_trains_on_as_through_a_checkpoint(case: str, tmp_path: Path) -> None:
    setup, kinds, shift = CASES[case]
    rows = run_on(setup, check_goes_on, kinds, shift, str(tmp_path), None)
    assert all(sum(of_table) > 9 for of_table in zip(*rows, strict=True))


@pytest.mark.parametrize("seed", deep_but([1], range(40)))
def test_any_plan_to_any_other(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    world, pooled = drawn.choice([2, 3, 4]), drawn.random() < 0.7
    kinds = [kind for kind in kinds_on(world, pooled) if pooled or kind != THREE]
    first, second = (tuple(drawn.choices(kinds, k=5)) for _ in range(2))
    setup = Setup(world, first, pooled, drawn.choice(OPTIMIZERS))
    names = drawn.sample(["plain", "sixteen", "brain", "counted", "drawn"], drawn.randint(1, 5))
    run_on(setup, check_goes_on, second, drawn.randrange(4), str(tmp_path), names)


def check_moves_one(setup: Setup) -> None:
    model, stayed = new(setup), new(setup)
    for one in (model, stayed):
        train(one, setup, range(3))
    shards = model.module.collection._shards
    kept = {name: list(shards.table(name).shards) for name in ("plain", "drawn")}
    move(model, plans(setup, (CW,), names=["plain"]))
    assert [*shards.table("drawn").shards] == kept["drawn"], "the very same shards"
    assert [*shards.table("plain").shards] != kept["plain"]
    assert model.module.collection.module_sharding_plan["plain"].sharding_type == CW
    got, expected = train(model, setup, range(3, 5)), train(stayed, setup, range(3, 5))
    assert all(same_bits(one, other) for one, other in zip(got, expected, strict=True))
    # The whole plan may be given: tables whose pieces lie where they lay do not move.
    here = shards.table("plain").shards
    move(model, plans(setup, (CW, *setup.kinds[1:])))
    assert [*shards.table("plain").shards] == [*here]


def test_one_of_several_tables_moves() -> None:
    run_on(Setup(2, (TW, RW, CW, CW, RW)), check_moves_one)


def check_moves_empty(setup: Setup) -> None:
    model, other = new(setup), new(setup)
    move(model, plans(setup, (RW,)))
    assert dist.get_world_size() == 2
    train(model, setup, range(2))
    train(other, setup, range(2))
    assert counts_of(model, setup) == counts_of(other, setup)


def test_tables_that_nobody_used_yet_move() -> None:
    run_on(Setup(2), check_moves_empty)


def starts_as(setup: Setup, folder: str) -> list[torch.Tensor]:
    """A table starts rows as the checkpoint that it was loaded from says, wherever it lies."""
    constant = {"plain": dyn.DynamicTableConfig(initializer=dyn.Constant(0.25))}
    case = setup.case()
    other = shard(case, collection_of(case, dynamic=constant))
    train(other, setup, range(1))
    save(other, folder)
    model = load(new(setup), folder)
    for kind in (RW, CW):
        move(model, plans(setup, (kind,)))
    train(model, setup, range(1, 3))
    ids = torch.tensor([1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007])  # of step 1 alone
    rows, found = dyn.lookup_rows(model.module.collection, "plain", ids)
    return rows[found]


def test_initializers_that_came_with_a_checkpoint_come_along(tmp_path: Path) -> None:
    for rows in run_on(
        Setup(2, optimizer="EXACT_SGD", tables=1), starts_as, str(tmp_path / "saved")
    ):
        assert len(rows) > 2
        # Gradients are multiples of 1/16, the learning rate is 0.1; other rows start within 0.04 of 0.
        steps = (rows - 0.25) * 160
        assert torch.allclose(steps, steps.round(), atol=1e-3)


def check_sends_once(setup: Setup) -> None:
    case, stayed = setup.case(), new(setup)
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})  # type: ignore[misc]
    sharder = dyn.DynamicEmbeddingCollectionSharder(case.fused_params, use_index_dedup=True)
    model = DistributedModelParallel(Holder(collection_of(case)), plan=plan, sharders=[sharder])
    for steps in (range(2), range(2, 4)):
        got, expected = train(model, setup, steps), train(stayed, setup, steps)
        assert all(same_bits(one, other) for one, other in zip(got, expected, strict=True))
        assert len(model.module.collection._send_once) == 3
        move(model, plans(setup, (RW, CW, TW)))


def test_sequences_that_are_sent_once_go_on_so() -> None:
    run_on(Setup(2, (TW, RW, CW), pooled=False, tables=3), check_sends_once)


# What cannot move stays: on every rank, with all that it holds

SETUP = Setup(2, (CW, TW), optimizer="ADAM", names=("plain", "counted"))
SEQUENCES = Setup(2, (TW, RW), pooled=False, tables=2)


def refused(model: Any, setup: Setup, changed: Any, error: Any, match: str) -> None:
    """Asserts that a plan is refused, that nothing has changed, and that training goes on."""
    before, counts, plan = held(model), counts_of(model, setup), planned(model)
    with pytest.raises(error, match=match):
        move(model, changed)
    check_same(held(model), before)
    assert counts_of(model, setup) == counts and planned(model) == plan


def planned(model: Any) -> list[Any]:
    plan = model.module.collection.module_sharding_plan
    return [(name, one.sharding_type, one.ranks) for name, one in sorted(plan.items())]


def check_bad_plans(setup: Setup) -> None:
    model, stayed, rank = new(setup), new(setup), dist.get_rank()
    for one in (model, stayed):
        train(one, setup, range(2))
    good = plans(setup, (RW,))
    bad = {
        "columns 0 to 12 once": {**good, "plain": shard_by_hand(CW, [([0], 0, 6)])},
        "ranks from 0 to 1": {**good, "plain": shard_by_hand(TW, [([2], 0, 12)])},
        "expected a plan for the tables": {**good, "other": good["plain"]},
        "expected sharding type": {"plain": shard_by_hand("data_parallel", [([0], 0, 12)])},
    }
    for match, plan in bad.items():
        refused(model, setup, plan, ValueError, match)
    check = model.module.collection._check_batch
    with mock.patch.object(
        check, "needs_weights", False
    ):  # as feature processors around it have it
        refused(model, setup, good, ValueError, "collection without feature processors")
    uneven = plans(setup, (TW,)) if rank else good
    refused(model, setup, uneven, ValueError, "same plan on every rank")
    refused(model, setup, good if rank else {"plain": None}, RuntimeError, "NoneType")
    for got, expected in zip(
        train(model, setup, range(2, 4)), train(stayed, setup, range(2, 4)), strict=True
    ):
        assert same_bits(got, expected)


def test_bad_plans_change_nothing() -> None:
    run_on(SETUP, check_bad_plans)


def other_optimizers(setup: Setup) -> None:
    model = new(setup)
    train(model, setup, range(2))
    used = model.sharders[0]
    for changed in ({"learning_rate": 0.3}, {"eps": 0.1}, {"optimizer": EmbOptimType.EXACT_SGD}):
        model.sharders[0] = type(used)({**used.fused_params, **changed})
        match = "optimizers that the collection was sharded with, got plain: "
        refused(model, setup, plans(setup, (RW,), names=["plain"]), ValueError, match)
    model.sharders[0] = type(used)(dict(used.fused_params))
    move(model, plans(setup, (RW,), names=["plain"]))


def test_a_sharder_with_another_optimizer_is_refused() -> None:
    run_on(SETUP, other_optimizers)


def uneven_columns(setup: Setup) -> None:
    model = new(setup)
    train(model, setup, range(2))
    wide, narrow = (
        shard_by_hand(CW, [([0], 0, 6), ([1], 6, 6)]),
        shard_by_hand(CW, [([0], 0, 4), ([1], 4, 4), ([0], 8, 4)]),
    )
    changed = {"plain": wide, "sixteen": narrow}
    refused(model, setup, changed, ValueError, "column shards of one width")


def test_sequences_keep_their_rule_of_widths() -> None:
    run_on(SEQUENCES, uneven_columns)


def failing(rank: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs out of memory on one rank, when it comes to the last table."""

    def run(table: Any, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == rank and table.name == "counted":
            raise MemoryError("no more")
        return real(table, *args, **options)

    return run


def fails_on_the_way(setup: Setup) -> None:
    """Reading or writing fails on one rank: the tables before have not moved either."""
    model = new(setup)
    train(model, setup, range(2))
    changed = plans(setup, (TW, RW))
    for rank, target, name in (
        (1, live_rows, "read_tensor"),  # rank 0 holds nothing of it yet
        (0, resharding, "append"),
        (1, resharding, "append"),
    ):
        with mock.patch.object(target, name, failing(rank, getattr(target, name))):
            refused(model, setup, changed, RuntimeError, f"rank={rank}.: no more")
    move(model, changed)
    assert planned(model) == sorted((n, p.sharding_type, p.ranks) for n, p in changed.items())


def test_what_fails_on_one_rank_leaves_all_as_they_were() -> None:
    run_on(SETUP, fails_on_the_way)


def check_open_forwards(setup: Setup) -> None:
    model = new(setup)
    train(model, setup, range(1))
    mine = batch(setup.case(), 1, dist.get_rank(), setup.world)
    outputs = model(mine)
    changed = plans(setup, (RW,), names=["plain"])
    with pytest.raises(ValueError, match="expected no forward that waits for its backward"):
        move(model, changed)
    outputs.values().sum().backward()
    # An evaluation has no backward, and what nobody can reach any more does not wait for one.
    with torch.no_grad():
        kept = model(mine)
    model(mine)
    move(model, changed)
    assert kept.values().shape == outputs.values().shape
    gc.disable()  # else it may be collected before the move
    try:
        model(mine).values()  # in a cycle of TorchRec's
        move(model, plans(setup, (CW,), names=["plain"]))
        cycle: list[Any] = [model(mine).values()]
        cycle.append(cycle)
        del cycle
        move(model, changed)
    finally:
        gc.enable()


def test_an_open_forward_is_refused() -> None:
    run_on(SETUP, check_open_forwards)


def check_of_before(setup: Setup, folder: str) -> None:
    """A state dict and a marker of before the move are not of the tables of now."""
    model = new(setup)
    train(model, setup, range(2))
    marker, state = mark(model), {"model": model.state_dict()}
    move(model, plans(setup, (RW,), names=["plain"]))
    with pytest.raises(ValueError, match="from before the table was copied, moved"):
        quietly(export_delta, model, f"{folder}/delta", marker)
    with pytest.raises(CheckpointException, match="as it was when its state dict was made"):
        quietly(dcp.save, state, checkpoint_id=f"{folder}/state")


def test_markers_and_state_dicts_of_before_are_refused(tmp_path: Any) -> None:
    run_on(SETUP, check_of_before, str(tmp_path))


def check_deltas_across_moves(setup: Setup, folder: str) -> None:
    """After a move a new marker starts the next delta; the copy may stay, or move elsewhere, in between."""
    model, copied = new(setup), new(setup)
    marker = mark(model)
    train(model, setup, range(2))
    marker = quietly(export_delta, model, f"{folder}/0", marker)
    quietly(apply_delta, copied, f"{folder}/0")
    for number, (names, elsewhere) in enumerate(((["plain"], CW), (["plain", "counted"], RW))):
        move(model, plans(setup, (RW, TW), number, names))
        marker = mark(model)
        train(model, setup, range(2 + number, 3 + number))
        quietly(export_delta, model, f"{folder}/{number + 1}", marker)
        quietly(apply_delta, copied, f"{folder}/{number + 1}")
        move(copied, plans(setup, (elsewhere,), number))
    move(copied, model.module.collection.module_sharding_plan)
    check_same(held(copied), held(model))
    for one in (model, copied):
        train(one, setup, range(4, 6))
    check_same(held(copied), held(model))


def test_deltas_go_on_across_a_reshard_of_the_model_and_of_its_copy(tmp_path: Any) -> None:
    run_on(SETUP, check_deltas_across_moves, str(tmp_path))
