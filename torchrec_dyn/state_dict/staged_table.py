"""StagedTable: this rank's rows of a saved chain, read into shards beside those of a table.

A rank reads its ranges of mixed ids, and each shard its columns, from the save with the newest row of an id.
Once the content sums over all ranks are compared, `replace` or `merge` of the table takes the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import (
    SCORES,
    MergedTable,
    RowSource,
    add_sums,
    saved_initializer,
)
from torchrec_dyn.life import last_step
from torchrec_dyn.ranks import Table, mixed_ranges
from torchrec_dyn.storage import commit, lacks_memory, turn_of
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
        if table.part is not None:
            most = source.most_in_a_save(mixed_ranges(table.part, table.layout.row_ranks))
            for rows in self.shards:
                rows.reserve(most)
        try:
            append_rows(source, table, self.shards, self._names, _CHUNK_BYTES, self.sums)
        except RuntimeError as error:  # an op refuses scores and counters that none can have
            if lacks_memory(error):
                raise
            raise ValueError(
                f"{source.where}: expected rows that a table can have, got rows that an op refuses: {error} "
                f"{source.damaged}"
            ) from error

    def check_sums(self, *ranks: Mapping[str, int]) -> None:
        """Raises ValueError if the rows of all ranks have other content sums than the saved ones."""
        waiting = ["waiting"] if self.table.options.counts_waiting else []
        self.source.check_sums(["ids", *self._names, *waiting], add_sums(*ranks))

    def last_step(self) -> int:
        """Returns the last training step that scores and counters of this rank's rows record."""
        last, life = 0, self.shards[0].life if self.shards else None
        if life is None:
            return last
        if life.waiting is not None:
            last = last_step({"waiting": life.waiting.export()})
        high = 0 if self.is_unscored else self.shards[0].row_numbers.high_water_mark
        for places in torch.arange(high, device=self.table.device).split(knobs.IDS_LOADED_TOGETHER):
            last_seen, counts = life.scores.read(places)
            last = max(last, last_step({"last_seen": last_seen, "count": counts}))
        return last

    def finished(self, step: int = 0) -> list[TableShard]:
        """Completes the shards; `step` is the last one that the rows of any rank record."""
        if "step" in self.source.last.names:
            step = max(step, int(self.source.last.read("step")))
        for rows in self.shards:
            rows.start_as(self._initializer)
            complete(rows, step, self.source.clock, self.is_unscored)
        return self.shards

    def replacing(self, step: int = 0) -> Commit:
        """Prepares to replace the contents of the table; `step` as of `finished`."""
        table = self.table
        with turn_of(table, also_torn=True):
            changes = [*map(replace, table.shards, self.finished(step))]

        def take() -> None:
            with turn_of(table, also_torn=True), commit(table, replaces=True):
                for change in changes:
                    change()
                table.initializers[table.name] = self._initializer

        return take


def append_rows(
    source: RowSource,
    table: Table,
    shards: Sequence[TableShard],
    names: Sequence[str],
    chunk_bytes: int | None = None,
    sums: dict[str, int] | None = None,
) -> None:
    """Appends this rank's part of the rows of a source to its shards of a table, or to those beside them."""
    if table.part is None:
        return
    mixed = mixed_ranges(table.part, table.layout.row_ranks)
    columns = [(first, first + width) for first, width in table.columns]
    chunks = source.chunks(names, chunk_bytes, mixed=mixed, columns=columns, sums=sums)
    for rows, chunk in zip(cycle(shards), chunks, strict=False):
        append(rows, chunk)
    if table.options.counts_waiting:
        for chunk in source.chunks(
            SCORES, chunk_bytes, mixed=mixed, columns=columns[:1], sums=sums, waiting=True
        ):
            append_waiting(shards, chunk)


def append_waiting(shards: Sequence[TableShard], chunk: Mapping[str, Tensor]) -> None:
    """Adds the counters of ids that wait, "ids" and scores [M], to each of some shards."""
    for rows in shards:
        if rows.waiting is not None:
            counters = (chunk[name].contiguous().to(rows.device) for name in ("ids", *SCORES))
            rows.waiting.write(*counters)
