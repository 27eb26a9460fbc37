"""The parts of a table on each rank, and agreement between ranks.

Imports the ground; this is the lowest room that imports TorchRec. Start with `layout`: the traits of the
sharding types, and the rows and columns of each table on each rank. `routing` computes the owner of an id,
`agreement` raises an error of one rank on all ranks, also before it sends tensors. `host_group` returns the
group for tensors of the CPU.
"""

from torchrec_dyn.ranks.agreement import agree, exchange, gather_results, run_together
from torchrec_dyn.ranks.groups import host_group
from torchrec_dyn.ranks.layout import (
    SHARDING_TRAITS,
    SPREAD_SHARDINGS,
    Piece,
    TableLayout,
    checked_plan,
    table_layouts,
)
from torchrec_dyn.ranks.routing import config_of_share, ids_per_rank, owners, row_limit
