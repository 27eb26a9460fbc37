"""TorchRec's planner API, which TorchRec has from 1.9 on, with our planner behind it."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from planned_cases import topology
from sharded_cases import Case, Table
from sharded_training import Holder, collection_of, sharder_of
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from torchrec_dyn.planner import make_planner, make_planner_provider

NAME = "torchrec.distributed.planner.provider"
CASE = Case([Table("t", ["f"], None, rows=10**6)])


class TheirProvider:
    """Theirs, as far as a test without TorchRec 1.9 goes."""

    def build_topology(self, sku: str, request: Any, ctx: Any) -> str:
        return f"topology of {sku}, {request}, {ctx}"

    def build_storage_reservation(self, sku: str, request: Any) -> str:
        return f"reservation of {sku}, {request}"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(NAME)
    module.DefaultPlannerProvider = TheirProvider
    monkeypatch.setitem(sys.modules, NAME, module)


def context(**choices: Any) -> Any:
    config = SimpleNamespace(proposer_type=None, **choices)
    request = SimpleNamespace(batch_size=64, constraints=None, planner_config=config)
    return SimpleNamespace(request=request)


def storage(planner: Any) -> list[int]:
    planner.plan(Holder(collection_of(CASE)), [sharder_of(CASE)])
    return [shard.storage.ddr for option in planner._best_plan for shard in option.shards]


def test_the_planner_of_a_request_is_ours(theirs: None) -> None:
    provider = make_planner_provider(expected_rows={"t": 1000})
    assert provider.build_topology("x", "r", "c") == "topology of x, r, c"
    assert provider.build_storage_reservation("x", "r") == "reservation of x, r"
    reserved = FixedPercentageStorageReservation(percentage=0.1)
    built = provider.build_planner(
        "x", topology=topology("cpu"), storage_reservation=reserved, ctx=context()
    )
    options = {"batch_size": 64, "storage_reservation": reserved}
    expected = storage(make_planner(topology("cpu"), expected_rows={"t": 1000}, **options))
    assert storage(built) == expected != storage(make_planner(topology("cpu"), **options))


def test_a_request_chooses_no_part_of_the_planner(theirs: None) -> None:
    text = r"^make_planner_provider: expected a planner_config without partitioner_type\. Pass "
    with pytest.raises(ValueError, match=text):
        make_planner_provider().build_planner(
            "x",
            topology=topology("cpu"),
            storage_reservation=FixedPercentageStorageReservation(percentage=0.1),
            ctx=context(partitioner_type="memory_balanced"),
        )


def test_torchrec_without_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    text = r"^make_planner_provider: expected TorchRec with a planner API \(1\.9\), got 1\.\d+\.\d+\. Pass "
    with pytest.raises(ValueError, match=text):
        make_planner_provider()


def test_a_request_is_planned_by_torchrec() -> None:
    pytest.importorskip(NAME)
    from torchrec.distributed.planner.api import ProductionPlannerOrchestrator
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.types import PlannerSessionContext, ShardingPlanRequest

    peaks = []
    for rows in (1000, 10**6):
        request = ShardingPlanRequest(
            model=Holder(collection_of(CASE)),
            sharders=[sharder_of(CASE)],
            world_size=2,
            local_world_size=2,
            batch_size=64,
            compute_device="cpu",
            ddr_gb=16,
        )
        executor = DefaultPlannerExecutor(make_planner_provider(expected_rows={"t": rows}))
        planned = ProductionPlannerOrchestrator(executor, sku="any").plan(
            request, PlannerSessionContext(request=request, results={})
        )
        assert planned["any"].success and "collection" in planned["any"].sharding_plan.plan
        peaks.append(planned["any"].estimated_max_ddr_bytes)
    assert 0 < peaks[0] < peaks[1]
