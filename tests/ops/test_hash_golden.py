"""Pinned values of the mixer and of the home slots.

The mixed id decides the place of a saved row, so it is part of the checkpoint format. If a test of mix64 or
unmix64 fails, do not change the numbers: all saved tables would be read wrongly. Home slots are not saved;
their numbers may change together with csrc/mix64.h, for a measured gain.
"""

import random

import pytest
import torch
from oracle import (
    EXTREME_IDS,
    canonical_order,
    home_slot,
    ids_at_home,
    mix64,
    signed,
    unmix64,
    unmixed,
)

from torchrec_dyn import ops
from torchrec_dyn.storage.id_map import canonical_order as order_of

pytestmark = pytest.mark.usefixtures("device")

MIXED = {
    0: 0x0,
    1: 0x5692161D100B05E5,
    -1: 0xB4D055FCF2CBBD7B,
    2**63 - 1: 0x5A682AFE7965DEBD,
    -(2**63): 0x25C26EA579CEA98A,
    1234567890123456789: 0xC83574DDD6CE4A52,
}


def tensor(ids):
    return torch.tensor(ids, dtype=torch.int64)


def some_ids(count=2000):
    draw = random.Random(5)
    return EXTREME_IDS + [signed(draw.getrandbits(64)) for _ in range(count)] + list(range(50))


@pytest.mark.parametrize("number", MIXED)
def test_mixed_ids_are_pinned(number):
    assert ops.mix64(tensor([number])).item() % 2**64 == MIXED[number]


def test_mix_and_unmix_are_the_oracles():
    ids = some_ids()
    assert ops.mix64(tensor(ids)).tolist() == [signed(mix64(i)) for i in ids]
    assert unmixed(tensor(ids)).tolist() == [unmix64(i % 2**64) for i in ids]


def test_unmix_undoes_mix_both_ways():
    ids = tensor(some_ids())
    assert torch.equal(unmixed(ops.mix64(ids)), ids)
    assert torch.equal(ops.mix64(unmixed(ids)), ids)


@pytest.mark.parametrize(
    ("capacity", "homes"),
    [
        (64, [0, 4, 28, 56, 40]),
        (100, [0, 4, 44, 92, 64]),
        (1000, [0, 76, 464, 924, 652]),
        (1 << 20, [0, 81940, 489580, 969336, 683752]),
    ],
)
def test_home_slots_are_pinned(capacity, homes):
    """A single id in a map is in its home slot."""
    found = []
    for number in (0, 1, -1, 2**63 - 1, -(2**63)):
        slots = torch.zeros(capacity, 2, dtype=torch.int64)
        ops.insert(tensor([number]), tensor([7]), tensor([0, 1]), [slots], tensor([-1]))
        found.append(int((slots[:, 1] == 8).nonzero()))
        assert found[-1] == home_slot(number, capacity)
    assert found == homes


def test_ids_of_the_oracle_share_a_home():
    for capacity in (64, 100, 4096):
        for slot in (0, capacity // 2, capacity // 2 + 1, capacity - 1):
            ids = ids_at_home(slot, capacity, 20)
            assert len(set(ids)) == 20
            assert {home_slot(i, capacity) for i in ids} == {slot // 4 * 4}


def test_canonical_order_is_unsigned_order_of_mixed_ids():
    ids = [*dict.fromkeys(some_ids()), unmix64(2**64 - 1), unmix64(2**63), unmix64(2**63 - 1)]
    got = tensor(ids)[order_of(tensor(ids))].tolist()
    assert got == canonical_order(ids)
    assert got[-1] == unmix64(2**64 - 1)
