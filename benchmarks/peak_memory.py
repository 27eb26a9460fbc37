"""Peak memory of saving and loading, part by part (bench_checkpoint.py --memory).

Linux keeps the peak of a process's resident memory and sets it back when asked to. Source: proc(5), VmHWM
and clear_refs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saved_sides import ID_BYTES, ROW_BYTES, Plain, Saved, dynamic, empty_dynamic

from torchrec_dyn.checkpoint import LoadPlanner

MB = 1e6
_STATUS = Path("/proc/self/status")
_SET_BACK = "5"


def resident(name: str) -> int:
    """Reads bytes of resident memory: "VmRSS" now, "VmHWM" the peak."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Peaks:
    """Notes the memory of the parts, on the rank where it was highest; one line each."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    @contextmanager
    def of(self, what: str, size: int) -> Iterator[None]:
        """Measures one part.

        Args:
            what: its name.
            size: bytes that are saved, of all ranks.
        """
        gc.collect()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text(_SET_BACK)
        before = resident("VmRSS")
        yield
        peak, after = resident("VmHWM"), resident("VmRSS")
        mine = (peak - max(before, after), before, peak, after)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        extra, before, peak, after = max(everyone)
        line = {
            "what": f"peak memory of {what}", "ranks": len(everyone), "bytes": size,
            "extra_mb": extra / MB, "before_mb": before / MB, "peak_mb": peak / MB, "after_mb": after / MB,
        }  # fmt: skip
        self.lines.append(line)
        if dist.get_rank() == 0:
            print(
                f"{len(everyone)} ranks  {what:42} {extra / MB:8.0f} MB above both ends: before "
                f"{before / MB:,.0f}, peak {peak / MB:,.0f}, after {after / MB:,.0f}",
                flush=True,
            )


def measure_memory(size: int, folder: Path) -> list[dict[str, Any]]:
    """Saves a table, copies it, and loads it into itself and into an empty one; collective.

    Args:
        size: bytes of the table as saved, all ranks together.
        folder: where to.
    """
    rows = size // (ROW_BYTES + ID_BYTES)
    peaks = Peaks()
    full = dynamic(rows)
    with peaks.of("state_dict", size):
        state = full.state()
    with peaks.of("dcp.save", size):
        dcp.save(state, checkpoint_id=folder / "saved")
    with peaks.of("async_save, which copies", size):
        dcp.async_save(state, checkpoint_id=folder / "copied").result()
    del state
    _load(full, folder / "saved", "a full table", size, peaks)
    del full
    gc.collect()
    _load(empty_dynamic(rows), folder / "saved", "an empty table", size, peaks)
    gc.collect()
    plain = Plain(rows)
    with peaks.of("torch.save", size):
        plain.save(folder / "plain", is_synced=True)
    with peaks.of("torch.load, into new tensors", size):
        plain.load(folder / "plain")
    return peaks.lines


def _load(side: Saved, folder: Path, into: str, size: int, peaks: Peaks) -> None:
    state = side.state()
    with peaks.of(f"dcp.load, for {into}", size):
        dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    with peaks.of(f"load_state_dict, into {into}", size):
        side.take(state)
