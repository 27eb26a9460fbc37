"""Moves tables of a trained collection to another plan, and compares the results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checkpoint_cases import LOCAL_SIZES, Setup, held, load, new, plan_of, same_bits, save, train
from torchrec.distributed.types import ParameterSharding

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint_format import saved_tensor

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
    with mock.patch.object(saved_tensor, "CHUNK_BYTES", 4000):  # many chunks, many rounds
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
        for shard in model.module.collection._shards.shards_of(name):
            assert shard.row_numbers.high_water_mark <= shard.num_rows + shard.num_rows // 8


def loaded_elsewhere(
    model: Any, setup: Setup, changed: dict[str, ParameterSharding], path: str
) -> Any:
    """Returns the oracle: the same model, saved and loaded into a model under the other plan."""
    save(model, path)
    dist.barrier()
    other = new(setup)
    move(other, changed)  # the tables are empty: this only sets the plan
    for name, sharding in changed.items():
        assert other.module.collection.module_sharding_plan[name].ranks == sharding.ranks
    return load(other, path)


def goes_on(
    setup: Setup, kinds: Sequence[str], shift: int, folder: str, names: Collection[str] | None
) -> list[int]:
    """Trains, moves, trains again, beside a model that is moved by a checkpoint; returns rows per table."""
    model = new(setup)
    train(model, setup, range(3))
    changed = plans(setup, kinds, shift, names)
    other = loaded_elsewhere(model, setup, changed, f"{folder}/before")
    before = counts_of(model, setup)
    move(model, changed)
    assert counts_of(model, setup) == before
    check_same(held(model), held(other))
    for one in (model, other):
        check_closed_up(one, changed)
    got, expected = train(model, setup, range(3, 6)), train(other, setup, range(3, 6))
    for one, another in zip(got, expected, strict=True):
        assert same_bits(one, another)
    check_same(held(model), held(other))
    collection = model.module.collection
    return [collection.table(table.name).num_rows for table in setup.case().tables]
