"""Entries that cannot be read for a moment: no older one is loaded instead, and none of them is removed."""

import errno
import os
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
    """Of its state or of its `entry.json`; the others are removed when the number that is kept is there."""
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
    assert len(names(kept)) == 5
    job.save()
    assert names(kept) == ["full-00000005", "full-00000006"]
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
        assert f"{unread}: [Errno 5] Input/output error" in chain.skipped[0] and not chain.torn
    assert names(kept) == [*before, "full-00000004"]
    assert job.checkpoints.prune() and names(kept) == ["full-00000004"]
    job.checkpoints.close()
