"""Functions on whole models and collections, sharded or not, under any plan.

Imports `distributed`, `modules`, `state_dict`, `ranks`, `lookup`, `table`, `storage`, `checkpoint_format` and
the ground. Start with `by_id`: it reads and edits rows by id across ranks. `tables` finds the tables of a
model.
"""

from torchrec_dyn.whole_model.by_id import (
    assign_rows,
    erase_rows,
    lookup_rows,
    mixed_ids,
    owner_ranks,
    read_counts,
    read_ids,
    read_last_seen,
    read_num_rows,
    read_stats,
    sample_ids,
)
from torchrec_dyn.whole_model.gradients import GradScaler, clip_grad_norm_
from torchrec_dyn.whole_model.stats_logger import add_stats_hook, log_stats, stats_layout
from torchrec_dyn.whole_model.tables import (
    Collection,
    collections_of,
    drop_load,
    sharding_types,
    table_in,
    table_names,
    tables_in,
    tables_of,
)
