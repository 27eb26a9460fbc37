"""SavedTable: one table of a checkpoint, or of a delta, read in pieces that are checked as they are read.

Legend: R rows, D columns, N removed ids, Q ids that wait, K times.
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
    OPTIMIZER_TENSORS,
    from_words,
    sum_of_small,
)
from torchrec_dyn.checkpoint_format.tensor_checks import (
    OPTIMIZER,
    ROW_TENSORS,
    SHAPES,
    SMALL_TENSORS,
    RowCheck,
    fits,
    is_canonical,
)

_PIECE_BYTES = 32 << 20  # by default; a user's, who may want larger ones than those that are saved


class SavedTable:
    """Reads one table.

    Args:
        where: table and checkpoint, for messages.
        key: of the table in the checkpoint.
        config: as saved.
        optimizer: the optimizer's config as saved, None without optimizer state.
        tensors: the saved ones, by name; the optimizer's config, checksum, base and result as
            "optimizer.config", ...

    Attributes:
        key: "model.sparse.ebc.embedding_bags.user".
        name: "user".
        config: of its rows: "embedding_dim", "initializer", "seed", ...
        optimizer: of its optimizer state: "optimizer", "cuts"; None without any.
        num_rows: R; of a delta: rows that have changed.
        embedding_dim: D.
        dtype: of its rows.
        sums: content sum of each tensor as saved, 0 of a missing one.

    Raises:
        ValueError: if tensors are missing or do not fit each other, or a config is not as it was summed.
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
        self.sums: dict[str, int] = from_words(self._read_words("checksum"), MODEL_TENSORS)
        if optimizer is not None:
            words = self._read_words(OPTIMIZER + "checksum")
            for name, total in from_words(words, OPTIMIZER_TENSORS).items():
                self.sums[OPTIMIZER + name if name == "config" else name] = total
        for name, total in self.sums.items():
            if name not in self._tensors:
                self._check_sum(name, 0, total)
        for name in ("config", OPTIMIZER + "config"):
            if name in self._tensors:
                self.read(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the saved tensors; a tensor without numbers may be missing."""
        return tuple(self._tensors)

    @property
    def is_delta(self) -> bool:
        """True if it holds the changes of a table only."""
        return "base" in self._tensors

    @property
    def row_names(self) -> tuple[str, ...]:
        """Those of `names` that have one row an id."""
        return tuple(name for name in ROW_TENSORS if name in self._tensors)

    def row_bytes_of(self, names: Sequence[str]) -> int:
        """Returns the bytes of a row in these tensors."""
        return sum(self._tensors[name].row_bytes for name in names)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.shape[0] * one.row_bytes for one in self._tensors.values() if one.shape)

    def rows_of(self, name: str) -> int:
        """Returns the number of rows of a tensor, 0 of a missing one."""
        return self._tensors[name].shape[0] if name in self._tensors else 0

    def fingerprint(self, when: str = "checksum", of_optimizer: bool = False) -> int:
        """Returns 64 bits that stand for the contents, whatever plan they were saved under.

        Args:
            when: "checksum": as saved here; of a delta "base" or "result": the whole table before or after.
            of_optimizer: of the optimizer state instead of the rows.

        Source: BLAKE2b with an 8 byte digest (RFC 7693) of the table's name and the content sums.
        """
        words = self._read_words(OPTIMIZER + when if of_optimizer else when).tolist()
        text = "\0".join([self.name, *map(str, words)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def read(self, name: str) -> Tensor:
        """Reads a whole tensor and checks it; meant for tensors that are not by row, which are small.

        Args:
            name: one of `names`.

        Raises:
            ValueError: if it is missing or damaged.
        """
        if name in ROW_TENSORS:
            parts = [chunk[name] for chunk in self.chunks((name,))]
            return torch.cat(parts) if parts else self._tensor(name).whole()
        saved = self._tensor(name).whole()
        if name in SMALL_TENSORS:
            plain = name.removeprefix(OPTIMIZER)
            self._check_sum(name, sum_of_small(self.name, plain, saved), self.sums[name])
        return saved

    def chunks(
        self,
        names: Sequence[str] = ("ids", "weight"),
        rows: range | None = None,
        chunk_bytes: int = _PIECE_BYTES,
        verify: bool = True,
    ) -> Iterator[dict[str, Tensor]]:
        """Reads rows in canonical order, piece by piece.

        Args:
            names: of tensors by row, or "waiting" or "removed" alone.
            rows: a range by 1; None: all.
            chunk_bytes: most bytes of a piece, one row at least.
            verify: where all rows are read, checks the order of ids, and after the last piece the content
                sums of `names`. Do not rely on any piece before that.

        Returns:
            Pieces, each the same rows of all `names`: [M, D] or [M].

        Raises:
            ValueError: if a tensor is missing; while reading, if one is damaged.
        """
        wanted = {
            name: self._tensor(name) for name in names if name in self._tensors or self.num_rows
        }
        lengths = {one.shape[0] for one in wanted.values()}
        if len(lengths) > 1:
            raise ValueError(
                f"{self._where}.chunks: expected tensors with the same rows, got {', '.join(names)}. "
                "Read them one after the other."
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
                raise self._damaged("ids in canonical order", f"others from row {first} to {last}")
            yield {name: chunk[name] for name in names}
        if check is not None:
            for name in wanted:
                self._check_sum(name, check.sums.get(name, 0), self.sums[name])

    def verify(self, progress: Callable[[int], Any] | None = None) -> None:
        """Reads everything and checks it.

        Args:
            progress: called with the number of rows read since its last call.

        Raises:
            ValueError: names the table and the tensor that is damaged.
        """
        self.verify_small()
        for chunk in self.chunks(self.row_names):
            if progress is not None:
                progress(len(chunk["ids"]))

    def verify_small(self) -> None:
        """Reads the tensors that are not by row and checks them.

        Raises:
            ValueError: names the table and the tensor that is damaged.
        """
        for name in (*SMALL_TENSORS, "removed"):
            if name in self._tensors:
                saved = self.read(name)
                if name == "removed" and not is_canonical(saved):
                    raise self._damaged("removed ids in canonical order", "others")

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
                    f"{name} {SHAPES[name]} with R, D = {', '.join(map(str, sizes.values()))}",
                    f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}",
                )

    def _check_sum(self, name: str, total: int, expected: int) -> None:
        if total != expected:
            raise self._damaged(f"the content sum {expected:016x} of {name}", f"{total:016x}")

    def _damaged(self, expected: str, got: str) -> ValueError:
        return ValueError(f"{self._where}: expected {expected}, got {got}. {DAMAGED}")
