"""Tables into state dicts and out of them, verified before anything changes.

Imports `ranks`, `lookup`, `checkpoint_format` and the rooms below; torch alone. Start with
`collection_state`. A load runs through these files: `load_planner` (what DCP is asked to read), `loading`
(where a chunk goes), `load_session` (all ranks agree that everything came), `staged_rows` (rows beside
the table, verified, then made the table's). A save is `saving`. `unsharded` does both for tables without
shards.
"""

from torchrec_dyn.state_dict.aligned_state import commit_state
from torchrec_dyn.state_dict.collection_state import load_tables, save_tables
from torchrec_dyn.state_dict.load_planner import LoadPlanner
from torchrec_dyn.state_dict.load_session import LoadSession, TableEntry
from torchrec_dyn.state_dict.loading import SMALL, ModelEntry, OptimizerEntry
from torchrec_dyn.state_dict.pieces import ShardPieces
from torchrec_dyn.state_dict.places import Run, Share, runs_of, share_of
from torchrec_dyn.state_dict.saving import ModelSource, OptimizerSource, Told, whole_tensor
from torchrec_dyn.state_dict.staged_rows import StagedRows, commit_rows
from torchrec_dyn.state_dict.unsharded import (
    MODEL_NAMES,
    checked_model_state,
    checked_optimizer_state,
    empty_model_tensors,
    model_tensors,
    optimizer_tensors,
)
