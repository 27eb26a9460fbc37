"""LiveRows: the rows of a table in a model. Each rank reads its share; column shards of other ranks are sent.

Legend: M rows of a part, K ids sent to this rank, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint_format import RowSource, TableFacts
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import IdExchange, Piece, Table, TableLayout, gather_results, run_together
from torchrec_dyn.storage import CanonicalRows, to_host, turn_of
from torchrec_dyn.table import TableShard, read_tensor, stamp_of
from torchrec_dyn.whole_model.tables import tables_in

_OF_FIRST = ("last_seen", "count")  # tensors that are the same in every column shard
_Part = dict[str, Tensor]


class LiveRows(RowSource):
    """A table of a collection, sharded or not. Making it is collective.

    A rank's share are the ids that it holds with the first columns.

    The collection must not be trained or edited while it is read. `table` is None for its only table.

    Raises:
        ValueError: if there is no such table.
    """

    def __init__(self, collection: nn.Module, table: str | None, call: str) -> None:
        tables = tables_in(collection, call=call)
        (group,) = {one.group for one in tables.values()}
        held = self._table = run_together(group, call, lambda: _named(tables, table, call))
        self.where, self.group = f"{call}(table='{held.name}')", group
        ranks = held.layout.pieces[0].ranks
        self.share = (ranks.index(held.rank), len(ranks)) if held.has_first_column else None
        self.facts = TableFacts(held.name, held.embedding_dim, held.dtype, int(held.config["seed"]))
        clocks = gather_results(group, self.where, self._clock_here)
        self._clock: list[list[int]] = next((one for one in clocks if one is not None), [[], []])
        self._stamps = [stamp_of(shard) for shard in held.shards]

    @property
    def _first(self) -> Sequence[TableShard]:
        return self._table.shards[:1] if self._table.has_first_column else ()

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors by row."""
        of_life = _OF_FIRST if self._table.options.has_life else ()
        return ("ids", "weight", *of_life, *self._table.optimizer.state_names)

    def columns_of(self, name: str) -> int:
        """Returns the number of columns of a tensor by row."""
        if self._table.optimizer.is_rowwise(name):
            return len(self._table.layout.pieces)
        return 1 if name in ("ids", *_OF_FIRST) else self._table.embedding_dim

    def parts(self, names: Sequence[str], part_bytes: int, ids: range | None) -> Iterator[_Part]:
        """Yields this rank's rows, with "ids", in canonical order. Collective; parts may be empty.

        Raises:
            RuntimeError: on every rank, if the table was trained or edited since this object was made, or a
                rank failed.
        """
        names = [name for name in names if name != "ids"]
        row_bytes = 8 + sum(8 * self.columns_of(name) for name in names)
        rows = self._canonical(lambda shard: self._table.canonical(shard))
        for start, stop in self._rounds(rows, max(1, part_bytes // row_bytes)):
            part = run_together(
                self.group, self.where, partial(self._read_here, names, rows, start, stop, ids)
            )
            yield self._with_other_shards(part, names)

    def _read_here(
        self, names: Sequence[str], rows: CanonicalRows | None, start: int, stop: int,
        ids: range | None,
    ) -> _Part:  # fmt: skip
        """Returns ids of this rank's share and what the first shard has of them, if it has whole rows."""
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        if rows is None:
            return {"ids": nothing, **{name: nothing for name in names if name in _OF_FIRST}}
        with turn_of(self._table):
            self._check_unchanged()
            found, places = rows.read(min(start, rows.count), min(stop, rows.count))
            if ids is not None:
                is_chosen = (found >= ids.start) & (found <= ids.stop - 1)
                found, places = found[is_chosen], places[is_chosen]
            part = {"ids": to_host(found)}
            for name in names:
                if name in _OF_FIRST or len(self._table.layout.pieces) == 1:
                    part[name] = to_host(read_tensor(self._table.shards[0], name, places))
            return part

    def _with_other_shards(self, part: _Part, names: Sequence[str]) -> _Part:
        """Adds what column shards of several ranks have of a part. Collective."""
        layout, optimizer = self._table.layout, self._table.optimizer
        if self.group is None or len(layout.pieces) == 1:
            return part
        of_shards = [name for name in names if name not in _OF_FIRST]
        for is_rowwise in (False, True):
            some = [name for name in of_shards if optimizer.is_rowwise(name) == is_rowwise]
            if some:
                exchange = IdExchange(
                    self.where,
                    lambda: part["ids"],
                    _one_a_shard(layout) if is_rowwise else layout,
                    self.group,
                    torch.device("cpu"),
                )
                for name in some:
                    sent = self._read_sent(name, exchange.arrived)
                    part[name] = exchange.return_rows(sent)
        return part

    def _read_sent(self, name: str, ids: Tensor) -> Tensor:
        """Returns what this rank's shards have of ids [K] that other ranks sent, [K, columns]."""
        with turn_of(self._table):
            self._check_unchanged()
            of_shards = [
                to_host(read_tensor(shard, name, shard.id_map.lookup(ids.to(shard.device))))
                for shard in self._table.shards
            ]
        dtype = self._table.dtype if name == "weight" else torch.float32
        nothing = torch.empty(len(ids), 0, dtype=dtype, device="cpu")
        return torch.cat([nothing, *(one.reshape(len(ids), -1) for one in of_shards)], 1)

    def waiting(self, part_rows: int) -> Iterator[Tensor]:
        """Yields this rank's waiting ids, [M, 3] int64. Collective; parts may be empty."""
        rows = self._canonical(_waiting_rows)

        def read(start: int, stop: int) -> Tensor:
            if rows is None:
                return torch.empty(0, 3, dtype=torch.int64, device="cpu")
            with turn_of(self._table):
                self._check_unchanged()
                life = self._table.shards[0].life
                assert life is not None and life.waiting is not None
                ids, places = rows.read(min(start, rows.count), min(stop, rows.count))
                return to_host(torch.stack([ids, *life.waiting.read(places)], dim=1))

        for start, stop in self._rounds(rows, part_rows):
            yield run_together(self.group, self.where, partial(read, start, stop))

    def clock(self) -> Tensor:
        """Returns steps and the time that begins at each, [2, K] int64."""
        return torch.tensor(self._clock, dtype=torch.int64, device="cpu")

    def _clock_here(self) -> list[list[int]] | None:
        lives = [shard.life for shard in self._table.shards]
        return None if not lives or lives[0] is None else lives[0].clock.export().tolist()

    def _canonical(
        self, read: Callable[[TableShard], CanonicalRows | None]
    ) -> CanonicalRows | None:
        """Returns rows of this rank's share, None without a share. Collective: a fault is raised on all."""

        def make() -> CanonicalRows | None:
            with turn_of(self._table):
                return next((read(shard) for shard in self._first), None)

        return run_together(self.group, self.where, make)

    def _rounds(self, rows: CanonicalRows | None, most: int) -> Iterator[tuple[int, int]]:
        """Yields places [start, stop) of a share, as often as the largest share needs. Collective."""
        counts = gather_results(self.group, self.where, lambda: 0 if rows is None else rows.count)
        for start in range(0, max(counts), most):
            yield start, start + most

    def _check_unchanged(self) -> None:
        if [stamp_of(shard) for shard in self._table.shards] != self._stamps:
            raise RuntimeError(
                "expected the table as it was when the call began, got a table that was trained or edited "
                "since. Export while the collection is not trained or edited."
            )


def _named(tables: Mapping[str, Table], name: str | None, call: str) -> Table:
    """Returns the table of a name; None: the only table."""
    if name is None and len(tables) == 1:
        return next(iter(tables.values()))
    if name is None or name not in tables:
        raise ValueError(f"{call}: expected a table among {listed(sorted(tables))}, got {name!r}.")
    return tables[name]


def _one_a_shard(layout: TableLayout) -> TableLayout:
    """Returns the layout of row-wise state: one column for each column shard."""
    pieces = [Piece(number, 1, one.ranks) for number, one in enumerate(layout.pieces)]
    return TableLayout(tuple(pieces), layout.rows_are_spread)


def _waiting_rows(shard: TableShard) -> CanonicalRows | None:
    if shard.life is None or shard.life.waiting is None:
        return None
    return CanonicalRows(shard.life.waiting.id_map, shard.where, lambda: stamp_of(shard))
