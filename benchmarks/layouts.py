"""Internal names that benchmarks use, imported from where the measured version keeps them.

`make bench-ab` also runs the benchmarks of the checkout on an older version. A name that is moved gets a
second import here.
"""

from torchrec_dyn.lookup import TableGroup

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

__all__ = ["IdMap", "TableGroup", "TableShard", "begin_version"]
