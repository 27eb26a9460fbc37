"""RowSource: the rows of one table, read in chunks, wherever they are.

The sources are `MergedTable` (a full save and deltas, saved_table.py), `LiveRows` (a table of a model,
state_dict/live_rows.py), `FileRows` (a .safetensors file, tools/safetensors_rows.py) and `StaticRows` (a
table of TorchRec's, migration/static_rows.py). Each gives ids, the places of their rows, and the rows at some
places; `RowSource.chunks` is the one loop over them.

Legend: M rows of a chunk, D columns of the table, C columns asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format.content_sums import DAMAGED, add_sums, content_sum
from torchrec_dyn.checkpoint_format.saved_config import mean_over_cuts
from torchrec_dyn.optimizers import STATE_NAMES
from torchrec_dyn.storage import canonical_keys

ALL_MIXED = range(1 << 64)
SCORES = ("last_seen", "count")  # one int64 a row, the same in every column shard


class RowSource(ABC):
    """The rows of one table: ids in order, with their rows, optimizer state and scores.

    The order is the canonical order; rows of a file and of a static table come as they are stored.

    Attributes:
        where: the call and the table, for messages.
        name: name of the table.
        embedding_dim: D.
        dtype: dtype of its rows.
        cuts: the first column of each column shard of its row-wise optimizer state, and D.
        clock: steps and the time that begins at each, [2, K] int64.
        seed: seed of its initial rows; None: not known.
        step: the step of the entry of `Checkpoints` that is read; None: of a table without entries.
        sums: content sums that all rows together must have, by tensor.
        damaged: the end of the message if they have others.
        group: the ranks, each of which has its share of the rows; None: all rows are here.
        share: number of this rank's share, and the number of shares; None: this rank has none.
    """

    where: str
    name: str
    embedding_dim: int
    dtype: torch.dtype
    cuts: Sequence[int]
    clock: Tensor = torch.empty(2, 0, dtype=torch.int64, device="cpu")
    seed: int | None = None
    step: int | None = None
    sums: Mapping[str, int] = {}
    damaged: str = DAMAGED
    group: dist.ProcessGroup | None = None
    share: tuple[int, int] | None = (0, 1)

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the tensors by row, "ids" first."""

    @abstractmethod
    def is_rowwise(self, name: str) -> bool:
        """Returns True for optimizer state with one number for each column shard of `cuts`."""

    @abstractmethod
    def _places(
        self, rows: int, mixed: Sequence[range], waiting: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields at most `rows` ids and the places of their rows, [M] each; also ids outside of `mixed`."""

    @abstractmethod
    def _read(
        self, names: Sequence[str], ids: Tensor, places: Tensor, columns: slice, waiting: bool
    ) -> dict[str, Tensor]:
        """Returns the rows at places [M]: scores [M], row-wise state [M, shards], other tensors [M, C]."""

    def columns_of(self, name: str) -> int:
        """Returns the number of columns of a tensor by row."""
        if name == "ids" or name in SCORES:
            return 1
        return len(self.cuts) - 1 if self.is_rowwise(name) else self.embedding_dim

    def row_bytes_of(self, names: Sequence[str]) -> int:
        """Returns the bytes of a row in these tensors together."""
        return sum(self.nothing(name, 1).nbytes for name in names)

    def nothing(self, name: str, rows: int = 0) -> Tensor:
        """Returns rows of a tensor that have no numbers yet."""
        if name == "ids" or name in SCORES:
            return torch.empty(rows, dtype=torch.int64, device="cpu")
        dtype = self.dtype if name == "weight" else torch.float32
        return torch.empty(rows, self.columns_of(name), dtype=dtype, device="cpu")

    def in_columns(self, name: str, values: Tensor, columns: slice) -> Tensor:
        """Returns what a shard with some columns has of values [M, columns] of all columns: [M, C]."""
        if self.is_rowwise(name):
            return mean_over_cuts(values, self.cuts, (columns.start, columns.stop))
        return values if values.dim() == 1 else values[:, columns]

    def chunks(
        self,
        names: Sequence[str] = ("weight",),
        chunk_bytes: int | None = None,
        *,
        ids: range | None = None,
        mixed: Sequence[range] | None = None,
        columns: Sequence[tuple[int, int]] | None = None,
        waiting: bool = False,
        sums: dict[str, int] | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Yields this rank's rows of tensors `names`, with "ids". Collective if there is a `group`.

        A chunk has at most `chunk_bytes`, or one row; None: `knobs.CHUNK_BYTES`. After the last chunk the
        content sums of all rows are compared: do not rely on a chunk before that.

        `ids` is a range of ids: all ids are read and compared, but no rows of other ids. `mixed` are ranges
        of mixed ids (`ranks.mixed_ranges`), `columns` the first column and the end of column shards, each of
        which gets a chunk in turn: then `sums` gets the content sums of what was read, and the caller
        compares their total by `check_sums`. Row-wise state becomes its mean over the columns of the shard.
        With `waiting` the ids are those that wait, which have scores only.
        """
        known = ("ids", *SCORES) if waiting else self.names
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"{self.where}: expected names among {', '.join(known)}, got {', '.join(unknown)}."
            )
        wanted = SCORES if waiting else [name for name in dict.fromkeys(names) if name != "ids"]
        chunk_bytes = knobs.CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        spans = [slice(*span) for span in columns or [(0, self.embedding_dim)]]
        total = {} if sums is None else sums

        def add(row_ids: Tensor, numbers: Mapping[str, Tensor], first_column: int) -> None:
            if sums is not None or self.sums:
                total.update(add_sums(total, self._sums_of(row_ids, numbers, first_column)))

        def places_inside(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
            for row_ids, places in self._places(rows, mixed or (ALL_MIXED,), waiting):
                if mixed is not None:
                    keys = canonical_keys(row_ids)
                    row_ids, places = _inside(mixed, keys, row_ids, places, 1 << 63)
                if not waiting:
                    add(row_ids, {"ids": row_ids}, spans[0].start)
                if ids is not None:
                    row_ids, places = _inside([ids], row_ids, row_ids, places)
                if self.group is not None or len(row_ids):
                    yield row_ids, places

        def read(rows: int) -> Iterator[dict[str, Tensor]]:
            for row_ids, places in places_inside(rows):
                for span, chunk in self._of_spans(spans, wanted, row_ids, places, waiting):
                    if waiting:
                        numbers = torch.stack([row_ids, *chunk.values()], 1)
                        add(row_ids, {"waiting": numbers}, span.start)
                    elif ids is None:
                        add(row_ids, chunk, span.start)
                    for name in chunk if columns is not None else ():
                        if self.is_rowwise(name):
                            chunk[name] = self.in_columns(name, chunk[name], span)
                    yield {"ids": row_ids, **chunk}
            if mixed is None and columns is None:
                compared = ["ids", *(wanted if ids is None else ())]
                self.check_sums(["waiting"] if waiting else compared, total)

        return read(max(1, chunk_bytes // self.row_bytes_of(["ids", *wanted])))

    def _of_spans(
        self,
        spans: Sequence[slice],
        names: Sequence[str],
        ids: Tensor,
        places: Tensor,
        waiting: bool,
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yields rows of each range of columns; what is not cut into columns is read once."""
        cut = [name for name in names if name not in SCORES and not self.is_rowwise(name)]
        whole: dict[str, Tensor] = {}
        for span in spans:
            chunk = whole | self._read(cut if whole else names, ids, places, span, waiting)
            whole = {name: chunk[name] for name in names if name not in cut}
            yield span, chunk

    def _sums_of(
        self, ids: Tensor, numbers: Mapping[str, Tensor], first_column: int
    ) -> dict[str, int]:
        """Returns content sums; only the shard with the first column sums what is not cut into columns."""
        cut = {"weight", *STATE_NAMES}
        cut -= {name for name in STATE_NAMES if self.is_rowwise(name)}
        return {
            name: content_sum(self.name, name, ids, values, first_column if name in cut else 0)
            for name, values in numbers.items()
            if name in cut or first_column == 0
        }

    def check_sums(self, names: Sequence[str], sums: Mapping[str, int]) -> None:
        """Raises ValueError if the rows that were read have other content sums than those that were saved."""
        for name in names:
            if name in self.sums and sums.get(name, 0) != self.sums[name]:
                raise ValueError(
                    f"{self.where}: expected the content sum {self.sums[name]:016x} of {name}, got "
                    f"{sums.get(name, 0):016x}. {self.damaged}"
                )


def rows_at(
    read: Callable[[int, int], Tensor], places: Tensor, known: Tensor | None = None
) -> Tensor:
    """Returns rows at places [M] of what reads rows [first, last); the places ascend.

    With `known` [K] only these of the places do and are right; the other rows may have any numbers.
    """
    ends = places[[0, -1]] if known is None else places[known[[0, -1]]]
    first, last = int(ends[0]), int(ends[1]) + 1
    rows = read(first, last)
    if len(places) == last - first and (known is None or len(known) == len(places)):
        return rows
    return rows.index_select(0, (places - first).clamp_(0, last - first - 1))


def _inside(
    ranges: Sequence[range], numbers: Tensor, ids: Tensor, places: Tensor, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns the ids and places whose numbers [M], each with `offset` added, are in one of the ranges."""
    is_inside = torch.zeros(len(numbers), dtype=torch.bool, device="cpu")
    for span in ranges:
        if span.start < span.stop:
            is_inside |= (numbers >= span.start - offset) & (numbers <= span.stop - 1 - offset)
    if bool(is_inside.all()):
        return ids, places
    return ids[is_inside], places[is_inside.to(places.device)]
