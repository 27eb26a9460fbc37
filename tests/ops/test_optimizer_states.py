"""The rules in torchrec_dyn/optimizers.py equal the rules of the core (csrc/lookup/row_update.h)."""

import itertools
from contextlib import nullcontext

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
        torch.ones(COLUMNS), torch.tensor([7]), torch.tensor([1]), offsets, None, weights, states,
        layout, segments, torch.tensor([[0, 0, step]]), False, number, hyper, [1.0], None, [], None,
        [], [],
    )  # fmt: skip
    return states


@every_kind
def test_the_core_takes_and_writes_the_states_of_a_kind(kind):
    optimizer = RowOptimizer(kind)
    for state in update_a_row(optimizer.rule, optimizer, optimizer.state_columns(COLUMNS)):
        assert not state[0].any() and state[1].all()


@every_kind
def test_the_core_refuses_other_states(kind):
    optimizer = RowOptimizer(kind)
    for count in range(len(STATE_NAMES) + 2):
        for widths in itertools.product((1, COLUMNS), repeat=count):
            if widths != optimizer.state_columns(COLUMNS):
                with pytest.raises(RuntimeError, match=r"(blocks of states|elements of a block)"):
                    update_a_row(optimizer.rule, optimizer, widths)


@every_kind
def test_the_core_takes_the_hyper_parameters_of_a_kind(kind):
    optimizer = RowOptimizer(kind)
    rule, hyper = RULES[kind], optimizer.hyper(0.1)
    assert hyper == [0.1, *(getattr(optimizer, name) for name in rule.hyper)]
    for wrong in (hyper[:-1], [*hyper, 0.0]):
        with pytest.raises(
            RuntimeError, match=f"hyper-parameters = {len(hyper)}, got {len(wrong)}"
        ):
            update_a_row(rule.number, optimizer, optimizer.state_columns(COLUMNS), wrong)


@every_kind
def test_the_core_refuses_step_0_of_a_kind_that_counts_steps(kind):
    optimizer = RowOptimizer(kind)
    refused = pytest.raises(RuntimeError, match="a step of at least 1 in streams, got 0")
    with refused if optimizer.counts_steps else nullcontext():
        update_a_row(optimizer.rule, optimizer, optimizer.state_columns(COLUMNS), step=0)


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
