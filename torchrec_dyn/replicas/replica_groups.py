"""The replica groups of a job: the ranks at the same place of every sharding group.

A sharding group shards the model by itself; a rank's place is its rank there. All sharding groups have the
same plan and the same tables, so the ranks of a replica group hold the same ids and columns of every table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardedModule, ShardingType

from torchrec_dyn.checkpoint_format import optimizer_config
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table
from torchrec_dyn.whole_model import collections_of, tables_of

CALL = "Replicas"

_T = TypeVar("_T")

# A rank as it describes itself to the others: the ranks of its sharding group, as ranks of the job, its place
# there, and a description of each table, the same on the ranks of a replica group.
Described = tuple[tuple[int, ...], int, dict[str, str]]


def describe(model: nn.Module, group: dist.ProcessGroup) -> tuple[list[Table], Described]:
    """Returns the dynamic tables of a model, and this rank's description for the job, `group`."""
    tables = tables_of(model, CALL)
    _check_no_static_tables(model)
    groups = {_ranks_of(table, group) for table in tables}
    if len(groups) > 1:
        raise ValueError(
            f"{CALL}: expected dynamic tables over the same ranks, got tables over {sorted(groups)}. "
            "Make one Replicas for each collection."
        )
    described = {table.name: _described(table) for table in tables}
    return tables, (groups.pop(), tables[0].rank, described)


def _ranks_of(table: Table, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the ranks over which a table is sharded, as ranks of `group`."""
    if table.group is None:
        return (dist.get_rank(group),)
    of_job = dist.get_process_group_ranks(group)
    ranks = dist.get_process_group_ranks(table.group)
    if outside := sorted({*ranks} - {*of_job}):
        raise ValueError(
            f"{CALL}: expected a group with all ranks of the job, got {of_job} without ranks {outside} of "
            "the model. Leave group out, or pass the group of all ranks."
        )
    return tuple(of_job.index(rank) for rank in ranks)


def _described(table: Table) -> str:
    options = replace(table.options, storage=None)  # each rank may have a directory of its own
    limits = [
        (shard.first_column, shard.columns, shard.row_limit, shard.num_embeddings)
        for shard in table.shards
    ]
    optimizer = optimizer_config(table.optimizer, table.cuts)
    return f"{table.layout}, {table.config}, {options}, {optimizer}, shards here {limits}"


def _check_no_static_tables(model: nn.Module) -> None:
    ours = {id(module) for _, module in collections_of(model, CALL)}
    for path, module in model.named_modules():
        has_ours = any(id(inner) in ours for inner in module.modules())
        if not isinstance(module, ShardedModule) or has_ours:
            continue
        plan = getattr(module, "module_sharding_plan", None) or {}
        sharded = [
            name
            for name, sharding in plan.items()
            if sharding.sharding_type != ShardingType.DATA_PARALLEL.value
        ]
        if sharded:
            raise ValueError(
                f"{CALL}: expected no sharded static tables, which no sync would merge, got "
                f"{listed(sharded)} of {path}. Make them dynamic, or data_parallel."
            )


def replica_groups(described: Sequence[Described]) -> list[list[int]]:
    """Returns the replica groups, by place; each has the ranks of the replicas in their order.

    The order of replicas is that of their lowest ranks. described: of all ranks of the job.
    """
    groups = sorted({ranks for ranks, _, _ in described}, key=min)
    places = [(rank, ranks, place) for ranks in groups for place, rank in enumerate(ranks)]
    expected = [(rank, ranks, place) for rank, (ranks, place, _) in enumerate(described)]
    if sorted(places) != expected:
        raise ValueError(
            f"{CALL}: expected sharding groups that have each rank of the job once, got {groups} of "
            f"{len(described)} ranks."
        )
    if len({len(ranks) for ranks in groups}) > 1:
        raise ValueError(f"{CALL}: expected sharding groups of the same size, got {groups}.")
    by_place = [list(ranks) for ranks in zip(*groups, strict=True)]
    names = [[("", list(tables))] for _, _, tables in described]
    for _, tables, others, rank, other in differences(by_place, names):
        raise ValueError(
            f"{CALL}: expected the same tables in the same order in all replicas, got {listed(tables)} on "
            f"rank {rank} and {listed(others)} on rank {other}."
        )
    plans = [list(tables.items()) for _, _, tables in described]
    for name, plan, other_plan, rank, other in differences(by_place, plans):
        raise ValueError(
            f"{CALL}(table='{name}'): expected the same plan, options and optimizer in all replicas, got "
            f"{plan} on rank {rank} and {other_plan} on rank {other}. Give all sharding groups one plan."
        )
    return by_place


def differences(
    groups: Sequence[Sequence[int]], by_rank: Sequence[Sequence[tuple[str, _T]]]
) -> Iterator[tuple[str, _T, _T, int, int]]:
    """Yields name, two values and their ranks, for each table whose values differ in a replica group.

    All ranks see the same values by name, so either all raise or none does.
    """
    for first, *others in groups:
        for other in others:
            for (name, value), (_, other_value) in zip(by_rank[first], by_rank[other], strict=True):
                if value != other_value:
                    yield name, value, other_value, first, other
