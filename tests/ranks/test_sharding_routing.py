"""Row-wise routing: one contiguous range of mixed ids per rank, for any id."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from oracle import unmixed
from sharded_cases import EXTREME_IDS
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist

from torchrec_dyn import AdmitAfter, DynamicTableConfig, Never, ops
from torchrec_dyn.ranks.routing import config_of_share, ids_per_rank, owners, row_limit
from torchrec_dyn.sharding.dists import OwnerInputDist
from torchrec_dyn.sharding.sent_batch import sent_batch
from torchrec_dyn.storage import canonical_order

LAST = 2**64 - 1


def mixed_by_hand(identity: int) -> int:
    """SplitMix64's finalizer in Python integers (Steele, Lea, Flood 2014)."""
    x = identity & LAST
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & LAST
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & LAST
    return x ^ (x >> 31)


def owner_by_hand(identity: int, ranks: int) -> int:
    mixed, block = mixed_by_hand(identity), LAST // ranks
    return mixed // block if mixed < block * ranks else mixed % ranks


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def hard_ids(ranks: int) -> torch.Tensor:
    """Extreme ids, random ones, and those mixed into the first and last of every range."""
    rng = random.Random(ranks)
    block = LAST // ranks
    edges = {block * r + d for r in range(ranks + 1) for d in (-2, -1, 0, 1, 2)} | {LAST, LAST - 1}
    edge_ids = unmixed(torch.tensor([signed(e) for e in sorted(edges) if 0 <= e <= LAST]))
    others = [signed(rng.getrandbits(64)) for _ in range(500)]
    return torch.cat([torch.tensor([*EXTREME_IDS, *range(-20, 20), *others]), edge_ids])


def test_mixing_is_that_of_the_paper_and_is_undone() -> None:
    ids = hard_ids(3)
    mixed = ops.mix64(ids)
    assert mixed.tolist() == [signed(mixed_by_hand(i)) for i in ids.tolist()]
    assert torch.equal(unmixed(mixed), ids)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 48])
def test_owner_is_the_range_of_the_mixed_id(ranks: int) -> None:
    ids = hard_ids(ranks)
    assert owners(ids, ranks).tolist() == [owner_by_hand(i, ranks) for i in ids.tolist()]
    if ranks > 1:
        assert set(owners(ids, ranks).tolist()) == set(range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ids_in_canonical_order_are_already_parted(ranks: int) -> None:
    """Each owner has one run of the order; the few ids beyond the last range follow."""
    ids = torch.unique(hard_ids(ranks))
    ids = ids[canonical_order(ids)]
    parts = owners(ids, ranks).tolist()
    is_beyond = [mixed_by_hand(id) >= ids_per_rank(ranks) * ranks for id in ids.tolist()]
    assert is_beyond == sorted(is_beyond) and sum(is_beyond) in range(1, ranks + 1)
    parted = parts[: is_beyond.index(True)]
    assert parted == sorted(parted) and {*parted} == {*range(ranks)}


def test_no_ids_have_no_owners() -> None:
    assert owners(torch.empty(0, dtype=torch.int64), 3).tolist() == []


@pytest.mark.parametrize(
    "rows, ranks, limit",
    [(1000, 1, 1000), (10_000, 4, 2900), (1_000_000, 2, 505_657), (10, 2, 10), (1, 4, 1)],
)
def test_row_limit_leaves_room_for_chance(rows: int, ranks: int, limit: int) -> None:
    assert row_limit(rows, ranks) == limit


def test_ranks_share_the_counters_that_the_user_chose() -> None:
    config = DynamicTableConfig(admission=AdmitAfter(2, counters=10_000), seed=7)
    share = DynamicTableConfig(admission=AdmitAfter(2, counters=2900), seed=7)
    assert config_of_share(config, 4) == share and config_of_share(config, 1) == config
    for admission in (None, Never(), AdmitAfter(2)):
        config = DynamicTableConfig(admission=admission)
        assert config_of_share(config, 4) == config


def dist_ids(kind: str, ids: torch.Tensor) -> list[list[int]]:
    """Sends the same ids from every rank and returns what arrives here, by feature."""
    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    if kind == "node":
        features = 3
        stock: Any = TwRwSparseFeaturesDist(group, 2, [1, 1, 2, 2], [0] * features)
    else:
        features = 2
        stock = RwSparseFeaturesDist(group, features, [0] * features)
    module = OwnerInputDist(stock, kind == "sequence")
    shifted = [ids + number for number in range(features)]
    features_kjt = KeyedJaggedTensor(
        keys=[f"f{number}" for number in range(features)],
        values=torch.cat(shifted),
        lengths=torch.tensor([len(ids), 0] * features),
    )
    arrived = module(sent_batch(features_kjt, trains=True)).wait().wait()
    values = arrived.values().split(arrived.length_per_key())
    assert arrived.stride() == 2 * world
    return [part.tolist() for part in values]


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ids_arrive_at_their_owner(kind: str, world: int) -> None:
    ids = hard_ids(world)
    by_rank = workers.run(dist_ids, kind, ids, world_size=world)
    for rank, features in enumerate(by_rank):
        for number, arrived in enumerate(features):
            expected = [
                i for i in (ids + number).tolist() if owner_by_hand(i, world) == rank
            ] * world
            assert arrived == expected


def test_ids_arrive_at_their_owner_within_the_node() -> None:
    ids = hard_ids(2)
    by_rank = workers.run(dist_ids, "node", ids, world_size=4, local_size=2)
    for rank, arrived in enumerate(by_rank):
        shifts = [0] if rank < 2 else [1, 2]
        for shift, values in zip(shifts, arrived, strict=True):
            expected = [i for i in (ids + shift).tolist() if owner_by_hand(i, 2) == rank % 2]
            assert sorted(values) == sorted(expected * 4)
