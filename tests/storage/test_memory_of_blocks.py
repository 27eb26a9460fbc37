"""The memory of blocks on a CPU follows the rows in use, also when other blocks were freed before."""

import mmap
import sys

import pytest
import torch
from system_memory import advice_of, committed_pages

from torchrec_dyn.storage import RowStore
from torchrec_dyn.storage.block_memory import HUGE_PAGE_BYTES

# Blocks of 8 MiB: malloc takes such sizes from its heap once one was freed.
COLUMNS, SHIFT = 16, 17


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
    assert committed_pages(store.blocks[0]) == 1
    assert store.read(torch.tensor([5])).sum() == COLUMNS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_first_rows_are_on_small_pages_until_they_need_a_huge_page() -> None:
    few, page = (128 << 10) // (4 * COLUMNS), HUGE_PAGE_BYTES // (4 * COLUMNS)
    store = new_store()
    store.reserve(few)
    assert "nh" in advice_of(store.blocks[0]) and "hg" in advice_of(store.blocks[0][page:])
    store.write(torch.arange(few), torch.ones(few, COLUMNS))
    assert committed_pages(store.blocks[0]) * mmap.PAGESIZE <= 128 << 10
    store.reserve(few + 1)
    assert "hg" in advice_of(store.blocks[0])
    many = RowStore(COLUMNS, SHIFT, torch.float32, torch.device("cpu"))
    many.reserve(few + 1)
    assert "hg" in advice_of(many.blocks[0])
    assert store.read(torch.arange(page)).sum() == few * COLUMNS  # the rest reads as zeros


@pytest.mark.parametrize("rows", [3, 1 << SHIFT])
def test_blocks_made_in_inference_mode_are_written_outside_of_it(rows: int) -> None:
    few = RowStore(COLUMNS, rows.bit_length(), torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        few.reserve(rows)
        zeros = few.empty()
        zeros.reserve_zeros(rows)
    for store in (few, zeros):
        store.put(0, 0, torch.ones(3, COLUMNS))
        assert store.read(torch.arange(3)).sum() == 3 * COLUMNS
