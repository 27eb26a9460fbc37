"""Real signals at random moments: nothing is lost."""

import random
import time

import pytest
from garbage import keep_what_exists
from interrupt_cases import (
    LIVES,
    Training,
    check_whole,
    contents,
    is_same,
    make_tables,
)
from real_interrupts import INTERRUPTS, at_alarm


def for_a_time(seconds, deep=10.0):
    """A loop of some seconds; in the deep tests of more."""
    return pytest.mark.parametrize(
        "seconds",
        [pytest.param(seconds, id="short"), pytest.param(deep, marks=pytest.mark.deep, id="deep")],
    )


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


@pytest.fixture(autouse=True, scope="module")
def cheap_checks():
    keep_what_exists()  # each check collects garbage


class Moments:
    """Random moments of calls, for some seconds, at least one; their range follows how long calls take."""

    def __init__(self, seed, seconds):
        self.dice, self.longest, self.seconds = random.Random(seed), 0.01, seconds

    def __iter__(self):
        end = time.monotonic() + self.seconds
        yield self.dice.uniform(0, self.longest)  # also where the time is up before the first
        while time.monotonic() < end:
            yield self.dice.uniform(0, self.longest)

    def interrupt(self, call, moment, kind=None):
        kind = kind or self.dice.choice(list(INTERRUPTS))
        raised = INTERRUPTS[kind](call, moment)
        self.follow(raised is not None)
        return raised

    def follow(self, was_in_time):
        self.longest *= 1.05 if was_in_time else 0.8


TRAININGS = {
    "plain": lambda: Training(LIVES["plain"]),
    "all": lambda: Training(LIVES["all"]),
    "time": lambda: Training(LIVES["time"]),
}


def same(one, other):
    return all(is_same(one[name], other[name]) for name in other)


class Twins:
    """A collection that is interrupted in training, and one that is not.

    Attributes:
        stages: contents before the last step, after its forward and after its backward.
    """

    def __init__(self, training):
        self.training = training
        self.restart()

    def restart(self):
        self.step, self.model, self.twin = 0, self.training.after(0), self.training.after(0)
        self.before = contents(self.twin)

    def take_step(self, take):
        """Takes a step with both; compares what the interrupted step has changed."""
        training = self.training
        take(lambda: training.step(self.model, self.step))
        check_whole(self.model)
        now = contents(self.model)
        is_begun = not same(now, self.before)
        if training.is_timed:
            self.twin.set_time(self.step)
            is_begun = is_begun and not same(now, contents(self.twin))
        output, stage = training.forward(self.twin, self.step), "before"
        forward = contents(self.twin)
        if is_begun:
            stage = "forward" if same(now, forward) else "after"
        else:
            training.step(self.model, self.step)
        if stage != "forward":
            (output * output).sum().backward()
        self.stages = [self.before, forward, contents(self.twin)]
        self.before = self.stages[-1]
        assert same(contents(self.model), self.before), stage
        self.step += 1
        return stage


@for_a_time(0.8)
@pytest.mark.parametrize("life", TRAININGS)
def test_a_step(life, seconds):
    moments, twins, seen = Moments(life, seconds), Twins(TRAININGS[life]()), []
    for moment in moments:
        seen.append(twins.take_step(lambda step, at=moment: moments.interrupt(step, at)))
    assert seen


@for_a_time(0.6)
def test_a_handler_that_saves_gets_a_state_that_loads_or_an_error(seconds):
    moments, twins = Moments(5, seconds), Twins(TRAININGS["all"]())
    training = twins.training
    for moment in moments:
        saved, model = [], twins.model

        def save(saved=saved, model=model):
            try:
                saved.append(training.save(model))
            except RuntimeError as error:
                assert "expected tables between two changes" in str(error)
                saved.append(None)

        assert (
            twins.take_step(lambda step, at=moment, save=save: at_alarm(step, at, save)) == "after"
        )
        moments.follow(bool(saved))
        if saved and saved[0] is not None:
            other = training.empty()
            training.load(other, *saved[0])
            make_tables(other)
            check_whole(other)
            rows = {name: (state, {}) for name, (state, _) in contents(other).items()}
            assert any(
                same(rows, {name: (state, {}) for name, (state, _) in stage.items()})
                for stage in twins.stages
            )
