"""Calls of update_rows_ for tests that compare devices with the CPU."""

import random
from functools import partial

import torch
from table_cases import ids_of
from update_rules import hyper_of, state_blocks

WRITTEN = ("weights", "states", "marks")


def drawn_update(seed, optimizer, dtype, widths, ids):
    """Returns arguments of a table for each width, 40 rows each, popular and rare, with marks and senders."""
    draw, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    bags = ids // 3
    parts = [torch.randint(0, ids + 1, (bags - 1,), generator=draw).sort().values for _ in widths]
    offsets = torch.cat([ids_of(0, *cuts, ids)[t > 0 :] + t * ids for t, cuts in enumerate(parts)])
    rows = torch.where(
        torch.rand(ids * len(widths), generator=draw) < 0.6,
        torch.randint(-1, 2, (ids * len(widths),), generator=draw),
        torch.randint(0, 40, (ids * len(widths),), generator=draw),
    )
    places = [sum(widths[:t]) for t in range(len(widths))]
    weights = [torch.randn(8, w, generator=draw).to(dtype) for w in widths for _ in range(5)]
    return {
        "grad": torch.randn(bags * sum(widths), generator=draw),
        "ids": torch.randint(-(2**63), 2**63 - 1, (ids * len(widths),), generator=draw),
        "rows": rows,
        "offsets": offsets,
        "bag_weights": rng.choice((None, torch.randn(ids * len(widths), generator=draw))),
        "weights": weights,
        "states": state_blocks(optimizer, weights, partial(torch.rand, generator=draw)),
        "layout": torch.tensor([[5 * t, 5, 3, width] for t, width in enumerate(widths)]),
        "segments": torch.tensor(
            [[t, bags * t, bags, places[t], sum(widths)] for t in range(len(widths))]
        ),
        "streams": torch.tensor([[rng.randrange(2**62), 5 * t, 3] for t in range(len(widths))]),
        "mean": rng.random() < 0.5,
        "optimizer": optimizer,
        "hyper": hyper_of(
            optimizer,
            weight_decay=rng.choice((0.0, 0.01)),
            weight_decay_mode=rng.randrange(3),
            max_norm=rng.choice((0.0, 2.0)),
            l1=0.1,
            l2=0.01,
        ),
        "grad_scales": [rng.choice((1.0, 0.3)) for _ in widths],
        "senders": torch.randint(-1, 5, (ids * len(widths),), generator=draw).int(),
        "marks": [torch.randint(0, 256, (64,), generator=draw).byte() for _ in widths],
        "mark_layout": torch.tensor([[t, 1, 6, 1] for t in range(len(widths))]),
        "on_nonfinite": [],
        "nonfinite": [],
    }
