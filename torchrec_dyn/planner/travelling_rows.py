"""The price of tables whose rows travel: those of max pooling whose rows several ranks share.

TorchRec's estimators price them as sequences, which also send a row for each id.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import SharderDataMap, ShardingOption

from torchrec_dyn.modules import UnshardedCollection
from torchrec_dyn.planner.measured import without_processors


class DynamicPerfEstimator(EmbeddingPerfEstimator):
    """TorchRec's estimator of times, also for tables whose rows travel."""

    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_data_map: SharderDataMap,
    ) -> None:
        """Writes the time of each shard of each option."""
        price_as_sequences(sharding_options)
        super().estimate(sharding_options, sharder_data_map)


def price_as_sequences(options: Sequence[ShardingOption]) -> None:
    """Marks the options whose rows travel as not pooled."""
    for option in options:
        collection = without_processors(option.module[1])
        if not isinstance(collection, UnshardedCollection):
            continue
        sharers = sum(shard.offset[1] == option.shards[0].offset[1] for shard in option.shards)
        if sharers > 1 and collection.dynamic_configs()[option.name].pooling == "max":
            option._is_pooled = False
