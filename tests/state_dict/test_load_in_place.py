"""Blocks of a checkpoint are read into the staged stores themselves, where a whole block has its place."""

import pytest
import torch

from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.state_dict.staged_rows import place_of_block, put_block
from torchrec_dyn.storage import RowStore

COLUMNS, SHIFT = 6, 4
CPU = torch.device("cpu")
# The store holds columns 10 to 15 of the tensor; of its rows the places 5 to 24 and 100 to 119.
ORIGIN, PLACES = 10, Places([(5, 25), (100, 120)])


def a_store() -> RowStore:
    store = RowStore(COLUMNS, SHIFT, torch.float32, CPU)
    store.reserve(PLACES.count)
    for block in store.blocks:
        block.fill_(-1)
    return store


def everything(store: RowStore) -> torch.Tensor:
    return store.read(torch.arange(PLACES.count))


@pytest.mark.parametrize(
    ("offset", "size", "has_place"),
    [
        ((5, 10), (16, 6), True),
        ((7, 12), (3, 2), True),
        ((21, 10), (4, 6), True),  # rows 16 to 19: the second block of the store
        ((106, 11), (6, 1), True),  # rows 26 to 31: up to the end of that block
        ((20, 10), (2, 6), False),  # rows 15 and 16: two blocks of the store
        ((4, 10), (3, 6), False),  # a row before the places
        ((23, 10), (3, 6), False),  # a row after the places
        ((5, 9), (3, 6), False),  # a column before the store
        ((5, 11), (3, 6), False),  # a column after the store
        ((30, 10), (3, 6), False),  # no row
    ],
)
def test_a_block_read_in_place_is_as_a_block_copied(offset, size, has_place):
    values = torch.arange(size[0] * size[1]).view(size).float()
    copied, read = a_store(), a_store()
    count = put_block(copied, ORIGIN, PLACES, *offset, values)
    place = place_of_block(read, ORIGIN, PLACES, offset, size)
    assert (place is not None) == has_place
    if place is not None:
        place.copy_(values)
        assert put_block(read, ORIGIN, PLACES, *offset, place) == count == values.numel()
        assert torch.equal(everything(read), everything(copied))
