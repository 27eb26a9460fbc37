"""Draws of live ids, uniform and with replacement.

A draw is a place in the canonical order, so it depends on the seed and on the ids of the table only.

Legend: R rows, n draws, M of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.storage import CanonicalRows
from torchrec_dyn.table.arrays import TableArrays
from torchrec_dyn.table.contents import stamp_of


def check_draw(where: str, n: int, seed: int, rows: int) -> None:
    """Raises ValueError if `n` or `seed` is not valid, or the table has no rows."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"{where}: expected a number of ids from 1 on, got {n!r}.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"{where}: expected an int64 as seed, got {seed!r}.")
    if not rows:
        raise ValueError(
            f"{where}: expected a table with rows, got none. Draw after the first training step or a load."
        )


def draw_places(rows: int, n: int, seed: int) -> Tensor:
    """Returns n places in [0, R), [n] int64 on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(rows, (n,), generator=generator, device="cpu")


def ids_at(table: TableArrays, places: Tensor) -> Tensor:
    """Returns the ids at places [M] int64 of the canonical order of one table, [M] int64 on its device."""
    rows = CanonicalRows(table.id_map, table.where, lambda: stamp_of(table))
    places = places.to(table.device)
    found = torch.empty_like(places)
    ordered, order = places.sort()
    for start in range(0, rows.count, knobs.IDS_SAMPLED_TOGETHER):
        stop = min(rows.count, start + knobs.IDS_SAMPLED_TOGETHER)
        bounds = torch.tensor([start, stop], device="cpu").to(table.device)
        first, last = torch.searchsorted(ordered, bounds).tolist()
        if last > first:
            ids, _ = rows.read(start, stop)
            found[order[first:last]] = ids[ordered[first:last] - start]
    return found
