"""SavedTensor: one tensor of a saved table. This rank holds parts of it, which are read only when needed.

torch.distributed.checkpoint (DCP) calls `__create_write_items__` of any tensor that has it, and then reads
the chunks one by one. So rows are gathered only when their chunk is written. A copy of the tensor
(async_save, copy.deepcopy, torch.save) holds copies of all parts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format.content_sums import CHECKSUM_WORDS

_KEPT_ROWS = 16
_MAKES_A_SHELL = (
    "aten.new_empty.default",
    "aten.zeros_like.default",
    "aten.empty_like.default",
)


class Part(NamedTuple):
    """A block of the whole tensor that this rank holds."""

    offset: tuple[int, ...]  # place in the whole tensor, one number per dimension
    size: tuple[int, ...]
    read: Callable[[int, int], Tensor]  # returns rows [start, stop) of the block
    is_saved: bool = True  # False: the block is for copies, and another rank saves it
    block: Tensor | None = None  # the numbers, if they are in memory; None: they are read


class _Held:
    """The parts of a tensor, in one attribute, so that a copy of the tensor's attributes copies them too."""

    def __init__(self, parts: Sequence[Part], entry: Any) -> None:
        self.parts = tuple(parts)
        self.entry = entry
        self._chunks: dict[tuple[int, ...], tuple[Part, int, int]] = {}

    def chunks(self, dtype: torch.dtype) -> dict[tuple[int, ...], tuple[Part, int, int]]:
        """Returns the chunks that this rank saves, by offset: part, first row and row after the last."""
        if not self._chunks:
            for part in self.parts:
                if part.is_saved:
                    for start, stop in row_ranges(part.size, dtype) if part.size else [(0, 1)]:
                        offset = (part.offset[0] + start, *part.offset[1:]) if part.size else ()
                        self._chunks[offset] = (part, start, stop)
        return self._chunks

    def check_readable(self) -> None:
        """Raises RuntimeError between dcp.load and load_state_dict, where a read returns the old contents."""
        if getattr(self.entry, "staged", None) is not None:
            raise RuntimeError(
                "SavedTensor: expected load_state_dict after dcp.load, got a read before it, which would "
                "return the old contents of the table. Call load_state_dict, then state_dict again."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        self.check_readable()
        return _Held(
            [_part_of(part.offset, _copied(part), part.is_saved) for part in self.parts], None
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _held_again, (_blocks_of(self),)


def _whole(part: Part) -> Tensor:
    return _copied(part) if part.block is None else part.block


def _copied(part: Part) -> Tensor:
    dtype = part.read(0, 0 if part.size else 1).dtype
    return _filled(torch.empty(part.size, dtype=dtype, device="cpu"), part)


def _filled(into: Tensor, part: Part) -> Tensor:
    """Copies a part into a tensor, a chunk at a time: its rows may be on a GPU without memory for a copy."""
    if part.block is not None or not part.size:
        return into.copy_(part.read(0, 1) if part.block is None else part.block)
    for start, stop in row_ranges(part.size, into.dtype):
        into[start:stop] = part.read(start, stop)
    return into


def _part_of(offset: tuple[int, ...], block: Tensor, is_saved: bool) -> Part:
    def read(start: int, stop: int) -> Tensor:
        return block[start:stop] if block.dim() else block

    return Part(offset, tuple(block.shape), read, is_saved, block)


_Block = tuple[tuple[int, ...], Tensor, bool]


def _blocks_of(held: _Held) -> list[_Block]:
    held.check_readable()
    return [(part.offset, _whole(part), part.is_saved) for part in held.parts]


def _held_again(blocks: Sequence[_Block]) -> _Held:
    return _Held([_part_of(*block) for block in blocks], None)


def row_ranges(size: Sequence[int], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Returns the chunks of a block: first row and row after the last."""
    if not size or not size[0]:
        return []
    row_bytes = dtype.itemsize * torch.Size(size[1:]).numel()
    if not row_bytes:
        return [(0, size[0])]
    step = max(1, knobs.SAVED_CHUNK_BYTES // row_bytes)
    begins = list(range(0, size[0], step))
    last = size[0] - begins[-1]
    if last * row_bytes > knobs.LAST_CHUNK_BYTES and last > _KEPT_ROWS:
        begins.append(size[0] - _KEPT_ROWS)
    return list(zip(begins, [*begins[1:], size[0]], strict=True))


class SavedTensor(torch.Tensor):
    """A tensor of a saved table, with the shape of the whole tensor and without storage.

    `parts` are the parts on this rank. `entry` loads the tensor (state_dict/loading.py); None in a copy.
    """

    _held: _Held

    @staticmethod
    def __new__(  # noqa: D102 (described by the class)
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[Part],
        entry: Any = None,
    ) -> SavedTensor:
        tensor: SavedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=dtype, device=torch.device("cpu")
        )
        tensor._held = _Held(parts, entry)
        return tensor

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts on this rank."""
        return self._held.parts

    @property
    def entry(self) -> Any:
        """The entry that loads the tensor; None in a copy."""
        return self._held.entry

    def local(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Reads this rank's parts, and returns the offset of each in the whole tensor and its block."""
        self._held.check_readable()
        return [(part.offset, _whole(part)) for part in self.parts]

    # Called by torch.distributed.checkpoint.

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Only other load planners call it. They would read into a tensor that is dropped afterwards.
        raise RuntimeError(
            "SavedTensor: expected to be loaded by our planner, got another planner. Call "
            "dcp.load(..., planner=torchrec_dyn.checkpoint.LoadPlanner())."
        )

    def _chunks(self) -> list[ChunkStorageMetadata]:
        self._held.check_readable()
        chunks = []
        for offset, (part, start, stop) in self._held.chunks(self.dtype).items():
            size = (stop - start, *part.size[1:]) if part.size else ()
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
        return chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offset = tuple(index.offset or ())
        part, start, stop = self._held.chunks(self.dtype)[offset]
        if not part.size:
            return _whole(part)
        block = part.read(start, stop)
        return block.reshape(stop - start, *part.size[1:])

    # Called by copies: copy.deepcopy, pickle, and stagers.

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedTensor:
        copied = memo.get(id(self))
        if copied is None:
            copied = memo[id(self)] = self._shell()
            copied._held = copy.deepcopy(self._held, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _tensor_again, (tuple(self.shape), self.dtype, _blocks_of(self._held))

    def _shell(self) -> SavedTensor:
        return SavedTensor(self.shape, self.dtype, ())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> SavedTensor:
        source, name = args[0], str(func)
        if name == "aten.detach.default":
            held = source._held
            return SavedTensor(source.shape, source.dtype, held.parts, held.entry)
        if name in _MAKES_A_SHELL:
            return source._shell()  # a stager fills it, through `copy_` or the attributes
        if name in ("aten.clone.default", "aten._to_copy.default"):
            return copy.deepcopy(source)
        if name == "aten.copy_.default" and not isinstance(source, SavedTensor):
            if not args[1].dim():  # stagers copy single numbers into plain tensors
                return source.copy_(numbers_of(args[1]))
            # The same error on every rank, also on a rank that holds all rows.
            raise ValueError(
                "SavedTensor: expected to be saved by torch.distributed.checkpoint (DCP), got a copy into a "
                "plain tensor, as TorchRec's state_dict_gather makes. Call dcp.save, then dcp.load with "
                "torchrec_dyn.checkpoint.LoadPlanner() into a model of any plan or without sharding."
            )
        if name == "aten.copy_.default" and _may_take(source.shape, args[1].shape):
            # A plain tensor has the rows of all ranks: a load picks the rows of this rank.
            held = getattr(args[1], "_held", None)
            block = (0,) * source.dim(), args[1].detach(), False
            source._held = copy.deepcopy(held or _held_again([block]))
            return source
        raise NotImplementedError(
            f"SavedTensor: expected to be saved, loaded or copied, got {func}. It stands for the rows of all "
            "ranks; read rows with torchrec_dyn.lookup_rows, or this rank's parts with .local()."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = [list(part.size) for part in self.parts]
        return f"SavedTensor(size={list(self.shape)}, dtype={self.dtype}, here={held})"


def _may_take(size: Sequence[int], given: Sequence[int]) -> bool:
    # A checksum has a row for each rank that saved.
    return [*given] == [*size] or (*given[1:],) == (*size[1:],) == (CHECKSUM_WORDS,)


def whole_tensor(value: Tensor, is_saved: bool, entry: Any = None) -> SavedTensor:
    """Returns a SavedTensor for a small plain tensor that every rank has, and exactly one rank saves."""
    parts = [_part_of((0,) * value.dim(), value, is_saved)] if value.numel() else []
    return SavedTensor(value.shape, value.dtype, parts, entry)


def numbers_of(value: Tensor, at_once: bool = False) -> Tensor:
    """Returns a tensor as a plain one; ValueError unless this rank holds it completely.

    `at_once` reads all rows together, which copies them once; their memory must be the CPU's.
    """
    if not isinstance(value, SavedTensor):
        return value
    value._held.check_readable()
    if at_once and value.dim() and len(value.parts) == 1 and value.parts[0].size == value.shape:
        return value.parts[0].read(0, len(value)).reshape(value.shape)
    whole, copied = torch.empty(value.shape, dtype=value.dtype, device="cpu"), 0
    for part in value.parts:
        block = tuple(slice(o, o + n) for o, n in zip(part.offset, part.size, strict=True))
        copied += _filled(whole[block], part).numel()
    if copied != whole.numel():
        raise ValueError(
            f"SavedTensor: expected a tensor that this rank holds completely, got {copied} of "
            f"{whole.numel()} numbers. Save and load it with torch.distributed.checkpoint."
        )
    return whole


def _tensor_again(size: Sequence[int], dtype: torch.dtype, blocks: Sequence[_Block]) -> SavedTensor:
    return SavedTensor(size, dtype, _held_again(blocks).parts)


torch.serialization.add_safe_globals([SavedTensor, _tensor_again])
