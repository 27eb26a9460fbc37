"""A provider for TorchRec's planner API, which TorchRec has from 1.9 on: `make_planner` behind its requests.

That API makes the topology and the storage reservation of a request, asks a provider for the planner, and
runs it on rank 0.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import StorageReservation

from torchrec_dyn.planner.priced_planner import make_planner

_THEIRS = "torchrec.distributed.planner.provider"
# Parts of a planner that a request may choose, and `make_planner` takes as objects.
_CHOICES = ("proposer_type", "proposer_config", "partitioner_type", "performance_model")


class _PricedProvider:
    """TorchRec's default provider, except for the planner."""

    def __init__(self, theirs: Any, options: Mapping[str, Any]) -> None:
        self._theirs = theirs
        self._options = dict(options)

    def build_topology(self, sku: str, request: Any, ctx: Any) -> Topology:
        """Returns TorchRec's topology of a request."""
        topology: Topology = self._theirs.build_topology(sku, request, ctx)
        return topology

    def build_storage_reservation(self, sku: str, request: Any) -> StorageReservation:
        """Returns TorchRec's storage reservation of a request."""
        reservation: StorageReservation = self._theirs.build_storage_reservation(sku, request)
        return reservation

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
            storage_reservation=storage_reservation,
            **self._options,
        )


def make_planner_provider(
    expected_rows: Mapping[str, int] | None = None, deltas: bool = False, **options: Any
) -> Any:
    """Returns a provider for TorchRec's planner API whose planner is that of `make_planner`.

    Pass it to `DefaultPlannerExecutor(provider=...)` of `torchrec.distributed.planner.executor`. Batch size,
    constraints, topology and storage reservation are those of the request.

    Args:
        expected_rows: as in `make_planner`.
        deltas: as in `make_planner`.
        **options: other arguments of EmbeddingShardingPlanner, as in `make_planner`.

    Raises:
        ValueError: if this version of TorchRec has no such API.
    """
    try:
        theirs = importlib.import_module(_THEIRS).DefaultPlannerProvider()
    except ImportError:
        version = importlib.metadata.version("torchrec")
        raise ValueError(
            f"make_planner_provider: expected TorchRec with a planner API (1.9), got {version}. Pass "
            "make_planner(...) to DistributedModelParallel, or call its plan."
        ) from None
    return _PricedProvider(theirs, {"expected_rows": expected_rows, "deltas": deltas, **options})
