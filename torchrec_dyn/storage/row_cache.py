"""RowCache: the rows of a table in host memory that are in its GPU's memory, too (docs/dev/decisions/0051).

The GPU's memory has frames, each with room for the weights and the optimizer state of one row. Where a row is
in a frame, the frame holds its numbers, and the host's memory older ones. `places` says where each row is.
Kernels reach both memories by one list of blocks: the host's first, then those of the frames. So the place of
a row is a number like a row's: the row itself, or the number of its frame.

Legend: R rows, F frames, C caches, T tables, N rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage.block_memory import lasting, longer_block
from torchrec_dyn.storage.host_reads import host_numbers, keep_in_use
from torchrec_dyn.storage.id_map import BLOCKS


class RowCache:
    """The frames of one table. Without rows in frames it changes nothing.

    Attributes:
        limit: most frames.
        frames: F, those in use.
        calls: number of batches so far, modulo 2^32.
        is_used: True once a row may be in a frame.
    """

    def __init__(self, limit: int, row_limit: int, device: torch.device) -> None:
        self.limit, self.frames, self.calls, self.is_used = limit, 0, 0, False
        self._row_limit = row_limit
        self._places = torch.empty(0, 1, dtype=torch.int32, device=device)
        self._owners = torch.empty(0, 1, dtype=torch.int64, device=device)
        self._used = torch.empty(0, 1, dtype=torch.int32, device=device)
        self._free = torch.empty(0, 1, dtype=torch.int32, device=device)
        # Sent from the host, which waits: any stream may use them.
        with torch.inference_mode(False):
            self._counts = torch.zeros(4, dtype=torch.int64, device="cpu").to(device)

    @lasting
    def reserve(self, rows: int) -> int:
        """Makes room for `rows` rows; returns the frames that they may use once all stores have them."""
        if rows > len(self._places):
            longer = longer_block(self._places, rows, max(rows, self._row_limit))
            longer[len(self._places) :].zero_()
            keep_in_use(self._places)  # of more rows than the limit they are copied
            self._places = longer
            BLOCKS.renew()
        frames = min(self.limit, rows)
        # Only what is too short: without memory for the frames, ops go on with the tensors they have, and
        # on a page longer ones would be copies.
        for name in ("_owners", "_used", "_free"):
            if frames > len(getattr(self, name)):
                setattr(self, name, longer_block(getattr(self, name), frames, self.limit))
        return max(frames, self.frames)

    def use(self, frames: int) -> None:
        """Uses frames for which there is room here and in all stores."""
        if frames > self.frames:
            self.frames = frames
            BLOCKS.renew()

    def tensors(self, rows: int) -> list[Tensor]:
        """Returns the tensors of the cache as ops take them, of the first `rows` rows."""
        of_frames = (self._owners, self._used, self._free)
        return [self._places[:rows], *(tensor[: self.frames] for tensor in of_frames), self._counts]

    def owners(self, rows: int) -> tuple[Tensor, Tensor]:
        """Returns the frames of rows below `rows`, and the row in each: both [M] int64."""
        used = int(self._counts[1])
        owners = self._owners[:used].flatten()
        frames = ((owners >= 0) & (owners < rows)).nonzero().flatten()
        return frames, owners[frames]

    def take_counts(self) -> dict[str, int]:
        """Returns how many rows were loaded into frames and written back since the last call."""
        loaded, written = self._counts[2:].tolist()
        self._counts[2:].zero_()
        return {"rows_loaded": loaded, "rows_written_back": written}

    def keep_in_use(self) -> None:
        """Keeps the memory of the cache, which is dropped next, for present kernels."""
        keep_in_use(self._places, self._owners, self._used, self._free, self._counts)


class CachedTables:
    """The caches of some of T tables, in the form that ops take."""

    def __init__(self, caches: dict[int, RowCache], bases: Sequence[int]) -> None:
        """`caches` by number of the table, ascending; `bases`, the place of the first frame of each."""
        self._caches, self._bases = caches, list(bases)
        self._tensors = [
            tensor
            for cache, base in zip(caches.values(), bases, strict=True)
            for tensor in cache.tensors(base)
        ]

    def _layout(self) -> Tensor:
        lines = [
            (t, cache.calls, base)
            for (t, cache), base in zip(self._caches.items(), self._bases, strict=True)
        ]
        return host_numbers(lines)

    def cache_rows(
        self, rows: Tensor, table_offsets: Tensor, tables: Tensor, is_new: bool, loads: bool
    ) -> None:
        """Gives frames to rows [N] int64 of a batch in table order, -1 is skipped, as far as there are any.

        The rows that were not used for the longest time make room, and go back to the host. `is_new`: new
        rows, of the batch of the call before. `loads` is False if nothing is in the rows yet. `tables`: the
        result of `ops.prepare_tables`.
        """
        for cache in self._caches.values():
            cache.calls, cache.is_used = (cache.calls + (not is_new)) & 0xFFFFFFFF, True
        ops.cache_rows_(rows, table_offsets, self._tensors, self._layout(), loads, tables)

    def places(self, rows: Tensor, table_offsets: Tensor) -> Tensor:
        """Returns the places of rows [N] int64 in table order, [N] int64; of other rows, -1 too, the rows."""
        return ops.row_places(rows, table_offsets, self._tensors, self._layout())
