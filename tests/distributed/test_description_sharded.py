"""`describe()` of a sharded collection: what each rank has, under every plan, and after tables have moved."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import workers
from sharded_cases import EVERY_PLAN, Case, Table, case_of_plans, usual_plan
from sharded_training import batches, collection_of, shard

import torchrec_dyn as dyn
from torchrec_dyn.lookup import TableGroup


def called(model: Any, batch: Any) -> list[tuple[tuple[str, int], ...]]:
    """The column shards of each call of a training forward on this rank."""
    calls = []
    look_up = TableGroup.__call__

    def noted(group: TableGroup, *arguments: Any) -> Any:
        calls.append(tuple((table.name, table.first_column) for table in group.tables))
        return look_up(group, *arguments)

    with mock.patch.object(TableGroup, "__call__", noted):
        model(batch)
    return calls


def check_as_planned(case: Case, model: Any, plans: dict[str, Any]) -> dyn.Description:
    """Asserts that all descriptions together are the plans, and their numbers those of the handles."""
    collection, rank = model.module.collection, dist.get_rank()
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("collective")):
        described: dyn.Description = collection.describe()
    assert (described.rank, described.world_size) == (rank, dist.get_world_size())
    shards = [shard for group in described.groups for shard in group.shards]
    for table in case.tables:
        handle, mine = collection.table(table.name), [s for s in shards if s.table == table.name]
        assert [s.columns for s in sorted(mine, key=lambda s: s.columns)] == [*handle.columns]
        assert {s.rows for s in mine} <= {handle.num_rows}
        assert sum(s.bytes for s in mine[:1]) == handle.stats().get("bytes", 0)
        assert all(s.features == tuple(table.features) for s in mine)
        plan, given = described.plan[table.name], plans[table.name]
        assert plan.sharding_type == given.sharding_type
        pieces = {}  # of the plan, by first column
        for planned, at in zip(given.sharding_spec.shards, given.ranks, strict=True):
            piece = (planned.shard_offsets[1], planned.shard_sizes[1])
            pieces.setdefault(piece, []).append(at)
        assert plan.columns == tuple(sorted(pieces))
        assert plan.ranks == tuple(tuple(pieces[piece]) for piece in sorted(pieces))
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, [(s.columns, s.rows) for s in mine])
        for piece, ranks in zip(plan.columns, plan.ranks, strict=True):
            assert [r for r, of in enumerate(held) if piece in dict(of)] == sorted(ranks)
        whole = sum(dict(of).get(plan.columns[0], 0) for of in held)
        assert whole == dyn.read_num_rows(collection, table.name) > 0
    here = [collection.table(table.name).num_rows for table in case.tables]
    assert described.rows == sum(here) == sum(group.rows for group in described.groups)
    missing = [name for name in described.plan if name not in {s.table for s in shards}]
    assert all(f"{name} ({described.plan[name]})" in str(described) for name in missing)
    return described


def check_describes(case: Case) -> int:
    model, rank = shard(case, collection_of(case)), dist.get_rank()
    before = model.module.collection.describe()
    per_rank, _ = batches(case, 0)
    calls = called(model, per_rank[rank])
    assert before.rows == 0
    plans = {table.name: table.plan for table in case.tables}
    described = check_as_planned(case, model, plans)
    groups = [tuple((s.table, s.columns[0]) for s in g.shards) for g in described.groups]
    assert groups == calls
    for group in described.groups:
        assert len({described.plan[name].sharding_type for name in group.tables}) == 1
        assert group.pooling == ("sum" if case.pooled else "none")
    return len(groups)


@pytest.mark.parametrize(("world", "local"), [(4, 2), (1, 1)])
@pytest.mark.parametrize("name", EVERY_PLAN)
def test_every_plan(name: str, world: int, local: int) -> None:
    case = case_of_plans(name, world, local)
    counts = workers.run(check_describes, case, world_size=world, local_size=local)
    assert all(counts)


def check_after_a_move() -> None:
    tables = [Table(f"t{i}", [f"f{i}"], usual_plan("table_wise", 8, 2, 2, 0)) for i in range(2)]
    case = Case(tables)
    model, rank = shard(case, collection_of(case)), dist.get_rank()
    model(batches(case, 0)[0][rank])
    described = check_as_planned(case, model, {table.name: table.plan for table in tables})
    assert len(described.groups) == (1 if rank == 0 else 0)
    assert rank == 0 or str(described).endswith(
        "no rows on this rank: t0 (table_wise on rank 0), t1 (table_wise on rank 0)"
    )
    moved = {"t1": usual_plan("row_wise", 8, 2, 2)}
    model.sharders[0].reshard(model.module.collection, moved, model._env, model.device)
    described = check_as_planned(case, model, {"t0": tables[0].plan, **moved})
    assert [group.tables for group in described.groups] == [("t0",), ("t1",)][rank:]
    assert "t1 " in str(described) and "row_wise on ranks 0, 1" in str(described)


def test_after_tables_have_moved() -> None:
    workers.run(check_after_a_move, world_size=2)


def check_means() -> None:
    plans = [usual_plan(kind, 8, 2, 2) for kind in ("row_wise", "column_wise")]
    tables = [Table(f"t{i}", [f"f{i}"], plan, pooling="MEAN") for i, plan in enumerate(plans)]
    model = shard(Case(tables), collection_of(Case(tables)))
    model.module.collection.table("t0").freeze()
    groups = model.module.collection.describe().groups
    assert [(g.tables, g.pooling) for g in groups] == [(("t0",), "sum"), (("t1",), "mean")]
    assert [s.is_frozen for g in groups for s in g.shards] == [True, False]


def test_means_of_spread_rows_are_summed_here() -> None:
    workers.run(check_means, world_size=2)
