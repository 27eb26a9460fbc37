"""A table over all ranks that have it, and agreement between ranks.

Imports `table`, `storage` and the ground; this is the lowest room that imports TorchRec. Start with
`layout`: the traits of the sharding types, and the rows and columns of each table on each rank. The file
`table` has the table itself, which collections return: this rank's shards, and the calls by id on all ranks.
`routing` computes the owner of an id, `agreement` is where ranks meet: an error of one is raised on all.
`host_group` returns the group for tensors of the CPU.
"""

from torchrec_dyn.ranks.agreement import (
    background_group,
    exchange,
    gather_results,
    host_group,
    run_together,
)
from torchrec_dyn.ranks.layout import (
    CACHED_ON_DEVICE,
    IN_DEVICE_MEMORY,
    IN_HOST_MEMORY,
    SHARDING_TRAITS,
    SPREAD_SHARDINGS,
    Piece,
    TableLayout,
    checked_plan,
    planned_storage,
    table_layouts,
)
from torchrec_dyn.ranks.routing import (
    IdExchange,
    config_of_share,
    ids_per_rank,
    mixed_ranges,
    owners,
    row_limit,
)
from torchrec_dyn.ranks.table import OF_EVERY_SHARD, Stats, Table

TableHandle = Table  # the name in the documentation of what collections return
