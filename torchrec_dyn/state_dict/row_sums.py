"""Content sums of rows: of all rows of a shard, and of those that have changed.

Sums are added up by tensor over the rows, so the log keeps the sums of the rows that were not touched since
a version (storage/touched_rows.py), and the others are read here. A GPU reads all of its rows: that is fast.

Legend: M ids.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchrec_dyn.checkpoint_format import add_sums, content_sum, rows_summed
from torchrec_dyn.storage import CanonicalRows, SumRows
from torchrec_dyn.table import TableShard, read_tensor


class RowTensor(NamedTuple):
    """One tensor by row of a shard; `first` and `columns` are () if it has one dimension."""

    name: str
    first: tuple[int, ...]  # column in the whole tensor
    columns: tuple[int, ...]
    is_saved: bool = True  # False: the tensor is for copies only


def sums_of_shard(
    shard: TableShard, rows: CanonicalRows, tensors: Sequence[RowTensor]
) -> dict[str, int]:
    """Returns the content sums of all of a shard's rows, by tensor; 0 for a tensor without rows."""
    saved = [tensor for tensor in tensors if tensor.is_saved]
    sums = dict.fromkeys((tensor.name for tensor in saved), 0)
    most = rows_summed(shard.weights.row_bytes, shard.device)
    for ids, places in rows.by_row(shard.row_numbers.high_water_mark, most):
        sums = add_sums(sums, _sums_of(shard, saved, ids, places, True))
    return sums


def present_sums(
    shard: TableShard, rows: CanonicalRows, tensors: Sequence[RowTensor]
) -> dict[str, int]:
    """Returns `sums_of_shard`, by the rows touched since the last call if the log of changes lists them."""
    log = shard.change_log
    touched = None if log is None else log.touched
    if touched is None:
        return sums_of_shard(shard, rows, tensors)
    sums = touched.sums(shard.id_map)
    if sums is None:
        sums = sums_of_shard(shard, rows, tensors)
        touched.keep(sums, _summing(shard, tensors), shard.id_map)
    return sums


def _summing(shard: TableShard, tensors: Sequence[RowTensor]) -> SumRows:
    """Returns a function that sums rows of a shard. It does not keep the shard: markers hold it."""
    saved = [tensor for tensor in tensors if tensor.is_saved]
    reference = weakref.ref(shard)

    def sum_rows(ids: Tensor, rows: Tensor) -> dict[str, int]:
        held = reference()
        assert held is not None
        sums: dict[str, int] = {}
        most = rows_summed(held.weights.row_bytes, held.device)
        for part, places in zip(ids.split(most), rows.split(most), strict=True):
            if places.numel():
                sums = add_sums(sums, _sums_of(held, saved, part, places, False))
        return sums

    return sum_rows


def _sums_of(
    shard: TableShard,
    tensors: Sequence[RowTensor],
    ids: Tensor,
    rows: Tensor,
    are_ascending: bool,
) -> dict[str, int]:
    """Returns the content sums of ids [M] int64, which have rows [M] int64, as of `read_tensor`."""
    return {
        tensor.name: content_sum(
            shard.name,
            tensor.name,
            ids,
            ids if tensor.name == "ids" else read_tensor(shard, tensor.name, rows, are_ascending),
            *tensor.first,
        )
        for tensor in tensors
    }
