"""Measured or assumed hit rates of the caches of tables in host memory, as TorchRec's planner takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats

_BINS = 1000  # of a curve of hit rates over the part of the rows that have frames


def hit_rates(rows: int, ids: float, exponent: float = 1.0) -> EmbeddingOffloadStats:
    """Returns the hit rates of a table with `rows` rows, of which a step looks up `ids` ids on all ranks.

    Of a cache with the part p of the rows the rate is p ** exponent. With 1 all rows are equally likely, as
    in TorchRec's estimate without statistics: LRU does no worse while the stream stands still.
    """
    curve = torch.linspace(0, 1, _BINS + 1, dtype=torch.float64) ** exponent
    # The area over the curve; TorchRec's scale-up gives memory in proportion to it.
    return EmbeddingOffloadStats(
        exponent / (1 + exponent), math.ceil(distinct_ids(rows, ids)), curve.diff().float(), rows
    )


def measured_hit_rates(stats: Mapping[str, int | float], rows: int) -> EmbeddingOffloadStats | None:
    """Returns the hit rates of a table of which stats have counted the loaded rows; None: nothing was loaded.

    The curve goes through the measured rate. `rows` are those that are planned for.
    """
    gpu_rows, forwards = stats.get("gpu_rows", 0), stats["forwards"]
    part = gpu_rows / max(stats["rows"], 1)
    if not 0 < part < 1 or not stats.get("rows_loaded", 0):
        return None
    ids = stats["ids_seen"] / forwards
    missed = stats["rows_loaded"] / forwards / distinct_ids(int(stats["rows"]), ids)
    exponent = math.log(max(1 - missed, 1e-3)) / math.log(part)
    return hit_rates(rows, ids, min(exponent, 1.0))


def distinct_ids(rows: int, ids: float) -> float:
    """Returns the expected number of distinct ids among `ids` of `rows` equally likely ones."""
    return -rows * math.expm1(-ids / rows)
