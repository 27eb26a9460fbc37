"""ChunkedTensor: reads any rows of one tensor of a checkpoint without reading the other rows.

torch.distributed.checkpoint (DCP) saves a tensor as chunks. Each chunk is an archive of `torch.save` in some
file. DCP's own reader loads whole chunks. This is too much if an unsharded module has saved 5 GB as one
chunk. Here torch loads the archive onto the meta device: this reads no numbers but finds their place in the
file. Then only the requested rows are read. Chunks that DCP's reader has loaded are read from memory.
"""

from __future__ import annotations

import io
import math
import mmap
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchrec_dyn.checkpoint_format.content_sums import DAMAGED
from torchrec_dyn.checkpoint_format.place_reader import PlaceReader
from torchrec_dyn.checkpoint_format.store_path import RangeFile
from torchrec_dyn.storage import lacks_memory, to_host

# The records of an archive before its numbers are shorter.
_HEAD_BYTES = 4096


@dataclass
class _Chunk:
    """Rows [first, last) of columns [left, right), and their place in the files or in memory."""

    first: int
    last: int
    left: int
    right: int
    entry: Any = None  # of DCP: relative_path, offset, length
    numbers_at: int | None = (
        None  # place of the numbers in the file, row after row; None: not known yet
    )
    block: Tensor | None = (
        None  # the numbers [rows, columns]; of a file, if they can only be loaded whole
    )

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, self.right - self.left


class ChunkedTensor:
    """One saved tensor of at most two dimensions, read by rows. `shape` is the shape of the whole tensor.

    Its chunks are in files (`in_files`), or in memory: then a load may put them as they arrive. With
    `is_read_once` a chunk in memory is dropped when reads, which ascend then, have passed it.
    """

    def __init__(
        self,
        where: str,
        key: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        is_read_once: bool = False,
        reader: PlaceReader | None = None,
    ) -> None:
        self._where, self.key, self.shape, self.dtype = where, key, tuple(shape), dtype
        self._rows, self._columns = _rows_and_columns(self.shape)
        self.row_bytes: int = self._columns * dtype.itemsize
        self._is_read_once, self._reader = is_read_once, reader
        self._chunks: list[_Chunk] = []  # by their first rows
        self._longest = 0
        self._loaded_whole: list[_Chunk] = []  # chunks of files that can only be loaded so
        # Of the last archive of each shape: the first byte of its numbers, and the records before them.
        self._loaded: dict[tuple[int, int], tuple[int, bytes]] = {}

    @classmethod
    def in_files(
        cls, where: str, reader: PlaceReader, key: str, saved: TensorStorageMetadata
    ) -> ChunkedTensor:
        """Returns a tensor of a checkpoint; `reader` is set up with the metadata, as of `open_files`."""
        tensor = cls(where, key, saved.size, saved.properties.dtype, reader=reader)
        numbers = 0
        for chunk in saved.chunks:
            numbers += math.prod(chunk.sizes)
            if math.prod(chunk.sizes):
                entry = reader.storage_data.get(MetadataIndex(key, chunk.offsets))
                tensor._add(_as_rows(chunk.offsets, chunk.sizes), entry)
        # Before anyone makes room for so many rows.
        if numbers != math.prod(tensor.shape):
            raise tensor._damaged(f"{math.prod(tensor.shape)} numbers", f"{numbers}")
        return tensor

    def _add(self, chunk: _Chunk, entry: Any) -> None:
        chunk.entry = entry
        is_known = entry is not None or chunk.block is not None
        if not is_known or chunk.last > self._rows or chunk.right > self._columns:
            raise self._damaged(f"a saved chunk inside {list(self.shape)}", repr(chunk))
        insort(self._chunks, chunk, key=lambda other: other.first)
        self._longest = max(self._longest, chunk.shape[0])

    def put(self, offset: Sequence[int], block: Tensor) -> None:
        """Adds a chunk in memory; `offset` is its place in the tensor, one number per dimension."""
        chunk = _as_rows(offset, block.shape)
        chunk.block = block.reshape(chunk.shape)
        self._add(chunk, None)

    def new_block(self, size: Sequence[int]) -> Tensor:
        """Returns memory for a chunk, which goes back to the system as soon as the chunk is dropped."""
        numbers = math.prod(size)
        memory = mmap.mmap(-1, max(1, numbers * self.dtype.itemsize))
        return torch.frombuffer(memory, dtype=self.dtype, count=numbers).view(torch.Size(size))

    def whole(self) -> Tensor:
        """Reads the whole tensor."""
        return self.rows(0, self._rows).reshape(self.shape)

    def rows(self, first: int, last: int, columns: slice | None = None) -> Tensor:
        """Reads rows [first, last), of some columns: [M, C], or [M] of a tensor with one dimension."""
        span = columns or slice(0, self._columns)
        size = last - first, span.stop - span.start
        rows: Tensor | None = None
        missing = math.prod(size)
        for chunk in self._chunks_at(first, last):
            top, bottom = max(first, chunk.first), min(last, chunk.last)
            low, high = max(span.start, chunk.left), min(span.stop, chunk.right)
            if top >= bottom or low >= high:
                continue
            missing -= (bottom - top) * (high - low)
            if chunk.block is not None and (bottom - top, high - low) == size:
                block = chunk.block[top - chunk.first : bottom - chunk.first]
                rows = to_host(block[:, low - chunk.left : high - chunk.left])
                break
            rows = self._nothing(size) if rows is None else rows
            part = rows[top - first : bottom - first, low - span.start : high - span.start]
            if high - low == chunk.shape[1]:
                self._read_into(part, chunk, top - chunk.first)
            else:
                whole = part.new_empty(bottom - top, chunk.shape[1])
                self._read_into(whole, chunk, top - chunk.first)
                part.copy_(whole[:, low - chunk.left : high - chunk.left])
        if missing:
            got = math.prod(size) - missing
            raise self._damaged(f"{math.prod(size)} numbers", f"{got}")
        rows = self._nothing(size) if rows is None else rows
        return rows if len(self.shape) == 2 else rows.reshape(-1)

    def _nothing(self, size: Sequence[int]) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device="cpu")

    def _chunks_at(self, first: int, last: int) -> list[_Chunk]:
        """Returns the chunks that may have some of the rows, and drops what is not used any more."""
        begin = bisect_left(self._chunks, first - self._longest + 1, key=lambda chunk: chunk.first)
        end = bisect_left(self._chunks, last, key=lambda chunk: chunk.first)
        for chunk in self._loaded_whole:  # kept while calls read rows of it
            if chunk.last <= first or last <= chunk.first:
                chunk.block = None
        if self._is_read_once:
            self._chunks = [chunk for chunk in self._chunks if chunk.last > first]
            begin, end = 0, bisect_left(self._chunks, last, key=lambda chunk: chunk.first)
        return self._chunks[begin:end]

    def _read_into(self, into: Tensor, chunk: _Chunk, row: int) -> None:
        """Fills `into` with rows of one chunk, from the chunk's row `row` on."""
        if chunk.block is None and chunk.numbers_at is None:
            chunk.numbers_at = self._find_numbers(chunk)
        if chunk.block is not None:
            into.copy_(chunk.block[row : row + len(into)])
            return
        assert chunk.numbers_at is not None
        part = into if into.is_contiguous() else into.new_empty(into.shape)
        size = part.numel() * self.dtype.itemsize
        assert self._reader is not None
        with self._reader.open_file(chunk.entry.relative_path) as file:
            file.seek(chunk.numbers_at + row * chunk.shape[1] * self.dtype.itemsize)
            if file.readinto(part.view(torch.uint8).reshape(-1).numpy().data) != size:
                raise self._damaged(f"{size} bytes more", f"the end of {file.name}")
        if part is not into:
            into.copy_(part)

    def _find_numbers(self, chunk: _Chunk) -> int | None:
        """Returns the place of a chunk's rows in the file; None if the chunk had to be loaded whole."""
        assert self._reader is not None
        with self._reader.open_file(chunk.entry.relative_path) as file:
            file.seek(chunk.entry.offset)
            head = file.read(min(chunk.entry.length, _HEAD_BYTES))
            at, records = self._loaded.get(chunk.shape, (0, b""))
            if not records or _records_before(head, at) != records:
                saved = self._load(file, chunk, "meta")
                if not saved.is_contiguous():
                    chunk.block = self._load(file, chunk, "cpu").reshape(chunk.shape)
                    self._loaded_whole.append(chunk)
                    return None
                at = cast(int, saved.untyped_storage()._checkpoint_offset)
                at += int(saved.storage_offset()) * self.dtype.itemsize
                self._loaded[chunk.shape] = at, _records_before(head, at)
        if at + math.prod(chunk.shape) * self.dtype.itemsize > chunk.entry.length:
            raise self._damaged(f"an archive of {chunk.entry.length} bytes", "a longer one")
        return int(chunk.entry.offset + at)

    def _load(self, file: io.BufferedReader | RangeFile, chunk: _Chunk, device: str) -> Tensor:
        assert self._reader is not None
        try:
            stream = self._reader._slice_file(file, chunk.entry)
            saved = torch.load(stream, map_location=device, weights_only=True)
        # torch does not document its exceptions for damaged bytes: RuntimeError, UnpicklingError, ...
        except Exception as error:
            if lacks_memory(error):
                raise
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise self._damaged("an archive of torch.save", why) from error
        if not isinstance(saved, Tensor) or saved.dtype != self.dtype:
            raise self._damaged(
                f"numbers of {self.dtype}", f"{getattr(saved, 'dtype', type(saved))}"
            )
        if _rows_and_columns(tuple(saved.shape)) != chunk.shape:
            raise self._damaged(f"a chunk of {list(chunk.shape)}", f"{list(saved.shape)}")
        return saved

    def _damaged(self, expected: str, got: str) -> ValueError:
        return ValueError(f"{self._where}: expected {expected}, got {got}. {DAMAGED}")


def _records_before(head: bytes, at: int) -> bytes:
    """Returns the records of an archive, from its first bytes, up to the numbers at byte `at`; b"" if longer.

    They describe the tensor. A load of an archive takes a millisecond, so equal ones are loaded once. Sum and
    sizes of the numbers, which differ, stand in the header of their record (APPNOTE.TXT of PKWARE, 4.3.7).
    """
    begin = head.rfind(b"PK\3\4", 0, at)
    return head[: begin + 14] + head[begin + 26 : at] if begin > 0 and at <= len(head) else b""


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the numbers of rows and columns; with one dimension or none, each number is a row."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def _as_rows(offset: Sequence[int], size: Sequence[int]) -> _Chunk:
    rows, columns = _rows_and_columns(tuple(size))
    first, left, *_ = (*offset, 0, 0)
    return _Chunk(first, first + rows, left, left + columns)
