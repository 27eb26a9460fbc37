"""StaticRows: the rows of a table of TorchRec's, which become those of a dynamic table: id i has row i.

Legend: N rows, D columns of the static table, M rows of a chunk, C columns of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import RowSource, rows_at
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import mixed_ranges
from torchrec_dyn.table import TableShard, named_states

ReadRows = Callable[[int, int], Tensor]  # returns rows [first, last)


class StaticRows(RowSource):
    """A static table: a dense tensor of rows, and the state of the optimizer that trained it.

    `tensors` read "weight" [M, D] and optimizer state by FBGEMM's name, [M, D] or [M, shards of `cuts`].

    Attributes:
        trained_steps: training steps so far.
    """

    def __init__(
        self,
        where: str,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        tensors: Mapping[str, ReadRows],
        optimizer: RowOptimizer,
        trained_steps: int,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.where, self.name, self.dtype = where, name, dtype
        self._count, self.embedding_dim = shape
        self._tensors, self._optimizer, self.trained_steps = tensors, optimizer, trained_steps
        self.cuts = cuts or (0, self.embedding_dim)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors by row."""
        return ("ids", *self._tensors)

    def is_rowwise(self, name: str) -> bool:
        """Returns True for optimizer state with one number for each column shard."""
        return self._optimizer.is_rowwise(name)

    def _places(
        self, rows: int, mixed: Sequence[range], waiting: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, 0 if waiting else self._count, rows):
            ids = torch.arange(first, min(first + rows, self._count), device="cpu")
            yield ids, ids

    def _read(
        self, names: Sequence[str], ids: Tensor, places: Tensor, columns: slice, waiting: bool
    ) -> dict[str, Tensor]:
        rows = {name: rows_at(self._tensors[name], places) for name in names}
        return {
            name: values if self.is_rowwise(name) else values[:, columns]
            for name, values in rows.items()
        }

    def fill(self, shards: Sequence[TableShard], part: int = 0, ranks: int = 1) -> None:
        """Fills empty shards with the ids of one of `ranks` ranks; their scores start at the last step."""
        for shard in shards:
            shard.step = self.trained_steps  # first: policies count the rows' age from this step
            shard.reserve(self._count // ranks)
        for chunk in self.chunks(self.names, knobs.CHUNK_BYTES, mixed=mixed_ranges(part, ranks)):
            for shard in shards:
                span = slice(shard.first_column, shard.first_column + shard.columns)
                rows = {name: self.in_columns(name, chunk[name], span) for name in self._tensors}
                _insert(shard, chunk["ids"], rows)


def _insert(table: TableShard, ids: Tensor, values: Mapping[str, Tensor]) -> None:
    """Inserts rows of distinct new ids [M], "weight" and states [M, C], without a check of the limit."""
    table.reserve(ids.numel())
    if table.changes is not None:
        table.changes.forget_sums()
    rows = table.row_numbers.take(ids.numel())
    ids = ids.to(table.device)
    table.id_map.insert(ids, rows)
    table.weights.write(rows, values["weight"].to(table.device))
    for state in named_states(table):
        if state.name in values:
            state.store.write(rows, values[state.name].to(table.device))
        else:
            state.store.fill(rows, state.initial)
    if table.life is not None:
        table.life.prepare_rows(ids, rows, table.step, None)()
