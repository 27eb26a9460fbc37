"""The op that sorts a batch by owner."""

from __future__ import annotations

import random
from collections.abc import Sequence

import oracle
import torch
from op_cases import (
    FLOATS,
    I64,
    Arguments,
    cuts,
    equal,
    need,
    numbers,
    numbers_of,
    register,
    size,
    some_ids,
    whole,
)
from torch import Tensor

WEIGHTS = (*FLOATS, torch.float64)


def owner(key: int, ranks: int) -> int:
    """Returns the owner of an id: torchrec_dyn/ranks/routing.py has the rule."""
    mixed, block = oracle.mix64(key), (oracle.WORD - 1) // ranks
    return mixed // block if mixed < block * ranks else mixed % ranks


def ids_at_ends(rng: random.Random, ranks: int) -> list[int]:
    """Returns ids beside the ends of the owners' ranges, and those with the last mixed ids."""
    block = (oracle.WORD - 1) // ranks
    ends = [rng.randint(0, ranks) * block + rng.randint(-2, 2) for _ in range(6)]
    return [oracle.unmix64(word % oracle.WORD) for word in ends]


def draw_sort_by_owner(rng: random.Random) -> Arguments:
    count, ranks = size(rng), rng.choice((1, 2, 3, 5, 8, 48, 1000))
    if rng.random() < 0.02:
        count = 20_000  # several pieces
    ids = some_ids(rng, min(count, 300)) + ids_at_ends(rng, ranks)
    bags = rng.choice((1, 2, count, 3 * count)) if count else rng.choice((0, 1, 7))
    if bags * ranks > 10**6:
        ranks = 3
    ends = cuts(rng, count, bags)
    lengths = torch.tensor(ends).diff().to(rng.choice((I64, torch.int32)))
    weights = numbers_of(rng, (count,), rng.choice(WEIGHTS)) if rng.random() < 0.5 else None
    return {
        "ids": whole(*(rng.choice(ids) for _ in range(count))), "lengths": lengths,
        "weights": weights, "ranks": ranks, "positions": rng.random() < 0.5,
    }  # fmt: skip


def check_sort_by_owner(before: Arguments, _: Arguments, result: Sequence[Tensor]) -> None:
    ids, lengths, weights = numbers(before["ids"], "ids"), before["lengths"], before["weights"]
    ranks = before["ranks"]
    need(1 <= ranks <= 2**20, "ranks in [1, 2^20]")
    need(lengths.dtype in (I64, torch.int32), "lengths of dtype int64 or int32")
    each = lengths.flatten().tolist()
    need(min(each, default=0) >= 0 and sum(each) == len(ids), "lengths that add up to N")
    if weights is not None:
        need(weights.dtype in WEIGHTS and weights.numel() == len(ids), "a weight of each id")
    known = {key: owner(key, ranks) for key in {*ids}}
    owners = [known[key] for key in ids]
    order = sorted(range(len(ids)), key=owners.__getitem__)
    equal(result[0], whole(*(ids[i] for i in order)), "ids")
    per_bag = torch.zeros(ranks * len(each), dtype=I64)
    bags = torch.arange(len(each)).repeat_interleave(lengths.flatten().long())
    places = whole(*owners) * len(each) + bags
    per_bag.index_add_(0, places, torch.ones_like(places))
    equal(result[1], per_bag.to(lengths.dtype), "lengths")
    expected = torch.empty(0) if weights is None else weights.flatten()[order]
    equal(result[2], expected, "weights")
    where = whole(*order).argsort() if before["positions"] else whole()
    equal(result[3], where, "where")


register(globals())
