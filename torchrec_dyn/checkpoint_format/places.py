"""Places of files: paths of a disk, and names in a store (store_path.py). What both can do is here."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from torchrec_dyn.checkpoint_format.file_writer import FileWriter, sync_to_disk
from torchrec_dyn.checkpoint_format.store_path import StorePath, StoreWriter

Place = Path | StorePath
# What users give: a path, or a URL.
PlaceLike = str | os.PathLike[str]

_URL = re.compile("([A-Za-z][A-Za-z0-9+.-]+):/+")


def place_of(path: PlaceLike) -> Place:
    """Returns a path, or the place in a store that a URL names; `file://` is a path.

    Raises:
        ValueError: if fsspec has no driver for the URL, or a Path was made of it.
    """
    if isinstance(path, StorePath):
        return path
    text = os.fspath(path)
    scheme = _URL.match(text)
    if scheme is None and "://" not in text:
        return Path(path)
    if scheme is None:
        raise ValueError(
            f"{text}: expected a URL of one driver, got several. Give the URL of the store itself."
        )
    if scheme[1] == "file":
        return Path(text.removeprefix(scheme[0].rstrip("/")))
    if not text.startswith(f"{scheme[1]}://"):
        raise ValueError(
            f"{text}: expected a URL with ://, got one without, as Path makes it. Give a str."
        )
    return StorePath(text)


def lasting_place_of(path: PlaceLike) -> Place:
    """As `place_of`, of a path that stays when the process changes its working directory."""
    place = place_of(path)
    return place if isinstance(place, StorePath) else place.absolute()


def sizes_in(folder: Place) -> dict[str, int]:
    """Returns the lengths of the files in a folder, by name; empty if there is no folder."""
    if isinstance(folder, StorePath):
        return {name: size for name, size in folder.listing().items() if size is not None}
    if not folder.is_dir():
        return {}
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}


def names_in(folder: Place) -> list[str]:
    """Returns the names in a folder; empty if there is no folder."""
    if isinstance(folder, StorePath):
        return [*folder.listing()]
    return os.listdir(folder) if folder.is_dir() else []


def open_writer(place: Place) -> FileWriter | StoreWriter:
    """Opens a file that is written from its first byte on; in a store it is there when it is closed."""
    if isinstance(place, StorePath):
        return place.writer()
    file = FileWriter(place)
    file.resize(0)
    return file


def write_file(place: Place, data: bytes) -> None:
    """Writes a file, to the disk."""
    if isinstance(place, StorePath):
        place.write_bytes(data)
        return
    file = FileWriter(place)
    try:
        file.resize(0)
        file.write(0, data)
        file.sync()
    finally:
        file.close()


def create_file(place: Place, data: bytes) -> None:
    """Puts a whole file where there is none; else FileExistsError. One of several writers succeeds."""
    if isinstance(place, StorePath):
        place.create(data)
        return
    if not place.parent.exists():
        place.parent.mkdir(exist_ok=True)
        sync_to_disk(place.parent.parent)
    file = FileWriter(place.with_name(f"{place.name}.new"))
    try:
        file.resize(0)
        file.write(0, data)
        file.sync()
        # The name is taken or it is not, as by O_EXCL, and no reader sees a part of the file.
        try:
            os.link(file.path, place)
        except OSError as error:
            # A file system without hard links: the lock of the directory keeps out other writers.
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if place.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place) from None
            os.replace(file.path, place)
    finally:
        file.drop()
    sync_to_disk(place.parent)


def remove_all(folder: Place, ignore_errors: bool = True) -> None:
    """Removes a folder and all in it."""
    if not isinstance(folder, StorePath):
        shutil.rmtree(folder, ignore_errors=ignore_errors)
        return
    try:
        folder.remove_all()
    except OSError:
        if not ignore_errors:
            raise
