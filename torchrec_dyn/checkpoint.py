"""Checkpoints: what is needed beside `torch.distributed.checkpoint` itself (docs/checkpoints.md)."""

from torchrec_dyn.apply_delta import apply_delta
from torchrec_dyn.checkpoint_reader import open_checkpoint
from torchrec_dyn.deltas import Marker, export_delta, mark
from torchrec_dyn.from_static_checkpoint import load_static
from torchrec_dyn.load_planner import LoadPlanner
from torchrec_dyn.safetensors_rows import export_rows, export_saved_rows, import_rows

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
