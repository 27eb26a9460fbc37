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
    states = [[torch.zeros(2, width)] if width else [] for width in widths]
    offsets, weights = torch.tensor([0, 1]), [torch.ones(2, COLUMNS)]
    layout, segments = torch.tensor([[0, 1, 1, COLUMNS]]), torch.tensor([[0, 0, 1, 0, COLUMNS]])
    ops.update_rows_(
        torch.ones(COLUMNS), torch.tensor([7]), torch.tensor([1]), offsets, None, weights, *states,
        layout, segments, torch.tensor([[0, 0, step]]), False, number, hyper, [1.0], None, [], None,
        [], [],
    )  # fmt: skip
    return [blocks[0] if blocks else None for blocks in states]


def widths_of(optimizer):
    """Returns the width of each state that the op takes, 0 for a state that the rule does not have."""
    width = dict(zip(optimizer.state_names, optimizer.state_columns(COLUMNS), strict=True))
    return tuple(width.get(name, 0) for name in STATE_NAMES)


@every_kind
def test_the_core_takes_and_writes_the_states_of_a_kind(kind):
    optimizer = RowOptimizer(kind)
    for state in update_a_row(optimizer.rule, optimizer, widths_of(optimizer)):
        if state is not None:
            assert not state[0].any() and state[1].all()


@every_kind
def test_the_core_refuses_other_states(kind):
    optimizer = RowOptimizer(kind)
    of_kind = widths_of(optimizer)
    for widths in itertools.product((0, 1, COLUMNS), repeat=len(STATE_NAMES)):
        if any(width not in (given, 0) for given, width in zip(widths, of_kind, strict=True)):
            with pytest.raises(RuntimeError, match=r"(blocks of|elements of a block)"):
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
            update_a_row(rule.number, optimizer, widths_of(optimizer), wrong)


@every_kind
def test_the_core_refuses_step_0_of_a_kind_that_counts_steps(kind):
    optimizer = RowOptimizer(kind)
    refused = pytest.raises(RuntimeError, match="a step of at least 1 in streams, got 0")
    with refused if optimizer.counts_steps else nullcontext():
        update_a_row(optimizer.rule, optimizer, widths_of(optimizer), step=0)


def test_the_core_has_the_rules_of_the_table_and_no_other():
    numbers = {rule.number for rule in RULES.values()}
    assert RULES.keys() == {*OptimizerKind} and numbers == {*range(len(numbers))}
    with pytest.raises(RuntimeError, match=rf"expected optimizer in \[0, {max(numbers)}\]"):
        update_a_row(len(numbers), RowOptimizer(), (0, 0, 0))


@every_kind
def test_states_are_the_first_of_all(kind):
    rule = RULES[kind]
    assert rule.states == STATE_NAMES[: len(rule.states)] and {*rule.rowwise} <= {*rule.states}
