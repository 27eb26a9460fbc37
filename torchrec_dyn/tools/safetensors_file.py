"""The .safetensors file format, read and written in stretches of rows.

The first eight bytes are the length of the header. The header is JSON. The tensors follow without gaps. Files
are read by plain reads: if a file were mapped and another program truncated it, this process would be killed.

Source: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import write_beside
from torchrec_dyn.storage import to_host

_DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the limit of the format
DAMAGED = "The file is damaged, or it is no .safetensors file."


# Of a tensor in a file: dtype, shape and the first byte of its numbers.
_Entry = tuple[torch.dtype, tuple[int, ...], int]


class SafetensorsReader:
    """A reader of the rows of an open file. Its constructor checks the header and all lengths.

    `entries` are the tensors by name, `metadata` the strings of the header by name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "\0" in str(path) or Path(path).is_fifo():  # a pipe would be waited for
            got = "one with a zero byte" if "\0" in str(path) else "a pipe"
            raise ValueError(
                f"{str(path)!r}: expected the path of a .safetensors file, got {got}. Give a file."
            )
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by close()
        self._where = f"{Path(path)}"
        try:
            self.entries, self.metadata = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Reads the rows [first, last) of a tensor."""
        dtype, shape, begin = self.entries[name]
        values = torch.empty(last - first, *shape[1:], dtype=dtype, device="cpu")
        data = values.flatten().view(torch.uint8)
        self._file.seek(begin + first * math.prod(shape[1:]) * dtype.itemsize)
        if self._file.readinto(data.numpy().data) != data.numel():
            raise self._fault(f"{data.numel()} bytes of '{name}'", "the end of the file")
        return values

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _read_header(self) -> tuple[dict[str, _Entry], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
        longest = min(size - _LENGTH_BYTES, _LONGEST_HEADER)
        if length > longest:  # also true for a file that is shorter than the length field
            raise self._fault(
                "the length of a header that fits", f"{length} in a file of {size} bytes"
            )
        metadata, tensors = self._parsed(self._file.read(length))
        begin = end = _LENGTH_BYTES + length  # of the numbers
        entries = {}
        for name, kind, shape, span in tensors:
            dtype = _DTYPES.get(str(kind))
            if dtype is None:
                raise ValueError(
                    f"{self._where}: expected tensors of {', '.join(_DTYPES)}, got '{name}' of "
                    f"{kind!r:.60}. Convert it."
                )
            entries[name] = dtype, tuple(shape), end
            expected = [end - begin, end - begin + math.prod(shape) * dtype.itemsize]
            if span != expected:
                raise self._fault(f"data_offsets {expected} of '{name}' {shape}", f"{span}")
            end = begin + expected[1]
        if end != size:
            raise self._fault(f"a file of {end} bytes, as its header says", f"{size}")
        return entries, metadata

    def _parsed(self, text: bytes) -> tuple[dict[str, str], list[Any]]:
        """Returns the metadata of a header, and in order name, dtype, shape and data_offsets of tensors."""
        try:
            header = json.loads(text)
            metadata = header.pop(_METADATA, {})
            fields = ("dtype", "shape", "data_offsets")
            tensors = [
                [name, *(given[field] for field in fields)] for name, given in header.items()
            ]
            sizes = [size for *_, shape, span in tensors for size in (*shape, *span)]
            kinds = {*map(type, sizes)}, {*map(type, metadata.values())}
            if kinds[0] - {int} or kinds[1] - {str} or min(sizes, default=0) < 0:
                raise ValueError("a size that is no size, or metadata that are no strings")
            return metadata, sorted(tensors, key=lambda tensor: tensor[3])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._fault("a header that describes tensors", repr(error)) from error

    def _fault(self, expected: str, got: str) -> ValueError:
        return ValueError(f"{self._where}: expected {expected}, got {got}. {DAMAGED}")


class SafetensorsWriter:
    """A writer of a file, which has a temporary name until it is complete and on the disk.

    `tensors` has dtype and shape by name. Wider numbers are first, so that all are aligned.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> None:
        self._header: dict[str, Any] = {_METADATA: dict(metadata)}
        self._left: dict[str, range] = {}  # the bytes of each tensor that are not written yet
        end = 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            self._left[name] = range(begin, end)
            self._header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        self._path = Path(path)
        self._file = write_beside(self._path)
        try:
            self._numbers = self._write_header()
        except BaseException:
            self.drop()
            raise

    def _write_header(self) -> int:
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)  # so that numbers are aligned
        self._file.write(0, len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        return _LENGTH_BYTES + len(text)

    def write(self, name: str, values: Tensor) -> None:
        """Writes the next rows of a tensor, values [M, ...] in its dtype."""
        numbers = to_host(values).contiguous().flatten().view(torch.uint8)
        left = self._left[name]
        self._file.write(self._numbers + left.start, numbers.numpy())
        self._left[name] = left[numbers.numel() :]

    def finish(self, **metadata: str) -> None:
        """Replaces metadata by others of the same length, and renames the file, when all is written."""
        left = sum(map(len, self._left.values()))
        assert not left, f"{left} bytes of {self._path} were not written"
        self._header[_METADATA] |= metadata
        assert self._write_header() == self._numbers
        self._file.publish(self._path)

    def drop(self) -> None:
        """Removes the temporary file; does nothing after `finish`."""
        self._file.drop()
