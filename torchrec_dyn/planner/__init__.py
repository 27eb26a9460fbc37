"""Planning with TorchRec's planner: what tables will hold, what was seen of them, and where the load falls.

The stock EmbeddingShardingPlanner plans dynamic collections without any of this. `make_planner` is that
planner with storage priced by what a DynamicTable allocates; `constraints_from` makes it plan a running
model anew by what its tables hold and are asked for, and `load_by_rank` tells what a plan is worth.

Imports `whole_model`, `distributed` and the rooms below. Start with `priced_planner`.
"""

from torchrec_dyn.planner.balance import EvenLoad, PlanLoad, load_by_rank
from torchrec_dyn.planner.measured import MeasuredConstraints, constraints_from, read_model_stats
from torchrec_dyn.planner.priced_planner import make_planner
from torchrec_dyn.planner.storage import DynamicStorageEstimator, table_bytes
from torchrec_dyn.planner.vocabulary_cuts import FairCuts, fair_cuts

__all__ = [
    "DynamicStorageEstimator",
    "EvenLoad",
    "FairCuts",
    "MeasuredConstraints",
    "PlanLoad",
    "constraints_from",
    "fair_cuts",
    "load_by_rank",
    "make_planner",
    "read_model_stats",
    "table_bytes",
]
