"""Damaged, missing and foreign entries, forks, other writers: rows do not go back, nor silently stay."""

import errno
import io
import itertools
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import quietly
from follow_cases import Trainer, served_rows, sorted_ids
from full_disk import file_limit

from torchrec_dyn import __main__ as command_line
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import checkpoints
from torchrec_dyn.checkpoint_format import chunked_tensor, read_chain
from torchrec_dyn.serving import builder, update
from torchrec_dyn.serving import follower as follower_file
from torchrec_dyn.serving import manifest as manifest_file
from torchrec_dyn.serving.files import only_writer
from torchrec_dyn.serving.manifest import current_generation, read_manifest


class Job:
    """A trainer with its follower; each save trains one more id."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.kept, self.served = folder / "kept", folder / "served"
        self.trainer = Trainer(self.kept, **options)
        self.follower = self.new_follower()
        self.rows: dict[int, torch.Tensor] = {}  # by step

    def new_follower(self, **options: Any) -> serving.Follower:
        return serving.Follower(self.kept, self.served, **options)

    def save(self, count: int = 1) -> None:
        for _ in range(count):
            self.trainer.train(self.trainer.step, 50)
            self.trainer.save()
            self.rows[self.trainer.step] = self.trainer.rows()

    def entry(self, kind: str, number: int) -> Path:
        return self.kept / f"{kind}-{number:08}"

    def serves(self, step: int) -> bool:
        return torch.equal(served_rows(self.served), self.rows[step])

    def restored_at(self, folder: Path, step: int) -> "Job":
        """Returns a job that goes on from an older step, with the same follower."""
        self.trainer.checkpoints.close()
        other = Job(folder, full_every=8)
        one = other.trainer
        quietly(one.checkpoints.restore, one.model, one.optimizer, step=step)
        one.step, other.follower, other.rows = step, self.follower, dict(self.rows)
        one.train(200)
        return other


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = Job(tmp_path, full_every=8)
    yield made
    made.trainer.checkpoints.close()


def damage(folder: Path) -> None:
    file = next(folder.glob("*/*.distcp"))
    content = bytearray(file.read_bytes())
    for place in range(500, len(content), 64):
        content[place] ^= 1
    file.write_bytes(bytes(content))


def test_a_damaged_delta_is_told_and_what_is_sound_is_served(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save()
    job.follower.poll()
    job.save(3)
    damage(job.entry("delta", 3))
    followed = job.follower.poll()
    assert followed.entry.step == 2 and job.serves(2)
    assert [line.split(":")[0] for line in followed.skipped] == ["delta-00000004", "delta-00000003"]
    assert "delta-00000003 before it: " in followed.skipped[0]
    assert job.follower.poll() is None  # what comes before the damaged one is served
    assert job.follower.skipped == followed.skipped
    command = ["follow", str(job.kept), "--to", str(job.served), "--once"]
    assert command_line.main(command) == 1 and "delta-00000003: " in capsys.readouterr().err
    (job.entry("delta", 3) / "entry.json").unlink()
    assert job.follower.poll() is None and "expected entry.json" in job.follower.skipped[0]
    assert "an entry before it is missing" in job.follower.skipped[1] and job.serves(2)


class Unreadable(io.BufferedReader):
    """A file whose rows cannot be read, though they are found in it."""

    finds = False

    def read(self, *size: int) -> bytes:
        self.finds = True
        return super().read(*size)

    def readinto(self, into: Any) -> int:
        if self.finds:
            return super().readinto(into)
        raise OSError(errno.EIO, "Input/output error")  # as that of Python, without a name


def test_a_delta_on_a_bad_sector_is_told_and_what_is_sound_is_served(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save()
    job.follower.poll()
    job.save(3)

    def opened(path: str, mode: str) -> io.BufferedReader:
        return (Unreadable if "delta-00000003" in path else io.BufferedReader)(
            io.FileIO(path, mode)
        )

    with monkeypatch.context() as changed:
        changed.setattr(chunked_tensor, "open", opened, raising=False)
        followed = job.follower.poll()
        assert followed.entry.step == 2 and job.serves(2)
        assert "delta-00000003: [Errno 5] Input/output error: '" in followed.skipped[1]
        assert job.follower.poll() is None and job.follower.skipped == followed.skipped
    full = OSError(errno.ENOSPC, "No space left on device", str(job.served / "rows-51ab20fe"))
    numbers = OSError(errno.EMFILE, "Too many open files", str(job.entry("delta", 3) / "f"))
    for fault in (full, numbers):
        with monkeypatch.context() as changed:
            changed.setattr(
                follower_file, "apply_deltas", lambda *_, e=fault: (_ for _ in ()).throw(e)
            )
            with pytest.raises(OSError, match=str(fault.strerror)):  # no fault of an entry
                job.new_follower().poll()
    assert job.new_follower().poll().entry.step == 4 and job.serves(4)


def test_followers_do_not_follow_torchs_default_device(job: Job) -> None:
    for _ in range(2):
        job.save(2)
        with torch.device("meta"):  # the default device of the user
            followed = job.follower.poll()
    assert sorted_ids(followed.changed)["user"] == [2, 3, 50] and job.serves(4)


def test_a_damaged_full_save_is_read_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save()
    job.follower.poll()
    job.trainer.checkpoints._marker = None  # the next save is full
    job.save(2)
    damage(job.entry("full", 2))
    build, calls = follower_file.build_again_from, []
    monkeypatch.setattr(
        follower_file, "build_again_from", lambda *given: calls.append(1) or build(*given)
    )
    for _ in range(3):
        assert job.follower.poll() is None and len(calls) == 1 and job.serves(1)
        assert len(job.follower.skipped) == 2
    now = time.monotonic() + follower_file._RETRY_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert job.follower.poll() is None and len(calls) == 2
    job.trainer.checkpoints._marker = None
    job.save()
    assert job.follower.poll().entry.step == 4 and job.serves(4) and not job.follower.skipped


def test_an_unreadable_entry_between_does_not_turn_rows_back(job: Job) -> None:
    job.save(5)
    job.follower.poll()
    file = job.entry("delta", 3) / "entry.json"
    text = file.read_text()
    file.unlink()
    for follower in (job.follower, job.new_follower(since=job.follower.since)):
        assert follower.poll() is None and job.serves(5) and follower.skipped == []
    job.save()
    followed = job.follower.poll()  # what is served leads to it
    assert followed.entry.step == 6 and job.serves(6)
    assert sorted_ids(followed.changed)["user"] == [5, 50]
    (job.entry("delta", 6) / "entry.json").unlink()
    file.write_text(text)
    assert job.follower.poll() is None and job.serves(6)


def test_a_second_follower_is_no_damage(job: Job) -> None:
    job.save()
    job.follower.poll()
    job.save(2)
    with only_writer(job.served), pytest.raises(serving.SecondWriter, match="second writer"):
        job.follower.poll()
    assert job.serves(1)
    assert job.follower.poll().entry.step == 3 and job.serves(3)


def test_another_follower_served_meanwhile(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deltas were applied after this follower looked: they fit no more, and are not damaged."""
    job.save()
    job.follower.poll()
    job.save(2)
    apply = follower_file.apply_deltas

    def late(*given: Any) -> None:
        monkeypatch.setattr(follower_file, "apply_deltas", apply)
        assert job.new_follower().poll().entry.step == 3
        apply(*given)

    monkeypatch.setattr(follower_file, "apply_deltas", late)
    followed = job.follower.poll()
    assert followed.entry.step == 3 and followed.skipped == [] and job.serves(3)
    assert sorted_ids(followed.changed)["user"] == [1, 2, 50]


@pytest.mark.parametrize("call", ["build_again_from", "apply_deltas"])
@pytest.mark.parametrize("is_late", [False, True])
def test_rows_do_not_go_back_when_another_follower_serves_meanwhile(
    job: Job, monkeypatch: pytest.MonkeyPatch, call: str, is_late: bool
) -> None:
    """The other one serves a newer entry between two writes of this one, to which the deltas fit, too."""
    job.save()
    job.follower.poll()
    job.trainer.checkpoints._marker = None  # the next save is full
    job.save()
    if call == "apply_deltas":
        job.follower.poll()
    job.trainer.save()  # a delta without a change
    taken, other = getattr(follower_file, call), job.new_follower()

    def serve_newer() -> None:
        monkeypatch.setattr(follower_file, call, taken)
        job.trainer.save()
        assert other.poll().entry.step == 4

    def between(*given: Any) -> Any:
        if not is_late:
            serve_newer()
        told = taken(*given)
        serve_newer()
        return told

    monkeypatch.setattr(follower_file, call, between)
    assert job.follower.poll().entry.step == (3 if is_late and call == "apply_deltas" else 4)
    assert job.follower.served() == other.since and job.serves(2)


def test_entries_that_are_removed_while_they_are_read(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save()
    job.follower.poll()
    job.save(2)
    job.trainer.checkpoints._keep = 1
    apply = follower_file.apply_deltas

    def late(*given: Any) -> None:
        monkeypatch.setattr(follower_file, "apply_deltas", apply)
        job.trainer.checkpoints._marker = None
        job.save()  # full: the entries before it are removed
        apply(*given)

    monkeypatch.setattr(follower_file, "apply_deltas", late)
    followed = job.follower.poll()
    assert followed.entry.step == 4 and followed.skipped == [] and job.serves(4)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_fork_is_refused(job: Job, tmp_path: Path, is_full: bool) -> None:
    job.save(3)
    job.follower.poll()
    other = job.restored_at(tmp_path, 2)
    if is_full:
        other.trainer.checkpoints._marker = None
    other.save()
    for _ in range(2):
        with pytest.raises(serving.ForkedChain, match=r"got .*-00000004, which does not: t"):
            job.follower.poll()
        assert job.serves(3)
    follower = job.new_follower(follow_forks=True, since=job.follower.since)
    followed = follower.poll()
    assert followed.is_fork and followed.changed is None and followed.entry.sequence == 4
    assert other.serves(3)
    other.save()
    assert not job.follower.poll().is_fork and other.serves(4)  # it is crossed
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


@pytest.mark.parametrize("is_older", [False, True])
def test_another_directory_whose_entries_are_all_later_is_a_fork(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_older: bool
) -> None:
    if is_older:  # the ids of versions whose entries do not tell their chain
        monkeypatch.setattr(checkpoints, "new_id", lambda _: secrets.token_hex(16))
    job.save(2)
    job.follower.poll()
    other = Job(tmp_path / "other", full_every=2, keep=1)
    other.save(4)
    rest = Trainer(other.kept, full_every=2, keep=1)  # a job that goes on after a restart
    other.trainer.checkpoints.close()
    quietly(rest.checkpoints.restore, rest.model, rest.optimizer)
    rest.step = 4
    rest.save()
    assert [one.sequence for one in read_chain(other.kept).entries] == [5]
    job.follower.path = other.kept
    if is_older:  # it cannot be told from days without a follower
        assert job.follower.poll().entry.step == 5
    else:
        with pytest.raises(serving.ForkedChain, match="or this is another directory"):
            job.follower.poll()
        assert job.serves(2)
    rest.checkpoints.close()


def test_entries_removed_between_are_no_fork(job: Job) -> None:
    job.save(2)
    job.follower.poll()
    for _ in range(2):
        job.trainer.checkpoints._marker = None
        job.save(2)
    shutil.rmtree(job.entry("full", 3))  # 1 and 2 were removed by the trainer
    followed = job.follower.poll()
    assert followed.entry.step == 6 and not followed.is_fork and job.serves(6)


def test_tables_without_the_name_of_an_entry_are_known_by_their_sums(job: Job) -> None:
    """They are of an older version, or were built and updated by hand; a follower goes on from there."""
    job.save(2)
    full, delta = read_chain(job.kept).entries
    serving.build(full.tables, job.served)
    serving.apply_delta(job.served, delta.tables)

    def manifest() -> Any:
        return read_manifest(job.served, current_generation(job.served))

    assert manifest().entry is None and '"format": 2' in manifest().to_json()
    assert job.follower.served() == delta.id
    assert job.new_follower(since=delta.id).poll() is None
    job.save()
    followed = job.new_follower(since=delta.id).poll()
    assert sorted_ids(followed.changed)["user"] == [2, 50] and job.serves(3)
    assert manifest().entry.id == followed.entry.id and '"format": 3' in manifest().to_json()
    serving.verify(job.served)
    # Rows that another than a follower wrote are not those of the entry.
    job.save()
    serving.apply_delta(job.served, job.entry("delta", 4) / "changes")
    assert manifest().entry is None and job.follower.served() == read_chain(job.kept).entries[3].id
    serving.build_again(job.served, full.tables)
    assert manifest().entry is None and job.follower.served() == full.id


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sums", {"user": 5}), ("sums", {"user": "xyz 1"}), ("sums", {"user": "1"}), ("sums", []),
        ("id", "../../x"), ("parent", 5), ("time", float("nan")), ("step", "1"),
    ],
)  # fmt: skip
def test_an_entry_with_other_values_is_damaged(job: Job, name: str, value: Any) -> None:
    job.save()
    file = job.entry("full", 1) / "entry.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    assert job.follower.poll() is None and "It is damaged" in job.follower.skipped[0]


def test_lag_is_not_negative(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save()
    now = time.time() - 100  # the clock of the trainer's machine is ahead
    monkeypatch.setattr(time, "time", lambda: now)
    assert job.follower.poll().lag == 0 and job.follower.lag() == 0


def test_lag_beside_a_writer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation is removed after its name was read."""
    job.save()
    job.follower.poll()
    read, calls = manifest_file.read_manifest, itertools.count()

    def late(*given: Any) -> Any:
        if next(calls) == 0:
            writer = job.new_follower()
            for _ in range(2):
                job.save()
                writer.poll()
        return read(*given)

    monkeypatch.setattr(manifest_file, "read_manifest", late)
    assert job.follower.lag() < 60


def test_faults_are_told_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save(2)
    damage(job.entry("delta", 2))
    waits: list[float] = []
    texts: list[str] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        texts.extend(str(one.message) for one in seen)
        seen.clear()
        if len(waits) == 3:
            (job.entry("delta", 2) / "entry.json").unlink()
        if len(waits) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        generations = serving.follow(job.kept, job.served, every=0.5)
        assert next(generations).entry.step == 1
        with pytest.raises(KeyboardInterrupt):
            next(generations)
    assert len(texts) == 1 and "follow: delta-00000002: expected entry.json, got none" in texts[0]
    assert waits == [0.5] * 6


def test_errors_are_tried_again_in_longer_intervals(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save()
    faults, waits = [OSError(28, "No space left", f"file {n}") for n in range(9)], []
    poll = serving.Follower.poll
    monkeypatch.setattr(
        serving.Follower,
        "poll",
        lambda self: (_ for _ in ()).throw(faults.pop()) if faults else poll(self),
    )
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.warns(UserWarning) as seen:
        assert next(serving.follow(job.kept, job.served, every=1)).entry.step == 1
    assert len(seen) == 1 and "No space left" in str(seen[0].message)
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_lack_of_memory_is_told_once_and_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save(2)
    faults: list[Exception] = [MemoryError(), MemoryError(), KeyError("a bug")]
    apply = follower_file.apply_deltas

    def failing(*given: Any) -> Any:
        if faults:
            raise faults.pop(0)
        return apply(*given)

    monkeypatch.setattr(follower_file, "apply_deltas", failing)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with (
        pytest.warns(UserWarning, match=r"follow: expected memory .*, got MemoryError: ") as seen,
        pytest.raises(KeyError, match="a bug"),  # no lack of memory
    ):
        next(serving.follow(job.kept, job.served))
    assert len(seen) == 1
    assert next(serving.follow(job.kept, job.served)).entry.step == 2 and job.serves(2)
    job.save()
    text = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    )
    command = ["follow", str(job.kept), "--to", str(job.served), "--once"]
    for fault in (MemoryError(), RuntimeError(f"{text}:\nyou tried")):
        faults.append(fault)
        assert command_line.main(command) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"follow: expected memory for what it reads, got {type(fault).__name__}: "
        )
    for name, module in (("inspect", "inspect_checkpoint"), ("verify", "verify_checkpoint")):
        monkeypatch.setattr(command_line, module, lambda *_: (_ for _ in ()).throw(MemoryError()))
        assert command_line.main([name, str(job.entry("full", 1) / "state")]) == 1
        assert capsys.readouterr().err.startswith(f"{name}: expected memory for what it reads, got")
    assert command_line.main(command) == 0 and job.serves(3)


def test_deltas_that_have_no_room_together_are_applied_one_by_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "_WASTE_BYTES", 0)  # unused rows are given back after each delta
    for _ in range(4):  # 9,600 bytes of rows each
        job.trainer.train(*range(300))
        job.save()
        if job.trainer.step == 1:
            job.follower.poll()
    with file_limit(1000), pytest.raises(OSError, match="File too large"):
        job.follower.poll()  # not for one of them either
    assert job.serves(1)
    with file_limit(32_000):
        followed = job.follower.poll()
    assert followed is not None and followed.entry.step == 4 and job.serves(4)
    assert followed.skipped == [] and sorted_ids(followed.changed)["user"] == list(range(300))


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
    serving.Follower(job.kept, job.served / "tables").poll()
    assert torch.equal(served_rows(job.served / "tables"), job.rows[1])


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


def _build_and_die(checkpoint: Path, out: Path) -> None:
    builder.write_tables = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    serving.build(checkpoint, out)


def test_what_a_killed_build_left_is_removed(job: Job, tmp_path: Path) -> None:
    job.save()
    process = multiprocessing.get_context("fork").Process(
        target=_build_and_die, args=(job.entry("full", 1) / "state", job.served)
    )
    process.start()
    process.join()
    (left,) = tmp_path.glob(".served.*")
    others = [tmp_path / f".served{end}" for end in (".x.abcd1234", ".abcd12345", "2.abcd1234")]
    for one in others:
        shutil.copytree(left, one)
    with only_writer(left):  # as if it were still building
        job.new_follower()
        assert left.exists()
    job.new_follower()
    assert not left.exists() and all(one.exists() for one in others)
    shutil.copytree(others[0], left)
    serving.build(job.entry("full", 1) / "state", job.served)
    assert not left.exists() and replace(job.follower.poll().entry, sums={}).step == 1
