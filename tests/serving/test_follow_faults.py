"""Faults of what a follower serves, and of entries: it serves on, builds aside, and never goes back."""

import multiprocessing
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import quietly
from follow_cases import TABLES, Trainer, rows_of, served_rows, sorted_ids
from full_disk import file_limit

from torchrec_dyn import __main__ as command_line
from torchrec_dyn import serving
from torchrec_dyn.checkpoint_format import read_chain
from torchrec_dyn.serving import builder
from torchrec_dyn.serving import follower as follower_file
from torchrec_dyn.serving.files import only_writer
from torchrec_dyn.serving.manifest import current_generation, served_manifest


class Job:
    """A trainer with its follower; each save trains one more id."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.kept, self.served = folder / "kept", folder / "served"
        self.trainer = Trainer(self.kept, **options)
        self.follower = self.new_follower()
        self.rows: dict[int, torch.Tensor] = {}  # by step

    def new_follower(self, **options: Any) -> serving.Follower:
        return serving.Follower(self.kept, self.served, **options)

    def save(self, count: int = 1, full: bool = False) -> None:
        if full:
            self.trainer.checkpoints._marker = None
        for _ in range(count):
            self.trainer.train(self.trainer.step, 50)
            self.trainer.save()
            self.rows[self.trainer.step] = self.trainer.rows()

    def entry(self, kind: str, number: int) -> Path:
        return self.kept / f"{kind}-{number:08}"

    def serves(self, step: int) -> bool:
        return torch.equal(served_rows(self.served), self.rows[step])

    def files(self) -> set[str]:
        return {str(path.relative_to(self.served)) for path in self.served.rglob("*")}

    def lose(self, what: str) -> None:
        generation = self.served / current_generation(self.served)
        if what == "manifest is cut":
            path = generation / "manifest.json"
            path.write_bytes(path.read_bytes()[:100])
        elif what == "no generation":
            shutil.rmtree(generation)
        else:
            (self.served / "current").unlink()

    def restored_at(self, folder: Path, step: int) -> "Job":
        """Returns a job that goes on from an older step, with the same follower."""
        self.trainer.checkpoints.close()
        other = Job(folder, full_every=8)
        trainer = other.trainer
        quietly(trainer.checkpoints.restore, trainer.model, trainer.optimizer, step=step)
        trainer.step, other.follower, other.rows = step, self.follower, dict(self.rows)
        trainer.train(200)
        return other


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, full_every=8)
    yield made
    made.trainer.checkpoints.close()


@contextmanager
def damaged(folder: Path) -> Iterator[None]:
    """Rows of an entry have flipped bits, until the context ends."""
    contents = {file: file.read_bytes() for file in folder.glob("*/*.distcp")}
    for file, content in contents.items():
        flipped = bytearray(content)
        for place in range(500, len(flipped), 64):
            flipped[place] ^= 1
        file.write_bytes(bytes(flipped))
    yield
    for file, content in contents.items():
        file.write_bytes(content)


def damage(folder: Path) -> None:
    damaged(folder).__enter__()


@pytest.mark.parametrize("what", ["manifest is cut", "no generation", "no current"])
def test_tables_without_a_manifest_are_built_aside(job: Job, what: str) -> None:
    """With the deltas after the full save, in one switch; readers keep the old rows until then."""
    job.save(2)
    job.follower.poll()
    reader = serving.ServingEmbeddingBagCollection(job.served, TABLES)
    before, number = rows_of(reader), int(reader.generation[:6])
    job.lose(what)
    with pytest.raises(ValueError, match=r"Remove the directory, then build it\.$"):
        served_rows(job.served)
    job.save()
    assert job.follower.served() is None and job.follower.lag() is None
    with pytest.warns(UserWarning, match=r"^Follower: .* built anew from .*full-00000001") as seen:
        followed = job.follower.poll()
    assert len(seen) == 1 and followed.entry.step == 3 and followed.skipped == []
    assert torch.equal(rows_of(reader), before)
    assert reader.refresh() and torch.equal(rows_of(reader), job.rows[3])
    assert int(reader.generation[:6]) > number - (what == "no generation")
    assert serving.verify(job.served) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert job.follower.poll() is None
        job.save()
        assert job.follower.poll().entry.step == 4 and job.serves(4)


def test_a_follower_keeps_dtype_and_tables_without_a_manifest(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save()
    follower = job.new_follower(tables=["user"], rows=torch.float16)
    follower.poll()
    job.lose("manifest is cut")
    with pytest.warns(UserWarning, match="built anew"):
        follower.poll()
    manifest = served_manifest(job.served)[1]
    assert (manifest.rows, sorted(manifest.tables)) == ("float16", ["user"])
    job.lose("manifest is cut")
    fresh, files = job.new_follower(), job.files()  # which has not read it
    with pytest.raises(ValueError, match=r"Or follow with the dtype of its rows, as rows="):
        fresh.poll()
    assert fresh.poll() is None and len(fresh.skipped) == 1 and job.files() == files
    command = ["follow", str(job.kept), "--to", str(job.served), "--once"]
    assert command_line.main(command) == 1 and "--dtype float32" in capsys.readouterr().err
    assert command_line.main([*command, "--dtype", "float16"]) == 0
    assert "The tables were built anew" in capsys.readouterr().err


@pytest.mark.parametrize("is_fresh", [True, False])
def test_without_a_manifest_no_older_entry_is_served(
    job: Job, tmp_path: Path, is_fresh: bool
) -> None:
    """A fresh follower cannot know what was served: any entry but the newest may be older than that."""
    job.save(3)
    job.follower.poll()
    job.lose("manifest is cut")
    follower = job.new_follower(rows=torch.float32) if is_fresh else job.follower
    shutil.move(job.entry("delta", 2), tmp_path / "aside")
    with pytest.raises(ValueError, match="delta-00000003: an entry before it is missing"):
        follower.poll()
    shutil.move(tmp_path / "aside", job.entry("delta", 2))
    with pytest.warns(UserWarning, match="built anew"):
        follower.poll()
    assert job.serves(3)


@pytest.mark.parametrize("number", [1, 2])
def test_a_build_that_would_go_back_is_not_served(job: Job, number: int) -> None:
    """An entry up to what was served is damaged: the error comes once, and each look tries again."""
    job.save(3)
    job.follower.poll()
    reader = serving.ServingEmbeddingBagCollection(job.served, TABLES)
    job.lose("manifest is cut")
    files = job.files()
    with damaged(job.entry("full" if number == 1 else "delta", number)):
        with pytest.raises(ValueError, match=f"0000000{number}"):
            job.follower.poll()
        for _ in range(2):
            assert job.follower.poll() is None and len(job.follower.skipped) == 1
        assert job.files() == files and torch.equal(rows_of(reader), job.rows[3])
        if number == 2:
            job.save(full=True)  # newer than what was served
            with pytest.warns(UserWarning, match="built anew"):
                assert job.follower.poll().entry.step == 4 and job.serves(4)
            return
    with pytest.warns(UserWarning, match="built anew"):
        assert job.follower.poll() is None and job.serves(3)


def test_served_tables_that_a_delta_finds_damaged_are_built_aside(job: Job) -> None:
    job.save()
    job.follower.poll()
    reader = serving.ServingEmbeddingBagCollection(job.served, TABLES)
    slots = job.served / reader.generation / "slots"
    pairs = bytearray(slots.read_bytes())
    pairs[8:] = bytes(len(pairs) - 8)  # ids are lost
    slots.with_name("new").write_bytes(pairs)
    os.replace(slots.with_name("new"), slots)
    job.save()
    with pytest.warns(UserWarning, match=r"slots: expected a map .* built anew"):
        assert job.follower.poll().entry.step == 2
    assert torch.equal(rows_of(reader), job.rows[1]) and job.serves(2)


def test_a_damaged_delta_is_an_error_once(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.save()
    job.follower.poll()
    job.save(3)
    with damaged(job.entry("delta", 3)):
        with pytest.raises(ValueError, match="delta-00000003"):
            job.follower.poll()
        assert job.follower.poll() is None and job.serves(1)
        assert len(job.follower.skipped) == 1 and "delta-00000003" in job.follower.skipped[0]
        command = ["follow", str(job.kept), "--to", str(job.served), "--once"]
        assert command_line.main(command) == 1 and "delta-00000003" in capsys.readouterr().err
    assert job.follower.poll().entry.step == 4 and job.serves(4) and not job.follower.skipped


def test_a_damaged_full_save_is_an_error_once(job: Job) -> None:
    job.save()
    job.follower.poll()
    job.save(full=True)
    damage(job.entry("full", 2))
    with pytest.raises(ValueError, match="full-00000002"):
        job.follower.poll()
    for _ in range(2):
        assert job.follower.poll() is None and job.serves(1) and len(job.follower.skipped) == 1
    assert len(list(job.served.glob("0*"))) == 1  # nothing is left of the builds
    job.save(full=True)
    assert job.follower.poll().entry.step == 3 and job.serves(3) and not job.follower.skipped


def test_a_gap_is_crossed_by_a_full_save_and_never_backwards(job: Job, tmp_path: Path) -> None:
    job.save(5)
    job.follower.poll()
    shutil.move(job.entry("delta", 3), tmp_path / "aside")
    for follower in (job.follower, job.new_follower(since=job.follower.since)):
        assert follower.poll() is None and job.serves(5) and follower.skipped == []
    job.save()
    followed = job.follower.poll()  # what is served leads to it
    assert followed.entry.step == 6 and job.serves(6)
    assert sorted_ids(followed.changed)["user"] == [5, 50]
    shutil.move(job.entry("delta", 6), tmp_path / "newest")
    shutil.move(tmp_path / "aside", job.entry("delta", 3))
    assert job.follower.poll() is None and job.serves(6)
    shutil.move(tmp_path / "newest", job.entry("delta", 6))
    job.save(2)
    shutil.rmtree(job.entry("delta", 7))
    assert job.follower.poll() is None and job.serves(6)
    assert job.follower.skipped == ["delta-00000008: an entry before it is missing."]
    job.save(full=True)
    assert job.follower.poll().changed is None and job.serves(9)


def test_entries_removed_between_are_no_fork(job: Job) -> None:
    job.save(2)
    job.follower.poll()
    for _ in range(2):
        job.save(full=True)
        job.save()
    shutil.rmtree(job.entry("full", 3))  # 1 and 2 were removed by the trainer
    followed = job.follower.poll()
    assert followed.entry.step == 6 and not followed.is_fork and job.serves(6)


def test_entries_removed_while_they_are_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save()
    job.follower.poll()
    job.save(2)
    job.trainer.checkpoints._keep = 1
    apply = follower_file.apply_deltas

    def late(*given: Any) -> str:
        monkeypatch.setattr(follower_file, "apply_deltas", apply)
        job.save(full=True)  # the entries before it are removed
        return apply(*given)

    monkeypatch.setattr(follower_file, "apply_deltas", late)
    with pytest.raises((ValueError, OSError)):
        job.follower.poll()
    followed = job.follower.poll()
    assert followed.entry.step == 4 and followed.skipped == [] and job.serves(4)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_fork_is_refused(job: Job, tmp_path: Path, is_full: bool, is_lost: bool) -> None:
    job.save(3)
    job.follower.poll()
    other = job.restored_at(tmp_path, 2)
    other.save(full=is_full)
    if is_lost:  # the follower remembers what it served
        job.lose("manifest is cut")
    for _ in range(2):
        with pytest.raises(serving.ForkedChain, match=r"got .*-00000004, which does not: t"):
            job.follower.poll()
        assert is_lost or job.serves(3)
    job.follower._follow_forks = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        followed = job.follower.poll()
    assert followed.is_fork and followed.changed is None and followed.entry.sequence == 4
    assert other.serves(3)
    job.follower._follow_forks = False
    other.save()
    assert not job.follower.poll().is_fork and other.serves(4)  # it is crossed
    other.trainer.checkpoints.close()


def test_a_fork_is_seen_though_older_entries_are_gone(job: Job, tmp_path: Path) -> None:
    job.save(3)
    job.follower.poll()
    other = job.restored_at(tmp_path, 2)
    other.save(full=True)
    shutil.rmtree(job.entry("full", 1))
    with pytest.raises(serving.ForkedChain):
        job.follower.poll()
    other.trainer.checkpoints.close()


def test_another_directory_is_a_fork(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.save(4)
    job.follower.poll()
    job.trainer.checkpoints.close()
    shutil.rmtree(job.kept)
    assert job.follower.poll() is None and "got none" in job.follower.skipped[0]
    job.trainer = Trainer(job.kept)
    job.save()
    with pytest.raises(serving.ForkedChain, match="or this is another directory"):
        job.follower.poll()
    command = ["follow", str(job.kept), "--to", str(job.served), "--once"]
    assert command_line.main(command) == 1 and "(--forks)" in capsys.readouterr().err
    assert command_line.main([*command, "--forks"]) == 0 and job.serves(1)
    assert job.follower.poll().entry.step == 1


def test_another_directory_whose_entries_are_all_later_is_a_fork(job: Job, tmp_path: Path) -> None:
    job.save()
    job.follower.poll()
    other = Job(tmp_path / "other", full_every=2, keep=1)
    other.save(4)
    assert read_chain(other.kept).entries[0].sequence > 1
    job.follower.path = other.kept
    with pytest.raises(serving.ForkedChain, match="or this is another directory"):
        job.follower.poll()
    assert job.serves(1)
    other.trainer.checkpoints.close()


def test_tables_of_no_entry_are_built_anew(job: Job) -> None:
    """Those that were built or updated by hand: a follower does not know how new they are."""
    job.save(2)
    full, delta = read_chain(job.kept).entries
    serving.build(full.tables, job.served)
    assert job.follower.served() is None
    with damaged(job.entry("delta", 2)), pytest.raises(ValueError, match="delta-00000002"):
        job.follower.poll()
    assert served_manifest(job.served)[1].entry is None
    assert job.follower.poll().entry.step == 2 and job.serves(2)
    assert served_manifest(job.served)[1].entry.id == delta.id == job.follower.served()


def test_two_followers_on_one_directory(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save()
    job.follower.poll()
    job.save(2)
    with only_writer(job.served), pytest.raises(serving.SecondWriter, match="second writer"):
        job.follower.poll()
    assert job.serves(1)
    assert job.follower.poll().entry.step == 3 and job.serves(3)


@pytest.mark.parametrize("call", ["build_instead", "apply_deltas"])
def test_what_another_follower_served_meanwhile_is_not_replaced(
    job: Job, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Between the look and the lock the other one serves a newer entry, to which the delta fits, too."""
    job.save()
    job.follower.poll()
    job.save(full=call == "build_instead")
    taken, other = getattr(follower_file, call), job.new_follower()

    def between(*given: Any) -> Any:
        monkeypatch.setattr(follower_file, call, taken)
        job.trainer.save()  # a delta without a change
        assert other.poll().entry.step == 3
        return taken(*given)

    monkeypatch.setattr(follower_file, call, between)
    with pytest.raises(serving.SecondWriter, match=r"expected generation .* of another writer"):
        job.follower.poll()
    assert job.follower.served() == other.since and job.serves(2)
    assert job.follower.poll().entry.step == 3


def kill_at(name: str, module: Any, call: Callable[[], Any]) -> None:
    """Calls in another process, which is killed when a function of a module is called."""

    def killed() -> None:
        setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        call()

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("at", ["new_slots", "complete", "switch"])
def test_a_build_aside_that_is_killed(job: Job, at: str) -> None:
    job.save()
    job.follower.poll()
    reader, files = serving.ServingEmbeddingBagCollection(job.served, TABLES), job.files()
    job.save(full=True)
    job.save()
    kill_at(at, builder, job.new_follower().poll)
    assert job.serves(1) and not reader.refresh()
    assert job.follower.poll().entry.step == 3 and job.serves(3)
    assert len(job.files()) == len(files)


def test_the_next_build_takes_the_place_of_a_killed_one(job: Job, tmp_path: Path) -> None:
    job.save()
    kill_at("new_slots", builder, job.follower.poll)
    (left,) = tmp_path.glob(".served*")
    before = sorted(path.name for path in left.iterdir())
    with only_writer(left), pytest.raises(serving.SecondWriter):  # as if it were still building
        job.follower.poll()
    assert sorted(path.name for path in left.iterdir()) == before
    assert job.follower.poll().entry.step == 1 and job.serves(1)
    assert not left.exists() and not {*before} & {path.name for path in job.served.iterdir()} - {
        "lock"
    }


def test_a_full_disk_changes_nothing(job: Job) -> None:
    job.save()
    job.follower.poll()
    job.trainer.train(*range(300))
    job.save()
    files = job.files()
    with file_limit(1000), pytest.raises(OSError, match="File too large"):
        job.follower.poll()
    assert job.serves(1) and job.files() == files
    job.lose("manifest is cut")
    files = job.files()
    with file_limit(100), pytest.raises(OSError, match="File too large"):
        job.new_follower(rows=torch.float32).poll()
    assert job.files() == files
    with pytest.warns(UserWarning, match="built anew"):
        assert job.follower.poll().entry.step == 2 and job.serves(2)


def test_a_generator_warns_once_and_waits_longer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.warns(UserWarning) as seen:
        generations = serving.follow(job.kept, job.served, every=1)
        assert next(generations).entry.step == 1
        job.save()
        damage(job.entry("delta", 2))
        with pytest.raises(KeyboardInterrupt):
            next(generations)
    texts = [str(one.message) for one in seen if "serving.follow: " in str(one.message)]
    assert len(texts) == 1 and "delta-00000002" in texts[0]
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]


def test_lack_of_memory_is_told_once_and_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save()
    job.follower.poll()
    job.save()
    faults: list[Exception] = [MemoryError(), MemoryError(), KeyError("a bug")]
    apply = follower_file.apply_deltas

    def failing(*given: Any) -> Any:
        if faults:
            raise faults.pop(0)
        return apply(*given)

    monkeypatch.setattr(follower_file, "apply_deltas", failing)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    generations = serving.follow(job.kept, job.served, since=job.follower.since)
    with (
        pytest.warns(UserWarning, match=r"follow: expected memory .*, got MemoryError: ") as seen,
        pytest.raises(KeyError, match="a bug"),  # no lack of memory
    ):
        next(generations)
    assert len(seen) == 1
    command = ["follow", str(job.kept), "--to", str(job.served), "--once"]
    faults.append(MemoryError())
    assert command_line.main(command) == 1
    assert capsys.readouterr().err.startswith("follow: expected memory for what it reads, got Mem")
    assert command_line.main(command) == 0 and job.serves(2)


def test_other_rows_or_tables_than_those_served(job: Job) -> None:
    job.save()
    job.new_follower(rows=torch.float16, tables=["user"]).poll()
    with pytest.raises(
        ValueError, match=r"with rows torch.int8, got torch.float16\. Leave rows out"
    ):
        job.new_follower(rows=torch.int8)
    with pytest.raises(ValueError, match=r"with tables \['item', 'user'\], got \['user'\]"):
        job.new_follower(tables=["user", "item"])
    job.save()
    follower = job.new_follower(since=job.follower.served())
    assert follower.poll().changed.keys() == {"user"}


def test_the_error_of_an_empty_directory_says_what_to_give(job: Job) -> None:
    """The mount of a volume is an empty directory, which a build cannot replace by a rename."""
    job.save()
    job.served.mkdir()
    for make in (
        lambda: job.new_follower().poll(),
        lambda: serving.build(job.entry("full", 1) / "state", job.served),
    ):
        with pytest.raises(ValueError, match=r"does not exist, such as .*/served/tables"):
            make()


def test_paths_and_devices_are_those_of_the_first_moment(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    follower = serving.Follower("kept", "served")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for _ in range(2):
        job.save(2)
        with torch.device("meta"):  # the default device of the user
            followed = follower.poll()
    assert sorted_ids(followed.changed)["user"] == [2, 3, 50] and job.serves(4)
    assert list((tmp_path / "other").iterdir()) == []
