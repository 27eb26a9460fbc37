"""Saving of tables to state dicts, and loading, which verifies everything before anything changes.

Imports `ranks`, `checkpoint_format`, `table`, `life`, `storage` and the ground; needs torch only. Start with
`collection_state`. The rows of a table are in the state dict of the model, its optimizer state in that of the
optimizer; in memory both are one `TableLoad`. The first `load_state_dict` of either commits all that was read
for the table; the second finds the table as it was committed, and does nothing. Optimizer state that was not
asked for starts anew. A state dict of the optimizer alone is loaded if its numbers are those of the ids that
the table has. A load runs in this order; each file checks its part and may refuse the load:

    dcp.load            load_planner      makes a `TableLoad` of the tensors of each table
                        staged_table      reads this rank's rows into shards beside the table
    load_state_dict     collection_state  prepares: checks all tables over all ranks: configs, sums,
                                          completeness; then takes all memory
                        loading           commits: `table.replace` swaps the shards
    of the optimizer    staged_state      matches state without rows to the present rows
    no load_state_dict  loading           makes the next forward an error

Ranks meet twice: when each has checked its part, and when each can commit. No table changes on any rank
before. A plain state dict, as of an unsharded table, is a load that `whole_tensors` fills.
`Checkpoints.restore` and `apply_delta` need no state dict: a `StagedTable` (staged_table.py) reads a saved
chain beside the table. Exports and moves to another plan read `LiveRows` (live_rows.py).
"""

from torchrec_dyn.state_dict.collection_state import (
    are_rows_left_out,
    check_is_not_static,
    load_optimizer_state,
    load_tables,
    rows_left_out,
    save_optimizer_states,
    save_tables,
    stage_table,
)
from torchrec_dyn.state_dict.live_rows import LiveRows, for_each_chunk
from torchrec_dyn.state_dict.load_planner import LoadPlanner
from torchrec_dyn.state_dict.loading import TableLoad, check_taken, drop_awaited, note_taken
from torchrec_dyn.state_dict.saving import (
    Counts,
    Run,
    Share,
    TableSource,
    runs_of,
    saved_sums,
    saved_tensors,
    share_of,
    sums_here,
)
from torchrec_dyn.state_dict.staged_table import StagedTable, append_rows, append_waiting
