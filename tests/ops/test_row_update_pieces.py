"""Gradients of a row that occurs often are summed in pieces of 256 ids (docs/dev/decisions/0004).

The oracle adds in float32, one after the other, so the bits are fixed.
"""

import numpy as np
import pytest
import torch
from table_cases import ids_of

from torchrec_dyn import ops

COLUMNS = 86  # 64 and 16 at once, and six alone
# How often each row of the two tables occurs.
TIMES = [[1, 255, 256, 257, 512, 513, 2000], [300, 70_000]]


def sum_in_pieces(terms):
    """Returns the sum of terms [N, D] float32."""
    sums = [np.add.accumulate(terms[i : i + 256])[-1] for i in range(0, len(terms), 256)]
    return np.add.accumulate(np.stack(sums))[-1]


def batch(draw, times, bags):
    """Returns rows and offsets: row r occurs times[r] times, in bags of any length."""
    rows = torch.repeat_interleave(torch.arange(len(times)), torch.tensor(times))
    rows = rows[torch.randperm(len(rows), generator=draw)]
    cuts = torch.randint(0, len(rows) + 1, (bags - 1,), generator=draw).sort().values
    return rows, torch.cat([ids_of(0), cuts, ids_of(len(rows))])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("mean", "weighted", "sent", "scale"),
    [(False, False, False, 1.0), (True, False, False, 0.3), (False, True, True, 1.0),
     (True, True, False, 1.0), (False, False, True, 2.0)],
)  # fmt: skip
def test_long_runs_are_summed_in_pieces(mean, weighted, sent, scale):
    draw, bags = torch.Generator().manual_seed(7), 900
    parts = [batch(draw, times, bags) for times in TIMES]
    rows = torch.cat([part[0] for part in parts])
    offsets = torch.cat([parts[0][1], parts[1][1][1:] + len(parts[0][0])])
    grad = torch.randn(bags, 2 * COLUMNS, generator=draw)
    factors = torch.randn(len(rows), generator=draw) if weighted else None
    senders = torch.randint(-1, 40, (len(rows),), generator=draw).int() if sent else None
    weights = [torch.zeros(8, COLUMNS) for _ in TIMES]  # SGD's rate is 1: rows become -1 * sum
    ops.update_rows_(
        grad.view(-1), torch.arange(len(rows)), rows, offsets, factors,
        torch.tensor([[0, 0, bags, 0, 2 * COLUMNS], [1, bags, bags, COLUMNS, 2 * COLUMNS]]),
        ids_of(1, 0, 1, 2, 0, 1).view(2, 3), mean, [1.0], [scale, scale], senders, [], None,
        weights, [], torch.tensor([[0, 1, 3, COLUMNS], [1, 1, 3, COLUMNS]]), 0, [], [],
    )  # fmt: skip
    bag_of = torch.repeat_interleave(torch.arange(2 * bags), offsets.diff()).numpy()
    scales = np.ones(len(rows), np.float32) if factors is None else factors.numpy()
    if mean:
        scales = scales * (np.float32(1) / offsets.diff().numpy()[bag_of].astype(np.float32))
    table_of = bag_of // bags
    bag_grads = grad.view(bags, 2, COLUMNS).transpose(0, 1).reshape(2 * bags, COLUMNS).numpy()
    for t, times in enumerate(TIMES):
        for row in range(len(times)):
            own = np.flatnonzero((rows.numpy() == row) & (table_of == t))
            total = sum_in_pieces(scales[own, None] * bag_grads[bag_of[own]])
            factor = np.float32(scale)
            if sent:
                factor = factor / np.float32(len({*senders.numpy()[own].tolist()}))
            assert torch.equal(weights[t][row], torch.from_numpy(-(total * factor))), (t, row)
