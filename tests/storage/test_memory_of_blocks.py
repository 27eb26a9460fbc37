"""The memory of blocks on a CPU follows the rows in use, also when other blocks were freed before."""

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

from torchrec_dyn.storage import RowStore

# Blocks of 8 MiB: malloc takes such sizes from its heap once one was freed.
COLUMNS, SHIFT = 16, 17
LIBC = ctypes.CDLL(None, use_errno=True)


def committed_pages(block: Tensor) -> int:
    """Returns how many of the block's pages the system has committed."""
    first = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (block.data_ptr() + block.nbytes - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert LIBC.mincore(ctypes.c_void_p(first), size, found) == 0, ctypes.get_errno()
    return sum(page & 1 for page in found)


def new_store(dtype: torch.dtype = torch.float32) -> RowStore:
    store = RowStore(COLUMNS, SHIFT, dtype, torch.device("cpu"))
    store.reserve(1)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_block_commits_nothing_after_others_were_freed(dtype: torch.dtype) -> None:
    for _ in range(3):  # as plans come and go
        store = new_store(dtype)
        store.blocks[0].fill_(1.0)
        del store
    store = new_store(dtype)
    assert committed_pages(store.blocks[0]) == 0
    store.write(torch.tensor([5]), torch.ones(1, COLUMNS))
    assert committed_pages(store.blocks[0]) * mmap.PAGESIZE <= 2 << 20  # a huge page at most
    assert store.read(torch.tensor([5])).sum() == COLUMNS


def test_added_blocks_are_beside_the_store() -> None:
    store = RowStore(COLUMNS, 4, torch.float32, torch.device("cpu"))
    store.reserve(16)
    more = store.with_added_blocks(17)
    assert (store.capacity, more.capacity) == (16, 48)
    assert more.blocks[0].data_ptr() == store.blocks[0].data_ptr()
    more.write(torch.tensor([16, 47]), torch.tensor([[1.0], [2.0]]).expand(2, COLUMNS))
    assert more.read(torch.tensor([47, 16]))[:, 0].tolist() == [2, 1]
