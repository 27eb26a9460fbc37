"""Growth moves slots and never a row."""

import pytest
import torch
from oracle import home_slot
from table_cases import HARD_IDS, ids_of, make_group, make_table

from torchrec_dyn import ops
from torchrec_dyn.storage.id_map import MAX_LOAD, SLOT_BYTES, IdMap, most_slots


def filled(ids):
    id_map = IdMap()
    id_map.reserve(len(ids))
    ops.insert(ids_of(*ids), torch.arange(len(ids)), torch.tensor([0, len(ids)]), *id_map.arrays())
    id_map.num_ids = len(ids)
    return id_map


@pytest.mark.parametrize("capacity", [68, 100, 128, 4096, 100_004])
def test_growth_keeps_every_row_at_any_capacity(capacity):
    old = filled(HARD_IDS[:39])
    grown = ops.new_slots(old.slots, capacity)
    assert ops.move_slots(old.slots, grown, 0, 64).item() == 64
    rows, absent = ops.lookup(ids_of(*HARD_IDS[:39]), torch.tensor([0, 39]), [grown], ids_of(-1))
    assert rows.tolist() == list(range(39))
    assert absent.item() == 0
    assert int((grown[:, 1] != 0).sum()) == 39
    assert not old.slots.any()


def test_a_map_is_never_fuller_than_its_load():
    id_map, held = IdMap(), 0
    for count in [1, 1, 40, 3, 500, 7, 20_000, 1, 200_000, 50_000]:
        id_map.reserve(count)
        ids = torch.arange(held, held + count) * 31
        ops.insert(
            ids, torch.arange(held, held + count), torch.tensor([0, count]), *id_map.arrays()
        )
        id_map.num_ids += count
        held += count
        assert held / id_map.held <= MAX_LOAD
        assert id_map.held <= most_slots(held)
    assert torch.equal(id_map.lookup(torch.arange(held) * 31), torch.arange(held))
    id_map.check_invariants()


def test_bytes_of_a_row_in_a_large_map_are_bounded():
    """A large map grows by a quarter: 32 bytes a row at most."""
    assert most_slots(10_000_000) * SLOT_BYTES / 10_000_000 <= 32.01


def test_rows_stay_where_they_are_while_the_table_grows():
    """New blocks are appended; the memory of old ones is neither moved nor written."""
    table = make_table(embedding_dim=1 << 16, num_embeddings=100_000)
    group = make_group(table)
    ids = torch.arange(100)
    group(ids, torch.tensor([0, 100]), training=True)
    first, places = table.id_map.lookup(ids), [b.data_ptr() for b in table.weights.blocks]
    before = table.lookup(ids)[0]
    for start in (100, 200, 300):
        group(torch.arange(start, start + 100), torch.tensor([0, 100]), training=True)
    assert len(table.weights.blocks) > len(places)
    assert [b.data_ptr() for b in table.weights.blocks[: len(places)]] == places
    assert torch.equal(table.id_map.lookup(ids), first)
    assert torch.equal(table.lookup(ids)[0], before)


def test_rows_are_numbered_in_order_of_first_sight():
    table = make_table()
    rows = table.find_or_insert(ids_of(9, -4, 9, 7, -4))
    assert rows.tolist() == [0, 1, 0, 2, 1]
    assert table.find_or_insert(ids_of(8, 7)).tolist() == [3, 2]


def test_a_chosen_capacity_gives_the_oracles_homes():
    old = filled(HARD_IDS[:1])
    grown = ops.new_slots(old.slots, 12348)
    ops.move_slots(old.slots, grown, 0, 64)
    assert int((grown[:, 1] == 1).nonzero()) == home_slot(HARD_IDS[0], 12348)


@pytest.mark.deep
def test_ten_million_rows():
    table = make_table(embedding_dim=1, num_embeddings=20_000_000)
    for start in range(0, 10_000_000, 1_000_000):
        table.find_or_insert(torch.arange(start, start + 1_000_000) * 2654435761)
    assert table.num_rows == 10_000_000
    assert table.lookup(torch.arange(10_000_000) * 2654435761)[1].all()
    assert not table.lookup(torch.arange(10_000_000) * 2654435761 + 1)[1].any()
    table.id_map.check_invariants()
    assert table.stats()["probe_length_mean"] < 3.6
