"""The fit of entries to a model: one of another model is whole, and no older one is taken for it.

A line of entries loads into tables with another dtype of rows and other policies, as a full save does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_dyn.checkpoint.delta_reader import has_scores
from torchrec_dyn.checkpoint_format import (
    Entry,
    SavedTable,
    check_config,
    check_optimizer,
    open_checkpoint,
    optimizer_config,
)
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.name_lists import listed
from torchrec_dyn.policies import is_timed
from torchrec_dyn.ranks import Table

PARTIAL = "To load what is in both, give restore(allow_partial_load=True)."


class MisfitError(ValueError):
    """An entry is whole, but of another model. Raised on all ranks at the same place."""

    is_agreed = True  # read by `settle`

    def __init__(self, told: str) -> None:
        super().__init__(
            f"{told} The entry is whole, so no older one was tried: to restore an older one, give its step."
        )


def fit_of_tables(
    tables: Sequence[Table], line: Sequence[Entry], is_partial: bool
) -> tuple[str, bool]:
    """Compares the tables of a line with those of a model; not collective.

    The line is a full save and the deltas after it. With `is_partial` tables may be missing, in it or in the
    model.

    Returns:
        What does not fit, "" if all fits; and True if the line has the tables in the form in which the model
        saves them, so that a delta can follow.

    Raises:
        ValueError: an entry cannot be read.
    """
    own, is_same = {table.key: table for table in tables}, True
    for entry in line:
        found = open_checkpoint(entry.tables).tables
        saved = {key.removeprefix("model."): one for key, one in found.items()}
        if saved.keys() != own.keys():
            is_same = False
            if not is_partial:
                told = (
                    f"{entry.path}: expected an entry with the tables {listed(sorted(own))} of the model, "
                    f"got {listed(sorted(saved))}. {PARTIAL}"
                )
                return told, False
        for key in sorted(saved.keys() & own.keys()):
            one, table = saved[key], own[key]
            where = f"{entry.path}(table={table.name!r})"
            try:
                check_config(where, one.config, table.config)
                rule = optimizer_config(table.optimizer, table.cuts)
                check_optimizer(where, one.optimizer or {}, rule)
            except ValueError as error:
                return str(error), False
            scored = has_scores(one)
            is_same &= one.dtype == table.dtype and scored in (None, table.options.has_life)
            is_same &= not _has_more(one, table.options)
    return "", is_same


def _has_more(saved: SavedTable, options: DynamicTableConfig) -> bool:
    """Returns True if waiting ids or times were saved that a table with these options does not keep."""
    has_times = "clock" in saved.names and saved.read("clock").numel()
    return bool(
        (saved.rows_of("waiting") and not options.counts_waiting)
        or (has_times and not is_timed(options.eviction))
    )


def misfit_of_dense(
    entry: Entry, state: Mapping[str, Any], saved: Mapping[str, Any], is_partial: bool
) -> str:
    """Returns what of the dense part is not in a checkpoint, or has another size; "" if all fits.

    `state` are state dicts of the dense part on this rank, `saved` is DCP's metadata by key. With
    `is_partial` tensors may be missing.
    """
    for key, value in flatten_state_dict(dict(state))[0].items():
        if not isinstance(value, (Tensor, ShardedTensor)):
            continue
        found = saved.get(key)
        if found is None and not is_partial:
            return f"{entry.path}: expected an entry with {key} as the model has, got one without. {PARTIAL}"
        if isinstance(found, TensorStorageMetadata) and found.size != value.size():
            return (
                f"{entry.path}: expected {key} of size {list(value.size())} as the model has, got "
                f"{list(found.size)}. Restore with the parameters that were saved."
            )
    return ""
