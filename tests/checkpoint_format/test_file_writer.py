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


def test_what_a_killed_process_left_is_taken_over(tmp_path, monkeypatch):
    """But not the file of a process that writes."""
    for name in ("f", "f.partial"):
        (tmp_path / name).write_bytes(b"1")
    first = write_beside(tmp_path / "f")
    assert first.length() == 0 and sorted(os.listdir(tmp_path)) == ["f", "f.partial"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BlockingIOError) as raised:
        write_beside("f")
    assert raised.value.filename == "f.partial"
    first.write(0, b"22")
    first.close()  # as its process ends
    second = write_beside("f")
    first.drop()  # is closed: the file there is another's
    assert second.length() == 0 and os.path.exists("f.partial")
    second.drop()
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_bytes() == b"1"


def test_a_file_that_got_its_name_is_not_written_again(tmp_path, monkeypatch):
    """Another process renames it between our open and our lock."""
    real, renamed = fcntl.flock, []
    (tmp_path / "f.partial").write_bytes(b"whole")

    def flock(file, how):
        if not renamed:
            renamed.append(os.replace(tmp_path / "f.partial", tmp_path / "f"))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    file = write_beside(tmp_path / "f")
    assert renamed and (tmp_path / "f").read_bytes() == b"whole" and file.length() == 0
    file.close()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_beside(tmp_path / "f").drop()
    assert not os.listdir(tmp_path)
