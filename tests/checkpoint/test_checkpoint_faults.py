"""`Checkpoints` after kills, full disks, damaged files and errors of one rank."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import workers
from checkpoint_cases import differences, held, train
from checkpoint_jobs import TWO, Job, failing, flip, names

from torchrec_dyn.checkpoint import (
    LoadPlanner,
    checkpoints,
    dcp_files,
    entry_files,
    entry_load,
    export_delta,
    mark,
)
from torchrec_dyn.checkpoint.pruning import outdated
from torchrec_dyn.checkpoint_format import Entry, SavedChain, read_chain


class Killed(BaseException):
    """Stands for a kill: no code of ours handles it."""


def test_a_kill_while_entries_are_removed_leaves_no_lone_delta(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept", keep=1, full_every=3)
    for _ in range(3):
        job.save()
    assert names(tmp_path / "kept") == ["delta-00000002", "delta-00000003", "full-00000001"]
    with failing(Path, "rename", 4, Killed()), pytest.raises(Killed):
        job.save()  # two renames by DCP and for the entry; one of the three old entries is gone
    assert names(tmp_path / "kept") == ["delta-00000002", "full-00000001", "full-00000004"]
    job.checkpoints.close()  # as a kill frees the lock
    job = Job(tmp_path / "kept", keep=1, full_every=3)
    job.restore()
    job.save()
    job.checkpoints.close()
    assert names(tmp_path / "kept") == ["delta-00000005", "full-00000004"]


def test_an_interrupt_while_entries_are_removed_costs_no_entry(tmp_path: Path) -> None:
    """The new entry is there already: the same job goes on from it."""
    job = Job(tmp_path / "kept", keep=1)
    job.save()
    with failing(shutil, "rmtree", 1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        job.save()
    assert names(tmp_path / "kept")[1:] == ["full-00000002"]
    assert job.save().sequence == 3
    job.checkpoints.close()


def test_an_interrupt_is_no_damage(tmp_path: Path) -> None:
    """DCP wraps Ctrl-C, or the SystemExit of a signal handler, as it wraps a damaged file."""
    job = Job(tmp_path / "kept", full_every=9)
    for _ in range(2):
        job.save()
    for place, name, number in (
        (LoadPlanner, "finish_plan", 1),  # the tables of the full save
        (LoadPlanner, "finish_plan", 2),  # the dense part
        (LoadPlanner, "finish_plan", 3),  # the delta
        (dcp_files.TableWriter, "write_data", 1),
    ):
        with failing(place, name, number, SystemExit(15)), pytest.raises(SystemExit):
            job.restore() if place is LoadPlanner else job.save()
        if place is LoadPlanner:
            assert job.restore().step == 2
    assert names(tmp_path / "kept") == ["delta-00000002", "full-00000001"]
    assert job.save().kind == "delta"
    job.checkpoints.close()


def test_what_crashes_left_goes_when_it_is_old(tmp_path: Path) -> None:
    """Deltas without their full save, and torn folders; newer ones stay, and are reported."""
    kept = tmp_path / "kept"
    job = Job(kept, keep=1, full_every=2)
    for _ in range(3):
        job.save()
    job.checkpoints.close()
    chain = read_chain(kept)
    lone = replace(
        chain.entries[0], path=kept / "delta-00000002", kind="delta", sequence=2, id="1" * 32
    )
    (kept / "delta-00000001").mkdir()
    (kept / "delta-00000002").mkdir()
    (kept / "delta-00000002" / "entry.json").write_text(replace(lone, parent="0" * 32).as_json())
    (kept / "delta-00000009").mkdir()
    (kept / "full-00000000").mkdir()
    (kept / "full-00000000" / "entry.json").write_text('{"format": 99}')  # of a newer version
    job.checkpoints.restore(job.model, job.optimizer)
    job.save()
    assert "delta-00000009: expected entry.json, got none" in read_chain(kept).skipped[0]
    assert names(kept) == ["delta-00000009", "delta-00000010", "full-00000000", "full-00000003"]
    job.checkpoints.close()


def test_the_last_sync_of_a_save_fails(tmp_path: Path) -> None:
    """The rename is undone, or, if that fails, too, by the next save."""
    job = Job(tmp_path / "kept", full_every=9)
    job.save()
    parent = [Path(tmp_path / "kept")]
    real: Callable[[Any], None] = entry_files.commit

    def commit(path: Any) -> None:
        if path in parent:
            raise OSError(5, "Input/output error")
        real(path)

    for undo_fails in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entry_files, "commit", commit)
            if undo_fails:
                patch.setattr(Path, "rename", _only_to_entries)
            with pytest.raises(OSError, match="Input/output error"):
                job.save()
        assert (len(job.checkpoints.entries()) == 2) is undo_fails
    assert job.save().kind == "delta"
    job.checkpoints.close()
    again = Job(tmp_path / "kept")
    assert again.restore().step == 4
    assert not differences(held(again.model), held(job.model))


def _only_to_entries(path: Path, to: Path) -> None:
    if to.name.startswith(".writing"):
        raise OSError(5, "Input/output error")
    os.rename(path, to)


def test_a_restore_that_failed_does_not_let_save(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept")
    job.save()
    job.checkpoints.close()
    again = Job(tmp_path / "kept")
    with (
        pytest.raises(ValueError, match="expected an entry that can be loaded"),
        failing(entry_load, "read_values", error=ValueError("damaged")),
    ):
        again.restore()
    with pytest.raises(ValueError, match="expected to write after a restore, got a directory with"):
        again.save()
    again.restore()
    assert again.save().parent == again.checkpoints.entries()[0].id
    again.checkpoints.close()


@pytest.fixture(scope="module")
def full_and_delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "kept"
    job = Job(path, full_every=9)
    for _ in range(2):
        job.save()
    job.checkpoints.close()
    return path


@pytest.mark.parametrize(
    "name",
    ["extra-0.pt", "entry.json", "dense/__0_0.distcp", "dense/.metadata", "changes/.metadata"],
)
def test_a_flipped_bit_is_found(name: str, full_and_delta: Path, tmp_path: Path) -> None:
    """Of each small file at several places."""
    shutil.copytree(full_and_delta, tmp_path / "kept")
    file = tmp_path / "kept" / "delta-00000002" / name
    content = file.read_bytes()
    for part in (1, 6):
        flip(file, len(content) * part // 8)
        again = Job(tmp_path / "kept")
        restored = again.restore()
        assert restored.step == 1 and "delta-00000002" in restored.skipped[0]
        file.write_bytes(content)
    if name == "entry.json":  # a flipped bit in a number is JSON, too
        file.write_text(file.read_text().replace('"step": 2', '"step": 3'))
        assert "expected entry.json with digest" in Job(tmp_path / "kept").restore().skipped[0]
        file.write_bytes(content)
    assert Job(tmp_path / "kept").restore().step == 2


def test_tables_of_another_entry_are_found(tmp_path: Path) -> None:
    """Whole folders, whose rows have their content sums: of the same ids in another run."""
    for run in ("kept", "other"):
        job = Job(tmp_path / run, full_every=2)
        if run == "other":
            train(job.model, job.setup, [0])
        for _ in range(4):
            job.save()
        job.checkpoints.close()
    for entry, before in (("delta-00000004", 3), ("full-00000003", 2), ("full-00000001", None)):
        folder = "changes" if "delta" in entry else "state"
        shutil.rmtree(tmp_path / "kept" / entry / folder)
        shutil.copytree(tmp_path / "other" / entry / folder, tmp_path / "kept" / entry / folder)
        again = Job(tmp_path / "kept")
        if before is None:
            with pytest.raises(ValueError, match="expected an entry that can be loaded"):
                again.restore()
        else:
            assert again.restore().step == before
    chain = read_chain(tmp_path / "kept")
    for entry in chain.entries:  # as an earlier version wrote them: only the sums are compared
        text = json.loads(replace(entry, digests={}).as_json())
        del text["digest"], text["digests"], text["plan"]
        (entry.path / "entry.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match="it is of another entry"):
        Job(tmp_path / "kept").restore()


def test_a_damaged_full_save_is_not_counted(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    job = Job(kept, keep=2)
    for _ in range(2):
        job.save()
    job.checkpoints.close()
    for file in (kept / "full-00000002" / "state").glob("*.distcp"):
        flip(file)
        content = bytearray(file.read_bytes())
        content[200 : len(content) : 64] = bytes(len(content[200 : len(content) : 64]))
        file.write_bytes(bytes(content))
    again = Job(kept, keep=2)
    assert again.restore().step == 1
    again.save()
    assert names(kept) == ["full-00000001", "full-00000002", "full-00000003"]
    (next((kept / "full-00000003" / "state").glob("*.distcp"))).write_bytes(b"")  # too short
    again.save()
    assert names(kept) == ["full-00000001", "full-00000002", "full-00000003", "full-00000004"]
    again.save()
    assert names(kept) == ["full-00000004", "full-00000005"]
    again.checkpoints.close()


def test_entries_that_cannot_be_removed_do_not_end_the_training(tmp_path: Path) -> None:
    """Whatever the error: the entry is there."""
    job = Job(tmp_path / "kept", keep=1)
    job.save()
    with (
        failing(checkpoints, "outdated", error=AttributeError("sizes")),
        pytest.warns(
            UserWarning, match=r"can be removed, got AttributeError\('sizes'\)\. They are"
        ),
    ):
        job.checkpoints.save(job.model, job.optimizer, step=2)
    assert names(tmp_path / "kept") == ["full-00000001", "full-00000002"]
    job.save()
    assert names(tmp_path / "kept") == ["full-00000003"]
    job.checkpoints.close()


def test_deeply_nested_json_is_damage(tmp_path: Path) -> None:
    (tmp_path / "full-00000001").mkdir()
    (tmp_path / "full-00000001" / "entry.json").write_text("[" * 100_000)
    (line,) = read_chain(tmp_path).skipped
    assert "expected JSON in entry.json, got maximum recursion" in line and "is damaged" in line


def test_another_working_directory_is_no_other_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    job = Job(Path("kept"))
    monkeypatch.chdir(tmp_path / "there")
    job.save()
    job.checkpoints.close()
    assert names(tmp_path / "here" / "kept") == ["full-00000001"] and not [*Path().iterdir()]


def test_long_chains_are_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "kept", full_every=9)
    calls = []
    monkeypatch.setattr(checkpoints, "read_chain", lambda path: calls.append(1) or read_chain(path))
    for _ in range(3):
        job.save()
    assert len(calls) == 3
    job.checkpoints.close()
    (first, *_) = read_chain(tmp_path / "kept").entries
    line: list[Entry] = [first]
    for number in range(2, 30_000):  # minutes, if each entry's line is followed
        line.append(
            replace(first, kind="delta", sequence=number, id=str(number), parent=line[-1].id)
        )
    assert outdated(SavedChain(tmp_path, line, [], 30_000), 1, first.id, set()) == []


def test_an_error_of_a_delta_is_raised(tmp_path: Path) -> None:
    """Only a table that was converted or is another object leads to a full save instead."""
    job = Job(tmp_path / "kept", full_every=9)
    job.save()
    with (
        failing(checkpoints, "collect_changes", error=ValueError("expected something else")),
        pytest.raises(ValueError, match="expected something else"),
    ):
        job.save()
    assert job.save().kind == "delta"
    job.checkpoints.close()


def test_full_saves_alone_record_no_changes(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept")
    with failing(checkpoints, "mark", error=AssertionError("marked")):
        first = job.save()
        job.restore()
    marked = Job(tmp_path / "marked", full_every=2)
    assert marked.save().sums == first.sums
    assert dict(first.plan) == {"plain": "unsharded"}
    job.checkpoints.close()
    marked.checkpoints.close()


def test_the_optimizer_of_a_collection_inside_the_model(tmp_path: Path) -> None:
    """Its keys begin below the model."""
    jobs = []
    for _ in range(2):
        job = Job(tmp_path / "kept", full_every=9)
        job.optimizer = job.model.collection.fused_optimizer
        jobs.append(job)
    for _ in range(2):
        jobs[0].save()
    jobs[0].checkpoints.close()
    assert jobs[1].restore().entry.kind == "delta"
    assert not differences(held(jobs[1].model), held(jobs[0].model))


def save_with_another_optimizer(path: str) -> str:
    job, other = Job(path, TWO), Job(path, TWO)
    job.optimizer = other.optimizer
    with pytest.raises(ValueError) as caught:
        job.save()
    job.checkpoints.close()
    return str(caught.value)


def test_the_optimizer_of_another_model_is_not_saved(tmp_path: Path) -> None:
    told = workers.run(save_with_another_optimizer, str(tmp_path / "kept"), world_size=2)
    assert "expected the optimizer with the state of this table, got one of another" in told[0]
    assert told[0] == told[1] and names(tmp_path / "kept") == []


def errors_of_one_rank_in_saves(path: str) -> list[str]:
    job, rank, told = Job(path, TWO, full_every=2), dist.get_rank(), []
    for kind in ("full", "delta"):
        for place, name, method in (
            (job.model, "state_dict", "save"),
            (job.optimizer, "state_dict", "save"),
            (checkpoints, "staged", "async_save"),
        ):
            with (
                failing(place, name, 1 if rank else 99, MemoryError("only here")),
                pytest.raises(RuntimeError) as caught,
            ):
                job.save(method, is_trained=False)
            told.append(str(caught.value))
        assert job.save().kind == kind
    job.checkpoints.close()
    return told


def test_an_error_of_one_rank_in_a_save_is_an_error_of_all(tmp_path: Path) -> None:
    told = workers.run(errors_of_one_rank_in_saves, str(tmp_path / "kept"), world_size=2)
    assert told == [["Checkpoints.save(rank=1): only here"] * 6] * 2
    assert names(tmp_path / "kept") == ["delta-00000002", "full-00000001"]


def saves_on_own_disks(path: str) -> list[str]:
    """Returns the errors of a save, and of a delta, where each rank has a disk of its own."""
    own = Path(path) / f"disk{dist.get_rank()}"
    job = Job(str(own / "kept"), TWO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_files, "_SEEN_WITHIN", 0.3)
        with pytest.raises(ValueError) as of_save:
            job.save()
        job.checkpoints.close()
        marker = mark(job.model)
        with pytest.raises(ValueError) as of_delta:
            export_delta(job.model, own / "delta", since=marker)
    assert not list(own.rglob("*.distcp")) and not list(own.rglob(".writing-*"))
    return [str(of_save.value), str(of_delta.value)]


def test_a_directory_that_the_ranks_do_not_share_is_an_error(tmp_path: Path) -> None:
    first, second = workers.run(saves_on_own_disks, str(tmp_path), world_size=2)
    assert first == second
    for told, call in zip(first, ("Checkpoints.save", "export_delta"), strict=True):
        assert re.match(rf"{call}\(rank=[01]\): {tmp_path}/disk[01]/", told)
        assert "expected a directory that all ranks share, got one without __" in told


def saves_beside_an_old_answer(path: str) -> int:
    """A network file system goes on saying that there is no file for which a rank has looked too early."""
    job, exists = Job(path, TWO), Path.exists
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(Path, "exists", lambda one: one.name != ".metadata" and exists(one))
        job.save()
    job.checkpoints.close()
    return len(job.checkpoints.entries())


def test_what_a_rank_has_looked_for_too_early_is_no_error(tmp_path: Path) -> None:
    assert workers.run(saves_beside_an_old_answer, str(tmp_path / "kept"), world_size=2) == [1, 1]


def errors_of_one_rank(path: str) -> list[str]:
    job = Job(path, TWO, full_every=2)
    job.save()
    entry = job.save()
    assert dict(entry.plan) == {"plain": "row_wise", "sixteen": "table_wise"}
    told = []
    for place, name in (
        (job.model, "load_state_dict"),
        (job.optimizer, "load_state_dict"),
        (entry_load, "set_options"),
        (entry_load, "read_values"),
        (entry_load, "check_files"),
    ):
        rank = dist.get_rank()
        with failing(
            place, name, error=KeyError("only here") if rank else None, at=1 if rank else 99
        ):
            restored = job.restore()
        told.append(f"{restored.step} {restored.skipped[0]}")
    job.checkpoints.close()
    return told


def test_an_error_of_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    told = workers.run(errors_of_one_rank, str(tmp_path / "kept"), world_size=2)
    assert told[0] == told[1]
    assert all(one.startswith("1 delta-00000002") and "only here" in one for one in told[0]), told[
        0
    ]
