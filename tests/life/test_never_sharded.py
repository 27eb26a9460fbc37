"""Never under every plan: shards as their unsharded parts, and rows that come with a trained table."""

from typing import Any

import pytest
import torch
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_life import Beside, drifting_batch
from sharded_training import collection_of, shard

import torchrec_dyn as dyn

DIM = 4
EVICTIONS: list[dict[str, Any]] = [
    {},
    {"eviction": dyn.LeastRecentlyUsed()},
    {"eviction": (dyn.ExpireAfter(steps=4), dyn.LeastFrequentlyUsed()), "unseen": "initial"},
]
ALL = ("table_wise", "row_wise", "column_wise")
PLANS = {
    "pooled": (2, 2, True, ALL),
    "sequences": (2, 2, False, ALL),
    "nodes": (4, 2, True, ("table_row_wise", "table_column_wise", "grid_shard")),
}


def case_of(
    world: int, local: int, pooled: bool, kinds: tuple[str, ...], grows: bool = False
) -> Case:
    tables = [
        Table(
            f"t{turn}",
            ["ab"[turn % 2]],
            usual_plan(kinds[turn], DIM, world, local, turn, 200),
            DIM,
            rows=200,
            config=dyn.DynamicTableConfig(
                initializer=dyn.Uniform(-0.1, 0.1),
                admission=None if grows else dyn.Never(),
                **({} if grows else EVICTIONS[turn]),
            ),
        )
        for turn in range(3)
    ]
    fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05}
    return Case(tables, pooled=pooled, fused_params=fused, exact=world == local)


def live(case: Case) -> list[dict[str, float]]:
    """Trains a vocabulary that only `edit` widens; every shard must be as its unsharded part."""
    beside = Beside(case)
    for step in range(9):
        if step % 4 == 1:  # of the ids around the newest
            ids = torch.arange(15 * step - 30, 15 * step + 60, 2)
            beside.edit(ids, torch.linspace(-1, 1, len(ids) * DIM).view(-1, DIM))
        beside.step(drifting_batch(case, step))
        beside.check()
    return [shard.stats() for shard in beside.shards]


@pytest.mark.parametrize("plan", PLANS)
def test_every_shard_lives_as_the_unsharded_table(plan: str) -> None:
    world, local = PLANS[plan][:2]
    case = case_of(*PLANS[plan])
    told = [
        one for rank in workers.run(live, case, world_size=world, local_size=local) for one in rank
    ]
    assert all(one["refused"] > 0 < one["hits"] and one["waiting"] == 0 for one in told)
    assert all(one["rows"] > 0 for one in told) and any(one["evicted_expired"] for one in told)


def shard_trained(kind: str) -> list[int]:
    """What was trained goes on under Never as it was, and nothing is added."""
    case = case_of(2, 2, True, (kind,) * 3)
    open_case = case_of(2, 2, True, (kind,) * 3, grows=True)
    trained, fixed = (collection_of(c, fused_params=case.fused_params) for c in (open_case, case))
    batch = drifting_batch(case, 0)
    trained(batch.together).values().sum().backward()
    fixed.load_state_dict(trained.state_dict())
    model = shard(case, fixed)
    for step in range(3):
        model(drifting_batch(case, step).mine).values().sum().backward()
    table = model.module.collection.table("t0")
    assert (
        dyn.read_ids(model.module.collection, "t0").tolist() == trained.table("t0").ids().tolist()
    )
    assert dyn.read_stats(model.module.collection, "t0")["refused"] > 0
    rows, found = table.lookup(table.ids())
    before, _ = trained.table("t0").lookup(table.ids())
    if table.columns:
        assert bool(found.all())
        columns = torch.cat([torch.arange(first, first + n) for first, n in table.columns])
        assert not torch.equal(rows, before[:, columns])  # they learn
    return [table.num_rows]


@pytest.mark.parametrize("kind", ALL)
def test_a_trained_table_is_sharded(kind: str) -> None:
    assert sum(rows for (rows,) in workers.run(shard_trained, kind, world_size=2)) > 0
