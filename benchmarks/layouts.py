"""Internal names that benchmarks use, imported from where the measured version keeps them.

`make bench-ab` also runs the benchmarks of the checkout on an older version. A name that is moved gets a
second import here.
"""

import inspect
from typing import Any

from torch import Tensor

from torchrec_dyn import lookup

try:
    from torchrec_dyn.table import TableShard
except ImportError:  # the name in 0.1.0 until November 2026
    from torchrec_dyn.table import DynamicTable as TableShard  # type: ignore[no-redef, attr-defined]

try:
    from torchrec_dyn.storage import IdMap
except ImportError:  # before the rooms (0.1.0, November 2026)
    from torchrec_dyn.id_map import IdMap  # type: ignore[no-redef]

try:
    from torchrec_dyn.table.changes import moment_of as begin_version  # until November 2026
except ImportError:
    begin_version = TableShard.version  # type: ignore[assignment]

_TAKES_BATCH = "batch" in inspect.signature(lookup.TableGroup.__call__).parameters


class TableGroup(lookup.TableGroup):
    """A group whose batches are ids and offsets."""

    def __call__(self, ids: Tensor, offsets: Tensor, *, training: bool, **others: Any) -> Tensor:  # type: ignore[override]
        """Looks up a batch; see the measured version."""
        if not _TAKES_BATCH:  # until 28 November 2026
            return super().__call__(ids, offsets, training=training, **others)
        others.pop("counts", None)  # of the ids of each table: found by the lookup
        return super().__call__(lookup.Batch(ids, offsets=offsets, training=training, **others))


__all__ = ["IdMap", "TableGroup", "TableShard", "begin_version"]
