"""Frozen tables beside others: as if they had been evaluated, and the others had trained alone."""

import random

import pytest
import torch
from freeze_cases import FEATURES, LIVES, OPTIMIZERS, draw, learn, make, parts, state_of


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("lives", LIVES)
@pytest.mark.parametrize("pooled", [True, False])
def test_frozen_in_between_as_never_given_those_batches(optimizer, lives, pooled):
    """Each table beside itself alone, which evaluates while it would be frozen."""
    fused = {"optimizer": optimizer, "learning_rate": 0.1}
    dice = random.Random(f"{optimizer} {lives} {pooled}")
    both = make(FEATURES, LIVES[lives], pooled, fused)
    alone = {name: make([name], LIVES[lives], pooled, fused) for name in FEATURES}
    frozen: set[str] = set()
    for step in range(16):
        for name in FEATURES:
            if dice.random() < 0.3:
                handle = both.table(name)
                handle.unfreeze() if name in frozen else handle.freeze()
                frozen ^= {name}
                assert handle.is_frozen == (name in frozen)
        training = dice.random() < 0.85
        both.train(training)
        batch, of_table = draw(dice, FEATURES)
        got = parts(both(batch), FEATURES)
        for name, collection in alone.items():
            collection.train(training and name not in frozen)
            expected = parts(collection(of_table[name]), [name], alone=True)
            for key, value in expected.items():
                assert torch.equal(got[key], value), (step, key, frozen)
            learn(expected)
        learn(got)
        for name, collection in alone.items():
            assert state_of(both, name) == state_of(collection, name), (step, name, frozen)
    assert all(1 < one.table(name).stats()["step"] < 16 for name, one in alone.items())
