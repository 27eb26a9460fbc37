"""`Checkpoints` in object stores: S3 by its protocol, and memory:// whose calls fail one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
import torch
from checkpoint_cases import tables_of
from checkpoint_jobs import Job, failing
from fsspec.implementations.memory import MemoryFileSystem
from object_store import AFTER, BEFORE, PARTLY, S3, Faults, forget_memory

from torchrec_dyn import serving
from torchrec_dyn.checkpoint import Checkpoints, entry_writing
from torchrec_dyn.checkpoint_format import create_file, place_of, read_chain


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3').new_bucket()}/run"
    else:
        forget_memory()
        yield "memory://run"
        forget_memory()


def state(job: Job) -> dict[str, torch.Tensor]:
    (table,) = tables_of(job.model)
    return {**table.export_state(), "dense": job.dense.clone()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def folders(url: str) -> list[str]:
    return sorted(place.name for place in place_of(url).iterdir() if place.name != "commits")


def test_a_line_is_saved_restored_and_pruned(url: str) -> None:
    job = Job(url, keep=1, full_every=3)
    states = []
    for kind in ("full", "delta", "delta", "full", "delta"):
        assert job.save().kind == kind
        states.append(state(job))
    assert [entry.step for entry in job.checkpoints.entries()] == [4, 5]
    assert [name[:13] for name in folders(url)] == ["delta-0000000", "full-00000004"]
    other = Job(url, full_every=3)
    for step in (4, 5):
        assert other.restore(step=step).extra == {"next": step}
        assert same(state(other), states[step - 1])
    assert other.restore().entry.id == other.checkpoints.latest().id
    other.train()
    job.train()
    assert same(state(job), state(other))


def test_saves_in_the_background(url: str) -> None:
    job = Job(url, full_every=2)
    for _ in range(3):
        job.save("async_save")
    job.checkpoints.close()
    again = Job(url)
    assert again.restore().step == 3 and same(state(again), state(job))


def test_each_race_for_a_name_has_one_winner(url: str) -> None:
    for number in range(6):
        place, won = place_of(url) / f"commits/{number:08}", list[bytes]()
        start = threading.Barrier(8)

        def put(data: bytes, place: Any = place, won: Any = won, start: Any = start) -> None:
            start.wait()
            try:
                create_file(place, data)
            except FileExistsError:
                return
            won.append(data)

        writers = [threading.Thread(target=put, args=(bytes([n]),)) for n in range(8)]
        for one in writers:
            one.start()
        for one in writers:
            one.join()
        assert won == [place.read_bytes()]


def save_after(work: Any, second: Job) -> None:
    """Works while a second writer has written its files, but not its commit file; it is told."""
    real = entry_writing.commit_entry

    def late(entry: Any) -> None:
        work()
        real(entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_writing, "commit_entry", lambda entry: (patch.undo(), late(entry)))
        with pytest.raises(ValueError, match="expected to write save 2, got one of another writer"):
            second.save()


def test_the_second_of_two_writers_is_told(url: str) -> None:
    first, second = Job(url, keep=9), Job(url, keep=9)
    first.save()
    second.restore()
    save_after(lambda: first.save(), second)
    with pytest.raises(ValueError, match="expected to write after save 1, got a directory with sa"):
        second.save()
    assert [entry.sequence for entry in read_chain(url).entries] == [1, 2]
    third = Job(url)
    assert third.restore().step == 2 and same(state(third), state(first))
    third.save()
    assert len(folders(url)) == 2  # what the second has left is gone


def test_a_sequence_that_was_pruned_is_taken(url: str) -> None:
    """By a writer that was given up for dead while others saved and pruned."""
    first, second = Job(url, keep=1), Job(url, keep=1)
    first.save()
    second.restore()
    save_after(lambda: [first.save() for _ in range(2)], second)
    assert [entry.sequence for entry in read_chain(url).entries] == [3]
    again = Job(url)
    assert again.restore().step == 3 and same(state(again), state(first))


def test_a_killed_save_leaves_files_that_the_next_one_removes(url: str) -> None:
    job = Job(url, keep=9)
    job.save()
    with failing(entry_writing, "commit_entry"), pytest.raises(OSError, match="No space"):
        job.save()
    assert len(folders(url)) == 2
    again = Job(url, keep=9)
    assert again.restore().step == 1
    again.save()
    assert [name[:13] for name in folders(url)] == ["full-00000001", "full-00000002"]
    assert [entry.sequence for entry in read_chain(url).entries] == [1, 2]


def test_a_commit_whose_answer_is_lost(url: str) -> None:
    """The driver sends it again, or gives up: the entry is there, once."""
    job = Job(url)
    driver = s3fs.S3FileSystem if url.startswith("s3") else MemoryFileSystem
    real = driver.pipe_file

    def pipe(self: Any, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        real(self, path, value, mode=mode, **options)
        if mode == "create":
            raise ConnectionError("the answer is lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "pipe_file", pipe)
        assert job.save().sequence == 1
        assert job.save().sequence == 2
    assert [entry.sequence for entry in read_chain(url).entries] == [1, 2]


def test_what_another_client_has_written_is_seen(s3: S3) -> None:
    """s3fs keeps listings for ever."""
    url = f"{s3.new_bucket()}/run"
    job = Job(url)
    job.save()
    mine = s3fs.S3FileSystem()
    mine.find(url)
    for folder in ("", "/commits"):
        mine.ls(f"{url}{folder}")
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_dyn.checkpoint_format.store_path.url_to_fs", lambda _: (other, ""))
        later = Job(url)
        later.restore()
        later.save()
    assert len(folders(url)) == 2
    assert Checkpoints(url).latest().sequence == 2


@pytest.mark.parametrize("keep", [1, 9])
def test_an_old_listing_hides_no_entry(keep: int) -> None:
    """The newest entries are found by their names, also if those that were listed are pruned."""
    forget_memory()
    job = Job("memory://run", keep=keep)
    job.save()
    old = {path: MemoryFileSystem().ls(path) for path in ("/run", "/run/commits")}
    for _ in range(2):
        job.save()
    real = MemoryFileSystem.ls

    def ls(self: Any, path: str, **options: Any) -> Any:
        return old.get(self._strip_protocol(path)) or real(self, path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "ls", ls)
        found = [entry.sequence for entry in read_chain("memory://run").entries]
        assert found == ([3] if keep == 1 else [1, 2, 3])
        assert Job("memory://run").restore().step == 3
        # A commit file that cannot be read may be there.
        with Faults(4).active(), pytest.raises(OSError, match="commits/00000002"):
            read_chain("memory://run")


def test_a_driver_that_may_let_two_writers_win_is_refused(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/run"
    with pytest.raises(
        ValueError, match="expected a URL of memory, s3, s3a to save to, got another"
    ):
        Job(url).save()
    assert not [*tmp_path.iterdir()]
    Job(tmp_path / "run").save()
    assert Job(url).restore().step == 1


class Derived(MemoryFileSystem):
    protocol = "derived"


def test_a_driver_derived_from_one_that_writes_is_written_with() -> None:
    forget_memory()
    fsspec.register_implementation("derived", Derived, clobber=True)
    Job("derived://run").save()
    assert Job("derived://run").restore().step == 1


@pytest.mark.parametrize("is_store", [True, False])
def test_a_follower_sees_a_branch_whose_begin_is_pruned(is_store: bool, tmp_path: Path) -> None:
    forget_memory()
    where: Any = "memory://run" if is_store else tmp_path / "run"
    job = Job(where, keep=2)
    for _ in range(3):
        job.save()
    job.restore(step=1) if job.checkpoints.entries()[0].step == 1 else job.restore(step=2)
    follower = serving.Follower(where, tmp_path / "served", follow_forks=True)
    for _ in range(2):
        follower.poll()
    for _ in range(3):
        job.save()
    followed = follower.poll()
    assert followed is not None and followed.entry.id == job.checkpoints.latest().id
    job.checkpoints.close()


def test_a_store_without_an_answer_is_no_damage() -> None:
    """No older entry is loaded instead, and nothing is marked."""
    forget_memory()
    job = Job("memory://run", keep=9)
    for _ in range(2):
        job.save()
    number, faults = 0, Faults(1)
    while number == 0 or faults.has_failed:
        number += 1
        again, faults = Job("memory://run"), Faults(number)
        with faults.active():
            try:
                assert again.restore(on_damage="previous").step == 2
            except OSError:
                assert faults.has_failed
    assert number > 10 and not any(entry.has_failed for entry in job.checkpoints.entries())


def test_a_long_read_of_which_a_part_is_short_is_an_error() -> None:
    forget_memory()
    place = place_of("memory://run/long")
    place.write_bytes(bytes(20 << 20))
    assert len(place.read_range(1, 20 << 20)) == (20 << 20) - 1
    for number in (1, 2, 3):
        with (
            Faults(number, PARTLY).active(),
            pytest.raises(OSError, match=r"expected \d+ bytes, got"),
        ):
            place.read_range(0, 20 << 20)


def test_what_may_not_be_removed_is_an_error() -> None:
    """s3fs passes over it."""
    forget_memory()
    place = place_of("memory://run")
    (place / "a" / "b").write_bytes(b"1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm", lambda *_, **options: None)
        with pytest.raises(OSError, match="a could not be removed"):
            place.remove_all()
    place.remove_all()
    assert not place.exists()


class Old(MemoryFileSystem):
    """As drivers before 2024.10."""

    protocol = "memory-of-old"

    def pipe_file(self, path: str, value: bytes) -> None:  # type: ignore[override]
        super().pipe_file(path, value)


def test_urls_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("memory-of-old", Old, clobber=True)
    with pytest.raises(
        ValueError, match="expected a URL of memory, s3, s3a to save to, got another"
    ):
        Job("memory-of-old://run").save()
    for url in ("S3://bucket/run", "simplecache::s3://bucket/run"):
        with pytest.raises(ValueError, match="expected a URL"):
            Checkpoints(url)
    assert not [*tmp_path.iterdir()]


CALLS = {"full": 60, "delta": 60, "prune": 40, "restore": 60}  # each makes fewer


@pytest.mark.everyday(18)
@pytest.mark.parametrize("kind", [BEFORE, AFTER, PARTLY])
@pytest.mark.parametrize(
    ("work", "number"), [(work, at) for work, most in CALLS.items() for at in range(1, most)]
)
def test_one_call_of_the_driver_fails(work: str, number: int, kind: str) -> None:
    """Then the next job finds the last entry, or the one before; nothing is lost, or there twice."""
    forget_memory()
    full_every = 1 if work in ("full", "prune") else 9
    begun, states = Job("memory://run", keep=9, full_every=full_every), {}
    for _ in range(2):
        begun.save()
        states[begun.step] = state(begun)
    job = Job("memory://run", keep=1 if work == "prune" else 9, full_every=full_every)
    job.restore()
    faults, saved = Faults(number, kind), False
    with faults.active():
        try:
            if work == "prune":
                job.checkpoints.prune()
            elif work == "restore":
                job.restore()
            else:
                saved = job.save() is not None
        except (OSError, ValueError):
            pass
    assert faults.calls < CALLS[work]
    states[3] = state(job)
    sequences = [entry.sequence for entry in read_chain("memory://run").entries]
    assert sequences in ([1, 2], [1, 2, 3], [2]) and (not saved or sequences[-1] == 3)
    again = Job("memory://run", keep=9, full_every=full_every)
    step = again.restore().step
    assert step == sequences[-1] and same(state(again), states[step])
    again.save()
    assert len(folders("memory://run")) == len(read_chain("memory://run").entries)


@pytest.mark.everyday(8)
@pytest.mark.parametrize("kind", [BEFORE, AFTER, PARTLY])
@pytest.mark.parametrize(("is_delta", "number"), [(d, n) for d in (0, 1) for n in range(1, 40)])
def test_one_call_of_a_follower_fails(
    is_delta: int, number: int, kind: str, tmp_path: Path
) -> None:
    """The served entry never goes back, and is the newest one soon."""
    forget_memory()
    job = Job("memory://run", keep=9, full_every=9)
    job.save()
    follower = serving.Follower("memory://run", tmp_path / "served")
    if is_delta:
        follower.poll()
        job.save()
    faults, sequences = Faults(number, kind), [0]
    with faults.active():
        for _ in range(3):
            try:
                followed = follower.poll()
            except (OSError, ValueError):
                continue
            sequences += [followed.entry.sequence] if followed else []
    assert sequences == sorted(sequences) and faults.calls > 10
    assert follower.served() == job.checkpoints.latest().id
    serving.verify(tmp_path / "served")
