"""Checkpoints: what is needed beside `torch.distributed.checkpoint` itself (docs/checkpoints.md)."""

from torchrec_dyn.load_planner import LoadPlanner

__all__ = ["LoadPlanner"]
