"""After an exception at any place of a call, e.g. Ctrl-C, the next call works and nothing is lost."""

import pytest
import torch
from garbage import keep_what_exists
from interrupt_cases import (
    LIVES,
    Training,
    check_every_place,
    check_steps,
    check_whole,
    contents,
    is_same,
    tables_of,
)
from interrupts import interrupted
from table_cases import ids_of

from torchrec_dyn.storage.id_map import IdMap


def at_one_place_in(everyday, deep=1):
    """Interrupts at one place in `everyday`; in the deep tests at one in `deep`."""
    return pytest.mark.parametrize(
        "every", [everyday, pytest.param(deep, marks=pytest.mark.deep, id="deep")]
    )


@pytest.mark.everyday(3)
@at_one_place_in(97)
@pytest.mark.parametrize(
    ("life", "steps"),
    [("plain", 0), ("plain", 3), *((life, 7) for life in LIVES if life != "plain")],
)
def test_a_step(life, steps, every):
    """The first step, a step that enlarges the map, and steps of full tables or with expired ids."""
    runs, seen = check_steps(Training(LIVES[life]), steps, every)
    assert runs > 6 and {0, 1} <= seen


@at_one_place_in(61)
def test_evaluation(every):
    """Evaluation changes nothing, interrupted or not."""
    training = Training(LIVES["all"])
    before = contents(training.after(3))

    def evaluate(model):
        model.eval()(training.batch(3))

    def check(model):
        check_whole(model)
        now = contents(model)
        assert all(is_same(now[name], before[name]) for name in before)
        model.train()

    assert check_every_place(lambda: training.after(3), evaluate, check, every) > 1


def test_the_growth_of_a_large_map():
    """A large map grows bit by bit: it is interrupted between its two arrays."""
    few, count = 41_000, 43_000  # of 72,892 slots: growth begins at 9/16 and ends at 5/8

    def make():
        id_map = IdMap()
        id_map.reserve(few)
        id_map.insert(torch.arange(few), torch.arange(few))
        for first in range(few, count, 1000):
            id_map.reserve(1000)
            id_map.insert(torch.arange(first, first + 1000), torch.arange(first, first + 1000))
        assert id_map.outgoing is not None
        return id_map

    def check(id_map):
        id_map.check_invariants()
        id_map.reserve(500)
        id_map.insert(torch.arange(count, count + 500), torch.arange(count, count + 500))
        id_map.check_invariants()

    assert check_every_place(make, lambda id_map: id_map.reserve(500), check) > 5


@at_one_place_in(131, deep=3)
@pytest.mark.parametrize("life", ["plain", "all"])
def test_changes_are_recorded_in_spite_of_an_interrupt(life, every):
    """Rows changed and ids removed since a version: none is missing, whatever the place."""
    training = Training(LIVES[life])

    def make():
        model = training.after(7)
        model.versions = {name: table.version() for name, table in tables_of(model).items()}
        model.before = contents(model)
        return model

    def check(model):
        for name, table in tables_of(model).items():
            version, now, before = model.versions[name], table.export_state(), model.before[name][0]
            changed, _ = version.log.changed_rows(version, table.id_map)
            removed = version.log.removed_ids(version, table.id_map)
            gone = before["ids"][~torch.isin(before["ids"], now["ids"])]
            assert sorted(removed.tolist()) == sorted(gone.tolist())
            kept = torch.isin(before["ids"], now["ids"]) & ~torch.isin(before["ids"], changed)
            rows, _ = table.lookup(before["ids"][kept])
            assert torch.equal(rows, before["weight"][kept])
            added = ~torch.isin(now["ids"], before["ids"])
            assert torch.isin(now["ids"][added], changed).all()

    assert check_every_place(make, lambda model: training.step(model, 7), check, every) > 5


def in_a_handler(training, work, every):
    """Does work at one place in `every` of a step, as a signal handler does.

    Yields the model after the step, and what the work returned, in a list; None if it was refused.
    """
    at, is_reached = 1, True
    while is_reached:
        model, done = training.after(7), []

        def handler(model=model, done=done):
            try:
                done.append([work(model)])
            except RuntimeError as error:
                assert "expected tables between two changes" in str(error)
                done.append(None)

        is_reached = interrupted(lambda model=model: training.step(model, 7), at, handler)
        if is_reached:
            yield model, done[0]
        at += every


@pytest.mark.everyday(2)
@at_one_place_in(607, deep=37)  # 80 of about 3,000, in 44 s
@pytest.mark.parametrize(
    "work",
    [
        lambda model: model(Training(LIVES["all"]).batch(3)).values().detach(),
        lambda model: model.table("t0").erase(ids_of(66, 67)),
        lambda model: model.table("t0").assign(ids_of(5, 6), torch.ones(2, 4)),
    ],
    ids=["forward", "erase", "assign"],
)
def test_a_signal_handler_changes_a_table_between_changes_or_gets_an_error(work, every):
    training = Training(LIVES["all"])
    expected, seen = contents(training.after(8)), set()
    keep_what_exists()  # each check collects garbage
    for model, done in in_a_handler(training, work, every):
        check_whole(model)
        seen.add(done is None)
        now = contents(model)
        assert done is not None or all(is_same(now[n], one) for n, one in expected.items())
    assert True in seen


def test_a_mark_that_an_interrupted_change_has_left_is_taken_away():
    training = Training(LIVES["all"])
    model = training.after(3)
    lock = model.table("t0").lock
    lock.is_changing = True
    training.step(model, 3)
    lock.is_changing = True
    model.state_dict()
    assert not lock.is_changing
