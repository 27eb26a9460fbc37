"""Planning with TorchRec's planner: exact storage, measured load, and the balance of a plan.

The stock EmbeddingShardingPlanner can plan dynamic collections without this room. `make_planner` returns
this planner with storage priced by the allocations of a TableShard. With `constraints_from` it plans a
running model again, from the measured rows and lookups of its tables. `load_by_rank` rates a plan.
`without_data_parallel` makes a plan of static tables one for dynamic tables.

Imports `whole_model`, `modules`, `ranks`, `table`, `life`, `storage` and the ground. Start with
`priced_planner`.
"""

from torchrec_dyn.planner.measured import (
    EvenLoad,
    MeasuredConstraints,
    PlanLoad,
    constraints_from,
    load_by_rank,
    read_model_stats,
)
from torchrec_dyn.planner.priced_planner import make_planner, make_planner_provider
from torchrec_dyn.planner.storage import (
    DynamicStorageEstimator,
    TableSize,
    print_size,
    table_bytes,
    table_size,
)
from torchrec_dyn.planner.vocabulary_cuts import FairCuts, fair_cuts, whole_features
from torchrec_dyn.planner.whole_tables import without_data_parallel

__all__ = [
    "DynamicStorageEstimator",
    "EvenLoad",
    "FairCuts",
    "MeasuredConstraints",
    "PlanLoad",
    "TableSize",
    "constraints_from",
    "fair_cuts",
    "load_by_rank",
    "make_planner",
    "make_planner_provider",
    "print_size",
    "read_model_stats",
    "table_bytes",
    "table_size",
    "whole_features",
    "without_data_parallel",
]
