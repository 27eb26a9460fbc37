"""Reads a delta into shards beside the tables of a copy, and checks this rank's part of it.

No table changes here; delta_apply.py changes the tables. Each rank reads its own rows and columns, under any
plan of the exported model.

Legend: N removed ids.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    MergedTable,
    SavedTable,
    check_config,
    open_checkpoint,
    optimizer_config,
)
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, mixed_ranges
from torchrec_dyn.state_dict import StagedTable

CALL = "apply_delta"
IN_ORDER = (
    "Apply every delta once and in order, to a copy whose model and optimizer were loaded from the "
    "checkpoint that was saved when the marker was made."
)
Sums = Mapping[str, int]


@dataclass
class TableChange:
    """The changes of one table in a delta, with this rank's part as read."""

    table: Table  # of the copy
    saved: SavedTable  # of the delta
    rows: StagedTable
    removed: Tensor  # [N] int64, the removed ids that this rank owns
    # True if the table of the delta has no scores: all its rows count as just seen, as after a load.
    is_unscored: bool

    @property
    def where(self) -> str:
        """The table, for messages."""
        return f"apply_delta(table={self.table.name!r})"

    @property
    def compared(self) -> list[str]:
        """Names of the tensors whose sums must be equal in copy and delta."""
        table, optimizer = self.table, self.table.optimizer
        cuts = (self.saved.optimizer or {}).get("cuts") or table.cuts
        names = ["ids", "weight", *optimizer.state_names, "step"]
        names += [*BY_ROW, "clock"] if table.options.has_life else []
        names += ["waiting"] if table.options.counts_waiting else []
        left_out = set(BY_ROW if self.is_unscored else ())
        if self.saved.dtype == table.dtype:
            names.append("config")
        else:  # converted
            left_out.add("weight")
        if cuts != table.cuts:
            left_out.update(name for name in optimizer.state_names if optimizer.is_rowwise(name))
        if cuts == table.cuts or not any(optimizer.state_is_rowwise):
            names.append("optimizer_config")
        return [name for name in names if name not in left_out]


def read_delta(tables: Sequence[Table], path: str | os.PathLike[str]) -> list[TableChange]:
    """Reads this rank's part of a delta; raises ValueError if it is damaged or of other tables."""
    saved = _tables_of(tables, path)
    for table in tables:
        _check_fits(table, saved[table.name])
    return [
        TableChange(
            table=table,
            saved=saved[table.name],
            rows=StagedTable(table, MergedTable([saved[table.name]])),
            removed=_own_removed(saved[table.name], table),
            is_unscored=has_scores(saved[table.name]) is False,
        )
        for table in tables
    ]


def _tables_of(tables: Sequence[Table], path: str | os.PathLike[str]) -> dict[str, SavedTable]:
    """Returns the tables of a delta by name, which are those of the copy."""
    delta = open_checkpoint(path)
    saved = {table.name: table for table in delta.tables.values()}
    names = sorted(table.name for table in tables)
    if not delta.is_delta:
        raise ValueError(
            f"apply_delta: expected a delta of export_delta, got {path}, a full checkpoint. Load it "
            "with torch.distributed.checkpoint.load."
        )
    if sorted(table.name for table in delta.tables.values()) != names:
        raise ValueError(
            f"apply_delta: expected a delta of the tables {listed(names)}, got a delta of "
            f"{listed(sorted(table.name for table in delta.tables.values()))} in {path}. "
            "Apply it to a model with the tables that were saved."
        )
    return saved


def _check_fits(table: Table, saved: SavedTable) -> None:
    """Raises ValueError unless a delta has the config and the optimizer of a table."""
    where = f"apply_delta(table={table.name!r})"
    check_config(where, saved.config, table.config)
    saved_rule = (saved.optimizer or {}).get("optimizer")
    rule = optimizer_config(table.optimizer, table.cuts)["optimizer"]
    if saved_rule != rule:
        raise ValueError(
            f"{where}: expected a delta with optimizer state of {rule} as the copy has, got "
            f"the state of {saved_rule}. Give both models the same optimizer."
        )
    if saved.config.get("initializer") != table.config["initializer"]:
        raise ValueError(
            f"{where}: expected a delta with initializer {table.config['initializer']!r} as the "
            f"copy has, got {saved.config.get('initializer')!r}. {IN_ORDER}"
        )


def has_scores(saved: SavedTable) -> bool | None:
    """Returns True if the whole saved table has scores; None if it has no rows. All ranks decide alike.

    False of a delta without rows may also mean that all scores are 0: these have the sum 0.
    """
    if saved.num_rows:
        return "last_seen" in saved.names
    whens = ("base", "result") if saved.is_delta else ()
    ends = [saved.sums_at(when) for when in whens]
    return any(sums["last_seen"] for sums in ends) if any(sums["ids"] for sums in ends) else None


def _own_removed(saved: SavedTable, table: Table) -> Tensor:
    """Returns the removed ids that this rank owns, [N] int64."""
    parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
    if table.part is not None and "removed" in saved.names:
        for mixed in mixed_ranges(table.part, table.layout.row_ranks):
            ends = (saved.place_of("removed", end) for end in (mixed.start, mixed.stop))
            parts.append(saved.ids("removed", *ends))
    return torch.cat(parts)
