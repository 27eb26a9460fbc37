"""Tables whose rows do not fit into the memory of GPUs: their price, and the caches that are chosen for them.

No GPU is needed: a topology of GPUs is planned on the CPU.
"""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from mock_device import CUDA, MockDevice
from planned_cases import POOLED, topology
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_training import Holder, collection_of, shard, sharder_of
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.planner import (
    DynamicStorageEstimator,
    constraints_from,
    make_planner,
    read_model_stats,
    table_bytes,
    table_size,
    without_data_parallel,
)
from torchrec_dyn.ranks import row_limit

MIB, GIB = 1 << 20, 1 << 30
ROWS, DIM = 1_000_000, 64
CACHED, UNCACHED = "fused_uvm_caching", "fused_uvm"
ADAM = RowOptimizer(kind=OptimizerKind.ADAM)
SHARDER = dyn.DynamicEmbeddingBagCollectionSharder({"optimizer": EmbOptimType.ADAM})
NOTHING_RESERVED = FixedPercentageStorageReservation(percentage=0.0)


# The price of a table


def size(rows=ROWS, gpu_rows=None, device="cuda", limit=None, **options):
    return table_size(rows, DIM, torch.float32, ADAM, device, limit, gpu_rows=gpu_rows, **options)


def test_the_parts_of_a_table_in_host_memory():
    options = {"has_life": True, "counters": 1000, "deltas": True, "limit": 10 * ROWS}
    whole, cached = size(**options), size(gpu_rows=100_000, **options)
    for part in ("id_map", "scores", "counters", "marks"):
        assert getattr(cached, part) == getattr(whole, part) > 0
    rows = DIM * 4
    block = knobs.BLOCK_BYTES // rows  # in the host's memory, whole blocks of 32 MiB
    assert cached.weights == -(-ROWS // block) * block * rows > ROWS * rows
    assert cached.optimizer_state == 2 * cached.weights
    assert cached.host == cached.weights + cached.optimizer_state
    assert (whole.host, whole.cache) == (0, 0)
    place = cached.cache - size(ROWS // 2, 100_000, **options).cache  # 4 bytes for each other row
    assert 4 * ROWS // 2 <= place <= 5 * ROWS // 2 + 2 * MIB
    frames = 100_000 * (3 * rows + 16)
    assert frames + 4 * ROWS < cached.cache <= 9 / 8 * (frames + 4 * ROWS) + 8 * 2 * MIB
    assert cached.total == cached.on_device + cached.host
    assert cached.on_device == whole.on_device - 3 * whole.weights + cached.cache
    assert table_bytes(ROWS, DIM, torch.float32, ADAM, "cuda", gpu_rows=5) == size(gpu_rows=5).total


def test_a_cache_has_no_more_frames_than_rows():
    assert size(gpu_rows=ROWS) == size(gpu_rows=10 * ROWS)
    assert size(100, 100, limit=ROWS).cache <= size(100, ROWS, limit=ROWS).cache <= 7 * 4 * MIB


@pytest.mark.parametrize(("rows", "gpu_rows"), [(50_000, 10_000), (9_000, 10_000), (300, 5)])
def test_a_table_in_host_memory_holds_what_it_costs(rows, gpu_rows):
    limit = 60_000
    with MockDevice():
        config = dyn.DynamicTableConfig(storage=dyn.HostMemory(gpu_rows))
        fused_params = {"optimizer": EmbOptimType.ADAM}
        tables = collection(config, limit, device=CUDA, fused_params=fused_params)
        handle = tables.table("user")
        for ids in torch.arange(rows).split(20_000):
            handle.assign(ids.to(CUDA), torch.ones(len(ids), DIM, device=CUDA))
        (table,) = handle.shards
        cache, stores = table.weights.cache, table.stores
        host = sum(block.nbytes for store in stores for block in store.blocks)
        frames = sum(block.nbytes for store in stores for block in store.frames.blocks)
        frames += sum(
            one.nbytes for one in (cache._places, cache._owners, cache._used, cache._free)
        )
        price = size(rows, gpu_rows, limit=limit)
        assert (host, table.num_rows) == (price.host, rows)
        assert min(rows, gpu_rows) * DIM * 12 < frames <= price.cache


def test_on_the_cpu_a_cache_has_no_effect():
    assert size(device="cpu", gpu_rows=10) == size(device="cpu")
    assert size(device="cpu").host == 0 and size(device="cpu").on_device == size(device="cpu").total


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [0, -1, True, 1.5, "all"])
def test_wrong_rows_of_a_cache_are_refused(device, rows):
    with pytest.raises(
        ValueError, match=r"^table_size\.gpu_rows: expected an integer, 1 or more, got .* Pass"
    ):
        size(device=device, gpu_rows=rows)


# The price of an option


def collection(config=None, rows=ROWS, names=("user",), **options):
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name in names
    ]
    return dyn.DynamicEmbeddingBagCollection(tables, dynamic=config, **options)


def priced(
    kernel,
    load_factor=None,
    config=None,
    sharder=SHARDER,
    device="cuda",
    expected=None,
    **of_module,
):
    """The options of a table by sharding type, with one kernel, priced by the planner of `make_planner`."""
    cache = None if load_factor is None else CacheParams(load_factor=load_factor)
    constraints = {
        "user": ParameterConstraints(
            POOLED, compute_kernels=[kernel], min_partition=16, cache_params=cache
        )
    }
    planner = make_planner(topology(device), 128, constraints, expected and {"user": expected})
    found = planner.enumerated(collection(config, **of_module), [sharder])
    return {option.sharding_type: option for option in found}


OWN = dyn.DynamicTableConfig(storage=dyn.HostMemory(50_000))
SHARDERS_CACHE = dyn.DynamicEmbeddingBagCollectionSharder(
    {"optimizer": EmbOptimType.ADAM, "cache_load_factor": 0.5}
)
MEANINGS = {
    "the table's own": (("fused", None, OWN), 50_000),
    "its own, not the plan's": ((CACHED, 0.5, OWN), 50_000),
    "the plan's": ((CACHED, 0.3, None, SHARDERS_CACHE), 300_000),
    "the sharder's": ((CACHED, None, None, SHARDERS_CACHE), 500_000),
    "FBGEMM's": ((CACHED,), 200_000),
    "the smallest": ((UNCACHED, 0.5), 1),
}


@pytest.mark.parametrize("meaning", MEANINGS)
def test_options_cost_what_their_shards_will_hold(meaning):
    arguments, rows_on_gpus = MEANINGS[meaning]
    in_host, on_gpu = priced(*arguments), priced("fused")
    assert in_host.keys() == on_gpu.keys() == set(POOLED)
    for kind, option in in_host.items():
        for one, plain in zip(option.shards, on_gpu[kind].shards, strict=True):
            sharers = ROWS // one.size[0]
            rows = row_limit(ROWS, sharers)
            held, whole = (
                table_size(rows, one.size[1], torch.float32, ADAM, "cuda", gpu_rows=gpu_rows)
                for gpu_rows in (math.ceil(rows_on_gpus / sharers), None)
            )
            batch = plain.storage.hbm - whole.total  # the same
            assert batch > 0 and plain.storage.ddr == 0
            assert (one.storage.hbm - batch, one.storage.ddr) == (held.on_device, held.host)


def test_options_on_the_cpu_cost_what_they_did():
    for kind, option in priced("fused", None, OWN, device="cpu").items():
        plain = priced("fused", device="cpu")[kind]
        assert (option.total_storage, option.total_perf) == (plain.total_storage, plain.total_perf)


def loading(option):
    return sum(one.perf.prefetch_compute for one in option.shards)


def test_missing_rows_are_priced_by_the_link():
    """Without statistics each row is equally likely: half of the rows in the cache, half of the ids miss."""
    times = {factor: loading(priced(CACHED, factor)["table_wise"]) for factor in (0, 0.25, 0.5, 1)}
    ids = 128 * 4  # of all ranks: nearly all are distinct
    link = topology("cuda").hbm_to_ddr_mem_bw
    everything = ids * DIM * 4 / link
    for factor, time in times.items():
        assert time == pytest.approx((1 - factor) * everything, rel=0.02, abs=everything / 90)
    fused = priced("fused")["table_wise"].shards[0].perf
    cached = priced(CACHED, 0.5)["table_wise"].shards[0].perf
    assert loading(priced("fused")["table_wise"]) == 0
    assert replace(cached, prefetch_compute=0.0) == fused  # kernels read the GPU's memory
    assert loading(priced(UNCACHED)["table_wise"]) == pytest.approx(everything, rel=0.02)
    assert loading(priced("fused", None, OWN)["table_wise"]) == pytest.approx(
        0.95 * everything, rel=0.02
    )


def test_ids_that_repeat_are_loaded_once():
    few = priced(CACHED, 0.5, rows=100)["table_wise"]  # 512 ids of 100 rows
    assert loading(few) == pytest.approx(
        50 * DIM * 4 / topology("cuda").hbm_to_ddr_mem_bw, rel=0.03
    )


def test_a_load_factor_of_many_expected_rows_is_a_cache_of_all():
    generous = {"rows": 2**40, "expected": ROWS}
    assert loading(priced(CACHED, 2.0**-20, **generous)["table_wise"]) == 0  # 2^20 of 10^6 rows
    assert loading(priced(CACHED, 2.0**-21, **generous)["table_wise"]) > 0


def test_measured_hit_rates_are_those_of_constraints():
    """A hundredth of the rows has nine of ten ids."""
    curve = torch.ones(100)
    curve[0] = 900
    stats = EmbeddingOffloadStats(0.1, 1000, curve, ROWS)
    constraints = {
        "user": ParameterConstraints(
            ["table_wise"],
            compute_kernels=[CACHED],
            cache_params=CacheParams(load_factor=0.009, stats=stats),
        )
    }
    (option,) = make_planner(topology("cuda"), 128, constraints).enumerated(collection(), [SHARDER])
    missing = 1000 * 99 / 999
    link = topology("cuda").hbm_to_ddr_mem_bw
    assert loading(option) == pytest.approx(missing * DIM * 4 / link, rel=0.001)


# Plans


def plan_of(model, hbm, constraints=None, sharders=None, ddr=8 * GIB, ranks=2, **options):
    """The plan of a model on ranks with so much memory, as (path, table) -> sharding; and its planner."""
    given = topology(
        "cuda", world_size=ranks, local_world_size=ranks, hbm_cap=int(hbm), ddr_cap=int(ddr)
    )
    options = {"storage_reservation": NOTHING_RESERVED} | options
    planner = make_planner(given, 128, constraints, **options)
    made = planner.plan(model, sharders or [SHARDER]).plan
    return {name: one for part in made.values() for name, one in part.items()}, planner


def held_by_ranks(planner, part="hbm", ranks=2):
    held = [0] * ranks
    for option in planner._best_plan:
        for one in option.shards:
            held[one.rank] += getattr(one.storage, part)
    return held


FULL = size().total  # 0.9 GiB


@pytest.mark.parametrize("tables", [1, 2, 5, 12])
def test_plans_that_fit_the_gpus_are_as_without_host_memory(tables):
    names = [f"t{number}" for number in range(tables)]
    model = collection(names=names)
    room = FULL * tables / 2 * 1.2
    fused = {name: ParameterConstraints(compute_kernels=["fused"]) for name in names}
    free, planner = plan_of(model, room)
    assert free == plan_of(model, room, fused)[0]
    assert {one.compute_kernel for one in free.values()} == {"fused"}
    cache = {
        name: ParameterConstraints(cache_params=CacheParams(load_factor=0.1)) for name in names
    }
    assert free == plan_of(model, room, cache)[0]  # it would have no effect
    assert all(one.cache_params is None for one in free.values())
    assert held_by_ranks(planner, "ddr") == [0, 0]


@pytest.mark.parametrize("part", [0.15, 0.3, 0.6])
def test_a_cache_takes_the_memory_that_is_left(part):
    room = int(part * FULL)
    made, planner = plan_of(collection(), room / 2)
    one = made["user"]
    assert one.compute_kernel == CACHED
    factor = one.cache_params.load_factor
    assert one.cache_params == CacheParams(load_factor=factor) and 0 < factor < 1
    assert 0.85 * room < sum(held_by_ranks(planner)) <= room
    assert sum(held_by_ranks(planner, "ddr")) >= ROWS * DIM * 12
    lines = math.ceil(factor * ROWS)
    sharers = len(set(one.ranks)) if one.sharding_type == "row_wise" else 1
    (option,) = planner._best_plan
    priced_rows = table_size(
        row_limit(ROWS, sharers), option.shards[0].size[1], torch.float32, ADAM, "cuda",
        gpu_rows=math.ceil(lines / sharers),
    )  # fmt: skip
    batch = option.shards[0].storage.hbm - priced_rows.on_device
    assert 0 < batch < MIB  # what the plan says is what was priced


def test_the_load_factor_is_a_part_of_the_limit():
    """The cache is that of a table without room to grow, so its part of a generous limit is small."""
    exact, _ = plan_of(collection(), 0.3 * FULL)
    generous, _ = plan_of(collection(rows=2**40), 0.3 * FULL, expected_rows={"user": ROWS})
    lines, more = (
        math.ceil(made["user"].cache_params.load_factor * rows)
        for made, rows in ((exact, ROWS), (generous, 2**40))
    )
    assert more == pytest.approx(lines, rel=0.25) and lines > 100_000


def test_tables_that_are_read_more_get_more():
    names = ["much", "little"]
    constraints = {
        name: ParameterConstraints(["row_wise"], pooling_factors=[factor])
        for name, factor in zip(names, (20.0, 1.0), strict=True)
    }
    made, _ = plan_of(collection(names=names), 0.4 * FULL, constraints)
    factors = [
        1.0 if one.compute_kernel == "fused" else one.cache_params.load_factor
        for one in (made[name] for name in names)
    ]
    assert factors[0] > 4 * factors[1]


def test_constraints_and_own_storages_stay():
    names = ["free", "here", "uncached", "cached", "factor", "both", "own"]
    constraints = {
        "here": ParameterConstraints(compute_kernels=["fused"]),
        "uncached": ParameterConstraints(compute_kernels=[UNCACHED]),
        "cached": ParameterConstraints(compute_kernels=[CACHED]),
        "factor": ParameterConstraints(cache_params=CacheParams(load_factor=0.125)),
        "both": ParameterConstraints(compute_kernels=["fused", CACHED]),
    }
    given = copy.deepcopy(constraints)
    model = collection({"own": OWN}, names=names)
    made, _ = plan_of(model, 1.5 * FULL, constraints, ddr=8 * FULL)
    assert constraints == given
    kernels = {name: one.compute_kernel for name, one in made.items()}
    factors = {
        name: one.cache_params and one.cache_params.load_factor for name, one in made.items()
    }
    assert (kernels["here"], factors["here"]) == ("fused", None)
    assert (kernels["own"], factors["own"]) == ("fused", None)
    assert (kernels["uncached"], factors["uncached"]) == (UNCACHED, None)
    assert (kernels["cached"], factors["cached"]) == (CACHED, None)  # FBGEMM's
    assert factors["factor"] == 0.125
    for name in ("free", "both"):
        assert (kernels[name] == CACHED) == (factors[name] is not None)
    assert CACHED in (kernels["free"], kernels["both"])


def test_statistics_of_constraints_are_used_and_stay_in_the_plan():
    stats = EmbeddingOffloadStats(0.1, 1000, torch.ones(10), ROWS)
    constraints = {"user": ParameterConstraints(cache_params=CacheParams(stats=stats))}
    cache = plan_of(collection(), 0.3 * FULL, constraints)[0]["user"].cache_params
    assert cache.load_factor > 0.05 and cache.stats.expected_lookups == 1000


def test_small_tables_stay_on_the_gpus():
    small = EmbeddingBagConfig(
        name="small", embedding_dim=DIM, num_embeddings=500, feature_names=["small"]
    )
    model = torch.nn.ModuleDict(
        {"big": collection(), "small": dyn.DynamicEmbeddingBagCollection([small])}
    )
    made, _ = plan_of(model, 0.3 * FULL)
    assert made["user"].compute_kernel == CACHED and made["small"].compute_kernel == "fused"


def test_static_and_processed_tables_are_planned_beside():
    config = EmbeddingBagConfig(
        name="static", embedding_dim=DIM, num_embeddings=3 * ROWS, feature_names=["static"]
    )
    weighted = collection(names=["processed"], is_weighted=True)
    model = torch.nn.ModuleDict(
        {
            "static": EmbeddingBagCollection([config], device=torch.device("meta")),
            "processed": FeatureProcessedEmbeddingBagCollection(
                weighted, PositionWeightedModuleCollection({"processed": 2})
            ),
            "plain": collection(),
        }
    )
    sharders = dyn.default_sharders({"optimizer": EmbOptimType.ADAM})
    made, planner = plan_of(model, 0.3 * FULL, sharders=sharders)
    assert made.keys() == {"static", "processed", "user"}
    assert made["static"].compute_kernel in (UNCACHED, CACHED)
    assert CACHED in (made["processed"].compute_kernel, made["user"].compute_kernel)
    assert max(held_by_ranks(planner)) <= 0.3 * FULL


def test_a_static_table_of_the_same_name_keeps_its_options():
    static = EmbeddingBagConfig(
        name="user", embedding_dim=DIM, num_embeddings=100, feature_names=["user"]
    )
    model = torch.nn.ModuleDict(
        {"static": EmbeddingBagCollection([static], device=torch.device("meta"))}
    )
    sharders, kernels = dyn.default_sharders({"optimizer": EmbOptimType.ADAM}), []
    for _ in range(2):
        planner = make_planner(topology("cuda"), 128)
        kernels.append({"static": set(), "dynamic": set()})
        for option in planner.enumerated(model, sharders):
            kernels[-1][option.path].add((option.sharding_type, option.compute_kernel))
        model["dynamic"] = collection()
    assert kernels[0]["static"] == kernels[1]["static"] > {("data_parallel", "dense")}
    assert {kernel for _, kernel in kernels[1]["dynamic"]} == {"fused"}


def test_a_planner_plans_again():
    """A model beyond the GPUs' memory, then one that fits, then the first."""
    large, small = collection(), collection(rows=10_000)
    _, planner = plan_of(large, 0.3 * FULL)
    kernels = [
        [one.compute_kernel for one in planner.plan(model, [SHARDER]).plan[""].values()]
        for model in (large, small, large)
    ]
    assert kernels == [[CACHED], ["fused"], [CACHED]]


def test_without_room_in_the_host_the_error_names_both_memories():
    with pytest.raises(PlannerError) as caught:
        plan_of(collection(names=["a", "b"]), 0.3 * FULL, ddr=0.3 * FULL)
    text = str(caught.value)
    assert "Last planner error" in text and "expected tables that fit into 0.2" in text
    assert "\n  'a': 0.8" in text
    assert "With rows in the host's memory the tables need at least 0." in text
    assert "GiB of ddr_cap in all; each of 2 ranks has 0.2" in text
    assert text.endswith("If a rank's host has more memory, set Topology(ddr_cap=bytes).")
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
    with pytest.raises(PlannerError) as caught:
        fused = {"user": ParameterConstraints(compute_kernels=["fused"])}
        plan_of(collection(), 0.3 * FULL, fused)
    assert "With rows in the host" not in str(caught.value)


# Plans and models


def train_a_plan_of_gpus():
    """In the workers: plans for GPUs together; returns plan, storages on the CPU, and what was warned of."""
    tables = [Table(f"t{n}", [f"f{n}"], None, dim=DIM, rows=ROWS) for n in range(2)]
    case = Case(tables, exact=False)
    devices = topology("cuda", world_size=2, local_world_size=2, hbm_cap=300 * MIB)
    planner = make_planner(devices, storage_reservation=NOTHING_RESERVED)
    model = Holder(collection_of(case))
    made = planner.collective_plan(model, [sharder_of(case)], dist.group.WORLD).plan["collection"]
    for table in tables:
        table.plan = made[table.name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = shard(case, collection_of(case)).module.collection
    held = {name: [part.config.storage for part in sharded.table(name).shards] for name in made}
    told = [str(one.message) for one in caught if "a cache" in str(one.message)]
    return made, held, told


def test_a_plan_is_what_its_shards_get():
    (first, held, told), (second, others, told_too) = workers.run(
        train_a_plan_of_gpus, world_size=2
    )
    assert repr(first) == repr(second) and told == told_too == []
    cached = 0
    for name, sharding in first.items():
        rows = None
        if sharding.compute_kernel == CACHED:
            cached += 1
            rows = math.ceil(sharding.cache_params.load_factor * ROWS)
            if sharding.sharding_type == "row_wise":
                rows = math.ceil(rows / 2)
        expected = rows and dyn.HostMemory(rows)
        found = held[name] + others[name]
        assert found and set(found) == {expected}
    assert cached > 0


def test_the_stock_planner_uses_host_memory_too():
    """TorchRec's own estimates choose the GPU's memory where it suffices; constraints may ask for a cache."""

    def planned(hbm, constraints=None):
        devices = topology("cuda", hbm_cap=int(hbm))
        planner = EmbeddingShardingPlanner(topology=devices, constraints=constraints)
        return planner.plan(collection(), [SHARDER]).plan[""]["user"]

    assert planned(4 * GIB).compute_kernel == "fused"
    assert planned(0.05 * GIB).compute_kernel in (CACHED, UNCACHED)
    cache = CacheParams(load_factor=0.1)
    asked = planned(
        4 * GIB, {"user": ParameterConstraints(compute_kernels=[CACHED], cache_params=cache)}
    )
    assert (asked.compute_kernel, asked.cache_params) == (CACHED, cache)


def test_tables_placed_beside_a_cache_have_the_memory_beside_it():
    """Rank 0 has a table in host memory, rank 1 one in its GPU's: the copied one goes to rank 0."""
    names, plan = ["copied", "cached", "fused"], {}
    for name, rank in zip(names, (0, 0, 1), strict=True):
        plan[name] = shard_by_hand("table_wise", [([rank], 0, DIM)], ROWS, "cuda")
    plan["cached"].compute_kernel = CACHED
    plan["cached"].cache_params = CacheParams(load_factor=0.01)
    plan["copied"] = ParameterSharding("data_parallel", "dense", [0, 1], None)
    devices = topology(
        "cuda", world_size=2, local_world_size=2, hbm_cap=int(1.4 * FULL), ddr_cap=8 * GIB
    )
    placed = without_data_parallel(
        ShardingPlan({"": plan}), collection(names=names), [SHARDER], devices,
        storage_reservation=NOTHING_RESERVED,
    ).plan[""]  # fmt: skip
    assert placed["copied"].ranks == [0] and placed["copied"].compute_kernel == "fused"
    assert placed["cached"] == plan["cached"]


def test_estimators_of_torchrec_take_the_options_too():
    """DynamicStorageEstimator alone, in a planner of TorchRec's."""
    devices = topology("cuda", hbm_cap=int(0.3 * FULL))
    estimator = DynamicStorageEstimator(devices)
    found = EmbeddingEnumerator(devices, 128, None, estimator).enumerate(collection(), [SHARDER])
    of_kernel = {o.compute_kernel: o for o in found if o.sharding_type == "table_wise"}
    hbm = {kernel: option.total_storage.hbm for kernel, option in of_kernel.items()}
    assert hbm[UNCACHED] < hbm[CACHED] < hbm["fused"]


def measured(rows_loaded, gpu_rows=200_000, rows=400_000, ids=1024, **changes):
    """The stats of a table in host memory after ten forwards of four ranks."""
    counts = {"rows": rows, "waiting": 0, "ids_seen": 10 * ids, "forwards": 10, "features": 1}
    counts |= {"ranks": 4, "gpu_rows": gpu_rows, "rows_loaded": rows_loaded}
    return {"user": counts | changes}


def test_rows_that_were_loaded_are_hit_rates():
    """Half of the rows have frames; ids of a tenth of a step were not in one: the curve goes through that."""
    stats = measured(rows_loaded=10 * 102)
    (given,) = constraints_from(stats, 256, growth=1.0).values()
    curve = given.cache_params.stats
    assert curve.expected_lookups == 1023 and given.cache_params.load_factor is None
    for part, missing in ((1.0, 0.0), (0.5, 0.1), (0.25, 1 - 0.9**2)):
        assert curve.expected_miss_rate(part) == pytest.approx(missing, abs=0.002)
    assert curve.cacheability == pytest.approx(
        sum(curve.expected_miss_rate(part / 100) for part in range(100)) / 100, abs=0.01
    )


@pytest.mark.parametrize(
    "changes",
    [{"rows_loaded": 0}, {"gpu_rows": 0}, {"gpu_rows": 400_000}, {"gpu_rows": 900_000}],
    ids=str,
)
def test_without_loaded_rows_hit_rates_are_assumed(changes):
    stats = measured(**({"rows_loaded": 500} | changes))
    assert constraints_from(stats, 256)["user"].cache_params is None
    for name in ("gpu_rows", "rows_loaded"):
        del stats["user"][name]
    assert constraints_from(stats, 256)["user"].cache_params is None


def test_more_misses_than_of_equally_likely_rows_are_at_most_those():
    """A stream that moves on, say."""
    (given,) = constraints_from(measured(rows_loaded=10**6), 256, growth=1.0).values()
    assert given.cache_params.stats.expected_miss_rate(0.5) == pytest.approx(0.5, abs=0.01)


def test_statistics_and_sizes_of_the_user_are_kept():
    stats = EmbeddingOffloadStats(0.1, 1000, torch.ones(10), ROWS)
    for cache in (CacheParams(load_factor=0.5), CacheParams(stats=stats)):
        mine = {"user": ParameterConstraints(cache_params=cache)}
        given = constraints_from(measured(500), 256, constraints=mine)["user"].cache_params
        assert given.load_factor == cache.load_factor
        assert (given.stats is stats) == (cache.stats is stats) and given.stats is not None


def test_measured_tables_get_what_their_misses_need():
    """Both are read as often; of one few rows were loaded."""
    stats = measured(10, rows=ROWS, gpu_rows=ROWS // 2) | {
        "even": measured(3000, rows=ROWS, gpu_rows=ROWS // 2)["user"]
    }
    constraints = constraints_from(stats, 256, growth=1.0)
    for given in constraints.values():
        given.sharding_types = ["row_wise"]
    made, _ = plan_of(collection(names=["user", "even"]), 0.5 * FULL, constraints)
    few, many = (
        1.0 if one.compute_kernel == "fused" else one.cache_params.load_factor
        for one in (made["user"], made["even"])
    )
    assert many > 5 * few
    assert all(one.cache_params is None or one.cache_params.stats for one in made.values())


def gpu_rows_of_models():
    config = {"in_host": dyn.DynamicTableConfig(storage=dyn.HostMemory(77))}
    tables = [
        Table(name, [name], usual_plan("row_wise", 8, 2, 2), config=config.get(name))
        for name in ("in_host", "planned", "plain")
    ]
    tables[1].plan.compute_kernel = CACHED
    case = Case(tables)
    model = shard(case, collection_of(case))
    return {name: one.get("gpu_rows") for name, one in read_model_stats(model).items()}


def test_stats_of_a_model_have_the_rows_of_its_caches():
    expected = {"in_host": 77, "planned": 200, "plain": None}
    assert workers.run(gpu_rows_of_models, world_size=2) == [expected] * 2
