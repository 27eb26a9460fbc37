"""FoundRows: the first numbers that a step on a GPU reads, in one wait: absent ids, expired ids, counts.

Legend: T tables, N ids, M expired ids of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.lookup.early_output import EarlyOutput
from torchrec_dyn.storage import HostRead, MapList, gather_reads, read
from torchrec_dyn.table import DynamicTable, read_absent

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


class Expired(NamedTuple):
    """The expired ids [M] int64 of a table, their rows [M] int64, and its number of ids with these."""

    ids: Tensor
    rows: Tensor
    num_ids: int


class FoundRows(NamedTuple):
    """The rows of a batch on a GPU before a step has changed anything.

    Attributes:
        rows: [N] int64, -1 for an absent id. Rows of expired ids may be among them.
        absent: [T] int64 on the CPU, number of absent ids of each table, repeats counted.
        expired: the expired ids of each table with an age limit.
        beside: the result of what was read beside these.
    """

    rows: Tensor
    absent: Tensor
    expired: list[Expired]
    beside: Any


def expired_of(table: DynamicTable) -> HostRead[Expired]:
    """Returns the expired ids of a table with an age limit and removes nothing."""
    assert table.life is not None
    high = table.row_numbers.high_water_mark
    expired = yield from table.life.expired(table.step + 1, table.id_map, high)
    return Expired(*(expired or (_NONE, _NONE)), table.id_map.num_ids)


def nothing_expired(table: DynamicTable) -> Expired:
    """Returns no ids."""
    return Expired(_NONE, _NONE, table.id_map.num_ids)


def find_first(
    maps: MapList,
    ids: Tensor,
    table_offsets: Tensor,
    ageing: Sequence[DynamicTable],
    beside: HostRead[Any],
    early: EarlyOutput | None = None,
) -> FoundRows:
    """Finds the rows of a batch on a GPU, and the expired ids, and reads numbers of the batch with them.

    ids [N] int64 in table order; table_offsets [T + 1] int64, on the CPU or on the device of `ids`: then they
    are not checked. `ageing` are the tables with an age limit. `beside` reads numbers of the batch; it may
    raise an error: nothing has changed then. `early` is pooled before the host waits.

    Raises:
        RuntimeError: an earlier op had invalid arguments (csrc/device_errors.h).
    """
    rows, absent = ops.lookup(ids, table_offsets, *maps.arrays())
    parts: list[HostRead[Any]] = [
        read_absent(absent, ids),
        gather_reads([expired_of(table) for table in ageing]),
        beside,
    ]
    return FoundRows(
        rows, *read(gather_reads(parts), None if early is None else partial(early.pool, rows))
    )
