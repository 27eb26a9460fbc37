"""Blocks of a GPU: each in a range of addresses, where it grows in place (docs/decisions/0028).

Addresses are reserved for all rows that a block will ever have. Memory is committed by the page as rows
are added. It is not torch's memory, so memory that torch keeps for later may be missing here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops

# Types of devices whose blocks are in ranges.
RANGE_DEVICES = {"cuda"}
# Upper bound of a range: few blocks for the memory of any GPU, and addresses for 4,000 stores.
_RANGE_BYTES = 32 << 30
# A GPU commits memory in pages of 2 MiB. A block of one page needs no range.
_PAGE_BYTES = 2 << 20
# Upper bound of the memory that is committed before rows need it.
_AHEAD_BYTES = 256 << 20
# The bound of a device that ran out of memory: half of what it could not commit. A growth by the whole bound
# doubles it again. The blocks of a device share its memory, and so the bound.
_less_ahead: dict[torch.device, int] = {}


def range_shift(row_limit: int, row_bytes: int) -> int:
    """Returns the binary logarithm of the rows of a block: up to the limit, if a range can hold so many.

    `row_bytes` are the bytes of a row's weights.
    """
    most = max(1, _RANGE_BYTES // max(1, row_bytes))
    return max(4, min((row_limit - 1).bit_length(), most.bit_length() - 1, 31))


def in_range(limit: int, row_bytes: int) -> bool:
    """Returns True if a block of up to `limit` rows has a range of addresses, False if memory of torch's."""
    return limit * row_bytes > _PAGE_BYTES


def most_bytes(rows: int, row_bytes: int, limit: int) -> int:
    """Returns the most bytes that `longer_block` commits for `rows` of `limit` rows, however a block grew."""
    used, whole = rows * row_bytes, limit * row_bytes
    if not in_range(limit, row_bytes) or not rows:
        return whole if rows else 0
    return -(-min(used + _ahead(used), whole) // _PAGE_BYTES) * _PAGE_BYTES


def _ahead(used: int) -> int:
    """Returns the bytes to commit beyond `used` bytes."""
    return min(max(used // 8, _PAGE_BYTES), _AHEAD_BYTES)


def longer_block(block: Tensor, rows: int, limit: int) -> Tensor:
    """Returns the block with at least `rows` rows, and a few more, so that growth is rare.

    block [R, D], 0 <= R < limit; `rows` is in (R, limit], and `limit` the number of rows of a whole block. A
    block that this function returned keeps its address. The memory of new rows is not initialised.
    """
    row_bytes = block.shape[1] * block.itemsize
    if not in_range(limit, row_bytes) and len(block) == 0:
        return block.new_empty(limit, block.shape[1])
    needed, device = rows * row_bytes, block.device
    most = _less_ahead.get(device, _AHEAD_BYTES)
    ahead = min(_ahead(block.nbytes), most)
    longer = None
    if needed < block.nbytes + ahead:
        longer = _grown(block, block.nbytes + ahead, limit)
        if longer is None:
            _less_ahead[device] = ahead // 2
        elif ahead == most:
            _less_ahead[device] = min(max(2 * most, _PAGE_BYTES), _AHEAD_BYTES)
    if longer is None:
        longer = _grown(block, needed, limit)
    if longer is None:
        # Memory that torch keeps would serve. It is taken last, since torch then has to allocate it again.
        torch.cuda.empty_cache()  # does nothing before CUDA is used
        longer = _grown(block, needed, limit)
    if longer is None:
        raise MemoryError(
            f"RowStore: expected {needed - block.nbytes} more bytes of memory on {device}, got none; "
            "no row has changed. Free memory, or use smaller tables."
        )
    return longer


def _grown(block: Tensor, wanted: int, limit: int) -> Tensor | None:
    """Returns the block with at least `wanted` bytes, in whole pages; None if there is no memory."""
    pages = -(-wanted // _PAGE_BYTES)
    rows = pages * _PAGE_BYTES // (block.shape[1] * block.itemsize)
    try:
        return ops.grow_block(block, min(limit, rows), limit)
    except MemoryError:
        return None
