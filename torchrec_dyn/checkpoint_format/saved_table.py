"""SavedTable has the tensors of one save of a table, MergedTable its rows after a full save and deltas.

All saves have their ids in canonical order, so one pass over all of them meets each id once. A pass first
reads ids and removed ids, some of each save at a time, decides which save has the newest row of each id, and
then reads these rows only.

Legend: R rows, D columns, M rows of a chunk.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format.chunked_tensor import ChunkedTensor
from torchrec_dyn.checkpoint_format.content_sums import (
    DAMAGED,
    MODEL_CHECKSUM,
    MODEL_TENSORS,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    ROW_TENSORS,
    SHAPES,
    SMALL_TENSORS,
    fits,
    from_words,
    is_canonical,
    sum_of_small,
)
from torchrec_dyn.checkpoint_format.row_source import SCORES, RowSource, rows_at
from torchrec_dyn.checkpoint_format.saved_config import mean_over_cuts
from torchrec_dyn.optimizers import STATE_NAMES, OptimizerKind, RowOptimizer
from torchrec_dyn.storage import canonical_keys, first_place

# A place is a row of a save: the number of the save is above these bits. A removed id has no place.
_ROW_BITS, _NO_PLACE = 48, -1
_LAST_KEY = torch.iinfo(torch.int64).max


class SavedTable:
    """A saved table of `open_checkpoint`, read in chunks.

    `sums` are the expected content sums by tensor; None: those saved with the table.

    Attributes:
        key: key of the table in the checkpoint, e.g. "model.sparse.ebc.embedding_bags.user".
        name: name of the table, e.g. "user".
        config: config of its rows: "embedding_dim", "initializer", "seed", ...
        optimizer: config of its optimizer state: "optimizer", "cuts"; None without optimizer state.
        num_rows: number of rows, R; for a delta, the number of changed rows.
        embedding_dim: number of columns, D.
        dtype: dtype of its rows.
    """

    def __init__(
        self,
        where: str,
        key: str,
        config: dict[str, Any],
        optimizer: dict[str, Any] | None,
        tensors: Mapping[str, ChunkedTensor],
        sums: Mapping[str, int] | None = None,
    ) -> None:
        self.where = where
        self._tensors = {name: tensor for name, tensor in tensors.items() if name in SHAPES}
        self.key = key
        self.name: str = config["table"]
        self.config = config
        self.optimizer = optimizer
        self.num_rows: int = tensors["ids"].shape[0] if "ids" in tensors else 0
        self.embedding_dim: int = config["embedding_dim"]
        self.dtype: torch.dtype = getattr(torch, str(config.get("rows")), torch.float32)
        self._check_shapes()
        if sums is not None:
            self.sums = dict(sums)
        self._ends: dict[str, dict[str, int]] = {}

    @cached_property
    def sums(self) -> dict[str, int]:
        """The content sum of each tensor as saved, 0 for a missing tensor; ValueError if they do not match.

        Read when they are needed: the rows of a checksum lie in files of all ranks.
        """
        words = from_words(self._tensor(MODEL_CHECKSUM).whole())
        sums = {name: words[name] for name in MODEL_TENSORS}
        if self.optimizer is not None:
            words = from_words(self._tensor(OPTIMIZER_CHECKSUM).whole())
            sums |= {name: words[name] for name in OPTIMIZER_TENSORS}
            if optimizer_ids := words["ids"]:  # 0: the state has no rows
                self._check_sum("ids", sums["ids"], optimizer_ids)
        for name, total in sums.items():
            if name not in self._tensors:
                self._check_sum(name, 0, total)
        for name in {"config", "optimizer_config"} & self._tensors.keys():
            saved = self._tensors[name].whole()
            self._check_sum(name, sum_of_small(self.name, name, saved), sums[name])
        return sums

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the saved tensors; a tensor without numbers may be missing."""
        return tuple(self._tensors)

    @property
    def cuts(self) -> list[int]:
        """The first column of each column shard of its row-wise optimizer state, and D."""
        return (self.optimizer or {}).get("cuts") or [0, self.embedding_dim]

    @property
    def is_delta(self) -> bool:
        """True if only the changes of a table were saved."""
        return "base" in self._tensors

    @property
    def row_names(self) -> tuple[str, ...]:
        """Names of the saved per-row tensors, which have a row for each id."""
        return tuple(name for name in ROW_TENSORS if name in self._tensors)

    @property
    def row_keys(self) -> set[str]:
        """Keys of the per-row tensors in the checkpoint, including optimizer state."""
        return {self._tensors[name].key for name in self.row_names}

    def columns_of(self, name: str) -> int:
        """Returns the number of columns of a saved per-row tensor."""
        return math.prod(self._tensors[name].shape[1:])

    @property
    def bytes(self) -> int:
        """Number of bytes of all tensors, without "step", a single number."""
        return sum(
            saved.shape[0] * saved.row_bytes for saved in self._tensors.values() if saved.shape
        )

    def rows_of(self, name: str) -> int:
        """Returns the number of rows of a tensor, 0 for a missing tensor."""
        return self._tensors[name].shape[0] if name in self._tensors else 0

    def fingerprint(self, when: str = "checksum", optimizer: bool = False) -> int:
        """Returns the fingerprint of the contents, 64 bits. It does not depend on the plan.

        Source: BLAKE2b with an 8 byte digest (RFC 7693) of the table's name and the content sums.
        """
        sums = self.sums if when == "checksum" else self.sums_at(when)
        names = OPTIMIZER_TENSORS if optimizer else MODEL_TENSORS
        text = "\0".join([self.name, *(str(sums[name]) for name in names)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def sums_at(self, when: str) -> dict[str, int]:
        """Returns the content sums of the whole table at the "base" or the "result" of a delta; read once."""
        if when not in self._ends:
            self._ends[when] = from_words(self.read(when))
        return self._ends[when]

    def read(self, name: str) -> Tensor:
        """Reads and checks a whole tensor; meant for the small tensors that are not per row."""
        if name in ROW_TENSORS:
            tensor = self._tensor(name)
            return torch.cat([tensor.rows(0, 0), *(chunk[name] for chunk in self.chunks((name,)))])
        saved = self._tensor(name).whole()
        if name in SMALL_TENSORS and name in self.sums:
            self._check_sum(name, sum_of_small(self.name, name, saved), self.sums[name])
        return saved

    def chunks(
        self, names: Sequence[str] = ("ids", "weight"), chunk_bytes: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yields rows in canonical order, chunk by chunk, and checks their content sums after the last chunk.

        Do not rely on any chunk until the iteration has ended without an error.

        Returns:
            Chunks, each with the same rows of all `names` and "ids": [M, D] or [M].
        """
        return MergedTable([self]).chunks(names, chunk_bytes)

    def rows(self, name: str, first: int, last: int, columns: slice | None = None) -> Tensor:
        """Reads rows [first, last) of the given columns without checks: [rows, columns] or [rows]."""
        return self._tensor(name).rows(first, last, columns)

    def place_of(self, name: str, mixed: int) -> int:
        """Returns the first place in "ids", "removed" or "waiting" with a mixed id of at least `mixed`."""
        return first_place(partial(self.ids, name), self.rows_of(name), mixed)

    def ids(self, name: str, first: int, last: int) -> Tensor:
        """Returns the ids [M] at places [first, last) in "ids", "removed" or "waiting"."""
        columns = slice(0, 1) if name == "waiting" else None
        return self.rows(name, first, last, columns).reshape(-1).contiguous()

    def verify(self) -> None:
        """Reads and checks all tensors."""
        self.verify_small()
        for _ in self.chunks(self.row_names):
            pass

    def verify_small(self) -> None:
        """Reads and checks the tensors that are not per row."""
        for name in (*SMALL_TENSORS, "removed"):
            if name in self._tensors:
                saved = self.read(name)
                if name == "removed" and not is_canonical(saved):
                    raise self._damaged("removed ids in canonical order", "another order")

    def _tensor(self, name: str) -> ChunkedTensor:
        if name not in self._tensors:
            raise ValueError(
                f"{self.where}: expected a name among {', '.join(self._tensors)}, got {name!r}."
            )
        return self._tensors[name]

    def _check_shapes(self) -> None:
        if "weight" in self._tensors:
            self.dtype = self._tensors["weight"].dtype
        sizes = {"R": self.num_rows, "D": self.embedding_dim}
        for name, saved in self._tensors.items():
            if not fits(name, saved.shape, saved.dtype, sizes):
                raise self._damaged(
                    f"{name} {SHAPES[name]} with {', '.join(sizes)} = {', '.join(map(str, sizes.values()))}",
                    f"{list(saved.shape)} {str(saved.dtype).removeprefix('torch.')}",
                )

    def _check_sum(self, name: str, total: int, expected: int) -> None:
        if total != expected:
            raise self._damaged(f"the content sum {expected:016x} of {name}", f"{total:016x}")

    def _damaged(self, expected: str, got: str) -> ValueError:
        return ValueError(f"{self.where}: expected {expected}, got {got}. {DAMAGED}")


class MergedTable(RowSource):
    """A table as it was at the last of some saves: a full save and the deltas after it, or one save alone.

    The rows must have the content sums that the last delta names as its result. `step` is the entry's.

    Attributes:
        last: the last save; configs and tensors that are not by row are whole in it.
        most_rows: the number of rows in all saves, with those that later saves replace or remove.
    """

    def __init__(
        self, saves: Sequence[SavedTable], where: str | None = None, step: int | None = None
    ) -> None:
        self._saves, self.last = tuple(saves), saves[-1]
        last = self.last
        self.where = where or last.where
        dtypes = sorted({str(save.dtype) for save in saves})
        if len(dtypes) > 1:
            raise ValueError(
                f"{self.where}: expected saves with one dtype of rows, got {dtypes}. Call "
                "Checkpoints.restore in the training job, then save(..., full=True), and use that entry."
            )
        self.name, self.embedding_dim, self.dtype = last.name, last.embedding_dim, last.dtype
        self.seed = int(last.config.get("seed", 0))
        self.step = step
        self.most_rows = sum(save.num_rows for save in saves)
        self.cuts = last.cuts
        if "clock" in last.names:
            self.clock = last.read("clock")
        is_chain = len(saves) > 1 and last.is_delta
        sums = last.sums_at("result") if is_chain else last.sums
        # Row-wise state that was saved in several column cuts was rounded twice.
        rounded = STATE_NAMES if any(save.cuts != last.cuts for save in saves) else ()
        names = {*ROW_TENSORS, "waiting"}.difference(rounded)
        self.sums = {name: sums[name] for name in names if name in sums}

    @cached_property
    def num_rows(self) -> int:
        """The number of rows; of several saves all ids are read."""
        if len(self._saves) == 1:
            return self.last.num_rows
        return sum(len(chunk["ids"]) for chunk in self.chunks(()))

    def most_in_a_save(self, mixed: Sequence[range]) -> int:
        """Returns the most ids in ranges of mixed ids that one of the saves has."""
        return max(
            sum(save.place_of("ids", ids.stop) - save.place_of("ids", ids.start) for ids in mixed)
            for save in self._saves
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors by row; a save without rows may lack some of them."""
        with_rows = [set(save.row_names) for save in self._saves if save.num_rows]
        known = set.intersection(*with_rows) if with_rows else {"ids", "weight", *self._states}
        return tuple(name for name in ROW_TENSORS if name in known)

    def is_rowwise(self, name: str) -> bool:
        """Returns True for optimizer state with one number for each column shard."""
        if name not in STATE_NAMES:
            return False
        saves = [save for save in self._saves if save.num_rows and name in save.row_names]
        shards = len(self.cuts) - 1
        if saves and shards < self.embedding_dim:
            return saves[-1].columns_of(name) == shards
        return self._states.get(name, False)

    @property
    def _states(self) -> dict[str, bool]:
        """By name of the optimizer state, True if it has a number per row (RowOptimizer.saved_name)."""
        name = str((self.last.optimizer or {}).get("optimizer"))
        kind = OptimizerKind.__members__.get(name.upper())
        if kind is not None:
            rule = RowOptimizer(kind)
            return dict(zip(rule.state_names, rule.state_is_rowwise, strict=True))
        states = name.partition(" with ")[2].split(", ")
        is_rowwise = [state.endswith("(a number per row)") for state in states if "(" in state]
        return dict(zip(STATE_NAMES, is_rowwise, strict=False))

    def _id_lists(self, waiting: bool) -> list[tuple[SavedTable, int, str]]:
        """Returns the saves, their numbers and the names of their lists of ids: what is newest first.

        The ids of a delta come before its removed ids: an id that is in both has a row.
        """
        if waiting:
            return [(self.last, len(self._saves) - 1, "waiting")]
        numbered = [*enumerate(self._saves)]
        lists = [(save, i, name) for i, save in numbered for name in ("removed", "ids")]
        return lists[::-1]

    def _places(
        self, rows: int, mixed: Sequence[range], waiting: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        lists = self._id_lists(waiting)
        for span in mixed:
            readers = [_IdReader(save, number, name, span) for save, number, name in lists]
            # A save holds as many ids as its share of all, so that all saves reach their ends together.
            count = max(1, sum(reader.count for reader in readers))
            for reader in readers:
                reader.most = max(1, rows * reader.count // count)
            while filled := [reader for reader in readers if reader.fill()]:
                end = min(reader.end_key for reader in filled)
                ids, places = _newest([reader.take(end) for reader in filled])
                yield from zip(ids.split(rows), places.split(rows), strict=True)

    def _read(
        self, names: Sequence[str], ids: Tensor, places: Tensor, columns: slice, waiting: bool
    ) -> dict[str, Tensor]:
        saves, rows = places >> _ROW_BITS, places & ((1 << _ROW_BITS) - 1)
        chunk: dict[str, Tensor] = {}
        counts = torch.bincount(saves, minlength=len(self._saves))
        # The save with the most rows fills the chunk, and the others overwrite their rows.
        for number in counts.argsort(descending=True)[: int((counts > 0).sum())].tolist():
            at = (saves == number).nonzero().flatten()
            for name in names:
                read = partial(self._rows, self._saves[number], name, columns, waiting)
                if name in chunk:
                    chunk[name].index_copy_(0, at, rows_at(read, rows[at]))
                else:
                    chunk[name] = rows_at(read, rows, at)
        return {name: chunk[name] for name in names}

    def _rows(
        self, save: SavedTable, name: str, columns: slice, waiting: bool, first: int, last: int
    ) -> Tensor:
        """Returns rows [first, last) of one save, row-wise state in the column cuts of the last save."""
        if waiting:
            column = 1 + SCORES.index(name)
            return save.rows("waiting", first, last, slice(column, column + 1)).flatten()
        if not self.is_rowwise(name):
            return save.rows(name, first, last, None if name in SCORES else columns)
        rows = save.rows(name, first, last)
        if save.cuts == self.cuts:
            return rows
        return torch.cat([mean_over_cuts(rows, save.cuts, span) for span in pairwise(self.cuts)], 1)


class _IdReader:
    """Reads the ids, removed ids or waiting ids of a save in a range of mixed ids, some at a time."""

    def __init__(self, save: SavedTable, number: int, name: str, mixed: range) -> None:
        self._save, self._name, self._number = save, name, number
        self._next, self._end = save.place_of(name, mixed.start), save.place_of(name, mixed.stop)
        self.count = self._end - self._next
        self.most = self.count  # ids that are held
        self._ids = self._keys = torch.empty(0, dtype=torch.int64, device="cpu")
        self._last = self._keys  # the key of the last id that was read

    def fill(self) -> bool:
        """Reads further ids; returns False at the end."""
        missing = min(self.most - len(self._ids), self._end - self._next)
        if missing > 0:
            more = self._save.ids(self._name, self._next, self._next + missing)
            keys = torch.cat([self._last, canonical_keys(more)])
            self._next += missing
            if not (keys[1:] > keys[:-1]).all():
                raise ValueError(
                    f"{self._save.where}: expected {self._name} in canonical order, got another order up to "
                    f"row {self._next}. {DAMAGED}"
                )
            self._ids = torch.cat([self._ids, more])
            self._keys = torch.cat([self._keys, keys[-missing:]])
            self._last = keys[-1:]
        return bool(len(self._ids))

    @property
    def end_key(self) -> int:
        """The largest key up to which all ids are held."""
        return _LAST_KEY if self._next == self._end else int(self._keys[-1])

    def take(self, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the ids with keys up to `end`: ids, keys and places, [M] int64 each."""
        cut = int(torch.searchsorted(self._keys, end, right=True))
        first = self._next - len(self._ids)
        places = torch.arange(first, first + cut, device="cpu") + (self._number << _ROW_BITS)
        if self._name == "removed":
            places.fill_(_NO_PLACE)
        taken = self._ids[:cut], self._keys[:cut], places
        self._ids, self._keys = self._ids[cut:], self._keys[cut:]
        return taken


def _newest(taken: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns ids and places [M] in canonical order; of equal ids the first counts, if it is not removed."""
    ids, keys, places = (torch.cat(parts) for parts in zip(*taken, strict=True))
    if len(taken) > 1:
        keys, order = keys.sort(stable=True)
        is_first = torch.ones(len(keys), dtype=torch.bool, device="cpu")
        is_first[1:] = keys[1:] != keys[:-1]
        ids, places = ids[order[is_first]], places[order[is_first]]
    has_row = places != _NO_PLACE
    return (ids, places) if bool(has_row.all()) else (ids[has_row], places[has_row])
