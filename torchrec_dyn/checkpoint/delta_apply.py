"""Applies a delta to a copy of the model that it was exported from.

All of it is read and verified before anything changes on any rank: the delta is whole, it begins at the
contents that the copy has, and what it leads to is what it says. Sums are additive: the result's are those
before, less those of the rows that go or are written anew, plus those of the delta.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from torchrec_dyn.checkpoint.delta_reader import CALL, IN_ORDER, Sums, TableChange, read_delta
from torchrec_dyn.checkpoint.delta_rows import reserve_rows, rows_replaced, write_rows
from torchrec_dyn.checkpoint_format import (
    BY_ROW,
    DAMAGED,
    MODEL_TENSORS,
    OPTIMIZER,
    OPTIMIZER_TENSORS,
    SavedTable,
    add_sums,
    from_words,
)
from torchrec_dyn.ranks import done_together, told_together
from torchrec_dyn.state_dict import ModelSource, OptimizerSource
from torchrec_dyn.whole_model import ModelTable, saved_forms, tables_of


def apply_delta(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Brings a copy of a model to the contents that it would have from a checkpoint saved at the delta.

    The copy may be sharded by another plan, over other ranks, or not at all; tables are found by their names.
    Rows, optimizer state, scores, counters, clock and steps change; forwards of before cannot run their
    backward. Collective where the tables are sharded. Costs one reading of all rows of the copy.

    Args:
        model: DistributedModelParallel, any module with dynamic tables, or one collection.
        path: of `export_delta`; every rank can read it.

    Raises:
        ValueError: on every rank, if the delta is torn or damaged, or is not for what the copy holds now (one
            before it is missing, or it was applied already); nothing has changed then.
    """
    tables = tables_of(model, CALL)
    changes = read_delta(tables, path)
    before = [
        (from_words(form.sums[0], MODEL_TENSORS), from_words(form.sums[1], OPTIMIZER_TENSORS))
        for form in saved_forms(tables, CALL)
    ]
    done_together(tables[0].group, CALL, lambda: _check_begins(changes, before))
    _verify_result(tables, changes, before)
    done_together(tables[0].group, CALL, lambda: _reserve(changes))
    done_together(tables[0].group, CALL, lambda: _write(changes))


def _check_begins(changes: Sequence[TableChange], before: Sequence[tuple[Sums, Sums]]) -> None:
    """Raises ValueError unless the delta begins at what the copy holds."""
    for change, sums in zip(changes, before, strict=True):
        base, result = _words(change.saved, "base"), _words(change.saved, "result")
        for which, names in enumerate(change.compared):
            for name in names:
                own, begin = sums[which][name], base[which][name]
                if own != begin:
                    is_end = own == result[which][name]
                    raise ValueError(
                        f"{change.where}: expected a delta that begins at content sum {own:016x} of {name} "
                        f"as the copy has, got one that begins at {begin:016x}"
                        f"{' and ends there: it was applied already' if is_end else ''}. {IN_ORDER}"
                    )


def _words(saved: SavedTable, which: str) -> tuple[Sums, Sums]:
    return (
        from_words(saved.read(which), MODEL_TENSORS),
        from_words(saved.read(OPTIMIZER + which), OPTIMIZER_TENSORS),
    )


def _verify_result(
    tables: Sequence[ModelTable],
    changes: Sequence[TableChange],
    before: Sequence[tuple[Sums, Sums]],
) -> None:
    """Raises ValueError unless the delta leads to what it says. Collective."""
    told = told_together(
        tables[0].group, CALL, lambda: [_sums_replaced(change) for change in changes]
    )
    gone = [
        [add_sums(*(one[number][which] for one in told)) for which in range(2)]
        for number in range(len(changes))
    ]
    done_together(tables[0].group, CALL, lambda: _check_ends(changes, before, gone))


def _check_ends(
    changes: Sequence[TableChange],
    before: Sequence[tuple[Sums, Sums]],
    gone: Sequence[Sequence[Sums]],
) -> None:
    for change, held, less in zip(changes, before, gone, strict=True):
        came, result = _words(change.saved, "checksum"), _words(change.saved, "result")
        for which, names in enumerate(change.compared):
            for name in names:
                kept = held[which][name] - less[which].get(name, 0) if name in BY_ROW else 0
                end, told = (kept + came[which][name]) % (1 << 64), result[which][name]
                if end != told:
                    raise ValueError(
                        f"{change.where}: expected a delta that leads to content sum {told:016x} of {name} "
                        f"as it says, got one that leads to {end:016x}. {DAMAGED}"
                    )


def _sums_replaced(change: TableChange) -> tuple[Sums, Sums]:
    """Sums the rows of the copy that the delta takes out or writes anew."""
    pieces = change.table.pieces
    both = zip(pieces.shards, change.model.staged or (), strict=True)
    maps = tuple(rows_replaced(shard, staged, change.removed) for shard, staged in both)
    some = replace(pieces, maps=maps)
    model = ModelSource(some, None).tell()
    optimizer = OptimizerSource(some, change.table.optimizer, None).tell()
    return ({} if model is None else model.sums, {} if optimizer is None else optimizer.sums)


def _reserve(changes: Sequence[TableChange]) -> None:
    for change in changes:
        for shard, staged in zip(
            change.table.pieces.shards, change.model.staged or (), strict=True
        ):
            reserve_rows(shard, staged)


def _write(changes: Sequence[TableChange]) -> None:
    for change in changes:
        small = change.model.small
        for number, shard in enumerate(change.table.pieces.shards):
            assert change.model.staged is not None and change.optimizer.staged is not None
            write_rows(
                shard,
                change.model.staged[number],
                change.removed,
                change.optimizer.staged[number],
                change.cuts,
                small.get("clock"),
                int(change.optimizer.small["step"]),
            )
