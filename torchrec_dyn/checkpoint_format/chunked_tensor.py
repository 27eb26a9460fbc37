"""ChunkedTensor: reads any rows of one tensor of a checkpoint without reading the other rows.

torch.distributed.checkpoint (DCP) saves a tensor as chunks. Each chunk is an archive of `torch.save` in some
file. DCP's own reader loads whole chunks. This is too much if an unsharded module has saved 5 GB as one
chunk. Here torch loads the archive onto the meta device: this reads no numbers but finds their place in the
file. Then only the requested rows are read.

HeldTensor: the same for a tensor whose numbers are in memory, as those that DCP's own reader has read.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torchrec_dyn.checkpoint_format.content_sums import DAMAGED
from torchrec_dyn.checkpoint_format.file_writer import naming
from torchrec_dyn.storage import lacks_memory, to_host

# The records of an archive before its numbers are shorter.
_HEAD_BYTES = 4096


@dataclass
class _Chunk:
    """Rows [first, last) of columns [left, right), and their place in the files."""

    first: int
    last: int
    left: int
    right: int
    entry: Any  # of DCP: relative_path, offset, length, transform_descriptors
    # Place of the numbers in the file, stored row after row; None: not known yet.
    numbers_at: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, self.right - self.left


class ChunkedTensor:
    """One saved tensor of at most two dimensions, read by rows. `shape` is the shape of the whole tensor.

    `reader` is set up with the metadata, as `open_files` returns it.
    """

    def __init__(
        self, where: str, reader: FileSystemReader, key: str, saved: TensorStorageMetadata
    ) -> None:
        self._where, self.key = where, key
        self._reader = reader
        self._folder = os.fspath(reader.path)
        self.shape = tuple(saved.size)
        self.dtype: torch.dtype = saved.properties.dtype
        self._rows, self._columns = _rows_and_columns(self.shape)
        self.row_bytes: int = self._columns * self.dtype.itemsize
        self._chunks = sorted(self._read_chunks(key, saved), key=lambda chunk: chunk.first)
        # Before anyone makes room for so many rows.
        saved_numbers = sum(math.prod(chunk.shape) for chunk in self._chunks)
        if saved_numbers != math.prod(self.shape):
            raise self._damaged(f"{math.prod(self.shape)} numbers", f"{saved_numbers}")
        self._starts = [chunk.first for chunk in self._chunks]
        self._longest = max((chunk.shape[0] for chunk in self._chunks), default=0)
        self._unpacked: dict[int, Tensor] = {}  # chunks in use that can only be loaded whole
        # Of the last archive of each shape: the first byte of its numbers, and the records before them.
        self._loaded: dict[tuple[int, int], tuple[int, bytes]] = {}

    def _read_chunks(self, key: str, saved: TensorStorageMetadata) -> list[_Chunk]:
        chunks = []
        for saved_chunk in saved.chunks:
            if math.prod(saved_chunk.sizes) == 0:
                continue
            entry = self._reader.storage_data.get(MetadataIndex(key, saved_chunk.offsets))
            chunk = _as_rows(saved_chunk, entry)
            if entry is None or chunk.last > self._rows or chunk.right > self._columns:
                raise self._damaged(f"a saved chunk inside {list(self.shape)}", repr(saved_chunk))
            chunks.append(chunk)
        return chunks

    def whole(self) -> Tensor:
        """Reads the whole tensor."""
        return self.rows(0, self._rows).reshape(self.shape)

    def rows(self, first: int, last: int, columns: slice | None = None) -> Tensor:
        """Reads rows [first, last), of some columns: [M, C], or [M] of a tensor with one dimension."""
        span = columns or slice(0, self._columns)
        rows = torch.empty(last - first, span.stop - span.start, dtype=self.dtype, device="cpu")
        self.read_into(first, span.start, rows)
        return rows if len(self.shape) == 2 else rows.reshape(-1)

    def read_into(self, first: int, left: int, into: Tensor) -> None:
        """Reads rows from `first` and columns from `left` on into [M, C] on the CPU, of this dtype."""
        missing, last, right = into.numel(), first + len(into), left + into.shape[1]
        begin = bisect_left(self._starts, first - self._longest + 1)
        end = bisect_left(self._starts, last)
        # An unpacked chunk is kept while calls read rows of it.
        self._unpacked = {
            number: chunk for number, chunk in self._unpacked.items() if begin <= number < end
        }
        for number in range(begin, end):
            chunk = self._chunks[number]
            top, bottom = max(first, chunk.first), min(last, chunk.last)
            low, high = max(left, chunk.left), min(right, chunk.right)
            if top >= bottom or low >= high:
                continue
            part = into[top - first : bottom - first, low - left : high - left]
            if high - low == chunk.shape[1]:
                self._read_into(part, number, top - chunk.first)
            else:
                whole = part.new_empty(bottom - top, chunk.shape[1])
                self._read_into(whole, number, top - chunk.first)
                part.copy_(whole[:, low - chunk.left : high - chunk.left])
            missing -= part.numel()
        if missing:
            raise self._damaged(f"{into.numel()} numbers", f"{into.numel() - missing}")

    def _read_into(self, into: Tensor, number: int, row: int) -> None:
        """Fills `into` with rows of one chunk, from the chunk's row `row` on."""
        chunk = self._chunks[number]
        if number not in self._unpacked and chunk.numbers_at is None:
            chunk.numbers_at = self._find_numbers(number)
        if number in self._unpacked:
            into.copy_(self._unpacked[number][row : row + len(into)])
            return
        assert chunk.numbers_at is not None
        part = into if into.is_contiguous() else into.new_empty(into.shape)
        size = part.numel() * self.dtype.itemsize
        with self._open(chunk) as file:
            file.seek(chunk.numbers_at + row * chunk.shape[1] * self.dtype.itemsize)
            if file.readinto(part.view(torch.uint8).reshape(-1).numpy().data) != size:
                raise self._damaged(f"{size} bytes more", f"the end of {file.name}")
        if part is not into:
            into.copy_(part)

    def _find_numbers(self, number: int) -> int | None:
        """Returns the place of a chunk's rows in the file; None if the chunk had to be unpacked whole."""
        chunk = self._chunks[number]
        packed = bool(chunk.entry.transform_descriptors)
        with self._open(chunk) as file:
            file.seek(chunk.entry.offset)
            head = file.read(min(chunk.entry.length, _HEAD_BYTES))
            at, records = self._loaded.get(chunk.shape, (0, b""))
            if packed or not records or _records_before(head, at) != records:
                saved = self._load(file, chunk, "cpu" if packed else "meta")
                if not packed and not saved.is_contiguous():
                    packed, saved = True, self._load(file, chunk, "cpu")
                if packed:
                    self._unpacked[number] = saved.reshape(chunk.shape)
                    return None
                at = cast(int, saved.untyped_storage()._checkpoint_offset)
                at += int(saved.storage_offset()) * self.dtype.itemsize
                self._loaded[chunk.shape] = at, _records_before(head, at)
        if at + math.prod(chunk.shape) * self.dtype.itemsize > chunk.entry.length:
            raise self._damaged(f"an archive of {chunk.entry.length} bytes", "a longer one")
        return int(chunk.entry.offset + at)

    def _load(self, file: io.BufferedReader, chunk: _Chunk, device: str) -> Tensor:
        entry = chunk.entry
        try:
            stream = self._reader._slice_file(file, entry)
            if entry.transform_descriptors:
                transforms = self._reader.transforms
                stream = transforms.transform_load_stream(
                    cast(Any, None), entry.transform_descriptors, stream
                )
                stream = io.BytesIO(stream.read())
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

    @contextmanager
    def _open(self, chunk: _Chunk) -> Iterator[io.BufferedReader]:
        path = os.path.join(self._folder, chunk.entry.relative_path)
        with naming(path), open(path, "rb") as file:
            yield file

    def _damaged(self, expected: str, got: str) -> ValueError:
        return ValueError(f"{self._where}: expected {expected}, got {got}. {DAMAGED}")


class HeldTensor:
    """One tensor in memory, read by rows; `shape` is the shape of the whole tensor, `blocks` are parts of it.

    With `is_read_once` a block is dropped when reads, which ascend then, have passed it.
    """

    def __init__(
        self,
        where: str,
        key: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        blocks: Iterable[tuple[Sequence[int], Tensor]] = (),
        is_read_once: bool = False,
    ) -> None:
        self._where, self.key, self.shape, self.dtype = where, key, tuple(shape), dtype
        self._rows, self._columns = _rows_and_columns(self.shape)
        self.row_bytes: int = self._columns * dtype.itemsize
        self._is_read_once = is_read_once
        self._blocks: list[tuple[int, int, Tensor]] = []  # first row, first column, [M, C]
        for offset, block in blocks:
            self.put(offset, block)

    def new_block(self, size: Sequence[int]) -> Tensor:
        """Returns memory for a block, which goes back to the system as soon as the block is dropped."""
        numbers = math.prod(size)
        memory = mmap.mmap(-1, max(1, numbers * self.dtype.itemsize))
        return torch.frombuffer(memory, dtype=self.dtype, count=numbers).view(torch.Size(size))

    def put(self, offset: Sequence[int], block: Tensor) -> None:
        """Adds a block; `offset` is its place in the tensor, one number per dimension."""
        first, left, *_ = (*offset, 0, 0)
        self._blocks.append((first, left, block.reshape(_rows_and_columns(tuple(block.shape)))))

    def whole(self) -> Tensor:
        """Returns the whole tensor."""
        return self.rows(0, self._rows).reshape(self.shape)

    def rows(self, first: int, last: int, columns: slice | None = None) -> Tensor:
        """Returns rows [first, last), of some columns: [M, C], or [M] of a tensor with one dimension."""
        span = columns or slice(0, self._columns)
        if self._is_read_once:
            self._blocks = [block for block in self._blocks if block[0] + len(block[2]) > first]
        size = last - first, span.stop - span.start
        rows, missing = None, math.prod(size)
        for top, left, block in self._blocks:
            low, high = max(first, top), min(last, top + len(block))
            begin, end = max(span.start, left), min(span.stop, left + block.shape[1])
            if low >= high or begin >= end:
                continue
            part = to_host(block[low - top : high - top, begin - left : end - left])
            missing -= part.numel()
            if part.shape == size:
                rows = part
                break
            rows = torch.empty(size, dtype=self.dtype, device="cpu") if rows is None else rows
            rows[low - first : high - first, begin - span.start : end - span.start] = part
        if missing:
            got = math.prod(size) - missing
            raise ValueError(
                f"{self._where}: expected {math.prod(size)} numbers of {self.key}, got {got}. {DAMAGED}"
            )
        rows = torch.empty(size, dtype=self.dtype, device="cpu") if rows is None else rows
        return rows if len(self.shape) == 2 else rows.reshape(-1)


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


def _as_rows(chunk: ChunkStorageMetadata, entry: Any) -> _Chunk:
    rows, columns = _rows_and_columns(tuple(chunk.sizes))
    first, left, *_ = (*chunk.offsets, 0, 0)
    return _Chunk(first, first + rows, left, left + columns, entry)
