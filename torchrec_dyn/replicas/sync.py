"""Replicas: merges the replicas of a model by id, as TorchRec's `DMPCollection.sync` does by position.

A sharding group shards the model by itself; a rank's place is its rank there. All sharding groups have the
same plan and the same tables, so the ranks at one place of all groups, a replica group, hold the same ids and
columns of every table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardedModule, ShardingType

from torchrec_dyn.checkpoint_format import optimizer_config
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, gather_results, host_group, run_together
from torchrec_dyn.replicas.merge import ROW
from torchrec_dyn.replicas.merging import Merged, Merging, run_over
from torchrec_dyn.replicas.side import Side
from torchrec_dyn.state_dict import saved_sums
from torchrec_dyn.storage import commit
from torchrec_dyn.whole_model import collections_of, tables_of

_T = TypeVar("_T")

_CALL = "Replicas"
_SYNC = "Replicas.sync"

# A rank as it describes itself to the others: the ranks of its sharding group, as ranks of the job, its place
# there, and a description of each table, the same on the ranks of a replica group.
_Described = tuple[tuple[int, ...], int, dict[str, str]]


class Synced(NamedTuple):
    """Counts of what a sync merged on this rank.

    Attributes:
        ids: number of ids that had changed on some replica, over the tables of this rank.
        rows: number of these ids that have a row afterwards, or were evicted again at the limit.
        sent_bytes: bytes that this rank sent to other replicas.
    """

    ids: int
    rows: int
    sent_bytes: int


class Replicas:
    """The replicas of a model, each sharded over its own group of ranks; `sync` merges them by id.

    Every *sharding group* wraps the model in `DistributedModelParallel` with
    `env=ShardingEnv.from_process_group(sharding_group)` and the same plan. An unsharded model is a sharding
    group of one rank. As long as this object exists, changes are recorded, which takes the memory of a marker
    (`torchrec_dyn.checkpoint.mark`) and 8 bytes for each row of a table with a policy. The constructor is
    collective over all ranks of the job, and reads all rows once. Make a new object after tables were loaded,
    converted or moved to another plan.

    Args:
        model: the model of this rank, with the same contents in all replicas.
        group: all ranks of the job; None: the default process group.

    Raises:
        ValueError: on every rank, if there is no process group, `group` is not a process group (such as a
            DeviceMesh), the sharding groups do not have each rank exactly once, plans, tables, options or
            contents differ between replicas, or the model has sharded static tables, which are not merged.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                f"{_CALL}: expected a process group, got none. Call torch.distributed.init_process_group "
                "first."
            )
        job = dist.group.WORLD if group is None else group
        if not isinstance(job, dist.ProcessGroup):
            raise ValueError(
                f"{_CALL}: expected group to be a ProcessGroup or None, got {type(job).__name__}. Give "
                "mesh.get_group() of a DeviceMesh of one dimension."
            )
        self._model, self._group = model, host_group(job)
        tables: list[Table] = []

        def described() -> _Described:
            tables[:], description = _describe(model, job)
            return description

        self._groups = _replica_groups(gather_results(self._group, _CALL, described))

        def prepare() -> list[tuple[str, dict[str, int]]]:
            sums = saved_sums(tables, _CALL)
            self._sides = [Side(table) for table in tables if table.shards]
            return [(table.name, of_table) for table, of_table in zip(tables, sums, strict=True)]

        contents = gather_results(self._group, _CALL, prepare)
        for name, _, _, rank, other in _differences(self._groups, contents):
            raise ValueError(
                f"{_CALL}(table='{name}'): expected the same contents in all replicas, got others on rank "
                f"{other} than on rank {rank}. Load the same checkpoint into all replicas, or begin before "
                "the first step."
            )
        rank = dist.get_rank(self._group)
        (self._ranks,) = [ranks for ranks in self._groups if rank in ranks]

    def __repr__(self) -> str:
        return f"Replicas({len(self._ranks)} of {len(self._groups)} ranks)"

    def sync(self) -> Synced:
        """Merges what the replicas have trained since the last sync, so that their contents are equal.

        Call it on all ranks at the same time, after a backward and before the next forward, when all replicas
        have trained the same number of steps. Weights and optimizer state become the mean over all replicas;
        if a replica has not seen an id, its initial row is used there. Counts are added, and last_seen is the
        latest. An id stays if any replica still has it; an id that was erased on any replica is erased on
        all. A table that evicts when it is full is cut to its limit by the merged scores. Dense parameters
        are not touched. Collective over all ranks of the job.

        Returns:
            What was merged on this rank.

        Raises:
            ValueError: on every rank, if a forward is open on some rank, the steps of the replicas differ, or
                a table was loaded, converted or moved since the last sync. Nothing has changed then.
            RuntimeError: on every rank, if the union of the replicas is over the limit of a table without a
                policy that replaces rows, or a rank fails in another way, e.g. for lack of memory. Nothing
                has changed then. A rank that fails while it writes raises alone, and its tables are torn:
                load the replicas again.
        """
        heads = gather_results(self._group, _SYNC, self._steps)
        for name, step, other_step, rank, other in _differences(self._groups, heads):
            raise ValueError(
                f"{_SYNC}(table='{name}'): expected replicas after the same number of training steps, got "
                f"{step} on rank {rank} and {other_step} on rank {other}. Call sync on all ranks after the "
                "same number of batches."
            )
        place = self._ranks.index(dist.get_rank(self._group))
        merging = Merging(self._sides, place, len(self._ranks))
        merged, sent_bytes = run_over(self._group, self._ranks, _SYNC, merging.run())
        commits = run_together(self._group, _SYNC, lambda: self._prepare(merged))
        with commit(*(side.table for side in self._sides)):
            for write in commits:
                write()
        rows = sum(int((kinds == ROW).sum()) for _, kinds, _, _ in merged)
        return Synced(sum(ids.numel() for ids, _, _, _ in merged), rows, sent_bytes)

    def _steps(self) -> list[tuple[str, int]]:
        """Returns name and step of each table here, after the checks of a sync."""
        present = {table.name: table for table in tables_of(self._model, _SYNC)}
        for side in self._sides:
            side.check_same(present.get(side.table.name))
            side.check_closed()
        return [(side.table.name, side.step) for side in self._sides]

    def _prepare(self, merged: Sequence[Merged]) -> list[Callable[[], None]]:
        return [
            side.prepare(*contents)
            for side, contents in zip(self._sides, merged, strict=True)
            if contents[0].numel() or contents[3] is not None
        ]


def _describe(model: nn.Module, group: dist.ProcessGroup) -> tuple[list[Table], _Described]:
    """Returns the dynamic tables of a model, and this rank's description for the job, `group`."""
    tables = tables_of(model, _CALL)
    _check_no_static_tables(model)
    groups = {_ranks_of(table, group) for table in tables}
    if len(groups) > 1:
        raise ValueError(
            f"{_CALL}: expected dynamic tables over the same ranks, got tables over {sorted(groups)}. "
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
            f"{_CALL}: expected a group with all ranks of the job, got {of_job} without ranks {outside} of "
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
    ours = {id(module) for _, module in collections_of(model, _CALL)}
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
                f"{_CALL}: expected no sharded static tables, which no sync would merge, got "
                f"{listed(sharded)} of {path}. Make them dynamic, or data_parallel."
            )


def _replica_groups(described: Sequence[_Described]) -> list[list[int]]:
    """Returns the ranks of each replica group, by place; replicas are in the order of their lowest ranks."""
    groups = sorted({ranks for ranks, _, _ in described}, key=min)
    places = [(rank, ranks, place) for ranks in groups for place, rank in enumerate(ranks)]
    expected = [(rank, ranks, place) for rank, (ranks, place, _) in enumerate(described)]
    if sorted(places) != expected:
        raise ValueError(
            f"{_CALL}: expected sharding groups that have each rank of the job once, got {groups} of "
            f"{len(described)} ranks."
        )
    if len({len(ranks) for ranks in groups}) > 1:
        raise ValueError(f"{_CALL}: expected sharding groups of the same size, got {groups}.")
    by_place = [list(ranks) for ranks in zip(*groups, strict=True)]
    _check_alike(described, by_place)
    return by_place


def _check_alike(described: Sequence[_Described], by_place: Sequence[Sequence[int]]) -> None:
    """Raises ValueError unless the ranks of each replica group have the same tables and plans."""
    names = [[("", list(tables))] for _, _, tables in described]
    for _, tables, others, rank, other in _differences(by_place, names):
        raise ValueError(
            f"{_CALL}: expected the same tables in the same order in all replicas, got {listed(tables)} on "
            f"rank {rank} and {listed(others)} on rank {other}."
        )
    plans = [list(tables.items()) for _, _, tables in described]
    for name, plan, other_plan, rank, other in _differences(by_place, plans):
        raise ValueError(
            f"{_CALL}(table='{name}'): expected the same plan, options and optimizer in all replicas, got "
            f"{plan} on rank {rank} and {other_plan} on rank {other}. Give all sharding groups one plan."
        )


def _differences(
    groups: Sequence[Sequence[int]], by_rank: Sequence[Sequence[tuple[str, _T]]]
) -> Iterator[tuple[str, _T, _T, int, int]]:
    """Yields name, two values and their ranks, where a table's differ in a replica group."""
    for first, *others in groups:
        for other in others:
            for (name, value), (_, other_value) in zip(by_rank[first], by_rank[other], strict=True):
                if value != other_value:
                    yield name, value, other_value, first, other
