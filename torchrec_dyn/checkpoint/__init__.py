"""Checkpoints: what is needed beside `torch.distributed.checkpoint` itself (docs/checkpoints.md).

Imports `migration`, `whole_model`, `state_dict` and the rooms below. Start with `delta_export`; `inspection`
is the command `python -m torchrec_dyn inspect`.
"""

from torchrec_dyn.checkpoint.delta_apply import apply_delta
from torchrec_dyn.checkpoint.delta_export import Marker, export_delta, mark
from torchrec_dyn.checkpoint.inspection import (
    headline,
    names_to_read,
    plot,
    plot_fault,
    read_rows,
    table_lines,
)
from torchrec_dyn.checkpoint.safetensors_rows import export_rows, export_saved_rows, import_rows
from torchrec_dyn.checkpoint_format import open_checkpoint
from torchrec_dyn.migration import load_static
from torchrec_dyn.state_dict import LoadPlanner

__all__ = [
    "LoadPlanner",
    "Marker",
    "apply_delta",
    "export_delta",
    "export_rows",
    "export_saved_rows",
    "import_rows",
    "load_static",
    "mark",
    "open_checkpoint",
]
