"""Division of ids as unsigned numbers, against Python's divmod."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_dyn.layers.quotient_remainder import quotient_and_remainder

EXTREMES = [-(2**63), 1 - 2**63, -2, -1, 0, 1, 2, 2**62, 2**63 - 2, 2**63 - 1]
DIVISORS = [1, 2, 3, 2**32, 2**32 + 1, 2**62, 2**62 + 1, 2**63 - 2, 2**63 - 1]


def check_division(ids: list[int], divisor: int) -> None:
    quotients, remainders = quotient_and_remainder(torch.tensor(ids), divisor)
    assert quotients.dtype == remainders.dtype == torch.int64
    got = [(q % 2**64, r) for q, r in zip(quotients.tolist(), remainders.tolist(), strict=True)]
    assert got == [divmod(id % 2**64, divisor) for id in ids]


@pytest.mark.parametrize("divisor", DIVISORS)
def test_division_is_unsigned_at_the_extremes(divisor):
    near = [k * divisor + d for k in (0, 1, 2) for d in (-1, 0, 1)]
    check_division([*EXTREMES, *(id for id in near if -(2**63) <= id < 2**63)], divisor)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.integers(1, 2**63 - 1) | st.integers(1, 100),
)
def test_division_is_unsigned(ids, divisor):
    check_division(ids, divisor)
