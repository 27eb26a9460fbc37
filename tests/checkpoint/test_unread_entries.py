"""Entries that cannot be read for a moment: no older one is loaded instead, and none of them is removed."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_jobs import Job, failing, names

from torchrec_dyn.checkpoint import pruning
from torchrec_dyn.checkpoint_format import checkpoint_reader, read_chain

_NUMBERS = OSError(errno.EMFILE, "Too many open files", "f")


@pytest.mark.parametrize("error", [_NUMBERS, MemoryError("Cannot allocate")])
def test_an_index_without_memory_or_file_numbers_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An older entry must not be loaded instead."""
    job = Job(tmp_path / "kept")
    for _ in range(2):
        job.save()
    job.checkpoints.close()
    if isinstance(error, MemoryError):  # it is tried whether there is memory for a sound index
        monkeypatch.setattr(checkpoint_reader, "bytearray", _no_memory, raising=False)
    with (
        failing(checkpoint_reader.FileSystemReader, "read_metadata", error=error),
        pytest.raises(RuntimeError, match=r"expected memory for .*full-00000002, got too little"),
    ):
        Job(tmp_path / "kept").restore()


def _no_memory(size: int) -> None:
    raise MemoryError(f"Cannot allocate {size} bytes")


@pytest.mark.parametrize("error", [_NUMBERS, MemoryError("Cannot allocate")])
def test_an_entry_without_memory_or_file_numbers_is_no_damage(
    tmp_path: Path, error: Exception
) -> None:
    """An older entry must not be loaded instead."""
    job = Job(tmp_path / "kept")
    for _ in range(2):
        job.save()
    with failing(Path, "read_text", 2, error), pytest.raises(type(error), match=str(error)[-9:]):
        job.restore()
    assert job.restore().step == 2
    job.checkpoints.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_full_save_that_was_not_readable_once_stays(tmp_path: Path, number: int) -> None:
    """The index of its state; the others are removed when the number that is kept is there."""
    kept = tmp_path / "kept"
    job = Job(kept, keep=2)
    for _ in range(2):
        job.save()
    for name in ("open_files", "read_metadata"):
        at = pruning if name == "open_files" else checkpoint_reader.FileSystemReader
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(at, name, _failing_always(number))
            job.save()
        assert names(kept)[:2] == ["full-00000001", "full-00000002"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "open_files", _no_memory)
        job.save()
        assert not job.checkpoints.prune()  # a save only warns of an error there
    assert len(names(kept)) == 5
    job.save()
    assert names(kept) == ["full-00000005", "full-00000006"]
    job.checkpoints.close()


@pytest.mark.parametrize("name", ["read_metadata", "read_data"])
def test_full_saves_that_could_not_be_loaded_once_stay(tmp_path: Path, name: str) -> None:
    """A disk that fails during a restore: they may be whole, and fewer than are kept would be left."""
    kept = tmp_path / "kept"
    job = Job(kept, keep=4)
    for _ in range(3):
        job.save()
    job.checkpoints.close()
    job = Job(kept, keep=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_reader.FileSystemReader, name, _failing_always(errno.EIO))
        with pytest.raises(ValueError, match=r"can be loaded, got none.*Input/output error"):
            job.restore()
    assert job.restore().step == 3
    before = names(kept)
    job.save()
    assert names(kept) == [*before, "full-00000004"]
    for _ in range(2):
        job.save()
    assert names(kept) == [f"full-0000000{number}" for number in (3, 4, 5, 6)]
    job.checkpoints.close()


def _failing_always(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), "f")

    return call


def test_what_an_unread_entry_leads_to_stays(tmp_path: Path) -> None:
    """A disk that fails once at its `entry.json`: it may be whole, and so may the deltas after it."""
    kept, read, unread = tmp_path / "kept", Path.read_text, "full-00000001"
    job = Job(kept, keep=1, full_every=3)
    for _ in range(3):
        job.save()
    before = names(kept)

    def read_text(path: Path, *args: Any, **options: Any) -> str:
        if path.parent.name == unread:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", read_text)
        assert job.save().is_full
        chain = read_chain(kept)
        told = f"{unread}: [Errno 5] Input/output error: '{kept / unread / 'entry.json'}'."
        assert chain.skipped[0] == told and not chain.torn
    assert names(kept) == [*before, "full-00000004"]
    assert job.checkpoints.prune() and names(kept) == ["full-00000004"]
    job.checkpoints.close()


def test_a_file_with_the_name_of_an_entry_holds_nothing_back(tmp_path: Path) -> None:
    """It is no entry that a failing disk hides, and it is not removed."""
    kept = tmp_path / "kept"
    job = Job(kept, keep=1, full_every=2)
    for _ in range(2):
        job.save()
    (kept / "full-00000000").write_text("x")
    shutil.rmtree(kept / "full-00000001")
    for _ in range(3):
        job.save()
    assert names(kept) == ["full-00000005"] and (kept / "full-00000000").is_file()
    assert read_chain(kept).skipped == [
        "full-00000000: expected a folder, got a file. Give it another name."
    ]
    job.checkpoints.close()
