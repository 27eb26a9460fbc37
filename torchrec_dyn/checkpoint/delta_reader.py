"""Reads a delta into stores beside the tables of a copy, and verifies that it is whole.

No table changes here; delta_apply.py changes the tables. Each rank reads its own rows and columns, under any
plan of the exported model.

Legend: N removed ids.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_dyn.checkpoint.dcp_files import load_files
from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    MODEL_TENSORS,
    SavedTable,
    SavedTensor,
    add_sums,
    check_config,
    from_words,
    is_canonical,
    open_checkpoint,
    optimizer_config,
)
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import (
    LoadPlanner,
    ModelEntry,
    OptimizerEntry,
    StagedRows,
    places_of_part,
)
from torchrec_dyn.storage import RowStore, lacks_memory
from torchrec_dyn.table import TableShard

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
    model: ModelEntry  # receives ids, rows, scores, counters and clock
    optimizer: OptimizerEntry  # receives optimizer state and step
    # [N] int64, the removed ids that this rank owns.
    removed: Tensor = field(default_factory=lambda: _NONE)
    # True if the table of the delta has no scores: all its rows count as just seen, as after a load.
    is_unscored: bool = False

    @property
    def where(self) -> str:
        """The table, for messages."""
        return f"apply_delta(table={self.table.name!r})"

    @property
    def shards(self) -> list[tuple[TableShard, StagedRows, Mapping[str, RowStore]]]:
        """This rank's shards, each with its staged rows and its staged optimizer state by name."""
        staged = self.model.staged or (), self.optimizer.staged or ()
        return list(zip(self.table.shards, *staged, strict=True))

    @property
    def cuts(self) -> list[int]:
        """The column cuts of the delta's row-wise optimizer state; if it names no cuts, the copy's cuts."""
        return (self.saved.optimizer or {}).get("cuts") or self.table.cuts

    @property
    def compared(self) -> list[str]:
        """Names of the tensors whose sums must be equal in copy and delta."""
        table, optimizer = self.table, self.table.optimizer
        model = [*self.model.names, "config", *(["clock"] if table.options.has_life else [])]
        converted = ["weight", "config"] if self.saved.dtype != table.dtype else []
        converted += BY_ROW if self.is_unscored else []
        model = [name for name in model if name not in converted]
        same = self.cuts == table.cuts
        kept = [name for name in optimizer.state_names if same or not optimizer.is_rowwise(name)]
        config = ["optimizer_config"] if same or not any(optimizer.state_is_rowwise) else []
        return [*model, *kept, "step", *config]


def read_delta(
    tables: Sequence[Table], path: str | os.PathLike[str], is_partial: bool
) -> list[TableChange]:
    """Reads and verifies this rank's part of a delta: the changes of each of `tables`. Collective.

    `is_partial` is True if the delta may have further tables.

    Raises:
        ValueError: on every rank, if the delta is torn, damaged or of other tables.
    """
    changes = run_together(tables[0].group, CALL, lambda: _open(tables, path, is_partial))
    _read(tables, changes, path)
    _verify(tables, changes)
    return changes


def _open(
    tables: Sequence[Table], path: str | os.PathLike[str], is_partial: bool
) -> list[TableChange]:
    """Finds the tables of a delta and checks their configs."""
    found = open_checkpoint(path)
    saved = {table.name: table for table in found.tables.values()}
    names = [table.name for table in tables]
    wanted = [name for name in saved if name in names or not is_partial]
    if not found.is_delta:
        raise ValueError(
            f"apply_delta: expected a delta of export_delta, got {path}, a full checkpoint. Load it "
            "with torch.distributed.checkpoint.load."
        )
    if len(saved) < len(found.tables) or sorted(wanted) != sorted(names):
        raise ValueError(
            f"apply_delta: expected a delta of the tables {listed(sorted(names))}, got a delta of "
            f"{listed(sorted(table.name for table in found.tables.values()))} in {path}. "
            "Apply it to a model with the tables that were saved."
        )
    changes = []
    for table in tables:
        one = saved[table.name]
        model, optimizer = ModelEntry(table), OptimizerEntry(table)
        change = TableChange(table, one, model, optimizer)
        check_config(change.where, one.config, table.config)
        saved_rule = (one.optimizer or {}).get("optimizer")
        rule = optimizer_config(table.optimizer, table.cuts)["optimizer"]
        if saved_rule != rule:
            raise ValueError(
                f"{change.where}: expected a delta with optimizer state of {rule} as the copy has, got "
                f"the state of {saved_rule}. Give both models the same optimizer."
            )
        if one.config.get("initializer") != table.config["initializer"]:
            raise ValueError(
                f"{change.where}: expected a delta with initializer {table.config['initializer']!r} as the "
                f"copy has, got {one.config.get('initializer')!r}. {IN_ORDER}"
            )
        change.is_unscored = has_scores(one) is False
        if "removed" in one.names:
            removed = _own_removed(one, table)
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


def _read(
    tables: Sequence[Table], changes: Sequence[TableChange], path: str | os.PathLike[str]
) -> None:
    """Reads this rank's rows beside the tables. Collective."""
    wanted: dict[str, Any] = {}
    for change in changes:
        key = change.saved.key
        optimizer = f"optimizer.state.{key.removeprefix('model.')}.weight.{change.table.name}"
        # Also those that the copy does not use: as unread.
        for name in (*MODEL_TENSORS, "checksum"):
            wanted[f"{key}.{name}"] = SavedTensor((0,), torch.int64, (), change.model)
        for name in (*change.optimizer.small_names, *change.table.optimizer.state_names):
            wanted[f"{optimizer}.{name}"] = SavedTensor((0,), torch.int64, (), change.optimizer)
    group, rank = tables[0].group, tables[0].rank

    def load() -> None:
        try:
            load_files(wanted, path, LoadPlanner(path=path), group)
        except CheckpointException as error:
            # The same on every rank: only the first rank that failed names its fault.
            if rank == min(error.failures):
                raise _fault_of(error.failures[rank][0]) from None
        except Exception as error:
            raise _fault_of(error) from error

    run_together(group, CALL, load)


def _fault_of(error: BaseException) -> Exception:
    """Returns the error to raise for an error of a read."""
    if isinstance(error, Exception) and (isinstance(error, ValueError) or lacks_memory(error)):
        return error
    return ValueError(f"expected a delta that can be read, got {error!r}. {DAMAGED}")


def _verify(tables: Sequence[Table], changes: Sequence[TableChange]) -> None:
    """Raises ValueError unless the rows read are the rows written. Collective."""
    group = tables[0].group
    of_ranks = gather_results(group, CALL, lambda: [_checked(change) for change in changes])

    def compare() -> None:
        for number, change in enumerate(changes):
            for which, entry in enumerate((change.model, change.optimizer)):
                by_rank = [rank[number][which] for rank in of_ranks]
                words, sums = zip(*by_rank, strict=True)
                entry.compare(words, add_sums(*sums))

    run_together(group, CALL, compare)


def _checked(change: TableChange) -> list[tuple[list[list[int]], Sums]]:
    """Checks this rank's part and returns the saved words and its sums: of the model, of the optimizer."""
    summed = change.model.check(), change.optimizer.check([change.model])
    for one in change.model.staged or ():
        if bool((one.id_map.lookup(change.removed.to(one.id_map.slots.device)) >= 0).any()):
            raise ValueError(
                f"{change.where}: expected removed ids without a row, got removed ids with a row. {DAMAGED}"
            )
    return [
        (change.model.words, summed[0]),
        (change.optimizer.words, summed[1] or {}),
    ]
