"""`Checkpoints.restore(rename=...)`: a line of saves loads into tables with other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import Setup, held, load, new, quietly, run_on, save, train
from checkpoint_jobs import Job
from renamed_cases import NAMES, RENAME, Renamed, check_same_contents

from torchrec_dyn.checkpoint import LoadPlanner, apply_delta, export_delta, mark, open_checkpoint


def save_line(setup: Setup, folder: str, reference: str) -> None:
    """Saves a full save and two deltas, and the same contents by DCP."""
    job = Job(folder, setup, full_every=4)
    for rate in (0.5, 0.25, 0.125):
        for group in job.optimizer.param_groups:
            group["lr"] = rate
        job.save()
    assert [entry.kind for entry in job.checkpoints.entries()] == ["full", "delta", "delta"]
    save(job.model, reference)
    job.checkpoints.close()


def restore_line(setup: Setup, folder: str, again: str) -> None:
    job = Job(folder, setup, full_every=4)
    job.train()
    restored = job.restore(rename=RENAME)
    assert (restored.step, restored.skipped) == (3, [])
    assert {group["lr"] for group in job.optimizer.param_groups} == {0.125}
    save(job.model, again)
    kinds = [job.save().kind for _ in range(2)]
    assert kinds == ["full", "delta"]  # a delta first would follow saves of other names
    job.checkpoints.close()
    other = Job(folder, setup, full_every=3)
    assert other.restore().step == 5
    mine, its = held(job.model), held(other.model)
    assert all(mine[key].equal(its[key]) for key in mine)
    other.checkpoints.close()


WHOLE, CUT = ("row_wise", "table_wise"), ("column_wise", "row_wise", "column_wise")
PAIRS = [  # ranks, plans and kind of collection of the saves; ranks and plans of the restore
    (0, WHOLE, True, 0, WHOLE, "EXACT_ROWWISE_ADAGRAD"),
    (2, CUT, True, 0, WHOLE, "ADAM"),
    (0, WHOLE, False, 2, (*WHOLE, "column_wise"), "lion"),
    (2, WHOLE, True, 4, ("grid_shard", "table_row_wise", "table_column_wise"), "EXACT_SGD"),
]


@pytest.mark.parametrize(("ranks", "kinds", "pooled", "later", "other", "optimizer"), PAIRS)
def test_a_line_of_saves(
    ranks: int, kinds: Any, pooled: bool, later: int, other: Any, optimizer: str, tmp_path: Path
) -> None:
    folder, reference, again = (str(tmp_path / name) for name in ("saves", "reference", "again"))
    options: dict[str, Any] = {"pooled": pooled, "optimizer": optimizer, "names": NAMES}
    run_on(Setup(ranks, kinds, **options), save_line, folder, reference)
    run_on(Renamed(later, other, **options), restore_line, folder, again)
    check_same_contents(reference, again, RENAME)
    for table in open_checkpoint(again).tables.values():
        table.verify()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "saved": ({"rename": {"nobody": "flat"}}, "saved tables ['counted', 'plain', 'sixteen'], got ['nob"),
    "new": ({"rename": {"plain": "other"}}, "among the tables ['flat', 'sixteen', 'tally'] that are"),
    "clash": ({"rename": {"plain": "sixteen"}}, "that no other saved table has, got ['sixteen']"),
    "several": ({"rename": {"plain": "flat", "counted": "flat"}}, "got ['flat'] for several"),
    "kind": ({"rename": "plain"}, "expected a dict of new names of tables by their saved names"),
    "missing": ({"rename": {"plain": "flat"}}, "expected an entry with the tables"),
    "none": ({}, "expected an entry with the tables"),
}  # fmt: skip


def refuse(setup: Setup, folder: str, on_damage: str) -> dict[str, str]:
    job = Job(folder, setup)
    job.train()
    before, told = held(job.model), {}
    for name, (options, _) in WRONG.items():
        with pytest.raises(ValueError) as error:
            job.restore(on_damage=on_damage, **options)
        told[name] = str(error.value)
    if setup.world:
        with pytest.raises(ValueError, match="expected the same rename on every rank"):
            job.restore(rename=RENAME if job.model._env.rank else {})
    after = held(job.model)
    assert all(after[key].equal(before[key]) for key in before)
    assert job.restore(rename=RENAME).skipped == []
    job.checkpoints.close()
    return told


@pytest.mark.parametrize("world", [0, 2])
@pytest.mark.parametrize("on_damage", ["raise", "previous"])
def test_wrong_names_are_errors_on_every_rank(world: int, on_damage: str, tmp_path: Path) -> None:
    run_on(Setup(0, names=NAMES), save_line, str(tmp_path / "saves"), str(tmp_path / "other"))
    setup = Renamed(world, ("row_wise", "table_wise"))
    for told in run_on(setup, refuse, str(tmp_path / "saves"), on_damage):
        for name, (_, text) in WRONG.items():
            assert text in told[name], name


def test_a_part_of_an_entry(tmp_path: Path) -> None:
    """With allow_partial_load the other tables stay as they are."""
    options: dict[str, Any] = {"optimizer": "ADAM"}
    saved = Job(tmp_path, Setup(0, names=NAMES, **options))
    saved.save()
    saved.checkpoints.close()
    job = Job(
        tmp_path, Renamed(0, names=("plain", "brain"), others=(("plain", "flat"),), **options)
    )
    job.train()
    brain = job.model.collection.table("brain")
    before = brain.lookup(brain.ids())[0]
    job.restore(rename={"plain": "flat"}, allow_partial_load=True)
    assert brain.lookup(brain.ids())[0].equal(before)
    table = saved.model.collection.table("plain")
    rows, found = job.model.collection.table("flat").lookup(table.ids())
    assert found.all() and rows.equal(table.lookup(table.ids())[0])


def restore_rates(setup: Setup, folder: str) -> None:
    job = Job(folder, setup)
    job.restore(rename={"plain": "flat"})
    assert {group["lr"] for group in job.optimizer.param_groups} == {0.125}


@pytest.mark.parametrize("world", [0, 2])
def test_learning_rates_follow_the_names(world: int, tmp_path: Path) -> None:
    """No table has its old name, by which the learning rate of a group could be found."""
    saved = Job(tmp_path, Setup(0, names=("plain",)))
    saved.optimizer.param_groups[0]["lr"] = 0.125
    saved.save()
    saved.checkpoints.close()
    others = (("plain", "flat"),)
    run_on(Renamed(world, names=("plain",), others=others), restore_rates, str(tmp_path))


def export_line(setup: Setup, folder: str) -> None:
    """Saves a model in full, then two deltas, and what they lead to."""
    model = new(setup)
    train(model, setup, range(2))
    save(model, f"{folder}/full")
    marker = mark(model)
    for number in (2, 3):
        train(model, setup, range(number, number + 1))
        marker = quietly(export_delta, model, f"{folder}/delta_{number}", since=marker)
    save(model, f"{folder}/reference")


def apply_line(setup: Setup, folder: str) -> None:
    model = new(setup)
    load(model, f"{folder}/full", LoadPlanner(rename=RENAME))
    before = held(model)
    first = f"{folder}/delta_2"
    for options, text in (
        ({}, "expected a delta of the tables"),
        ({"rename": {"nobody": "flat"}}, r"apply_delta\.rename: expected names among the saved"),
        ({"rename": {"plain": "other"}}, r"apply_delta\.rename: expected new names among"),
        ({"rename": {"plain": "tally", "counted": "flat"}}, "seed|content sum"),
    ):
        with pytest.raises(ValueError, match=text):
            apply_delta(model, first, **options)
    after = held(model)
    assert all(after[key].equal(before[key]) for key in before)
    for number in (2, 3):
        apply_delta(model, f"{folder}/delta_{number}", rename=RENAME)
    with pytest.raises(ValueError, match="it was applied already"):
        apply_delta(model, f"{folder}/delta_3", rename=RENAME)
    save(model, f"{folder}/again")


@pytest.mark.parametrize(("ranks", "kinds", "pooled", "later", "other", "optimizer"), PAIRS)
def test_deltas(
    ranks: int, kinds: Any, pooled: bool, later: int, other: Any, optimizer: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"pooled": pooled, "optimizer": optimizer, "names": NAMES}
    run_on(Setup(ranks, kinds, **options), export_line, str(tmp_path))
    run_on(Renamed(later, other, **options), apply_line, str(tmp_path))
    check_same_contents(tmp_path / "reference", tmp_path / "again", RENAME)
