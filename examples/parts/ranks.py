"""Functions for the exchange of rows and memory figures between ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import torchrec_dyn as dyn


def gather(value: Any) -> list[Any]:
    """Returns the value of every rank, in the order of ranks. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def dynamic_tables(model: nn.Module) -> dyn.ShardedDynamicEmbeddingBagCollection:
    """Returns the sharded collection inside the model."""
    return next(
        module
        for module in model.modules()
        if isinstance(module, dyn.ShardedDynamicEmbeddingBagCollection)
    )


def rows_here(model: nn.Module, tables: list[str]) -> dict[str, int]:
    """Returns the number of rows of each table on this rank, whole rows or columns of rows."""
    collection = dynamic_tables(model)
    return {table: collection.table(table).num_rows for table in tables}


def resident_megabytes() -> int:
    """Returns the present resident memory of this process, in MB (10^6 bytes)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 10**6
