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
from torchrec_dyn.ranks import IdExchange, Table, gather_results, run_together
from torchrec_dyn.storage import CanonicalRows, to_host, turn_of
from torchrec_dyn.table import read_tensor, stamp_of
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
        (self.group,) = {held.group for held in tables.values()}

        def begin() -> list[list[int]] | None:
            self._table = held = _named(tables, table, call)
            with turn_of(held):
                self._stamps = [stamp_of(shard) for shard in held.shards]
                self._rows = self._canonical(waiting=False)
                life = held.shards[0].life if held.shards else None
                return None if life is None else life.clock.export().tolist()

        clocks = gather_results(self.group, call, begin)
        held = self._table
        self.where, self.name = f"{call}(table='{held.name}')", held.name
        self.embedding_dim, self.dtype, self.cuts = held.embedding_dim, held.dtype, held.cuts
        self.seed = int(held.config["seed"])
        clock: list[list[int]] = next((numbers for numbers in clocks if numbers), [[], []])
        self.clock = torch.tensor(clock, dtype=torch.int64, device="cpu")
        ranks = held.layout.pieces[0].ranks
        self.share = (ranks.index(held.rank), len(ranks)) if held.has_first_column else None
        self.count = 0 if self._rows is None else self._rows.count
        self._ids: Tensor | None = None  # of all ranks
        if on_first_rank and self.group is not None:
            self._ids = to_host(held.read_ids())
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
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._ids is not None and not waiting:
            for ids in self._ids.split(rows):
                yield (ids if self.share else nothing), nothing
            return
        canonical = self._together(partial(self._canonical, waiting)) if waiting else self._rows

        def read(start: int) -> tuple[Tensor, Tensor]:
            if canonical is None:
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
        if self.group is not None and (self._ids is not None or len(self.cuts) > 2):
            chunk = self._exchange(names, ids)
        else:
            chunk = self._together(partial(self._read_here, names, places))
        for name in names:
            if name not in SCORES and not self.is_rowwise(name):
                chunk[name] = chunk[name][:, columns]
        return chunk

    def _read_here(self, names: Sequence[str], places: Tensor) -> dict[str, Tensor]:
        """Returns rows of this rank's share, in whole rows: an uncut table has one shard."""
        if not self._table.has_first_column:
            return {name: self.nothing(name) for name in names}
        return {name: to_host(read_tensor(self._table.shards[0], name, places)) for name in names}

    def _read_waiting(self, places: Tensor) -> dict[str, Tensor]:
        life = self._table.shards[0].life if self._table.has_first_column else None
        if life is None or life.waiting is None:
            return {name: self.nothing(name) for name in SCORES}
        numbers = map(to_host, life.waiting.read(places))
        return dict(zip(SCORES, numbers, strict=True))

    def _exchange(self, names: Sequence[str], ids: Tensor) -> dict[str, Tensor]:
        """Returns rows of ids [M] that other ranks hold, in whole rows. Collective."""
        assert self.group is not None
        exchange = IdExchange(self.where, lambda: ids, self._table.layout, self.group, ids.device)
        read = self._together(
            lambda: [self._read_arrived(name, exchange.arrived) for name in names]
        )
        chunk = {}
        for name, values in zip(names, read, strict=True):
            if name in SCORES:
                chunk[name] = exchange.return_numbers(values)
            else:
                rows = exchange.return_rows(values)
                chunk[name] = rows[:, list(self.cuts[:-1])] if self.is_rowwise(name) else rows
        return chunk

    def _read_arrived(self, name: str, ids: Tensor) -> Tensor:
        """Returns what this rank's shards have of ids [K] that were sent here, [K, C]; scores [K].

        Row-wise state is repeated for each column of its shard, so that it travels as rows do.
        """
        shards = self._table.shards
        read = [
            to_host(read_tensor(shard, name, shard.id_map.lookup(ids.to(shard.device))))
            for shard in (shards if name not in SCORES else shards[: self._table.has_first_column])
        ]
        if name in SCORES:
            return read[0] if read else self.nothing(name)
        parts = [
            values.expand(-1, shard.columns) for values, shard in zip(read, shards, strict=True)
        ]
        return torch.cat([self.nothing(name, len(ids))[:, :0], *parts], 1)

    def _canonical(self, waiting: bool) -> CanonicalRows | None:
        """Returns the rows, or the waiting ids, of this rank's share; None without any."""
        table = self._table
        if not table.has_first_column:
            return None
        shard = table.shards[0]
        if not waiting:
            return table.canonical(shard)
        life = shard.life
        if life is None or life.waiting is None:
            return None
        return CanonicalRows(life.waiting.id_map, shard.where, lambda: stamp_of(shard))

    def _together(self, read: Callable[[], _T]) -> _T:
        """Reads on all ranks; a fault is raised on all."""

        def unchanged() -> _T:
            with turn_of(self._table):
                if [stamp_of(shard) for shard in self._table.shards] != self._stamps:
                    raise RuntimeError(
                        "expected the table as it was when the call began, got a table that was trained or "
                        "edited since. Export while the collection is not trained or edited."
                    )
                return read()

        return run_together(self.group, self.where, unchanged)


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
