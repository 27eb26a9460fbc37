"""The price of tables whose rows travel: those of max pooling whose rows several ranks share.

TorchRec's estimators price them as sequences, which also send a row for each id.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import SharderDataMap, ShardingOption

from torchrec_dyn.modules import UnshardedCollection
from torchrec_dyn.planner.caches import HitRates, gpu_rows_of
from torchrec_dyn.planner.measured import without_processors


class DynamicPerfEstimator(EmbeddingPerfEstimator):
    """TorchRec's estimator of times, also for tables whose rows travel, or are in the host's memory."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
        hit_rates: HitRates,
    ) -> None:
        super().__init__(topology, constraints)
        self._device_type: str = topology.compute_device
        self._hit_rates = hit_rates

    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_data_map: SharderDataMap,
    ) -> None:
        """Writes the time of each shard of each option."""
        price_as_sequences(sharding_options)
        priced = [self._as_cached(option, sharder_data_map) for option in sharding_options]
        super().estimate(priced, sharder_data_map)

    def _as_cached(
        self, option: ShardingOption, sharder_data_map: SharderDataMap
    ) -> ShardingOption:
        """Returns the option that TorchRec prices, with the same shards."""
        is_dynamic = isinstance(without_processors(option.module[1]), UnshardedCollection)
        if not is_dynamic or self._device_type == "cpu":
            return option
        gpu_rows = gpu_rows_of(option, sharder_data_map[option.module_type_key].fused_params)
        return option if gpu_rows is None else self._hit_rates.as_cached(option, gpu_rows)


def price_as_sequences(options: Sequence[ShardingOption]) -> None:
    """Marks the options whose rows travel as not pooled."""
    for option in options:
        collection = without_processors(option.module[1])
        if not isinstance(collection, UnshardedCollection):
            continue
        sharers = sum(shard.offset[1] == option.shards[0].offset[1] for shard in option.shards)
        if sharers > 1 and collection.dynamic_configs()[option.name].pooling == "max":
            option._is_pooled = False
