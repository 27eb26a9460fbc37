"""`Checkpoints` after kills, full disks, damaged files and errors of one rank."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from checkpoint_cases import differences, held, tables_of, train
from checkpoint_jobs import TWO, Job, failing, flip, names
from full_disk import FAILED, FailingFiles, fails_or_succeeds

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import (
    LoadPlanner,
    TableWriter,
    checkpoints,
    entry_writing,
    export_delta,
    mark,
    restoring,
)
from torchrec_dyn.checkpoint_format import read_chain
from torchrec_dyn.ranks import agreement


class Killed(BaseException):
    """Stands for a kill."""


@contextmanager
def killed_at(number: int) -> Iterator[list[int]]:
    """From the n-th operation on files on none is done, also none that would clear away."""
    done = [0]

    def until_killed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            done[0] += 1
            if done[0] >= number:
                raise Killed
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "pwrite", "ftruncate", "replace", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, until_killed(getattr(os, name)))
        yield done


@pytest.mark.parametrize("is_full", [True, False])
def test_a_kill_at_each_operation_on_files(is_full: bool, tmp_path: Path) -> None:
    """The saves before it stay until the new one is there, and the next save clears the rest away."""
    before, kept = tmp_path / "before", tmp_path / "kept"
    job = Job(before, keep=1, full_every=9)
    job.save()
    job.save()
    job.checkpoints.close()
    newest, number = Counter[int](), 0
    while newest[3] < 3 or (is_full and len(names(kept)) > 1):
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(before, kept)
        job = Job(kept, keep=1, full_every=9)
        job.restore()
        number += 1
        with killed_at(number) as done:
            try:
                job.save(full=is_full)
            except Killed:
                assert done[0] >= number
        job.checkpoints.close()  # as a kill frees the lock
        for entry in read_chain(kept).entries:
            assert all((entry.path / name).exists() for name in entry.digests)
        again = Job(kept, keep=1, full_every=9)
        restored = again.restore()
        newest[restored.step] += 1
        assert restored.step in (2, 3) and restored.extra == {"next": restored.step}
        if restored.step == 3:
            assert not differences(held(again.model), held(job.model))
        elif number % 5 == 0:
            assert again.save(full=is_full).step == 3
            assert not read_chain(kept).unfinished
            again.checkpoints.close()
    assert newest[2] > 15


def test_an_error_at_each_operation_on_files(tmp_path: Path) -> None:
    """The disk is full or fails: the error names a file, no entry is left, the next save has the changes."""
    kept = tmp_path / "kept"
    job = Job(kept, keep=9, full_every=99)
    job.save()
    number, is_saved = 1, False  # the first makes the directory, which is there
    while not is_saved:
        number += 1
        with FailingFiles(kept, number):
            is_saved = fails_or_succeeds(job.save, FAILED, kept)
        assert len(names(kept)) == 1 + is_saved and not read_chain(kept).unfinished
    assert number > 10, number
    job.checkpoints.close()
    again = Job(kept)
    assert again.restore().entry.kind == "delta"
    assert not differences(held(again.model), held(job.model))


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """A full save, a full save, a delta; and the bytes of a row that each of them has."""
    path = tmp_path_factory.mktemp("saved") / "kept"
    job, rows = Job(path, keep=9, full_every=9), list[torch.Tensor]()
    for number in range(3):
        job.save(full=number < 2)
        rows.append(tables_of(job.model)[0].export_state()["weight"])
    job.checkpoints.close()
    return path, rows


FILES = ("extra-0.pt", "commit", "dense/__0_0.distcp", "dense/.metadata")


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        *((entry, name) for entry in ("full-00000002", "delta-00000003") for name in FILES),
        *(("full-00000002", f"state/{name}") for name in (".metadata", "__0_0.distcp")),
        *(("delta-00000003", f"changes/{name}") for name in (".metadata", "__0_0.distcp")),
    ],
)
def test_a_flipped_bit(
    entry: str, name: str, line: tuple[Path, list[torch.Tensor]], tmp_path: Path
) -> None:
    """Of each kind of file: an error that names the entry before, which is loaded if that is wished."""
    kept, number = tmp_path / "kept", int(entry[-1])
    shutil.copytree(line[0], kept)
    for later in list(kept.glob("*-0*"))[:]:
        if int(later.name[-1]) > number:
            shutil.rmtree(later)
            (kept / "commits" / f"0000000{later.name[-1]}").unlink()
    file = kept / entry / name if name != "commit" else kept / "commits" / f"0000000{number}"
    place = len(file.read_bytes()) // 8
    if name in ("changes/__0_0.distcp", "state/__0_0.distcp"):
        place = max(file.read_bytes().find(row.numpy().tobytes()) for row in line[1][number - 1])
        assert place > 0
    flip(file, place)
    job = Job(kept)
    before = f"full-0000000{number - 1}"
    with pytest.raises(
        ValueError, match=rf"(?s)got {entry}: .*newest before it is {before}: call restore\(step="
    ):
        job.restore()
    job.train()  # no rows wait for a load
    restored = job.restore(on_damage="previous")
    assert restored.step == number - 1 and restored.entry.path.name == before
    (skipped,) = restored.skipped
    assert skipped.startswith(f"{entry}: ")


def test_exactly_one_entry_back(line: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(line[0], kept)
    for name in ("delta-00000003", "full-00000002"):
        flip(kept / name / "extra-0.pt")
    job = Job(kept)
    with pytest.raises(
        ValueError, match=r"(?s)got delta-00000003: .* full-00000002: .*No other was tried"
    ):
        job.restore(on_damage="previous")
    with pytest.raises(ValueError, match="expected to write after a restore"):
        job.save()
    assert job.restore(step=1).step == 1
    with pytest.raises(
        ValueError, match='expected on_damage "raise" or "previous", got \'search\''
    ):
        job.restore(on_damage="search")


def test_an_entry_without_the_one_before(
    line: tuple[Path, list[torch.Tensor]], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(line[0], kept)
    shutil.rmtree(kept / "full-00000002")
    job = Job(kept)
    with pytest.raises(ValueError, match="delta-00000003: expected the full save and deltas befor"):
        job.restore()
    assert job.checkpoints.latest() == job.checkpoints.at(1)
    assert job.restore(on_damage="previous").step == 1


def test_tables_of_another_entry_are_found(tmp_path: Path) -> None:
    """Files whose rows have their content sums: of the same ids in another run."""
    for run in ("kept", "other"):
        job = Job(tmp_path / run, full_every=2)
        if run == "other":
            train(job.model, job.setup, [0])
        for _ in range(2):
            job.save()
        job.checkpoints.close()
    for entry in ("delta-00000002/changes", "full-00000001/state"):
        file = f"{entry}/__0_0.distcp"
        shutil.copy(tmp_path / "other" / file, tmp_path / "kept" / file)
        with pytest.raises(ValueError, match="it is of another entry"):
            Job(tmp_path / "kept").restore()


def test_an_interrupt_is_no_damage(tmp_path: Path) -> None:
    """DCP wraps Ctrl-C, or the SystemExit of a signal handler, as it wraps a damaged file."""
    job = Job(tmp_path / "kept", full_every=9)
    for _ in range(2):
        job.save()
    for place, name in ((LoadPlanner, "finish_plan"), (TableWriter, "write_data")):
        with failing(place, name, 1, SystemExit(15)), pytest.raises(SystemExit):
            job.restore() if place is LoadPlanner else job.save()
        if place is LoadPlanner:
            assert job.restore().step == 2
    assert names(tmp_path / "kept") == ["delta-00000002", "full-00000001"]
    assert not read_chain(tmp_path / "kept").entries[1].has_failed
    assert job.save().kind == "delta"
    job.checkpoints.close()


def test_entries_that_cannot_be_removed_do_not_end_the_training(tmp_path: Path) -> None:
    """Whatever the error: the entry is there."""
    job = Job(tmp_path / "kept", keep=1)
    job.save()
    with (
        failing(entry_writing, "outdated", error=AttributeError("sizes")),
        pytest.warns(UserWarning, match=r"can be removed, got AttributeError\('sizes'\)\. They ar"),
    ):
        job.checkpoints.save(job.model, job.optimizer, step=2)
    assert names(tmp_path / "kept") == ["full-00000001", "full-00000002"]
    job.save()
    assert names(tmp_path / "kept") == ["full-00000003"]
    job.checkpoints.close()


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
    assert told[0] == told[1] and not (tmp_path / "kept").exists()


def errors_of_one_rank_in_saves(path: str) -> list[str]:
    job, rank, told = Job(path, TWO, full_every=2), dist.get_rank(), []
    for kind in ("full", "delta"):
        for place, name, method in (
            (job.model, "state_dict", "save"),
            (job.optimizer, "state_dict", "save"),
            (checkpoints, "copied", "async_save"),
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
        patch.setattr(knobs, "SEEN_WITHIN_SECONDS", 0.3)
        with pytest.raises(ValueError) as of_save:
            job.save()
        job.checkpoints.close()
        marker = mark(job.model)
        with pytest.raises(ValueError) as of_delta:
            export_delta(job.model, own / "delta", since=marker)
    assert not list(own.rglob("*.distcp")) and not list(own.rglob("full-*"))
    return [str(of_save.value), str(of_delta.value)]


def test_a_directory_that_the_ranks_do_not_share_is_an_error(tmp_path: Path) -> None:
    first, second = workers.run(saves_on_own_disks, str(tmp_path), world_size=2)
    assert first == second
    for told, call in zip(first, ("Checkpoints.save", "export_delta"), strict=True):
        assert re.match(rf"{call}\(rank=[01]\): {tmp_path}/disk[01]/", told)
        assert "expected a directory that all ranks share, got one without " in told


def errors_of_one_rank(path: str) -> list[str]:
    job = Job(path, TWO, full_every=2)
    job.save()
    entry = job.save()
    assert dict(entry.plan) == {"plain": "row_wise", "sixteen": "table_wise"}
    told = []
    for name in ("_check_files", "read_values", "_lazy_states"):
        at = 1 if dist.get_rank() else 99
        with failing(restoring, name, error=KeyError("only here"), at=at):
            restored = job.restore(on_damage="previous")
        told.append(f"{restored.step} {restored.skipped[0]}")
    job.checkpoints.close()
    return told


def test_an_error_of_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    told = workers.run(errors_of_one_rank, str(tmp_path / "kept"), world_size=2)
    assert told[0] == told[1]
    assert all(one.startswith("1 delta-00000002") and "only here" in one for one in told[0])


def commit_that_fails(path: str) -> None:
    job = Job(path, TWO, full_every=9)
    job.save()
    with (
        failing(entry_writing, "commit_entry", at=99 if dist.get_rank() else 1),
        pytest.raises(OSError, match="No space left"),
    ):
        job.save()
    assert job.save().kind == "delta"
    job.checkpoints.close()


def test_a_commit_that_fails_is_an_error_of_all(tmp_path: Path) -> None:
    workers.run(commit_that_fails, str(tmp_path / "kept"), world_size=2)
    assert names(tmp_path / "kept") == ["delta-00000002", "full-00000001"]


def meetings(path: str) -> dict[str, int]:
    """Returns how often the ranks meet in the calls of `Checkpoints` themselves."""
    job, real, counted = Job(path, TWO, full_every=2), agreement._gather, Counter[str]()

    def gather(group: Any, report: Any) -> list[Any]:
        counted[report[0]] += report[0].startswith("Checkpoints")
        return real(group, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_gather", gather)  # once a meeting
        for _ in range(2):  # full, delta
            job.save()
            job.restore()
            assert counted.pop("Checkpoints.save") == counted.pop("Checkpoints.restore") == 2
    job.checkpoints.close()
    return dict(+counted)


def test_ranks_meet_twice(tmp_path: Path) -> None:
    """When all have prepared and when one commits, beside the data."""
    assert workers.run(meetings, str(tmp_path / "kept"), world_size=2) == [{}, {}]
