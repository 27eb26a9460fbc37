"""FileWriter: whole files or an OSError that names the file."""

import errno
import fcntl
import os

import pytest
from full_disk import room_left, small_disk

from torchrec_dyn.checkpoint_format.file_writer import (
    FileWriter,
    naming,
    replace_file,
    write_beside,
)


def test_bytes_are_written_in_full(tmp_path, monkeypatch):
    real, file = os.pwrite, FileWriter(tmp_path / "f")
    monkeypatch.setattr(os, "pwrite", lambda fd, data, place: real(fd, bytes(data)[:3], place))
    file.write(2, b"0123456789")
    file.close()
    assert (tmp_path / "f").read_bytes() == b"\0\0" + b"0123456789"


def test_a_write_of_no_byte_is_an_error(tmp_path, monkeypatch):
    file = FileWriter(tmp_path / "f")
    monkeypatch.setattr(os, "pwrite", lambda fd, data, place: 0)
    with pytest.raises(OSError, match=rf"error: '{tmp_path}/f'") as raised:
        file.write(0, b"1")
    assert raised.value.errno == errno.EIO
    file.close()


def test_no_room_is_an_error_and_the_old_file_stays(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        replace_file(disk / "f", b"before")
        with room_left(disk, 16 << 10):
            file = FileWriter(disk / "g")
            with pytest.raises(OSError, match=rf"No space left on device: '{disk}/g'"):
                file.write(0, bytes(64 << 10))
            file.drop()
            with pytest.raises(OSError, match=rf"No space left on device: '{disk}/f.new'"):
                replace_file(disk / "f", bytes(64 << 10))
            assert sorted(os.listdir(disk)) == ["f", "filler"]
        assert (disk / "f").read_bytes() == b"before"


def test_errors_keep_the_names_that_they_have():
    with pytest.raises(FileNotFoundError, match="directory: '/none'"), naming("/other"):
        os.open("/none", os.O_RDONLY)
    with pytest.raises(PermissionError, match="permitted: '/other'"), naming("/other"):
        raise OSError(errno.EPERM, "x")


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    """But not the file of a process that writes, of another path, or of somebody else."""
    others = [
        "f.partial",
        f"f.{os.getpid()}.partial",
        f"g.{'0' * 16}.partial",
        f"{'0' * 16}.partial",
    ]
    for name in ("f", f"f.{'0' * 16}.partial", *others):
        (tmp_path / name).write_bytes(b"1")
    first = write_beside(tmp_path / "f")
    assert sorted(os.listdir(tmp_path)) == sorted(["f", os.path.basename(first.path), *others])
    monkeypatch.chdir(tmp_path)
    second = write_beside("f")
    assert {os.path.basename(one.path) for one in (first, second)} < {*os.listdir(tmp_path)}
    first.close()  # as its process ends
    third = write_beside("f")
    assert not os.path.exists(first.path) and os.path.exists(second.path)
    second.drop()
    third.drop()
    assert sorted(os.listdir(tmp_path)) == sorted(["f", *others])


def test_a_file_taken_for_a_left_one_is_made_anew(tmp_path, monkeypatch):
    """Another process has it between our open and our lock."""
    real, taken = fcntl.flock, []

    def flock(file, how):
        if not taken:
            (name,) = os.listdir(tmp_path)
            taken.append(name)
            os.unlink(tmp_path / name)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    file = write_beside(tmp_path / "f")
    assert taken and os.listdir(tmp_path) == [os.path.basename(file.path)] != taken
    file.close()


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    one, other = (write_beside(tmp_path / "f") for _ in range(2))
    assert len(os.listdir(tmp_path)) == 2
    one.drop()
    other.drop()
