"""Reads a delta into shards beside the tables of a copy, and checks this rank's part of it.

No table changes here; delta_apply.py changes the tables. Each rank reads its own rows and columns, under any
plan of the exported model.

Legend: N removed ids.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    MODEL_CHECKSUM,
    MODEL_TENSORS,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    ChunkedTensor,
    SavedTable,
    check_config,
    from_words,
    is_canonical,
    open_checkpoint,
    open_files,
    optimizer_config,
)
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict import (
    TableLoad,
    places_here,
    places_of_part,
    read_table,
)

CALL = "apply_delta"
IN_ORDER = (
    "Apply every delta once and in order, to a copy whose model and optimizer were loaded from the "
    "checkpoint that was saved when the marker was made."
)
_NONE = torch.empty(0, dtype=torch.int64, device="cpu")
Sums = Mapping[str, int]


@dataclass
class TableChange:
    """The changes of one table in a delta, with this rank's part as read."""

    table: Table  # of the copy
    saved: SavedTable  # of the delta
    load: TableLoad
    # [N] int64, the removed ids that this rank owns.
    removed: Tensor = field(default_factory=lambda: _NONE)
    # True if the table of the delta has no scores: all its rows count as just seen, as after a load.
    is_unscored: bool = False

    @property
    def where(self) -> str:
        """The table, for messages."""
        return f"apply_delta(table={self.table.name!r})"

    @property
    def compared(self) -> list[str]:
        """Names of the tensors whose sums must be equal in copy and delta."""
        table, optimizer = self.table, self.table.optimizer
        cuts = (self.saved.optimizer or {}).get("cuts") or table.cuts
        names = [*self.load.row_names, "step"]
        names += ["clock"] if table.options.has_life else []
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


def read_delta(
    tables: Sequence[Table], path: str | os.PathLike[str], is_partial: bool
) -> list[TableChange]:
    """Reads and checks this rank's part of a delta: the changes of each of `tables`.

    `is_partial` is True if the delta may have further tables. Raises ValueError if the delta is torn, damaged
    or of other tables.
    """
    changes = _open(tables, path, is_partial)
    files, metadata = open_files(Path(path))
    for change in changes:
        _read(change, files, metadata)
    return changes


def _open(
    tables: Sequence[Table], path: str | os.PathLike[str], is_partial: bool
) -> list[TableChange]:
    """Finds the tables of a delta and checks their configs."""
    delta = open_checkpoint(path)
    saved = {table.name: table for table in delta.tables.values()}
    names = [table.name for table in tables]
    wanted = [name for name in saved if name in names or not is_partial]
    if not delta.is_delta:
        raise ValueError(
            f"apply_delta: expected a delta of export_delta, got {path}, a full checkpoint. Load it "
            "with torch.distributed.checkpoint.load."
        )
    if len(saved) < len(delta.tables) or sorted(wanted) != sorted(names):
        raise ValueError(
            f"apply_delta: expected a delta of the tables {listed(sorted(names))}, got a delta of "
            f"{listed(sorted(table.name for table in delta.tables.values()))} in {path}. "
            "Apply it to a model with the tables that were saved."
        )
    changes = []
    for table in tables:
        of_table = saved[table.name]
        change = TableChange(table, of_table, TableLoad(table, has_state=True))
        check_config(change.where, of_table.config, table.config)
        saved_rule = (of_table.optimizer or {}).get("optimizer")
        rule = optimizer_config(table.optimizer, table.cuts)["optimizer"]
        if saved_rule != rule:
            raise ValueError(
                f"{change.where}: expected a delta with optimizer state of {rule} as the copy has, got "
                f"the state of {saved_rule}. Give both models the same optimizer."
            )
        if of_table.config.get("initializer") != table.config["initializer"]:
            raise ValueError(
                f"{change.where}: expected a delta with initializer {table.config['initializer']!r} as the "
                f"copy has, got {of_table.config.get('initializer')!r}. {IN_ORDER}"
            )
        change.is_unscored = has_scores(of_table) is False
        if "removed" in of_table.names:
            removed = _own_removed(of_table, table)
            if not is_canonical(removed):
                raise ValueError(
                    f"{change.where}: expected removed ids in canonical order, got another order. {DAMAGED}"
                )
            change.removed = removed[table.owns(removed)]
        changes.append(change)
    return changes


def has_scores(saved: SavedTable) -> bool | None:
    """Returns True if the whole saved table has scores; None if it has no rows. All ranks decide alike.

    False of a delta without rows may also mean that all scores are 0: these have the sum 0.
    """
    if saved.num_rows:
        return "last_seen" in saved.names
    whens = ("base", "result") if saved.is_delta else ()
    ends = [from_words(saved.read(when)) for when in whens]
    return any(one["last_seen"] for one in ends) if any(one["ids"] for one in ends) else None


def _own_removed(saved: SavedTable, table: Table) -> Tensor:
    """Returns the removed ids among which this rank has its own."""
    if table.part is None:
        return _NONE
    ranks = table.layout.row_ranks
    if ranks == 1:
        return saved.read("removed")
    total = saved.rows_of("removed")
    places = places_of_part(partial(saved.rows, "removed"), total, table.part, ranks)
    return torch.cat([_NONE, *(saved.rows("removed", *one) for one in places.ranges)])


def _read(change: TableChange, files: FileSystemReader, metadata: Metadata) -> None:
    """Reads this rank's rows into shards beside those of the copy."""
    table, key, load = change.table, change.saved.key, change.load
    of_state = f"optimizer.state.{key.removeprefix('model.')}.weight.{table.name}"
    # Also those that the copy does not use: as unread.
    keys = {name: f"{key}.{name}" for name in (*MODEL_TENSORS, MODEL_CHECKSUM)}
    for name in (*OPTIMIZER_TENSORS, OPTIMIZER_CHECKSUM):
        keys[name] = f"{of_state}.{name}"
    saved = {name: metadata.state_dict_metadata.get(own) for name, own in keys.items()}
    present = {name: one for name, one in saved.items() if isinstance(one, TensorStorageMetadata)}
    tensors = {
        name: ChunkedTensor(f"'{keys[name]}' in {files.path}", files, keys[name], one)
        for name, one in present.items()
    }
    ids, waiting = tensors.get("ids"), tensors.get("waiting")
    load.begin(present, places_here(table, ids), places_here(table, waiting))
    read_table(load, tensors)
    for staged in load.staged or ():
        if bool((staged.id_map.lookup(change.removed.to(staged.rows.device)) >= 0).any()):
            raise ValueError(
                f"{change.where}: expected removed ids without a row, got removed ids with a row. {DAMAGED}"
            )
