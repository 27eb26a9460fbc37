"""What cannot move stays: on every rank, with all that it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import Setup, batch, held, new, quietly, run_on, same_bits, train
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from reshard_cases import check_same, counts_of, move, plans
from sharded_cases import shard_by_hand
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_dyn.checkpoint import export_delta, mark
from torchrec_dyn.distributed import chunk_exchange
from torchrec_dyn.state_dict import aligned_state, loading, saving, staged_rows

TW, RW, CW = "table_wise", "row_wise", "column_wise"
SETUP = Setup(2, (TW, RW, CW), optimizer="ADAM", tables=4)
SEQUENCES = Setup(2, (TW, RW), pooled=False, tables=2)


def refused(model: Any, setup: Setup, changed: Any, error: Any, match: str) -> None:
    """Asserts that a plan is refused, that nothing has changed, and that training goes on."""
    before, counts, plan = held(model), counts_of(model, setup), plan_of(model)
    with pytest.raises(error, match=match):
        move(model, changed)
    check_same(held(model), before)
    assert counts_of(model, setup) == counts and plan_of(model) == plan


def plan_of(model: Any) -> list[Any]:
    plan = model.module.collection.module_sharding_plan
    return [(name, one.sharding_type, one.ranks) for name, one in sorted(plan.items())]


def bad_plans(setup: Setup) -> None:
    model, stayed, rank = new(setup), new(setup), dist.get_rank()
    for one in (model, stayed):
        train(one, setup, range(2))
    good = plans(setup, (RW,))
    bad = {
        "12 columns in all": {**good, "plain": shard_by_hand(CW, [([0], 0, 6)])},
        "ranks from 0 to 1": {**good, "plain": shard_by_hand(TW, [([2], 0, 12)])},
        "its tables only": {**good, "other": good["plain"]},
        "expected sharding type": {"plain": shard_by_hand("data_parallel", [([0], 0, 12)])},
    }
    for match, plan in bad.items():
        refused(model, setup, plan, ValueError, match)
    check = model.module.collection._check_batch
    with mock.patch.object(
        check, "needs_weights", False
    ):  # as feature processors around it have it
        refused(model, setup, good, ValueError, "feature processors wrap")
    uneven = plans(setup, (TW,)) if rank else good
    refused(model, setup, uneven, ValueError, "same plan on every rank")
    refused(model, setup, good if rank else {"plain": None}, RuntimeError, "NoneType")
    for got, expected in zip(
        train(model, setup, range(2, 4)), train(stayed, setup, range(2, 4)), strict=True
    ):
        assert same_bits(got, expected)


def test_bad_plans_change_nothing() -> None:
    run_on(SETUP, bad_plans)


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

    def run(it: Any, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == rank and it.name == "counted":
            raise MemoryError("no more")
        return real(it, *args, **options)

    return run


def fails_on_the_way(setup: Setup) -> None:
    """Reading, taking or putting in place fails on one rank: the tables before have not moved either."""
    model = new(setup)
    train(model, setup, range(2))
    changed = plans(setup, (RW, CW, TW))
    for rank, target, name in (
        (1, saving, "read_tensor"),  # rank 0 holds nothing of it yet
        (0, staged_rows.StagedRows, "receive"),
        (1, staged_rows.StagedRows, "receive"),
        (0, loading, "commit_rows"),
        (1, aligned_state, "named_states"),
    ):
        with mock.patch.object(target, name, failing(rank, getattr(target, name))):
            refused(model, setup, changed, RuntimeError, f"rank={rank}.: no more")
    move(model, changed)
    assert plan_of(model) == sorted((n, p.sharding_type, p.ranks) for n, p in changed.items())


def test_what_fails_on_one_rank_leaves_all_as_they_were() -> None:
    run_on(SETUP, fails_on_the_way)


def damaged_on_the_way(setup: Setup) -> None:
    model = new(setup)
    train(model, setup, range(2))
    real = chunk_exchange._bytes

    def flip(block: torch.Tensor) -> torch.Tensor:
        sent = real(block).clone()
        if block.dtype == torch.float32 and sent.numel():
            sent[1] ^= 1
        return sent

    with mock.patch.object(chunk_exchange, "_bytes", flip):
        refused(model, setup, plans(setup, (RW,)), ValueError, "checksum|sum")


def test_what_arrives_is_verified() -> None:
    run_on(SETUP, damaged_on_the_way)


def open_forwards(setup: Setup) -> None:
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


def test_an_open_forward_is_refused() -> None:
    run_on(SETUP, open_forwards)


def of_before(setup: Setup, folder: str) -> None:
    """A state dict and a marker of before the move are not of the tables of now."""
    model = new(setup)
    train(model, setup, range(2))
    marker, state = mark(model), {"model": model.state_dict()}
    move(model, plans(setup, (RW,), names=["plain"]))
    with pytest.raises(ValueError, match="one before it was copied, moved"):
        quietly(export_delta, model, f"{folder}/delta", marker)
    with pytest.raises(CheckpointException, match="as it was when its state dict was made"):
        quietly(dcp.save, state, checkpoint_id=f"{folder}/state")
    marker = mark(model)
    train(model, setup, range(2, 3))
    quietly(export_delta, model, f"{folder}/next", marker)


def test_markers_and_state_dicts_of_before_are_refused(tmp_path: Any) -> None:
    run_on(SETUP, of_before, str(tmp_path))
