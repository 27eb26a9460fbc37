"""Ids of entries tell their chain, also of a chain that a version without such ids began."""

import secrets

from torchrec_dyn.checkpoint_format import chain_of, new_id


def test_ids_of_a_chain_begin_with_its_digits() -> None:
    first = new_id(None)
    second, other = new_id(first), new_id(None)
    assert len(first) == 32 and chain_of(first) == first[:16] == second[:16] != other[:16]
    assert len({first, second, new_id(first)}) == 3


def test_a_chain_of_an_older_version_gets_digits() -> None:
    old = secrets.token_hex(8) + "0" * 16
    assert chain_of(old) is None
    first = new_id(old)
    assert chain_of(first) == chain_of(new_id(first)) == first[:16] != old[:16]
