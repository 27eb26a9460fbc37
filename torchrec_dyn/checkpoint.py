"""Checkpoints: what is needed beside `torch.distributed.checkpoint` itself (docs/checkpoints.md)."""

from torchrec_dyn.apply_delta import apply_delta
from torchrec_dyn.deltas import Marker, export_delta, mark
from torchrec_dyn.load_planner import LoadPlanner

__all__ = ["LoadPlanner", "Marker", "apply_delta", "export_delta", "mark"]
