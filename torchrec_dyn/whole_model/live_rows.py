"""LiveRows: the rows of a table of a model. Each rank reads its share; other ranks send what only they have.

Legend: M ids of this rank, K ids sent to this rank, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint_format import SCORES, RowSource
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import IdExchange, Piece, Table, TableLayout, gather_results, run_together
from torchrec_dyn.storage import CanonicalRows, to_host, turn_of
from torchrec_dyn.table import TableShard, read_tensor, stamp_of
from torchrec_dyn.whole_model.by_id import read_ids
from torchrec_dyn.whole_model.tables import tables_in

_T = TypeVar("_T")


class LiveRows(RowSource):
    """A table of a collection, sharded or not. Making it is collective, as reading it is.

    A rank's share are the ids that it holds with the first columns; with `on_first_rank` all ids are the
    share of rank 0. `table` is None for the only table. Nothing may train or edit the collection meanwhile.

    Attributes:
        count: number of rows of this rank's share.
    """

    def __init__(
        self, collection: nn.Module, table: str | None, call: str, on_first_rank: bool = False
    ) -> None:
        tables = tables_in(collection, call=call)
        (group,) = {one.group for one in tables.values()}
        held = self._table = run_together(group, call, lambda: _named(tables, table, call))
        self.where, self.group, self.name = f"{call}(table='{held.name}')", group, held.name
        self.embedding_dim, self.dtype, self.cuts = held.embedding_dim, held.dtype, held.cuts
        self.seed = int(held.config["seed"])
        ranks = held.layout.pieces[0].ranks
        self.share = (ranks.index(held.rank), len(ranks)) if held.has_first_column else None
        clocks = gather_results(group, self.where, self._clock_here)
        clock = next((numbers for numbers in clocks if numbers is not None), self.clock.tolist())
        self.clock = torch.tensor(clock, dtype=torch.int64, device="cpu")
        self._stamps = [stamp_of(shard) for shard in held.shards]
        self._rows = self._canonical(lambda shard: held.canonical(shard))
        self.count = 0 if self._rows is None else self._rows.count
        self._ids: Tensor | None = None  # of all ranks
        if on_first_rank and group is not None:
            ids = read_ids(collection, held.name)
            self._ids = run_together(group, self.where, lambda: to_host(ids))
            self.share = (0, 1) if held.rank == 0 else None
            self.count = len(self._ids) if held.rank == 0 else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors by row."""
        scores = SCORES if self._table.options.has_life else ()
        return ("ids", "weight", *scores, *self._table.optimizer.state_names)

    def is_rowwise(self, name: str) -> bool:
        """Returns True for optimizer state with one number for each column shard."""
        return self._table.optimizer.is_rowwise(name)

    def _places(
        self, rows: int, mixed: Sequence[range], waiting: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        canonical = self._canonical(_waiting_rows) if waiting else self._rows
        if self._ids is not None and not waiting:
            nothing = self._ids[:0]
            for ids in self._ids.split(rows):
                yield (ids if self.share else nothing), nothing
            return

        def read(start: int) -> tuple[Tensor, Tensor]:
            if canonical is None:
                nothing = torch.empty(0, dtype=torch.int64, device="cpu")
                return nothing, nothing
            count = canonical.count
            ids, places = canonical.read(min(start, count), min(start + rows, count))
            return to_host(ids), places

        counts = gather_results(self.group, self.where, lambda: canonical.count if canonical else 0)
        for start in range(0, max(counts), rows):
            yield self._together(partial(read, start))

    def _read(
        self, names: Sequence[str], ids: Tensor, places: Tensor, columns: slice, waiting: bool
    ) -> dict[str, Tensor]:
        if waiting:
            return self._together(partial(self._read_waiting, places))
        here, sent = list(names), []
        if self.group is not None and (self._ids is not None or len(self.cuts) > 2):
            here = [name for name in names if name in SCORES and self._ids is None]
            sent = [name for name in names if name not in here]
        chunk = self._together(partial(self._read_here, here, places))
        for layout, cut in self._layouts(sent):
            assert self.group is not None
            exchange = IdExchange(self.where, lambda: ids, layout, self.group, ids.device)
            for name in cut:
                sent_rows = self._together(partial(self._read_sent, name, exchange.arrived))
                rows = exchange.return_rows(sent_rows)
                chunk[name] = rows.flatten() if name in SCORES else rows
        return {
            name: chunk[name]
            if name in SCORES or self.is_rowwise(name)
            else chunk[name][:, columns]
            for name in names
        }

    def _read_here(self, names: Sequence[str], places: Tensor) -> dict[str, Tensor]:
        """Returns rows of this rank's share, in whole rows: an unsharded table has one shard."""
        if not self._table.has_first_column:
            return {name: self.nothing(name) for name in names}
        return {name: to_host(read_tensor(self._table.shards[0], name, places)) for name in names}

    def _read_waiting(self, places: Tensor) -> dict[str, Tensor]:
        life = self._table.shards[0].life if self._table.has_first_column else None
        if life is None or life.waiting is None:
            return {name: self.nothing(name) for name in SCORES}
        numbers = map(to_host, life.waiting.read(places))
        return dict(zip(SCORES, numbers, strict=True))

    def _layouts(self, names: Sequence[str]) -> Iterator[tuple[TableLayout, list[str]]]:
        """Yields layouts with the names of the tensors that are cut so: row-wise state by column shards."""
        layout = self._table.layout
        counted = [Piece(number, 1, one.ranks) for number, one in enumerate(layout.pieces)]
        rowwise = [name for name in names if self.is_rowwise(name)]
        scores = [name for name in names if name in SCORES]
        others = [name for name in names if name not in (*rowwise, *scores)]
        for pieces, cut in ((counted[:1], scores), (layout.pieces, others), (counted, rowwise)):
            if cut:
                yield TableLayout(tuple(pieces), layout.rows_are_spread), cut

    def _read_sent(self, name: str, ids: Tensor) -> Tensor:
        """Returns what this rank's shards have of ids [K] that other ranks sent, [K, columns]."""
        shards = self._table.shards
        if name in SCORES:
            shards = shards[:1] if self._table.has_first_column else ()

        parts = [
            to_host(read_tensor(shard, name, shard.id_map.lookup(ids.to(shard.device))))
            for shard in shards
        ]
        parts = [self.nothing(name, len(ids)), *parts]
        parts = [values if values.dim() == 2 else values[:, None] for values in parts]
        return torch.cat([parts[0][:, :0], *parts[1:]], 1)

    def _clock_here(self) -> list[list[int]] | None:
        lives = [shard.life for shard in self._table.shards]
        return None if not lives or lives[0] is None else lives[0].clock.export().tolist()

    def _canonical(
        self, read: Callable[[TableShard], CanonicalRows | None]
    ) -> CanonicalRows | None:
        """Returns rows of this rank's share, None without a share."""
        first = self._table.shards[:1] if self._table.has_first_column else ()
        return self._together(lambda: next((read(shard) for shard in first), None))

    def _together(self, read: Callable[[], _T]) -> _T:
        """Reads on all ranks; a fault is raised on all."""
        return run_together(self.group, self.where, lambda: self._unchanged(read))

    def _unchanged(self, read: Callable[[], _T]) -> _T:
        with turn_of(self._table):
            if [stamp_of(shard) for shard in self._table.shards] != self._stamps:
                raise RuntimeError(
                    "expected the table as it was when the call began, got a table that was trained or "
                    "edited since. Export while the collection is not trained or edited."
                )
            return read()


def for_each_chunk(
    source: RowSource,
    chunks: Iterable[dict[str, Tensor]],
    work: Callable[[dict[str, Tensor]], None],
) -> None:
    """Runs `work` on this rank's chunks. A fault is raised on all ranks, after all of them have read on."""
    fault: Exception | None = None
    for chunk in chunks:
        try:
            if fault is None:
                work(chunk)
        except Exception as error:
            if source.group is None:
                raise
            fault = error

    def check() -> None:
        if fault is not None:
            raise fault

    run_together(source.group, source.where, check)


def _named(tables: Mapping[str, Table], name: str | None, call: str) -> Table:
    """Returns the table of a name; None: the only table."""
    if name is None and len(tables) == 1:
        return next(iter(tables.values()))
    if name is None or name not in tables:
        raise ValueError(f"{call}: expected a table among {listed(sorted(tables))}, got {name!r}.")
    return tables[name]


def _waiting_rows(shard: TableShard) -> CanonicalRows | None:
    if shard.life is None or shard.life.waiting is None:
        return None
    return CanonicalRows(shard.life.waiting.id_map, shard.where, lambda: stamp_of(shard))
