"""SavedTable: one table of a checkpoint, or of a delta, read in chunks that are checked as they are read.

Legend: R rows, D columns, M rows of a chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format.chunked_tensor import ChunkedTensor
from torchrec_dyn.checkpoint_format.content_sums import (
    DAMAGED,
    MODEL_TENSORS,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    from_words,
    sum_of_small,
)
from torchrec_dyn.checkpoint_format.tensor_checks import (
    ROW_TENSORS,
    SHAPES,
    SMALL_TENSORS,
    RowCheck,
    fits,
    is_canonical,
)

# Default size of the chunks that a user reads. Saved chunks are smaller.
_PIECE_BYTES = 32 << 20


class SavedTable:
    """One saved table of `open_checkpoint`, read in chunks.

    Attributes:
        key: key of the table in the checkpoint, e.g. "model.sparse.ebc.embedding_bags.user".
        name: name of the table, e.g. "user".
        config: config of its rows: "embedding_dim", "initializer", "seed", ...
        optimizer: config of its optimizer state: "optimizer", "cuts"; None without optimizer state.
        num_rows: R; of a delta, the number of changed rows.
        embedding_dim: number of columns, D.
        dtype: dtype of its rows.
        sums: content sum of each tensor as saved, 0 for a missing tensor.

    Raises:
        ValueError: if tensors are missing or do not match each other, or a config does not have its content
            sum.
    """

    def __init__(
        self,
        where: str,
        key: str,
        config: dict[str, Any],
        optimizer: dict[str, Any] | None,
        tensors: Mapping[str, ChunkedTensor],
    ) -> None:
        self._where = where
        self._tensors = {name: tensor for name, tensor in tensors.items() if name in SHAPES}
        self.key = key
        self.name: str = config["table"]
        self.config = config
        self.optimizer = optimizer
        self.num_rows: int = tensors["ids"].shape[0] if "ids" in tensors else 0
        self.embedding_dim: int = config["embedding_dim"]
        self.dtype: torch.dtype = getattr(torch, str(config.get("rows")), torch.float32)
        self._check_shapes()
        words = from_words(self._read_words("checksum"))
        self.sums = {name: words[name] for name in MODEL_TENSORS}
        if optimizer is not None:
            words = from_words(self._read_words(OPTIMIZER_CHECKSUM))
            self.sums |= {name: words[name] for name in OPTIMIZER_TENSORS}
            if optimizer_ids := words["ids"]:  # 0: the state has no rows
                self._check_sum("ids", self.sums["ids"], optimizer_ids)
        for name, total in self.sums.items():
            if name not in self._tensors:
                self._check_sum(name, 0, total)
        for name in ("config", "optimizer_config"):
            if name in self._tensors:
                self.read(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the saved tensors; a tensor without numbers may be missing."""
        return tuple(self._tensors)

    @property
    def is_delta(self) -> bool:
        """True if only the changes of a table were saved."""
        return "base" in self._tensors

    @property
    def row_names(self) -> tuple[str, ...]:
        """Names of the saved tensors by row: these have one row for each id."""
        return tuple(name for name in ROW_TENSORS if name in self._tensors)

    @property
    def row_keys(self) -> set[str]:
        """Keys of the tensors by row in the checkpoint, also of optimizer state."""
        return {self._tensors[name].key for name in self.row_names}

    def row_bytes_of(self, names: Sequence[str]) -> int:
        """Returns the number of bytes of a row in these tensors together."""
        return sum(self._tensors[name].row_bytes for name in names)

    @property
    def bytes(self) -> int:
        """Number of bytes of all tensors; "step", a single number, is not counted."""
        return sum(one.shape[0] * one.row_bytes for one in self._tensors.values() if one.shape)

    def rows_of(self, name: str) -> int:
        """Returns the number of rows of a tensor, 0 for a missing tensor."""
        return self._tensors[name].shape[0] if name in self._tensors else 0

    def fingerprint(self, when: str = "checksum", of_optimizer: bool = False) -> int:
        """Returns the fingerprint of the contents, 64 bits. It does not depend on the plan.

        Args:
            when: "checksum": the contents as saved here; of a delta also "base" or "result": the whole table
                before or after the delta.
            of_optimizer: True for the optimizer state, False for the table.

        Source: BLAKE2b with an 8 byte digest (RFC 7693) of the table's name and the content sums.
        """
        sums = self.sums if when == "checksum" else from_words(self._read_words(when))
        names = OPTIMIZER_TENSORS if of_optimizer else MODEL_TENSORS
        text = "\0".join([self.name, *(str(sums[name]) for name in names)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def read(self, name: str) -> Tensor:
        """Reads and checks a whole tensor; meant for tensors that are not by row, which are small.

        Raises:
            ValueError: if the tensor is missing or damaged.
        """
        if name in ROW_TENSORS:
            parts = [chunk[name] for chunk in self.chunks((name,))]
            return torch.cat(parts) if parts else self._tensor(name).whole()
        saved = self._tensor(name).whole()
        if name in SMALL_TENSORS:
            self._check_sum(name, sum_of_small(self.name, name, saved), self.sums[name])
        return saved

    def chunks(
        self,
        names: Sequence[str] = ("ids", "weight"),
        rows: range | None = None,
        chunk_bytes: int = _PIECE_BYTES,
        verify: bool = True,
    ) -> Iterator[dict[str, Tensor]]:
        """Reads rows in canonical order, chunk by chunk.

        Args:
            names: names of tensors by row, or "waiting" or "removed" alone.
            rows: a range of rows with step 1; None: all rows.
            chunk_bytes: most bytes of a chunk; a chunk has at least one row.
            verify: True to check the order of ids and, after the last chunk, the content sums of `names`, if
                all rows are read. Do not rely on any chunk before that.

        Returns:
            Chunks, each with the same rows of all `names`: [M, D] or [M].

        Raises:
            ValueError: if a tensor is missing; while reading, if a tensor is damaged.
        """
        wanted = {
            name: self._tensor(name) for name in names if name in self._tensors or self.num_rows
        }
        lengths = {one.shape[0] for one in wanted.values()}
        if len(lengths) > 1:
            raise ValueError(
                f"{self._where}.chunks: expected tensors with the same rows, got {', '.join(names)}. "
                "Read each tensor by its own call."
            )
        every = range(lengths.pop() if lengths else 0)
        rows = every if rows is None else rows
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= len(every):
            raise ValueError(f"{self._where}.chunks: expected rows in {every} by 1, got {rows}.")
        is_checked = verify and rows == every and not set(names).isdisjoint(ROW_TENSORS)
        check = RowCheck(self.name) if is_checked else None
        if check is not None and "ids" in self._tensors:
            wanted.setdefault("ids", self._tensors["ids"])
        return self._stream(names, wanted, rows, chunk_bytes, check)

    def _stream(
        self,
        names: Sequence[str],
        wanted: Mapping[str, ChunkedTensor],
        rows: range,
        chunk_bytes: int,
        check: RowCheck | None,
    ) -> Iterator[dict[str, Tensor]]:
        size = max(1, chunk_bytes // max(1, sum(one.row_bytes for one in wanted.values())))
        for first in range(rows.start, rows.stop, size):
            last = min(first + size, rows.stop)
            chunk = {name: one.rows(first, last) for name, one in wanted.items()}
            if check is not None and not check.add(chunk):
                raise self._damaged(
                    "ids in canonical order", f"another order from row {first} to {last}"
                )
            yield {name: chunk[name] for name in names}
        if check is not None:
            for name in wanted:
                self._check_sum(name, check.sums.get(name, 0), self.sums[name])

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Reads the rows [first, last) of a tensor, and checks nothing: the caller checks what it reads.

        Returns:
            [last - first, columns], or [last - first] of a tensor with one dimension.
        """
        return self._tensor(name).rows(first, last)

    def verify(self, progress: Callable[[int], Any] | None = None) -> None:
        """Reads and checks all tensors.

        Raises:
            ValueError: if a tensor is damaged; the message names the table and the tensor.
        """
        self.verify_small()
        for chunk in self.chunks(self.row_names):
            if progress is not None:
                progress(len(chunk["ids"]))

    def verify_small(self) -> None:
        """Reads and checks the tensors that are not by row.

        Raises:
            ValueError: if a tensor is damaged; the message names the table and the tensor.
        """
        for name in (*SMALL_TENSORS, "removed"):
            if name in self._tensors:
                saved = self.read(name)
                if name == "removed" and not is_canonical(saved):
                    raise self._damaged("removed ids in canonical order", "another order")

    def _tensor(self, name: str) -> ChunkedTensor:
        if name not in self._tensors:
            raise ValueError(
                f"{self._where}: expected a name among {', '.join(self._tensors)}, got {name!r}."
            )
        return self._tensors[name]

    def _read_words(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise self._damaged(f"a saved {name}", "none")
        return self._tensors[name].whole()

    def _check_shapes(self) -> None:
        if "weight" in self._tensors:
            self.dtype = self._tensors["weight"].dtype
        sizes = {"R": self.num_rows, "D": self.embedding_dim}
        for name, one in self._tensors.items():
            if not fits(one, SHAPES[name], sizes):
                raise self._damaged(
                    f"{name} {SHAPES[name]} with {', '.join(sizes)} = {', '.join(map(str, sizes.values()))}",
                    f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}",
                )

    def _check_sum(self, name: str, total: int, expected: int) -> None:
        if total != expected:
            raise self._damaged(f"the content sum {expected:016x} of {name}", f"{total:016x}")

    def _damaged(self, expected: str, got: str) -> ValueError:
        return ValueError(f"{self._where}: expected {expected}, got {got}. {DAMAGED}")
