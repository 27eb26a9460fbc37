"""Names that benchmarks use below the public ones, wherever the version that is measured keeps them.

`make bench-ab` runs the benchmarks of the checkout on an older version too. A name that moves gets a second
line here.
"""

from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.table import DynamicTable

try:
    from torchrec_dyn.storage import IdMap
except ImportError:  # before the rooms (0.1.0, November 2026)
    from torchrec_dyn.id_map import IdMap  # type: ignore[no-redef]

__all__ = ["DynamicTable", "IdMap", "TableGroup"]
