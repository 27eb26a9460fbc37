"""StagedTable: this rank's rows of a saved chain, read into shards beside those of a table.

A rank reads its ranges of mixed ids, and each shard its columns, from the save with the newest row of an id.
Once the content sums over all ranks are compared, `replace` or `merge` of the table takes the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from torchrec_dyn.checkpoint_format import (
    SCORES,
    MergedTable,
    add_sums,
    saved_initializer,
)
from torchrec_dyn.ranks import Table, mixed_ranges
from torchrec_dyn.state_dict.loading import note_taken
from torchrec_dyn.storage import commit, turn_of
from torchrec_dyn.table import Commit, TableShard, append, beside, complete, replace

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
        if self.shards:
            self._read()

    def _read(self) -> None:
        table, source = self.table, self.source
        assert table.part is not None
        mixed = mixed_ranges(table.part, table.layout.row_ranks)
        for rows in self.shards:
            rows.reserve(source.most_in_a_save(mixed))
        columns = [(first, first + width) for first, width in table.columns]
        chunks = source.chunks(
            self._names, _CHUNK_BYTES, mixed=mixed, columns=columns, sums=self.sums
        )
        for rows, chunk in zip(cycle(self.shards), chunks, strict=False):
            append(rows, chunk)
        if not table.options.counts_waiting:
            return
        waiting = source.chunks(
            SCORES, _CHUNK_BYTES, mixed=mixed, columns=columns[:1], sums=self.sums, waiting=True
        )
        for chunk in waiting:
            counters = [chunk[name].contiguous().to(table.device) for name in ("ids", *SCORES)]
            for rows in self.shards:
                if rows.life is not None and rows.life.waiting is not None:
                    rows.life.waiting.write(*counters)

    def check_sums(self, *ranks: Mapping[str, int]) -> None:
        """Raises ValueError if the rows of all ranks have other content sums than the saved ones."""
        waiting = ["waiting"] if self.table.options.counts_waiting else []
        self.source.check_sums(["ids", *self._names, *waiting], add_sums(*ranks))

    def finished(self) -> list[TableShard]:
        """Completes the shards. Called once."""
        step = int(self.source.last.read("step"))
        for rows in self.shards:
            rows.start_as(self._initializer)
            complete(rows, step, self.source.clock, self.is_unscored)
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
