"""StagedTable: this rank's rows of a saved chain, read into shards beside those of a table.

A rank reads its ranges of mixed ids, and each shard its columns, from the save with the newest row of an id.
Once the content sums over all ranks are compared, `replace` or `merge` of the table takes the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    SCORES,
    MergedTable,
    add_sums,
    saved_initializer,
)
from torchrec_dyn.life import Clock
from torchrec_dyn.ranks import Table, mixed_ranges
from torchrec_dyn.state_dict.loading import note_taken
from torchrec_dyn.storage import commit, turn_of
from torchrec_dyn.table import Commit, TableShard, beside, named_states, replace

_CHUNK_BYTES = 8 << 20  # stays in the caches until it is summed and copied


class StagedTable:
    """This rank's rows of a saved chain for a table; to make it reads them, and changes nothing.

    Attributes:
        shards: the shards beside those of the table, complete after `finished`.
        sums: content sums of what was read here.
        is_unscored: True if no row was saved with a score: all count as just seen.
    """

    def __init__(self, table: Table, source: MergedTable) -> None:
        self.table, self.source = table, source
        self.sums: dict[str, int] = {}
        self._initializer = saved_initializer(table.where, source.last.config)
        life = table.options.has_life
        known = ("weight", *(SCORES if life else ()), *table.optimizer.state_names)
        self._names = [name for name in known if name in source.names]
        self.is_unscored = life and bool(source.most_rows) and "last_seen" not in self._names
        self.shards = [beside(shard) for shard in table.shards]
        for rows in self.shards:
            self._read(rows)

    def _read(self, rows: TableShard) -> None:
        """Reads the rows of one shard."""
        assert self.table.part is not None
        mixed = mixed_ranges(self.table.part, self.table.layout.row_ranks)
        chunks = partial(
            self.source.chunks,
            chunk_bytes=_CHUNK_BYTES,
            mixed=mixed,
            columns=(rows.first_column, rows.first_column + rows.columns),
            sums=self.sums,
        )
        rows.reserve(self.source.most_in_a_save(mixed))
        for chunk in chunks(self._names):
            _append(rows, chunk)
        if rows.life is not None and rows.life.waiting is not None:
            for chunk in chunks(SCORES, waiting=True):
                counters = (chunk[name].contiguous() for name in ("ids", *SCORES))
                rows.life.waiting.write(*(numbers.to(rows.device) for numbers in counters))

    def check_sums(self, *ranks: Mapping[str, int]) -> None:
        """Raises ValueError if the rows of all ranks have other content sums than the saved ones."""
        waiting = ["waiting"] if self.table.options.counts_waiting else []
        self.source.check_sums(["ids", *self._names, *waiting], add_sums(*ranks))

    def finished(self) -> list[TableShard]:
        """Completes the shards. Called once."""
        step = int(self.source.last.read("step"))
        for rows in self.shards:
            rows.start_as(self._initializer)
            rows.step = step
            if (life := rows.life) is not None:
                if life.is_timed:
                    life.clock = Clock.load(self.source.clock)
                rows.step = max(step, life.clock.present_step - 1)
                life.is_unscored = self.is_unscored
                rows.life = life.caught_up(rows.step, rows.row_numbers.high_water_mark)
        return self.shards

    def replacing(self) -> Commit:
        """Prepares to replace the contents of the table."""
        table = self.table
        with turn_of(table, also_torn=True):
            changes = [*map(replace, table.shards, self.finished())]

        def take() -> None:
            with turn_of(table, also_torn=True), commit(table, replaces=True):
                for change in changes:
                    change()
                table.initializers[table.name] = self._initializer
            note_taken(table.lock, table.name)

        return take


def _append(rows: TableShard, chunk: Mapping[str, Tensor]) -> None:
    """Appends a chunk of rows to a shard beside a table; missing scores are 0."""
    ids, first = chunk["ids"].to(rows.device), rows.row_numbers.high_water_mark
    rows.reserve(len(ids))
    places = torch.arange(first, first + len(ids), device=rows.device)
    rows.row_numbers.high_water_mark = first + len(ids)
    rows.id_map.insert(ids, places)
    stores = {"weight": rows.weights} | {state.name: state.store for state in named_states(rows)}
    for name in stores.keys() & chunk.keys():
        stores[name].put(first, 0, chunk[name])
    if rows.life is not None:
        scores = (chunk.get(name, torch.zeros_like(places)) for name in SCORES)
        rows.life.scores.write(places, *(numbers.to(rows.device) for numbers in scores))
