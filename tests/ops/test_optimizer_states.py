"""The rules in torchrec_dyn/optimizers.py equal the rules of the core (csrc/lookup/row_update.h)."""

import itertools

import pytest
import torch

from torchrec_dyn import ops
from torchrec_dyn.optimizers import RULES, STATE_NAMES, OptimizerKind, RowOptimizer

pytestmark = pytest.mark.usefixtures("device")

COLUMNS = 3
every_kind = pytest.mark.parametrize("kind", OptimizerKind, ids=lambda kind: kind.name)


def update_a_row(number, optimizer, widths, hyper=None, step=1):
    """Updates one of two rows by the rule of that number; returns the states, which have the given widths."""
    hyper = optimizer.hyper(0.1) if hyper is None else hyper
    states = [torch.zeros(2, width) for width in widths]
    offsets, weights = torch.tensor([0, 1]), [torch.ones(2, COLUMNS)]
    layout, segments = torch.tensor([[0, 1, 1, COLUMNS]]), torch.tensor([[0, 0, 1, 0, COLUMNS]])
    ops.update_rows_(
        torch.ones(COLUMNS), torch.tensor([7]), torch.tensor([1]), offsets, None, segments,
        torch.tensor([[0, 0, step]]), False, hyper, [1.0], None, [], None, weights, states, layout,
        number, [], [],
    )  # fmt: skip
    return states


@every_kind
def test_the_core_refuses_other_states(kind):
    optimizer = RowOptimizer(kind)
    for count in range(len(STATE_NAMES) + 2):
        for widths in itertools.product((1, COLUMNS), repeat=count):
            if widths != optimizer.state_columns(COLUMNS):
                with pytest.raises(RuntimeError, match=r"(blocks of states|elements of a block)"):
                    update_a_row(optimizer.rule, optimizer, widths)


def test_the_core_has_the_rules_of_the_table_and_no_other():
    numbers = {rule.number for rule in RULES.values()}
    assert RULES.keys() == {*OptimizerKind} and numbers == {*range(len(numbers))}
    with pytest.raises(RuntimeError, match=rf"expected optimizer in \[0, {max(numbers)}\]"):
        update_a_row(len(numbers), RowOptimizer(), ())


@every_kind
def test_states_have_places_in_checkpoints(kind):
    rule = RULES[kind]
    assert {*rule.rowwise} <= {*rule.states} <= {*STATE_NAMES}
    assert len({*rule.states}) == len(rule.states) and len(rule.rowwise) <= 1
