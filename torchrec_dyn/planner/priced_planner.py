"""TorchRec's planner, with storage priced by the allocations of dynamic tables, and its partitioner."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import (
    DeviceHardware,
    Enumerator,
    PlannerError,
    PlannerErrorType,
    ShardEstimator,
    ShardingOption,
    StorageReservation,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_dyn.planner.caches import (
    CacheProposer,
    DynamicEnumerator,
    HitRates,
    settled,
)
from torchrec_dyn.planner.measured import (
    EvenLoad,
    MeasuredConstraints,
    check_tables,
    checked_constraints,
    checked_count,
)
from torchrec_dyn.planner.storage import DynamicStorageEstimator
from torchrec_dyn.planner.travelling_rows import DynamicPerfEstimator

_MOST_TABLES = 8  # in a message
_GIB = 1 << 30
_NO_ROOM = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS)


class PricedPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner. If no plan fits the memory, its error lists the largest tables."""

    expected_rows: Sequence[str] = ()  # the tables that have them
    in_host: Enumerator  # for models that do not fit into the memory of their GPUs
    _enumerator: Any
    _proposers: Any

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Returns the plan that rank 0 makes."""
        given = get_default_sharders() if sharders is None else sharders

        def attempt() -> ShardingPlan | Exception:
            try:
                return self.plan(module, given)
            except Exception as error:  # else the other ranks would wait for the plan
                return error

        group = pg or dist.group.WORLD
        assert group is not None, "expected init_process_group before collective_plan"
        planned = invoke_on_rank_and_broadcast_result(group, 0, attempt)
        if isinstance(planned, Exception):
            raise planned
        return planned

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Returns a plan of a model."""
        topology, given = self._topology, self._constraints or {}
        check_tables(module, sharders, given, self.expected_rows, topology.compute_device)
        try:
            return super().plan(module, sharders)
        except PlannerError as error:
            if error.error_type not in _NO_ROOM:
                raise
            return self._plan_in_host(module, sharders, error)

    def _plan_in_host(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], error: PlannerError
    ) -> ShardingPlan:
        """Returns a plan that may have rows in the host's memory; without room raises an error for users."""
        on_device, proposers = self._enumerator, self._proposers
        options = on_device.enumerate(module, sharders)
        others = self.in_host.enumerate(module, sharders)
        has_more = len(others) > len(options)
        if has_more:
            self._enumerator, self._proposers = self.in_host, [CacheProposer(proposers)]
            try:
                return super().plan(module, sharders)
            except PlannerError as second:
                if second.error_type not in _NO_ROOM:
                    raise
                error = second
            finally:
                self._enumerator, self._proposers = on_device, proposers
        tables = _largest_tables(options, self._topology)
        in_host = _least_in_host(others, self._topology) if has_more else ""
        raise PlannerError(f"{error}\n{tables}{in_host}", error.error_type) from error

    # The parts of `plan`, for callers that leave some tables where they are.

    def enumerated(
        self, model: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """Returns all sharding options of the tables of a model, priced."""
        check_tables(
            model,
            sharders,
            self._constraints or {},
            self.expected_rows,
            self._topology.compute_device,
        )
        return self._enumerator.enumerate(model, sharders)

    def reserved(self, model: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> Topology:
        """Returns a copy of the devices, less what TorchRec reserves for the dense part and batches."""
        return self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=model,
            sharders=sharders,
            constraints=self._constraints,
        )

    def placed(self, options: list[ShardingOption], room: Topology) -> ShardingPlan:
        """Returns the plan of one option for each table, in the room and beside the work of the devices."""
        placed = self._partitioner.partition(proposal=options, storage_constraint=room)
        return to_sharding_plan(placed, self._topology)


def _largest_tables(options: list[ShardingOption], topology: Topology) -> str:
    """Returns the bytes of the largest tables and the ways to make them fit, for an error."""
    memory = "ddr" if topology.compute_device == "cpu" else "hbm"
    least: dict[str, tuple[int, int, str]] = {}
    for option in options:
        sizes = [getattr(shard.storage, memory) for shard in option.shards]
        shape = (max(sizes), sum(sizes), option.sharding_type)
        least[option.name] = min(least.get(option.name, shape), shape)
    largest = sorted(least.items(), key=lambda item: -item[1][1])
    lines = [
        f"  '{name}': {total / _GIB:,.2f} GiB in all, {shard / _GIB:,.2f} GiB in a shard under {kind}"
        for name, (shard, total, kind) in largest[:_MOST_TABLES]
    ]
    if len(largest) > _MOST_TABLES:
        rest = sum(total for _, (_, total, _) in largest[_MOST_TABLES:])
        lines.append(f"  {len(largest) - _MOST_TABLES} other tables: {rest / _GIB:,.2f} GiB in all")
    room = getattr(topology.devices[0].storage, memory) / _GIB
    head = (
        f"make_planner: expected tables that fit into {room:,.2f} GiB of {memory}_cap on each of "
        f"{topology.world_size} ranks, less what TorchRec reserves, got, under the sharding type with the "
        "smallest shards:"
    )
    remedy = (
        f"If a rank has more memory, set Topology({memory}_cap=bytes). If a table will have fewer rows than "
        "num_embeddings, set expected_rows={name: rows}. Else allow row_wise or column_wise in its "
        "constraints, use more ranks, smaller dtypes, or a row-wise optimizer. `python -m torchrec_dyn size` "
        "prints the parts of a table."
    )
    return "\n".join([head, *lines, remedy])


def _least_in_host(options: list[ShardingOption], topology: Topology) -> str:
    """Returns what the tables need at least if their rows are in the host's memory, for an error."""
    least: dict[str, tuple[int, int]] = {}
    for option in options:
        storage = option.total_storage
        shape = (storage.hbm, storage.ddr)
        least[option.fqn] = min(least.get(option.fqn, shape), shape)
    hbm, ddr = (sum(sizes) / _GIB for sizes in zip(*least.values(), strict=True))
    room = topology.devices[0].storage
    return (
        f"\nWith rows in the host's memory the tables need at least {hbm:,.2f} GiB of hbm_cap and {ddr:,.2f} "
        f"GiB of ddr_cap in all; each of {topology.world_size} ranks has {room.hbm / _GIB:,.2f} and "
        f"{room.ddr / _GIB:,.2f} GiB. If a rank's host has more memory, set Topology(ddr_cap=bytes)."
    )


class _QuickPartitioner(GreedyPerfPartitioner):
    """TorchRec's default partitioner, with the same plans in less time.

    To try a host for tables that stay on one host, TorchRec's code makes a deep copy of its devices. With 100
    tables on 64 ranks that is most of the time of planning.
    """

    @classmethod
    def _cohost_partition(cls, group: Any, hosts: list[list[DeviceHardware]]) -> None:
        super()._cohost_partition(group, [_HostDevices(devices) for devices in hosts])


class _HostDevices(list[DeviceHardware]):
    """The devices of a host. A copy has the same storages and perfs: no code writes to these."""

    def __deepcopy__(self, memo: dict[int, Any]) -> list[DeviceHardware]:
        return [DeviceHardware(hardware.rank, hardware.storage, hardware.perf) for hardware in self]


def make_planner(
    topology: Topology,
    batch_size: int = BATCH_SIZE,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    expected_rows: Mapping[str, int] | None = None,
    deltas: bool = False,
    **options: Any,
) -> EmbeddingShardingPlanner:
    """Returns TorchRec's planner with storage estimates of DynamicStorageEstimator.

    Plans are rated by their slowest rank, as in TorchRec. With measured constraints (`constraints_from`), the
    fullest rank is rated too; see EvenLoad. If no plan fits the memory of GPUs, tables whose constraints and
    config leave it open may have rows in the host's memory: compute kernel `fused_uvm_caching`, with a load
    factor that TorchRec's scale-up chooses. If no plan fits at all, the PlannerError also lists the largest
    tables.

    Args:
        topology: the devices.
        batch_size: samples per rank.
        constraints: constraints by table name. GRID is considered only for tables whose constraints name it.
        expected_rows: expected rows by table name, see DynamicStorageEstimator.
        deltas: True if deltas of the model will be exported, see DynamicStorageEstimator.
        **options: other arguments of EmbeddingShardingPlanner, except `enumerator`.

    Raises:
        ValueError: if an argument is not valid. The planner's `plan` and (on every rank) `collective_plan`
            also raise it, if the constraints of a dynamic table leave no sharding type or compute kernel that
            it supports, a name in `expected_rows` is not the name of a table, or a table cannot have so many
            rows.
    """
    if not isinstance(topology, Topology):
        raise ValueError(
            f"make_planner.topology: expected a Topology, got {topology!r}. Write "
            "make_planner(Topology(...), batch_size)."
        )
    batch_size = checked_count(
        batch_size, "make_planner.batch_size", 1, "Pass the samples per rank."
    )
    if "enumerator" in options:
        raise ValueError(
            f"make_planner.enumerator: expected none, got {options['enumerator']!r}. Leave it out, or pass "
            "it to EmbeddingShardingPlanner, with a DynamicStorageEstimator among its estimators."
        )
    by_table = checked_constraints(constraints, "make_planner.constraints") or None
    if any(
        isinstance(constraints, MeasuredConstraints) for constraints in (by_table or {}).values()
    ):
        options.setdefault("performance_model", EvenLoad(topology))
    if options.get("partitioner") is None:
        options["partitioner"] = _QuickPartitioner()
    storages = DynamicStorageEstimator(
        topology, by_table, expected_rows=expected_rows, deltas=deltas
    )
    hit_rates = HitRates(topology, by_table, storages.expected)
    estimators: list[ShardEstimator] = [
        DynamicPerfEstimator(topology, by_table, hit_rates),
        storages,
    ]
    on_device, in_host = (
        DynamicEnumerator(topology, batch_size, by_table, estimators, hit_rates, in_host)
        for in_host in (False, True)
    )
    options["callbacks"] = [settled, *(options.get("callbacks") or ())]
    planner = PricedPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=on_device,
        constraints=by_table,
        **options,
    )
    planner.expected_rows = list(expected_rows or ())
    planner.in_host = in_host
    return planner


_THEIRS = "torchrec.distributed.planner.provider"
# Parts of a planner that a request may choose, and `make_planner` takes as objects.
_CHOICES = ("proposer_type", "proposer_config", "partitioner_type", "performance_model")


def make_planner_provider(
    expected_rows: Mapping[str, int] | None = None, deltas: bool = False, **options: Any
) -> Any:
    """Returns a provider for TorchRec's planner API that uses the planner of `make_planner`.

    Pass it to `DefaultPlannerExecutor(provider=...)` of `torchrec.distributed.planner.executor`. Batch size,
    constraints, topology and storage reservation are taken from the request.

    Args:
        expected_rows: as in `make_planner`.
        deltas: as in `make_planner`.
        **options: other arguments of EmbeddingShardingPlanner, as in `make_planner`.

    Raises:
        ValueError: if this version of TorchRec has no such API.
    """
    try:
        theirs: Any = importlib.import_module(_THEIRS).DefaultPlannerProvider
    except ImportError:
        version = importlib.metadata.version("torchrec")
        raise ValueError(
            f"make_planner_provider: expected TorchRec with a planner API (1.9), got {version}. Pass "
            "make_planner(...) to DistributedModelParallel, or call its plan."
        ) from None

    class PricedProvider(theirs):
        """TorchRec's default provider, except for the planner."""

        def build_planner(
            self, sku: str, *, topology: Topology, storage_reservation: StorageReservation, ctx: Any
        ) -> EmbeddingShardingPlanner:
            """Returns the planner of a request, with its batch size and constraints."""
            config = ctx.request.planner_config
            chosen = [name for name in _CHOICES if getattr(config, name, None) is not None]
            if chosen:
                raise ValueError(
                    f"make_planner_provider: expected a planner_config without {', '.join(chosen)}. Pass "
                    "proposer, partitioner and performance_model to make_planner_provider."
                )
            return make_planner(
                topology,
                ctx.request.batch_size,
                ctx.request.constraints,
                expected_rows,
                deltas,
                storage_reservation=storage_reservation,
                **options,
            )

    return PricedProvider()
