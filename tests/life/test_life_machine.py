"""Tables with a life against a plain model of it, in any order of all that can happen to them."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from life_cases import EVERY_LIFE
from life_machine import LifeMachine


def run(lives, share: int) -> None:
    """Runs the machine with a share of the profile's examples: there are many such tests."""
    machine = type("LifeMachine", (LifeMachine,), {"lives": lives})
    examples = max(1, settings.default.max_examples // share)
    few = settings(settings.default, max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=few)


@pytest.mark.parametrize(("eviction", "admission"), EVERY_LIFE)
def test_every_life(eviction, admission):
    run([(eviction, admission)], share=10)


@pytest.mark.parametrize(
    "lives",
    [
        [("lru", "count"), ("none", "all"), ("steps, lfu", "chance")],
        [("none", "all"), ("time", "count, few counters"), ("lfu", "all")],
    ],
)
def test_tables_of_one_call_live_each_by_its_own(lives):
    """Where one has no room for its ids, none of them changes."""
    run(lives, share=5)
