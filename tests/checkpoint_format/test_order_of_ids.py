"""Canonical order is the unsigned order of the mixed ids, each once."""

import pytest
import torch
from oracle import unmixed

from torchrec_dyn.checkpoint_format import is_canonical


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 20])
def test_every_pair_of_neighbours_is_checked(count: int) -> None:
    mixed = torch.arange(count)
    mixed[count // 2 :] -= 2**63  # the order is unsigned
    assert is_canonical(unmixed(mixed))
    for place in range(count - 1):
        repeated, swapped = mixed.clone(), mixed.clone()
        repeated[place] = mixed[place + 1]
        swapped[[place, place + 1]] = mixed[[place + 1, place]]
        assert not is_canonical(unmixed(repeated))
        assert not is_canonical(unmixed(swapped))
