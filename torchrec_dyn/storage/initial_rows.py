"""InitialRows: the initial row of each id of one table, a pure function of the id.

Legend: M ids.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.initializers import Initializer, table_key
from torchrec_dyn.storage.row_store import RowStore


class InitialRows:
    """The initial rows of one table, or of the column shard of it that begins at `first_column`."""

    def __init__(self, initializer: Initializer, seed: int, name: str, first_column: int) -> None:
        self._kind, self._parameters = initializer.parameters()
        self._key = table_key(seed, name, "initial row")
        self._first_column = first_column

    def write(self, ids: Tensor, rows: Tensor, store: RowStore) -> None:
        """Writes the initial rows of ids [M] int64 to rows [M] int64 of a store of weights."""
        ops.init_rows_(
            ids, rows, store.blocks, store.shift, store.columns, self._first_column,
            self._kind, self._parameters, self._key,
        )  # fmt: skip
