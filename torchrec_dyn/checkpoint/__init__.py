"""Checkpoints: load planner and deltas (docs/guide/save/checkpoints.md); also files of rows for users.

Imports `tools`, `migration`, `whole_model`, `state_dict`, `ranks`, `checkpoint_format`, `table`, `life`,
`storage` and the ground. Start with `checkpoints`, then `delta_export` and `delta_apply`.
`torch.distributed.checkpoint` (DCP) itself saves and loads. A delta is a DCP checkpoint
of the changed rows; it is verified completely before any table changes.
"""

from torchrec_dyn.checkpoint.checkpoints import Checkpoints
from torchrec_dyn.checkpoint.dcp_files import TableWriter
from torchrec_dyn.checkpoint.delta_apply import apply_delta
from torchrec_dyn.checkpoint.delta_export import Marker, export_delta, mark
from torchrec_dyn.checkpoint.entry_writing import Saving
from torchrec_dyn.checkpoint.forgetting import Forgotten
from torchrec_dyn.checkpoint.positions import Positions
from torchrec_dyn.checkpoint.restoring import Restored
from torchrec_dyn.checkpoint_format import open_checkpoint, rename_tables
from torchrec_dyn.migration import load_static
from torchrec_dyn.state_dict import LoadPlanner
from torchrec_dyn.tools import (
    export_rows,
    export_saved_rows,
    export_table,
    import_rows,
    read_batches,
)
from torchrec_dyn.whole_model import drop_load

__all__ = [
    "Checkpoints",
    "Forgotten",
    "LoadPlanner",
    "Marker",
    "Positions",
    "Restored",
    "Saving",
    "TableWriter",
    "apply_delta",
    "drop_load",
    "export_delta",
    "export_rows",
    "export_saved_rows",
    "export_table",
    "import_rows",
    "load_static",
    "mark",
    "open_checkpoint",
    "read_batches",
    "rename_tables",
]
