"""Rows of a batch that are in mapped files: asked for before they are used (docs/dev/decisions/0043).

The system then reads the pages of a batch together, while the host goes on. Without it each page would be
read when it is touched, one after the other. This is advice: rows that are asked for in vain, or not at all,
only cost time.

Legend: T tables, N ids.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from torchrec_dyn.storage import RowStore
from torchrec_dyn.table import TableShard


class _Asking:
    """A thread that asks for rows of later batches, while the caller trains."""

    def __init__(self) -> None:
        self.process = os.getpid()  # a fork has no threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchrec_dyn rows ahead")
        self._last: Future[None] | None = None

    def ask_for(self, asked: list[tuple[RowStore, Tensor]]) -> None:
        """Asks for rows [M] int64 of each store, unless the thread is still busy with earlier rows."""
        if self._last is None or self._last.done():
            self._last = self._thread.submit(
                _ask, [(store.snapshot(), rows) for store, rows in asked]
            )


def _ask(asked: list[tuple[RowStore, Tensor]]) -> None:
    for store, rows in asked:
        store.ask_for(rows)


_asking: _Asking | None = None


def ask_for_batch(
    tables: Sequence[TableShard],
    in_files: Sequence[int],
    rows: Tensor,
    table_offsets: Tensor,
    is_trained: bool,
) -> None:
    """Asks for the rows of a batch: rows [N] int64 in table order, -1 for none.

    in_files: numbers of the tables in mapped files. table_offsets [T + 1] int64: where the ids of each table
    begin. is_trained: True to ask for the optimizer state, too, but that of frozen tables.
    """
    ends = table_offsets.tolist()
    of_tables = {t: rows[ends[t] : ends[t + 1]] for t in in_files}
    for t, of_table in of_tables.items():  # first: the forward needs no state
        tables[t].weights.ask_for(of_table)
    if is_trained:
        for t, of_table in of_tables.items():
            if not tables[t].is_frozen:
                for state in tables[t].states:
                    state.ask_for(of_table)


def ask_ahead(tables: Sequence[TableShard], ids: Mapping[int, Tensor], is_trained: bool) -> None:
    """Asks for the rows of ids of a later batch, and does not wait until they are asked for.

    ids: [N] int64 by number of the table. Those without a row here are ignored.
    """
    global _asking
    if _asking is None or _asking.process != os.getpid():
        _asking = _Asking()
    asked: list[tuple[RowStore, Tensor]] = []
    for t, of_table in ids.items():
        table, rows = tables[t], tables[t].id_map.lookup(of_table)
        stores = table.stores if is_trained and not table.is_frozen else (table.weights,)
        asked += [(store, rows) for store in stores]
    _asking.ask_for(asked)
