"""Damage to the files of a checkpoint."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader


@dataclass(frozen=True)
class Damage:
    """A change of one file.

    Attributes:
        file: name of the file.
        place: the first changed or missing byte.
        bytes: the bytes that replace the old bytes; empty: the file is cut at `place`, or removed if
            `place` is 0.
        other: path of a file whose contents take the place of the old ones, or with which a file of the
            directory changes places.
        link: target of a symbolic link that takes the place of the file.
    """

    file: str
    place: int = 0
    bytes: bytes = b""
    other: str = ""
    link: str = ""

    def do(self, folder: str) -> None:
        path = Path(folder, self.file)
        blob = path.read_bytes()
        if self.link:
            path.unlink()
            path.symlink_to(self.link)
        elif self.other:
            other = Path(folder, self.other)
            path.write_bytes(other.read_bytes())
            if other.parent == path.parent:
                other.write_bytes(blob)
        elif not self.place and not self.bytes:
            path.unlink()
        else:
            end = blob[self.place + len(self.bytes) :] if self.bytes else b""
            path.write_bytes(blob[: self.place] + self.bytes + end)


class Item(NamedTuple):
    """A chunk of a tensor in a file: its key, its numbers, and the place of their first byte."""

    key: str
    file: str
    begin: int
    numbers: torch.Tensor


def items_of(folder: Path) -> Iterator[Item]:
    """Yields the chunks of all tensors that are not empty."""
    where = FileSystemReader(folder).read_metadata().storage_data
    for index, place in sorted(where.items(), key=lambda one: (one[0].fqn, one[1].offset)):
        blob = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        numbers = torch.load(io.BytesIO(blob))
        if isinstance(numbers, torch.Tensor) and numbers.numel():
            begin = place.offset + _begin_of_numbers(blob)
            yield Item(index.fqn, place.relative_path, begin, numbers)


def _begin_of_numbers(blob: bytes) -> int:
    """Returns the place of the numbers in a file of torch.save, a zip archive without compression."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        (record,) = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
    lengths = blob[record.header_offset + 26 : record.header_offset + 30]  # of name and extra field
    return record.header_offset + 30 + sum(struct.unpack("<HH", lengths))


def flip(folder: Path, file: str, place: int, bit: int) -> Damage:
    byte = (folder / file).read_bytes()[place]
    return Damage(file, place, bytes([byte ^ (1 << bit)]))


def flips_in_numbers(
    folder: Path, chance: random.Random, times: int, of: str = "", but: str = "checksum"
) -> list[Damage]:
    """Returns flips of bits in the numbers of every tensor whose key contains `of` and not `but`."""
    found = []
    for item in items_of(folder):
        for _ in range(times if of in item.key and but not in item.key else 0):
            place = item.begin + chance.randrange(item.numbers.nbytes)
            found.append(flip(folder, item.file, place, chance.randrange(8)))
    return found
