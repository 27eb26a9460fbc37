"""Tables into state dicts and out of them, verified before anything changes.

Imports `ranks`, `checkpoint_format`, `table`, `life`, `storage` and the ground; torch alone. Start with
`collection_state`. `saving` saves sharded tables, `unsharded` saves and loads the others. A load of
sharded tables runs in this order, and may be refused in each file:

    dcp.load            load_planner      finds the tensors of each table; blocks to read
                        loading           an entry a table: its stores, the blocks of this rank (`places`)
                        staged_rows       chunk by chunk into the stores: ranges, order of ids
    load_state_dict     collection_state  the same tables on every rank, of this very model (`pieces`)
                        load_session      all tables of a load over all ranks: configs, completeness, sums
                        staged_rows       commit: the stores become the table's
    of the optimizer    aligned_state     the same for optimizer state, by the rows that were loaded before it

Until the commit nothing of a table changes on any rank.
"""

from torchrec_dyn.state_dict.aligned_state import commit_state
from torchrec_dyn.state_dict.collection_state import (
    load_optimizer_state,
    load_tables,
    save_optimizer_state,
    save_tables,
)
from torchrec_dyn.state_dict.load_planner import LoadPlanner
from torchrec_dyn.state_dict.load_session import LoadSession, TableEntry
from torchrec_dyn.state_dict.loading import ModelEntry, OptimizerEntry
from torchrec_dyn.state_dict.pieces import ShardPieces
from torchrec_dyn.state_dict.places import Run, Share, runs_of, share_of
from torchrec_dyn.state_dict.saving import ModelSource, OptimizerSource, ShardSource, saved_tensors
from torchrec_dyn.state_dict.staged_rows import StagedRows
from torchrec_dyn.state_dict.unsharded import (
    checked_model_state,
    checked_optimizer_state,
    empty_model_tensors,
    model_tensors,
    optimizer_tensors,
)
