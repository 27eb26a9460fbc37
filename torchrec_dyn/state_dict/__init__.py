"""Saving of tables to state dicts, and loading, which verifies everything before anything changes.

Imports `ranks`, `checkpoint_format`, `table`, `life`, `storage` and the ground; needs torch only. Start with
`collection_state`. An unsharded table is a table of one rank, without a process group: its state dict has
the tensors of `saving` as plain tensors, and a load of it begins with `fill` of `load_session`. A load of
sharded tables runs in this order; each file checks its part and may refuse the load:

    dcp.load            load_planner      finds the tensors of each table and the blocks to read
                        loading           makes an entry a table: its stores, this rank's blocks (`places`)
                        staged_rows       puts chunks into the stores; checks ranges and the order of ids
    load_state_dict     collection_state  checks that all ranks load the same tables, of this model
                        load_session      checks all tables over all ranks: configs, completeness, sums
                        staged_rows       commits: swaps the stores into the table
    of the optimizer    aligned_state     checks optimizer state by the loaded rows, and commits it
    no load_state_dict  awaited_loads     makes the next forward an error

No table changes on any rank before the commit.
"""

from torchrec_dyn.state_dict.aligned_state import commit_state
from torchrec_dyn.state_dict.awaited_loads import check_taken, drop_awaited
from torchrec_dyn.state_dict.collection_state import (
    check_is_not_static,
    load_optimizer_state,
    load_tables,
    rows_left_out,
    save_optimizer_states,
    save_tables,
    stage_table,
)
from torchrec_dyn.state_dict.load_planner import LoadPlanner
from torchrec_dyn.state_dict.load_session import LoadSession, TableEntry
from torchrec_dyn.state_dict.loading import ModelEntry, OptimizerEntry
from torchrec_dyn.state_dict.own_places import places_of_part
from torchrec_dyn.state_dict.places import Run, Share, runs_of, share_of
from torchrec_dyn.state_dict.saving import (
    Counts,
    TableSource,
    saved_sums,
    saved_tensors,
    sums_here,
)
from torchrec_dyn.state_dict.staged_rows import StagedRows
