"""Prices of tables on a GPU: HBM as blocks in ranges and maps that grow at once take it. No GPU is needed."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import example, given
from hypothesis import strategies as st
from planned_cases import POOLED, options, topology
from table_cases import make_group, make_table
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.distributed.types import PipelineType

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.planner import DynamicStorageEstimator, make_planner, table_size
from torchrec_dyn.ranks import row_limit
from torchrec_dyn.storage import (
    SLOT_BYTES,
    ChangeLog,
    IdMap,
    RowStore,
    most_slots,
    most_store_bytes,
)

CPU, PAGE, MIB = torch.device("cpu"), 4096, 1 << 20
ROWS, DIM = 300_000, 64
ADAM = RowOptimizer(kind=OptimizerKind.ADAM)
ADAM_SHARDER = dyn.DynamicEmbeddingBagCollectionSharder({"optimizer": EmbOptimType.ADAM})


def set_ranges(patch):
    """Stores of the CPU use ranges, and small pages."""
    patch.setattr(knobs, "RANGE_DEVICES", {"cpu"})
    patch.setattr(knobs, "PAGE_BYTES", PAGE)
    patch.setattr(knobs, "AHEAD_BYTES", 4 * PAGE)


def committed(store):
    """Returns the bytes of whole pages of a store; a block of at most one page is torch's memory."""
    whole = (store.row_bytes << store.shift) <= PAGE
    return sum(one.nbytes if whole else -(-one.nbytes // PAGE) * PAGE for one in store.blocks)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    st.integers(1, 40),
    st.integers(4, 13),
)
def test_a_store_commits_no_more_than_its_price(steps, columns, shift):
    with pytest.MonkeyPatch.context() as patch:
        set_ranges(patch)
        store, rows = RowStore(columns, shift, torch.float32, CPU), 0
        for more in steps:
            rows += more
            store.reserve(rows)
            price = most_store_bytes(rows, store.row_bytes, shift)
            assert rows * store.row_bytes <= committed(store) <= price
            spare = max(store.row_bytes << shift, rows * store.row_bytes // 8 + 2 * PAGE)
            pages = PAGE * len(store.blocks)
            assert price <= rows * store.row_bytes + spare + pages


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=30),
    st.integers(10, 400),
    st.none() | st.integers(1, 3000),
)
@example([100, 3], 400, None)  # a small map doubles
def test_most_slots_bounds_old_and_new_slots_of_a_map_that_grows_at_once(batches, large, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_dyn.knobs.LARGE_MAP_SLOTS", large)
        patch.setattr(IdMap, "_grows_in_steps", lambda self, capacity: False)
        ids, peak = IdMap(limit), 0
        for wanted in batches:
            before = ids.capacity
            batch = wanted if limit is None else min(wanted, limit - ids.num_ids)
            ids.reserve(batch)
            ids.num_ids += batch
            assert ids.outgoing is None
            peak = max(peak, ids.capacity + (before if ids.capacity > before else 0))
            assert peak <= most_slots(ids.num_ids, "cuda")


def test_a_large_map_on_a_gpu_is_priced_at_58_bytes_a_row():
    assert 57 < most_slots(10_000_000, "cuda") * SLOT_BYTES / 10_000_000 < 58


def test_a_table_in_ranges_commits_what_its_parts_cost(monkeypatch):
    set_ranges(monkeypatch)
    config = {"admission": dyn.AdmitAfter(2, 900), "eviction": dyn.LeastRecentlyUsed()}
    table = make_table(OptimizerKind.ADAM, embedding_dim=24, num_embeddings=3000, **config)
    group = make_group(table)
    for ids in torch.arange(3000).split(500):
        group(ids.repeat(2), torch.arange(1001), training=True)
    for ids in (10**6 + torch.arange(900)).split(50):
        group(ids, torch.arange(51), training=True)
    assert (table.num_rows, table.num_waiting) == (3000, 900)
    size = table_size(3000, 24, torch.float32, ADAM, "cpu", None, True, 900)
    waiting = table.life.waiting
    for held, price in [
        (committed(table.weights), size.weights),
        (sum(map(committed, table.states)), size.optimizer_state),
        (committed(table.life.scores.store), size.scores),
        (committed(waiting.scores.store), size.counters - most_slots(900) * SLOT_BYTES),
    ]:
        assert held <= price <= 1.3 * held + 2 * PAGE


@pytest.mark.parametrize("limit", [700, 700_000, 20_000_000])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_marks_cost_what_a_change_log_holds(device, limit):
    rows = limit // 2 + 1
    log = ChangeLog(limit, torch.device("cpu" if device == "cpu" else "meta"))
    log.reserve(rows)
    size = table_size(rows, 8, torch.float32, ADAM, device, limit, deltas=True)
    plain = table_size(rows, 8, torch.float32, ADAM, device, limit)
    listed = 8 * rows if device == "cpu" else 0  # the ids of the changed rows: here all
    assert size.marks == log.bytes + listed and plain.marks == 0
    assert size.total == plain.total + size.marks


# The planner

POLICY = dyn.DynamicTableConfig(
    admission=dyn.AdmitAfter(2, 100_000), eviction=dyn.LeastRecentlyUsed()
)


def collection(rows=ROWS, config=None, names=("user",)):
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name in names
    ]
    return dyn.DynamicEmbeddingBagCollection(tables, dynamic=config)


@pytest.mark.parametrize("config", [None, POLICY], ids=["plain", "policy"])
def test_shards_on_a_gpu_cost_hbm_alone(config):
    constraints = {"user": ParameterConstraints(sharding_types=POOLED, min_partition=16)}
    cuda, cpu = (
        options(
            DynamicStorageEstimator(topology(device), constraints, deltas=True),
            collection(config=config), ADAM_SHARDER, constraints, device,
        )
        for device in ("cuda", "cpu")
    )  # fmt: skip
    assert {kind for _, kind in cuda} == {kind for _, kind in cpu} == set(POOLED)
    for key, option in cuda.items():
        for shard, on_cpu in zip(option.shards, cpu[key].shards, strict=True):
            sharers = ROWS // shard.size[0]
            rows, waiting = row_limit(ROWS, sharers), row_limit(100_000, sharers) if config else 0
            sizes = [
                table_size(rows, shard.size[1], torch.float32, ADAM, device, None,
                           config is not None, waiting, True)
                for device in ("cuda", "cpu")
            ]  # fmt: skip
            # The memory of a batch is TorchRec's estimate, the same for both devices.
            assert shard.storage.hbm - sizes[0].total == on_cpu.storage.ddr - sizes[1].total > 0
            assert shard.storage.ddr == on_cpu.storage.hbm == 0


def test_the_parts_of_a_table_on_a_gpu():
    size = table_size(ROWS, DIM, torch.float32, ADAM, "cuda", 10 * ROWS, True, 100_000)
    for part, used in [
        (size.weights, ROWS * DIM * 4),
        (size.optimizer_state // 2, ROWS * DIM * 4),
        (size.scores, ROWS * 8),
    ]:
        assert part % (2 * MIB) == 0 and used < part <= used * 9 / 8 + 4 * MIB
    full = table_size(2**20, DIM, torch.float32, ADAM, "cuda")
    assert full.weights == 2**20 * DIM * 4  # a block is never longer than the limit needs
    assert size.id_map == most_slots(ROWS, "cuda") * SLOT_BYTES
    small = table_size(500, 4, torch.float32, ADAM, "cuda")
    assert small.weights == 512 * 4 * 4  # a block of at most a page is torch's memory


def test_more_counters_than_rows_are_in_one_range():
    """The user may choose more counters than the limit; their blocks are as long as the counters need."""
    size = table_size(1000, 4, torch.float32, ADAM, "cuda", 1000, True, 700_000)
    scores = size.counters - most_slots(700_000, "cuda") * SLOT_BYTES
    assert scores % (2 * MIB) == 0 and 700_000 * 8 < scores <= 2**20 * 8


@pytest.mark.parametrize("at_peak", [False, True])
def test_a_pipeline_costs_what_torchrec_says(at_peak):
    """A train pipeline has several inputs in memory; the estimate of a step without one is another."""
    place = topology("cuda")
    pipeline = {
        "pipeline_type": PipelineType.TRAIN_SPARSE_DIST,
        "run_embedding_at_peak_memory": at_peak,
    }
    ours, stock = (
        [
            options(make(place, **given), collection(), ADAM_SHARDER, None, "cuda")
            for given in ({}, pipeline)
        ]
        for make in (DynamicStorageEstimator, EmbeddingStorageEstimator)
    )
    for key, option in ours[0].items():
        added = ours[1][key].total_storage.hbm - option.total_storage.hbm
        assert added == stock[1][key].total_storage.hbm - stock[0][key].total_storage.hbm != 0


def test_without_room_the_error_names_tables_and_bytes():
    sharder = [ADAM_SHARDER]
    names = [f"t{number}" for number in range(10)]
    with pytest.raises(PlannerError) as caught:
        small = topology("cuda", hbm_cap=64 * MIB, ddr_cap=64 * MIB)
        make_planner(small).plan(collection(names=names), sharder)
    text = str(caught.value)
    assert "Last planner error" in text  # TorchRec's own text
    assert "expected tables that fit into 0.06 GiB of hbm_cap on each of 4 ranks" in text
    assert "  't0': 0.28 GiB in all, 0.07 GiB in a shard under row_wise\n" in text
    assert (
        "  2 other tables: 0.55 GiB in all\nIf a rank has more memory, set Topology(hbm_cap="
        in text
    )
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
    room = make_planner(topology("cuda", hbm_cap=2 << 30))
    assert len(room.plan(collection(names=names), sharder).plan[""]) == 10
    few = dict.fromkeys(names, 20_000)
    small = make_planner(topology("cuda", hbm_cap=256 * MIB), expected_rows=few)
    assert len(small.plan(collection(names=names), sharder).plan[""]) == 10


def test_a_table_without_room_under_its_constraints_is_named():
    """All ranks together have room, but none has room for the whole table."""
    constraints = {"user": ParameterConstraints(["table_wise"], compute_kernels=["fused"])}
    planner = make_planner(topology("cuda", hbm_cap=128 * MIB), constraints=constraints)
    with pytest.raises(
        PlannerError, match=r"'user': 0\.2\d GiB in all, .* under table_wise"
    ) as caught:
        planner.plan(collection(), [ADAM_SHARDER])
    assert caught.value.error_type == PlannerErrorType.STRICT_CONSTRAINTS


def test_other_errors_of_the_planner_stay_as_they_are(monkeypatch):
    planner = make_planner(topology("cuda"))

    def fail(**arguments):
        raise PlannerError("something else", PlannerErrorType.OTHER)

    monkeypatch.setattr(planner._partitioner, "partition", fail)
    with pytest.raises(PlannerError):
        planner.plan(collection(), [ADAM_SHARDER])
    monkeypatch.setattr(planner._enumerator, "enumerate", fail)
    with pytest.raises(PlannerError, match=r"^something else$"):
        planner.plan(collection(), [ADAM_SHARDER])
