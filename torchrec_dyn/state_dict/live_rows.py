"""LiveRows: the rows of a table of a model. Each rank reads its share; other ranks send what only they have.

Legend: M ids of this rank, K ids sent to this rank, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import SCORES, RowSource
from torchrec_dyn.ranks import IdExchange, Table, gather_results, run_together
from torchrec_dyn.storage import CanonicalRows, to_host, turn_of
from torchrec_dyn.table import read_tensor, stamp_of

_T = TypeVar("_T")


class LiveRows(RowSource):
    """A table, sharded or not. Making it is collective, as reading it is; an error is one of all ranks.

    A rank's share are the ids that it holds with the first columns; with `on_first_rank` all ids are the
    share of rank 0. Nothing may train or edit the collection meanwhile.

    Attributes:
        count: number of rows of this rank's share.
    """

    def __init__(self, table: Table, call: str, on_first_rank: bool = False) -> None:
        self._table, self.group = table, table.group
        self._fault: Exception | None = None  # of a read; raised after the last chunk

        def begin() -> tuple[int, int, list[list[int]] | None]:
            with turn_of(table):
                self._stamps = [stamp_of(shard) for shard in table.shards]
                self._rows, self._waiting = self._canonical(False), self._canonical(True)
                life = table.shards[0].life if table.shards else None
                clock = None if life is None else life.clock.export().tolist()
            rows, waiting = (held.count if held else 0 for held in (self._rows, self._waiting))
            return rows, waiting, clock

        rows, waiting, clocks = zip(*gather_results(self.group, call, begin), strict=True)
        self._most_rows, self._most_waiting = max(rows), max(waiting)  # of any rank
        self.where, self.name = f"{call}(table='{table.name}')", table.name
        self.embedding_dim, self.dtype, self.cuts = table.embedding_dim, table.dtype, table.cuts
        self.seed = int(table.config["seed"])
        clock: list[list[int]] = next((numbers for numbers in clocks if numbers), [[], []])
        self.clock = torch.tensor(clock, dtype=torch.int64, device="cpu")
        ranks = table.layout.pieces[0].ranks
        self.share = (ranks.index(table.rank), len(ranks)) if table.has_first_column else None
        self.count = 0 if self._rows is None else self._rows.count
        self._ids: Tensor | None = None  # of all ranks
        if on_first_rank and self.group is not None:
            self._ids = to_host(table.read_ids())
            self.share = (0, 1) if table.rank == 0 else None
            self.count = len(self._ids) if table.rank == 0 else 0

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
        canonical = self._waiting if waiting else self._rows

        def read(start: int) -> tuple[Tensor, Tensor]:
            if canonical is None:
                return nothing, nothing
            count = canonical.count
            ids, places = canonical.read(min(start, count), min(start + rows, count))
            return to_host(ids), places

        if self._ids is not None and not waiting:
            for ids in self._ids.split(rows):
                yield (ids if self.share else nothing), nothing
        else:
            for start in range(0, self._most_waiting if waiting else self._most_rows, rows):
                yield self._read_here(partial(read, start), lambda: (nothing, nothing))
        run_together(self.group, self.where, self._raise_fault)

    def _read(
        self, names: Sequence[str], ids: Tensor, places: Tensor, columns: slice, waiting: bool
    ) -> dict[str, Tensor]:
        def unread() -> dict[str, Tensor]:
            return {name: self.nothing(name, len(places)).zero_() for name in names}

        if waiting:
            return self._read_here(partial(self._read_waiting, places), unread)
        if self.group is not None and (self._ids is not None or len(self.cuts) > 2):
            chunk = self._exchange(names, ids)
        else:
            chunk = self._read_here(partial(self._read_rows, names, places), unread)
        for name in names:
            if name not in SCORES and not self.is_rowwise(name):
                chunk[name] = chunk[name][:, columns]
        return chunk

    def _read_rows(self, names: Sequence[str], places: Tensor) -> dict[str, Tensor]:
        """Returns rows of this rank's share, in whole rows: an uncut table has one shard."""
        if not self._table.has_first_column:
            return {name: self.nothing(name) for name in names}
        return {name: to_host(read_tensor(self._table.shards[0], name, places)) for name in names}

    def _read_waiting(self, places: Tensor) -> dict[str, Tensor]:
        waiting = self._table.shards[0].waiting if self._table.has_first_column else None
        if waiting is None:
            return {name: self.nothing(name) for name in SCORES}
        numbers = map(to_host, waiting.read(places))
        return dict(zip(SCORES, numbers, strict=True))

    def _exchange(self, names: Sequence[str], ids: Tensor) -> dict[str, Tensor]:
        """Returns rows of ids [M] that other ranks hold, in whole rows. Collective."""
        assert self.group is not None
        exchange = IdExchange(self.where, lambda: ids, self._table.layout, self.group, ids.device)
        width, arrived = sum(shard.columns for shard in self._table.shards), exchange.arrived

        def unread() -> dict[str, Tensor]:
            empty = {name: self.nothing(name, len(arrived)).zero_() for name in names}
            return {
                name: values if name in SCORES else values[:, :1].expand(-1, width)
                for name, values in empty.items()
            }

        read = self._read_here(
            lambda: {name: self._read_arrived(name, arrived) for name in names}, unread
        )
        chunk = {}
        for name, values in read.items():
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
        if shard.waiting is None:
            return None
        return CanonicalRows(shard.waiting.id_map, shard.where, lambda: stamp_of(shard))

    def _read_here(self, read: Callable[[], _T], unread: Callable[[], _T]) -> _T:
        """Reads on this rank. After a fault it gives `unread`, so that the other ranks come to the end."""
        try:
            if self._fault is None:
                with turn_of(self._table):
                    if [stamp_of(shard) for shard in self._table.shards] != self._stamps:
                        raise RuntimeError(
                            "expected the table as it was when the call began, got a table that was "
                            "trained or edited since. Export while the collection is not trained or edited."
                        )
                    return read()
        except Exception as fault:
            if self.group is None:
                raise
            self._fault = fault
        return unread()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


def for_each_chunk(source: RowSource, chunks: Iterable[_T], work: Callable[[_T], None]) -> None:
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
