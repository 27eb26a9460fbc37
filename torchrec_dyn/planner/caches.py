"""Rows beyond the memory of GPUs: which tables have them, and how many of these rows have a place on GPUs.

TorchRec's scale-up of caches chooses the numbers: it starts where every cache has one row, and divides the
memory that is left by the lookups of the tables.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.types import (
    Enumerator,
    Proposer,
    ShardEstimator,
    ShardingOption,
)
from torchrec.distributed.planner.utils import get_num_poolings
from torchrec.distributed.types import CacheParams, ModuleSharder

from torchrec_dyn.config import HostMemory
from torchrec_dyn.modules import UnshardedCollection, chosen_fused_params, merged_fused_params
from torchrec_dyn.planner.hit_rates import hit_rates
from torchrec_dyn.planner.measured import ExpectedRows, without_processors
from torchrec_dyn.ranks import CACHED_ON_DEVICE, IN_DEVICE_MEMORY, planned_storage

_LEAST_ROWS = (
    1024  # a smaller table saves nothing, and the scale-up divides by what its cache takes
)


@dataclass
class ChosenCache(CacheParams):
    """Parameters of a cache whose size the planner chooses.

    `load_factor` is here a part of the expected rows: of a table with a generous limit most load factors
    would mean all its rows. `given` are the user's parameters.
    """

    rows: int = 1
    given: CacheParams | None = None

    def __hash__(self) -> int:
        return super().__hash__()

    @property
    def gpu_rows(self) -> int:
        """Rows of the whole table with a place on GPUs."""
        return max(1, math.ceil((self.load_factor or 0) * self.rows))

    def as_planned(self, limit: int) -> CacheParams:
        """Returns the parameters in a plan, whose load factor is a part of the limit."""
        # Half a row less, so that rounding errors do not add a row.
        factor = (self.gpu_rows - 0.5) / limit
        return replace(self.given or CacheParams(), load_factor=factor)


def gpu_rows_of(option: ShardingOption, sharder_params: Mapping[str, Any] | None) -> int | None:
    """Returns the rows of a dynamic table that have a place on GPUs under an option; None: all rows."""
    storage = _collection_of(option).dynamic_configs()[option.name].storage
    if storage is None:
        cache = option.cache_params
        if isinstance(cache, ChosenCache) and option.compute_kernel == CACHED_ON_DEVICE:
            return cache.gpu_rows
        factor, limit = _given_load_factor(option, sharder_params), option.tensor.shape[0]
        storage = planned_storage(option.compute_kernel, factor, limit, f"table '{option.name}'")
    return storage.gpu_rows if isinstance(storage, HostMemory) else None


def _given_load_factor(option: ShardingOption, sharder_params: Mapping[str, Any] | None) -> Any:
    """Returns the load factor of the constraints, else that of `fused_params`; None: there is none."""
    if option.cache_load_factor is not None:
        return option.cache_load_factor
    merged = merged_fused_params(sharder_params, _collection_of(option).fused_params)
    chosen = chosen_fused_params(option.tensor, merged, f"table '{option.name}'")
    return (chosen or {}).get("cache_load_factor")


def _is_dynamic(option: ShardingOption) -> bool:
    return isinstance(_collection_of(option), UnshardedCollection)


def _collection_of(option: ShardingOption) -> Any:
    return without_processors(option.module[1])


class HitRates:
    """The statistics of the caches of tables: those of their constraints, else assumed ones."""

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None,
        expected: ExpectedRows,
    ) -> None:
        self._ranks: int = topology.world_size
        self._constraints = dict(constraints or {})
        self.expected = expected

    def of(self, option: ShardingOption) -> Any:
        """Returns the CacheStatistics of a table."""
        given = option.cache_params
        if given is not None and given.stats is not None:
            return given.stats
        rows = self.expected.rows(option.name, option.tensor.shape[0])
        return hit_rates(rows, self._ids(option))

    def as_cached(self, option: ShardingOption, gpu_rows: int) -> ShardingOption:
        """Returns an option, with the same shards, for which TorchRec's time is that of our cache."""
        stats, cached = self.of(option), copy.copy(option)
        rows = getattr(stats, "height", option.tensor.shape[0])
        cached.compute_kernel = CACHED_ON_DEVICE
        # With TorchRec's prefetching, missing rows are loaded first, and kernels read the GPU's memory alone.
        cached.cache_params = CacheParams(
            load_factor=min(1.0, gpu_rows / rows), prefetch_pipeline=True, stats=stats
        )
        return cached

    def _ids(self, option: ShardingOption) -> float:
        """Returns the ids of a table in a step of all ranks."""
        given = self._constraints.get(option.name)
        sizes = (given and given.batch_sizes) or [option.batch_size] * option.num_inputs
        poolings = get_num_poolings(self._constraints, option)
        bags = zip(option.input_lengths, poolings, sizes, strict=True)
        return self._ranks * sum(math.prod(factors) for factors in bags)


class DynamicEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, for the rows of dynamic tables in the memory of their device.

    With `in_host` they are also offered in the host's memory, with a cache of one row. A table with a storage
    of its own, or with constraints that list its compute kernel, is offered as these say.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None,
        estimators: list[ShardEstimator],
        hit_rates: HitRates,
        in_host: bool = False,
    ) -> None:
        super().__init__(topology, batch_size, constraints, estimators)
        self._given = constraints or {}
        self._hit_rates = hit_rates
        self._in_host = in_host
        self._sharder_params: dict[type, Any] = {}

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """Returns the options of all tables, priced."""
        by_type = {sharder.module_type: sharder for sharder in sharders}
        self._sharder_params = {
            kind: getattr(sharder, "fused_params", None) for kind, sharder in by_type.items()
        }
        kernels, others = self._kernels_of(module, by_type)
        # TorchRec enumerates and prices the kernels that constraints list, also those of a static table with
        # the name of a dynamic one.
        self._constraints = self._given | {
            name: replace(
                self._given.get(name) or ParameterConstraints(), compute_kernels=kernels[name]
            )
            for name in kernels.keys() - others
        }
        return _that_save_memory(
            option
            for option in super().enumerate(module, sharders)
            if not _is_dynamic(option) or option.compute_kernel in kernels[option.name]
        )

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Prices options; an option with a cache of no given size gets one that the planner may change."""
        for option in sharding_options:
            if self._in_host and _is_dynamic(option) and option.compute_kernel == CACHED_ON_DEVICE:
                self._choose(option)
        super().populate_estimates(sharding_options)

    def _kernels_of(
        self, module: nn.Module, by_type: Mapping[type, ModuleSharder[nn.Module]]
    ) -> tuple[dict[str, list[str]], set[str]]:
        """Returns the kernels of all dynamic tables, and the names of the other tables."""
        kernels: dict[str, list[str]] = {}
        others: set[str] = set()
        for part in module.modules():
            sharder, collection = by_type.get(type(part)), without_processors(part)
            if sharder is not None and isinstance(collection, UnshardedCollection):
                for name, config in collection.dynamic_configs().items():
                    kernels[name] = self._kernels(name, config.storage is None)
            elif sharder is not None:
                others.update(sharder.shardable_parameters(part))
        return kernels, others

    def _kernels(self, name: str, is_free: bool) -> list[str]:
        """Returns the kernels of a dynamic table; `is_free`: it has no storage of its own."""
        given = self._given.get(name)
        listed = (given and given.compute_kernels) or []
        if listed and not {IN_DEVICE_MEMORY, CACHED_ON_DEVICE} <= set(listed):
            return listed
        if self._in_host and is_free:
            return [IN_DEVICE_MEMORY, CACHED_ON_DEVICE]
        return [IN_DEVICE_MEMORY]

    def _choose(self, option: ShardingOption) -> None:
        given, constraints = option.cache_params, self._given.get(option.name)
        listed = (constraints and constraints.compute_kernels) or [IN_DEVICE_MEMORY]
        params = self._sharder_params[type(option.module[1])]
        is_given = _given_load_factor(option, params) is not None
        if isinstance(given, ChosenCache) or is_given or IN_DEVICE_MEMORY not in listed:
            return
        rows = self._hit_rates.expected.rows(option.name, option.tensor.shape[0])
        stats = self._hit_rates.of(option)
        option.cache_params = ChosenCache(load_factor=1 / rows, stats=stats, rows=rows, given=given)


def _that_save_memory(options: Iterable[ShardingOption]) -> list[ShardingOption]:
    """Returns options without caches of the planner's that would save less than a tenth of a GPU's memory."""
    found = list(options)
    of_device = {
        (option.fqn, option.sharding_type): option.total_storage.hbm
        for option in found
        if option.compute_kernel == IN_DEVICE_MEMORY
    }

    def saves(option: ShardingOption) -> bool:
        cache = option.cache_params
        if not isinstance(cache, ChosenCache):
            return True
        most = 0.9 * of_device[option.fqn, option.sharding_type]
        return cache.rows >= _LEAST_ROWS * option.num_shards and option.total_storage.hbm < most

    return [*filter(saves, found)]


def settled(plan: list[ShardingOption]) -> list[ShardingOption]:
    """Writes the load factors that a planner chose as those of a plan; a callback of TorchRec's planner."""
    for option in plan:
        cache = option.cache_params
        if _is_dynamic(option) and option.compute_kernel == IN_DEVICE_MEMORY:
            option.cache_params = None  # it would have no effect
        elif isinstance(cache, ChosenCache):
            option.cache_params = cache.as_planned(option.tensor.shape[0])
    return plan


class CacheProposer(Proposer):
    """Proposers in turn, and then TorchRec's scale-up of caches, twice, from the best plan of these.

    First all tables of that plan that may be in host memory are, and then those alone that are in the plan.
    """

    def __init__(self, first: list[Proposer]) -> None:
        self._first = first
        self._waiting: list[Proposer] = []
        self._space: list[ShardingOption] = []
        self._enumerator: Enumerator | None = None
        self._best: list[ShardingOption] | None = None
        self._best_rating = math.inf
        self._is_scaling = False

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Starts anew."""
        self._space, self._enumerator = search_space, enumerator
        self._best, self._best_rating, self._is_scaling = None, math.inf, False
        self._waiting = list(self._first)
        for proposer in self._waiting:
            proposer.load(search_space, enumerator)

    def propose(self) -> list[ShardingOption] | None:
        """Returns the next proposal; None: there is none."""
        while self._waiting:
            proposal = self._waiting[0].propose()
            if proposal:
                return proposal
            del self._waiting[0]
            if not self._waiting and not self._is_scaling:
                self._scale_up()
        return None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Tells the proposer of the last proposal how it was rated."""
        if plan and perf_rating is not None and perf_rating < self._best_rating:
            self._best, self._best_rating = copy.deepcopy(plan), perf_rating
        self._waiting[0].feedback(partitionable, plan, perf_rating, storage_constraint)

    def _scale_up(self) -> None:
        self._is_scaling = True
        if self._best is None:
            return
        caches = {
            (option.fqn, option.sharding_type): option
            for option in self._space
            if isinstance(option.cache_params, ChosenCache)
        }
        everywhere = [caches.get((one.fqn, one.sharding_type), one) for one in self._best]
        for start in (everywhere, self._best):
            space = copy.deepcopy(start)
            for option in space:
                if option.compute_kernel == CACHED_ON_DEVICE and option.cache_params is None:
                    option.cache_params = CacheParams()  # of a static table: TorchRec needs them
                for shard in option.shards:
                    shard.rank = None
            proposer = EmbeddingOffloadScaleupProposer()
            proposer.load(space, self._enumerator)
            self._waiting.append(proposer)
