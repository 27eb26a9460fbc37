"""Checks of a saved life, in the form that `RowLife.export` returns, and its last training step.

Legend: R rows, Q waiting ids, K times.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchrec_dyn.life.scores import NO_STEP
from torchrec_dyn.policies import MOST_COUNT

LIFE = ("last_seen", "count", "waiting", "clock")
BY_ROW = ("last_seen", "count")
NOT_BY_ROW = ("waiting", "clock")
_SHAPES = {"last_seen": "[R]", "count": "[R]", "waiting": "[3, Q]", "clock": "[2, K]"}


def last_step(state: Mapping[str, Tensor]) -> int:
    """Returns the last training step that a saved life shows, 0 if it shows no step.

    state: as `RowLife.export` returns it. Assigned rows (count 0) and new times may belong to the step after
    the last step.
    """
    known = []
    if "last_seen" in state:
        last_seen = state["last_seen"]
        was_seen = state.get("count", torch.ones_like(last_seen)) > 0
        known.append(torch.where(was_seen, last_seen, last_seen - 1))
    if "waiting" in state:
        known.append(state["waiting"][1])
    if "clock" in state:
        known.append(state["clock"][0] - 1)
    return max((int(steps.max()) for steps in known if steps.numel()), default=0)


def check_life(where: str, state: Mapping[str, Tensor], ids: Tensor) -> None:
    """Raises ValueError if saved scores, counters or clock are not valid.

    state: as `RowLife.export` returns it; each part may be missing. ids [R] int64, of the saved rows.
    """
    first = {"last_seen": ids.numel(), "count": ids.numel(), "waiting": 3, "clock": 2}
    for name in first.keys() & state.keys():
        saved, dims = state[name], 1 if name in ("last_seen", "count") else 2
        if saved.dtype != torch.int64 or saved.dim() != dims or len(saved) != first[name]:
            raise ValueError(
                f"{where}: expected {name} {_SHAPES[name]} of int64 for {ids.numel()} rows, got "
                f"{list(saved.shape)} of {saved.dtype}."
            )
    waiting = state.get("waiting", torch.empty(3, 0, dtype=torch.int64, device="cpu"))
    clock = state.get("clock", torch.empty(2, 0, dtype=torch.int64, device="cpu"))
    _check_range(where, "last_seen", NO_STEP - 1, state.get("last_seen"), waiting[1])
    _check_range(where, "count", MOST_COUNT, state.get("count"), waiting[2])
    _check_range(where, "clock", torch.iinfo(torch.int64).max, clock)
    if bool((clock.diff(dim=1) <= 0).any()):
        raise ValueError(f"{where}: expected ascending steps and times in clock, got others.")
    if torch.unique(waiting[0]).numel() != waiting.shape[1]:
        raise ValueError(f"{where}: expected distinct ids in waiting, got repeated ones.")
    if bool(torch.isin(waiting[0], ids.to(waiting.device)).any()):
        raise ValueError(f"{where}: expected ids without a row in waiting, got ids with a row.")


def _check_range(where: str, name: str, most: int, *saved: Tensor | None) -> None:
    for one in saved:
        if one is not None and one.numel() and not 0 <= int(one.min()) <= int(one.max()) <= most:
            raise ValueError(
                f"{where}: expected {name} from 0 to {most}, got {int(one.min())} to {int(one.max())}."
            )
