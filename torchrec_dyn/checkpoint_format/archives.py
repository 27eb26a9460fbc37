"""Where the numbers of a tensor lie in an archive of `torch.save`, without a load of the archive.

An archive is a zip file of records: "data.pkl" describes the tensor, "data/0" has its numbers. A load of the
archive takes a millisecond, which is long for each of the chunks of a table. So the place is found by the
directory of the zip file, and equal descriptions are read once. What is unexpected has no place here.
Source: APPNOTE.TXT of PKWARE, sections 4.3.7, 4.3.12 and 4.3.16; torch's notes on serialization.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_END, _ENTRY, _LOCAL = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_ENTRY_BYTES, _LOCAL_BYTES = 46, 30
# Bytes at either end of an archive that are read: its small records and its directory are there.
END_BYTES = 4096


class Numbers(NamedTuple):
    """The record of numbers of an archive.

    Attributes:
        at: its first byte in the archive.
        size: its bytes.
        description: the bytes of "data.pkl". The tensors of two archives with equal bytes have the same
            dtype, shape and strides, and begin at the same byte of their numbers.
    """

    at: int
    size: int
    description: bytes


def find_numbers(head: bytes, tail: bytes, length: int) -> Numbers | None:
    """Returns the place of the numbers of a tensor in an archive; None if the archive is not as expected.

    `head` and `tail` are its first and its last bytes, `length` is the number of its bytes.
    """
    try:
        records = _records(tail, length)
        described, order = _content(head, records["data.pkl"]), _content(head, records["byteorder"])
        (numbers,) = (one for name, one in records.items() if name.startswith("data/"))
        at, size = _place(head, numbers), numbers[1]
    except (KeyError, ValueError, struct.error):
        return None
    return Numbers(at, size, described) if order == b"little" and at + size <= length else None


_Record = tuple[int, int]  # the place of its local header in the archive, and its bytes


def _records(tail: bytes, length: int) -> dict[str, _Record]:
    """Returns the records of an archive by name, without the name of the archive's folder."""
    end = tail.rindex(_END)
    count, size, begin = struct.unpack_from("<HII", tail, end + 10)
    entry, records = begin - (length - len(tail)), {}
    if entry < 0 or entry + size > end:
        raise ValueError("the directory is not in the tail")
    for _ in range(count):
        method, _, _, _, packed, whole, name, *more, _, _, _, at = struct.unpack_from(
            "<HHHIIIHHHHHII", tail, entry + 10
        )
        if tail[entry : entry + 4] != _ENTRY or method or packed != whole:
            raise ValueError("no entry of a record that is stored as it is")
        first = entry + _ENTRY_BYTES
        path = tail[first : first + name].decode()
        records[path.partition("/")[2]] = (at, whole)
        entry = first + name + sum(more[:2])
    return records


def _place(head: bytes, record: _Record) -> int:
    """Returns the first byte of a record's content in the archive."""
    at, _ = record
    name, more = struct.unpack_from("<HH", head, at + 26)
    if head[at : at + 4] != _LOCAL:
        raise ValueError("no header of a record")
    return int(at + _LOCAL_BYTES + name + more)


def _content(head: bytes, record: _Record) -> bytes:
    begin = _place(head, record)
    found = head[begin : begin + record[1]]
    if len(found) != record[1]:
        raise ValueError("a record beyond the head")
    return found
