"""Compute kernels of a plan that have rows in the host's memory: the storage that each table gets."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from mock_device import MockDevice
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, check_trains_as_unsharded, collection_of, shard
from sharded_twins import ShardedTwins
from torchrec.distributed.types import CacheAlgorithm, CacheParams, ParameterSharding
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn
from torchrec_dyn.planner import constraints_from, read_model_stats

CACHED, UNCACHED, PLAIN = "fused_uvm_caching", "fused_uvm", "fused"
OWN = dyn.DynamicTableConfig(storage=dyn.HostMemory(7))


def planned(kernel: str, load_factor: float | None = None, kind: str = "table_wise") -> Any:
    """Returns a plan of a table of 1,000 rows on two ranks."""
    plan = usual_plan(kind, 8, 2, 2)
    plan.compute_kernel = kernel
    if load_factor is not None:
        plan.cache_params = CacheParams(load_factor=load_factor)
    return plan


def storages(model: Any) -> dict[str, Any]:
    """Returns the storage of the shards of each table on this rank."""
    collection, found = model.module.collection, {}
    for name in collection.module_sharding_plan:
        for part in collection.table(name).shards:
            found[name] = part.config.storage
    return found


# plan, own config, fused_params -> rows of the whole table with a place on GPUs; None: no such storage.
MEANINGS: dict[str, tuple[ParameterSharding, Any, dict[str, Any], int | None]] = {
    "fused": (planned(PLAIN), None, {}, None),
    "fused, a cache": (planned(PLAIN, 0.5), None, {"cache_load_factor": 0.5}, None),
    "no cache": (planned(UNCACHED), None, {}, 1),
    "no cache, a factor": (planned(UNCACHED, 0.5), None, {"cache_load_factor": 0.5}, 1),
    "the plan's factor": (planned(CACHED, 0.2504), None, {"cache_load_factor": 0.5}, 251),
    "the sharder's factor": (planned(CACHED), None, {"cache_load_factor": 0.5}, 500),
    "FBGEMM's factor": (planned(CACHED), None, {}, 200),
    "least": (planned(CACHED, 0.0), None, {}, 1),
    "all": (planned(CACHED, 1), None, {}, 1000),
    "its own": (planned(CACHED, 0.5), OWN, {}, 7),
    "its own, fused": (planned(PLAIN), OWN, {}, 7),
    "two ranks": (planned(CACHED, 0.251, "row_wise"), None, {}, 126),
    "two column shards": (planned(CACHED, 0.251, "column_wise"), None, {}, 251),
}


def storages_of_plans() -> dict[str, Any]:
    told = {}
    for what, (plan, config, params, _) in MEANINGS.items():
        table = Table("t", ["a"], copy.deepcopy(plan), config=config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = Case([table], fused_params=FUSED_PARAMS | params)
            told[what] = storages(shard(case, collection_of(case))).get("t", "not here")
    return told


def test_a_kernel_of_a_plan_is_a_storage() -> None:
    first, second = workers.run(storages_of_plans, world_size=2)
    for what, (plan, _, _, rows) in MEANINGS.items():
        expected = rows and dyn.HostMemory(rows)
        on_both = plan.sharding_type != "table_wise"
        assert (first[what], second[what]) == (expected, expected if on_both else "not here"), what


def test_tables_of_such_plans_train() -> None:
    kinds = ("table_wise", "row_wise", "column_wise")
    tables = [
        Table(f"t{n}", [f"f{n}"], planned(kernel, factor, kind))
        for n, (kernel, factor, kind) in enumerate(
            zip((CACHED, UNCACHED, CACHED), (0.01, None, None), kinds, strict=True)
        )
    ]
    rows = workers.run(check_trains_as_unsharded, Case(tables, exact=False), world_size=2)
    assert all(one for one in rows)


def groups_of_caches() -> int:
    kinds = [(PLAIN, None), (UNCACHED, None), (CACHED, 0.1), (CACHED, 0.7), (CACHED, None)]
    tables = [Table(f"t{n}", [f"f{n}"], planned(*kind, "row_wise")) for n, kind in enumerate(kinds)]
    return len(shard(Case(tables), collection_of(Case(tables))).module.collection.describe().groups)


def test_tables_in_both_memories_share_a_call() -> None:
    assert workers.run(groups_of_caches, world_size=2) == [1, 1]


def errors_of_load_factors() -> list[str]:
    told = []
    for factor in (1.5, -0.1, float("nan"), True, "0.2"):
        plan = planned(CACHED)
        plan.cache_params = CacheParams(load_factor=factor)  # type: ignore[arg-type]
        case = Case([Table("t", ["a"], plan)])
        with pytest.raises(ValueError) as caught:
            shard(case, collection_of(case))
        told.append(str(caught.value))
    return told


def test_other_load_factors_are_refused_on_every_rank() -> None:
    for told in workers.run(errors_of_load_factors, world_size=2):
        for factor, text in zip(("1.5", "-0.1", "nan", "True", "'0.2'"), told, strict=True):
            assert "(table='t'): expected a load factor of its cache from 0 to 1, got " in text
            assert f"got {factor}. Set CacheParams(load_factor=...) in the plan" in text


USED = CacheParams(load_factor=0.5, algorithm=CacheAlgorithm.LRU, prefetch_pipeline=False)
UNUSED = CacheParams(
    CacheAlgorithm.LFU, 0.5, reserved_memory=1.0, precision=DataType.FP16, prefetch_pipeline=True
)
UNUSED_FIELDS = ["algorithm", "precision", "prefetch_pipeline", "reserved_memory"]
# kernel, cache_params, own config, fused_params -> options without effect
TOLD: dict[str, tuple[str, CacheParams | None, Any, dict[str, Any], list[str]]] = {
    "used": (CACHED, USED, None, {"cache_load_factor": 0.5}, []),
    "the sharder's": (CACHED, None, None, {"cache_load_factor": 0.5}, []),
    "other fields": (CACHED, UNUSED, None, {}, [f"cache_params.{one}" for one in UNUSED_FIELDS]),
    "no cache": (UNCACHED, USED, None, {}, ["cache_params"]),
    "fused": (PLAIN, USED, None, {"cache_load_factor": 0.5}, ["cache_load_factor", "cache_params"]),
    "its own": (CACHED, USED, OWN, {"cache_load_factor": 0.5}, ["cache_load_factor", "cache_params"]),
    "the sharder's, others": (
        CACHED, USED, None, {"cache_load_factor": 0.5, "cache_sets": 3}, ["cache_sets"],
    ),
}  # fmt: skip


def warnings_of_caches() -> dict[str, list[str]]:
    told = {}
    for what, (kernel, cache_params, config, params, _) in TOLD.items():
        plan = planned(kernel)
        plan.cache_params = cache_params
        case = Case([Table("t", ["a"], plan, config=config)], fused_params=FUSED_PARAMS | params)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shard(case, collection_of(case))
        told[what] = [str(one.message) for one in caught if "a cache" in str(one.message)]
    return told


def test_options_of_a_cache_that_have_no_effect_are_warned_of() -> None:
    for told in workers.run(warnings_of_caches, world_size=2):
        for what, (*_, expected) in TOLD.items():
            texts = told[what]
            assert bool(texts) == bool(expected), what
            for text in texts:
                assert f"got {expected}, which have no effect. Remove them." in text, what


def move_between_memories() -> list[dict[str, Any]]:
    """Reshards one table of three; its ranks stay, its storage changes; returns the storages after each."""
    kernels = {"moved": PLAIN, "stays": CACHED, "own": PLAIN}
    tables = [
        Table(
            name, [name], planned(kernel, None, "row_wise"), config=OWN if name == "own" else None
        )
        for name, kernel in kernels.items()
    ]
    case = Case(tables)
    model, untouched = (shard(case, collection_of(case)) for _ in range(2))
    told = []
    for step, (kernel, factor) in enumerate([(CACHED, 0.5), (CACHED, 0.1), (PLAIN, None)]):
        batch = batches(case, step)[0][dist.get_rank()]
        for one in (model, untouched):
            one(batch).values().sum().backward()
        kept = model.module.collection.table("stays").shards
        changed = {"moved": planned(kernel, factor, "row_wise")}
        model.sharders[0].reshard(model.module.collection, changed, model._env, model.device)
        assert model.module.collection.table("stays").shards == kept
        told.append(storages(model))
        for name in kernels:
            tables_now = [one.module.collection.table(name) for one in (model, untouched)]
            ids = torch.sort(tables_now[1].ids()).values
            assert torch.equal(torch.sort(tables_now[0].ids()).values, ids)
            got, expected = (one.lookup(ids) for one in tables_now)
            assert all(map(torch.equal, got, expected))
    # The plan of the table that stayed was not given again since the model was sharded.
    changed = {"stays": planned(PLAIN, None, "row_wise")}
    model.sharders[0].reshard(model.module.collection, changed, model._env, model.device)
    assert storages(model)["stays"] is None
    return told


def test_a_table_moves_to_another_memory_on_its_ranks() -> None:
    for told in workers.run(move_between_memories, world_size=2):
        for storage, at in zip(told, (250, 50, None), strict=True):
            assert storage == {
                "moved": at and dyn.HostMemory(at),
                "stays": dyn.HostMemory(100),
                "own": dyn.HostMemory(4),
            }


def reshard_to_different_caches() -> str:
    case = Case([Table("t", ["a"], planned(PLAIN, None, "row_wise"))])
    model = shard(case, collection_of(case))
    changed = {"t": planned(CACHED, 0.1 * (1 + dist.get_rank()), "row_wise")}
    with pytest.raises(ValueError) as caught:
        model.sharders[0].reshard(model.module.collection, changed, model._env, model.device)
    return str(caught.value)


def test_ranks_that_would_move_rows_to_different_caches_are_told() -> None:
    for text in workers.run(reshard_to_different_caches, world_size=2):
        assert "expected the same plan on every rank" in text


def test_the_collection_is_not_changed() -> None:
    """Sharded again, under another plan, a table has that plan's storage."""
    (told,) = workers.run(shard_twice, world_size=1)
    assert told == [{"t": dyn.HostMemory(500)}, {"t": None}]


def shard_twice() -> list[dict[str, Any]]:
    table = Table("t", ["a"], shard_by_hand("table_wise", [([0], 0, 8)]))
    collection, told = collection_of(Case([table])), []
    for kernel, factor in ((CACHED, 0.5), (PLAIN, None)):
        plan = copy.deepcopy(table.plan)
        plan.compute_kernel = kernel
        plan.cache_params = factor and CacheParams(load_factor=factor)
        told.append(storages(shard(Case([replace(table, plan=plan)]), collection)))
    return told


def loaded(twins: ShardedTwins) -> dict[str, bool]:
    """Returns which tables of the model on the device have loaded rows from the host's memory so far."""
    stats = read_model_stats(twins.models[1])
    measured = constraints_from(stats, 4)
    for name, given in measured.items():
        is_cached = "gpu_rows" in stats[name] and stats[name]["rows_loaded"] > 0
        assert (given.cache_params is not None) == is_cached
    return {name: one["rows_loaded"] > 0 for name, one in stats.items()}


def train_on_devices() -> list[dict[str, bool]]:
    """Trains in host memory by a plan, and moves tables out of it and into it; as on the CPU."""
    kinds, told = ("table_wise", "row_wise", "column_wise"), []
    kernels = ((CACHED, 0.012), (UNCACHED, None), (PLAIN, None))
    tables = [
        Table(kind, [kind], planned(*kernel, kind))
        for kind, kernel in zip(kinds, kernels, strict=True)
    ]
    case = Case(tables, steps=6, longest_bag=8)
    with MockDevice() as device:
        twins = ShardedTwins(device, case)
        for step in range(3):
            twins.train(step)
        told.append(loaded(twins))
        changed = {"table_wise": planned(PLAIN), "column_wise": planned(CACHED, 0.012, kinds[2])}
        for model in twins.models:
            collection = model.module.collection
            model.sharders[0].reshard(collection, changed, model._env, model.device)
        twins.compare()
        for step in range(3, 6):
            twins.train(step)
        twins.compare()
        told.append(loaded(twins))
    return told


def test_a_device_has_the_rows_where_the_plan_says() -> None:
    for before, after in workers.run(train_on_devices, world_size=2):
        assert before == {"table_wise": True, "row_wise": True, "column_wise": False}
        assert after["column_wise"] and after["row_wise"]
