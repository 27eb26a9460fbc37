"""Peak memory of saving and loading, part by part (bench_checkpoint.py).

Linux keeps the peak of a process's resident memory; a write to clear_refs resets it. Source: proc(5), VmHWM
and clear_refs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saved_sides import ID_BYTES, ROW_BYTES, Plain, dynamic, empty_dynamic

MB = 1e6
_STATUS = Path("/proc/self/status")
_SET_BACK = "5"


def resident(name: str) -> int:
    """Returns bytes of resident memory: "VmRSS" now, "VmHWM" the peak."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Peaks:
    """Result lines of the measured parts: memory of the rank where it was highest."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    @contextmanager
    def of(self, what: str, size: int, keeps: bool = False) -> Iterator[None]:
        """Measures one part. Collective.

        Args:
            what: name of the part.
            size: saved bytes, all ranks together.
            keeps: True if the part keeps memory by design: then only memory above the amount afterwards
                counts.
        """
        gc.collect()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text(_SET_BACK)
        before = resident("VmRSS")
        yield
        peak, after = resident("VmHWM"), resident("VmRSS")
        mine = (peak - (after if keeps else before), before, peak, after)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        extra, before, peak, after = max(everyone)
        ranks = len(everyone)
        megabytes = {"before": before / MB, "peak": peak / MB, "after": after / MB}
        self.lines.append(
            {
                "what": f"peak of {what}",
                "ranks": ranks,
                "bytes": size,
                "extra_mb": extra / MB,
                "mb": megabytes,
            }
        )
        if dist.get_rank() == 0:
            parts = ", ".join(f"{name} {value:,.0f}" for name, value in megabytes.items())
            above = "after" if keeps else "before"
            print(
                f"{ranks} ranks  {what:34} {extra / MB:7,.0f} MB above {above}: {parts}", flush=True
            )


# The memory that is touched before a timed part would be the peak.
@mock.patch("saved_sides.touch_memory", lambda size: None)
def measure_memory(size: int, folder: Path) -> list[dict[str, Any]]:
    """Measures saving a table, copying it, and loading it into itself and into an empty table. Collective.

    Args:
        size: bytes of the table as saved, all ranks together.
        folder: folder to save to.
    """
    rows = size // (ROW_BYTES + ID_BYTES)
    peaks = Peaks()
    full = dynamic(rows)
    with peaks.of("state_dict", size):
        state = full.state()
    with peaks.of("dcp.save", size):
        dcp.save(state, checkpoint_id=folder / "measured")
    with peaks.of("async_save, a copy", size, keeps=True):
        dcp.async_save(state, checkpoint_id=folder / "copied").result()
    del state
    with peaks.of("load into a full table", size):
        full.load(folder / "measured")
    del full
    gc.collect()
    empty = empty_dynamic(rows)
    with peaks.of("load into an empty table", size, keeps=True):
        empty.load(folder / "measured")
    del empty
    gc.collect()
    plain = Plain(rows)
    with peaks.of("torch.save", size):
        plain.save(folder / "plain", is_synced=True)
    with peaks.of("torch.load", size):
        plain.load(folder / "plain")
    return peaks.lines
