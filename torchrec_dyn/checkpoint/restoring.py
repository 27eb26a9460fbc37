"""Loads an entry: the rows of its full save and deltas, merged, and the dense part of the last of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_dyn.checkpoint.dcp_files import load_files
from torchrec_dyn.checkpoint.delta_apply import has_scores
from torchrec_dyn.checkpoint.dense_part import (
    missing_names,
    optimizers_in,
    read_values,
    set_options,
    split_state,
)
from torchrec_dyn.checkpoint.entry_writing import sums_in_files
from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    Entry,
    MergedTable,
    Place,
    SavedTable,
    check_config,
    check_new_names,
    check_optimizer,
    checked_rename,
    open_checkpoint,
    open_files,
    optimizer_config,
    read_chain,
    renamed_keys,
    warn_of_options,
    with_options_of,
)
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.name_lists import listed
from torchrec_dyn.policies import is_timed
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict import LoadPlanner, StagedTable, note_taken, rows_left_out
from torchrec_dyn.table import Commit

_CALL = "Checkpoints.restore"
_STATE = "optimizer.state."
_PARTIAL = "To load what is in both, give restore(allow_partial_load=True)."


class Restored(NamedTuple):
    """The result of `Checkpoints.restore`.

    Attributes:
        step: the step that was given to `save`.
        extra: the `extra` values of this rank by name; the state dict of an object.
        entry: the entry.
        skipped: with `on_damage="previous"`, a line with the newer entry that could not be loaded, and why.
    """

    step: int
    extra: dict[str, Any]
    entry: Entry
    skipped: list[str]


# The entry that a restore was asked for, and the newest one before it, each with the full save and the deltas
# that lead to it, none if one is missing; why a newer folder cannot be judged; the highest sequence.
Choice = tuple[list[tuple[Entry, list[Entry]]], str, int]


def choice_of(path: Place, step: int | None) -> Choice:
    """Returns what a restore of a directory may load: of a step, or of None the newest entry."""
    chain = read_chain(path)
    entries, fault = list(chain.entries), ""
    if step is not None:
        entries = entries[: entries.index(chain.at(step)) + 1]
    elif chain.skipped and (not entries or entries[-1].sequence < chain.highest):
        fault = chain.skipped[-1]
    lines = [(entry, chain.line_of(entry) or []) for entry in entries[-2:][::-1]]
    return lines, fault, chain.highest


# The new names of tables by their saved names, as pairs.
NewNames = tuple[tuple[str, str], ...]


def new_names(rename: Mapping[str, str] | None, tables: Sequence[Table]) -> NewNames:
    """Returns checked new names of the tables of a model."""
    given = checked_rename(rename, f"{_CALL}.rename")
    check_new_names(given, (table.name for table in tables), f"{_CALL}.rename")
    return tuple(sorted(given.items()))


class LineLoad:
    """The load of a full save and the deltas after it. `prepare` loads nothing, `commit` is collective.

    With `is_partial` only what the line and the model have both is loaded.

    Attributes:
        values: the further values of this rank.
        group: the ranks; None: one process.
        is_same: True if a delta may follow: the line has tables as the model saves them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        tables: Sequence[Table],
        entry: Entry,
        line: Sequence[Entry],
        is_partial: bool,
        rename: NewNames,
    ) -> None:
        self.model, self._optimizer, self._tables = model, optimizer, tables
        self.entry, self.line, self._is_partial = entry, line, is_partial
        self._rename = dict(rename)
        self.group, self.rank = tables[0].group, tables[0].rank
        self.values: dict[str, Any] = {}
        self.is_same = False
        self._staged: list[StagedTable] = []
        self._commits: list[Commit] = []

    def prepare(
        self, objects: Mapping[str, Any]
    ) -> tuple[str, set[str], Sequence[Mapping[str, int]]]:
        """Checks the files, reads this rank's rows, and makes a place for all that is loaded.

        Returns what does not fit the model and `objects`, "" if all fits; the keys of saved optimizer state
        without a place here; and the content sums of the rows that were read, by table.
        """
        tables, line, group, rank = self._tables, self.line, self.group, self.rank
        if not line:
            raise ValueError(
                f"{self.entry.path}: expected the full save and deltas before it, got no such line."
            )
        _check_files(line, rank, 1 if group is None else dist.get_world_size(group))
        saves: Sequence[Mapping[str, SavedTable]] = [_saved_tables(entry) for entry in line]
        if rank == 0:
            _check_sums(line, saves)
        saved = open_files(line[0].tables)[1].state_dict_metadata
        saves, new_keys, wrong_names = _with_new_names(saves, saved, self._rename)
        misfit, self.is_same = _fit_of_tables(tables, line, saves, self._is_partial)
        self.values, options = read_values(line[-1], rank)
        self._options = _of_new_names(options, new_keys)
        dense_saved = open_files(line[-1].dense)[1].state_dict_metadata
        keys = _states_in([*map(new_keys.get, saved, saved), *dense_saved])
        self._make_places(keys)
        self._lazy = _lazy_states(self._optimizer)
        self._rows, dense = split_state(self._state, tables)
        self._dense = _with_states(dense, self._lazy, keys)
        dense_misfit = _misfit_of_dense(line[-1], self._dense, dense_saved, self._is_partial)
        left = _without_place(self._state, keys)
        misfit = wrong_names or misfit or dense_misfit or missing_names(self.values, objects)
        if not misfit:
            self._read_tables(saves)
        return misfit, left, [rows.sums for rows in self._staged]

    def misfit_in(self, misfits: Sequence[str], without_place: Sequence[set[str]]) -> str:
        """Returns what does not fit, "" if all fits, from the results of `prepare` by rank."""
        # A static table lies on some ranks only.
        left = set.intersection(*without_place)
        if any(misfits) or not left or self._is_partial:
            return next(filter(None, misfits), "")
        return (
            f"{self.entry.path}: expected an optimizer with state for {_STATE}{min(left)}, got one without. "
            f"Restore with the optimizers and parameters that were saved. {_PARTIAL}"
        )

    def _make_places(self, keys: set[str]) -> None:
        """Makes the state dicts, with a place for saved state of parameters of this rank.

        torch's optimizers make their state in the first step, and DCP reads only what has a place. So an
        optimizer without state takes a step of zeros, whose results the load replaces.
        """
        optimizer = self._optimizer
        self._state = self._state_dicts()
        left = _without_place(self._state, keys)
        own = set(optimizer.params)
        if any(own & _begins(key) for key in left) and hasattr(optimizer, "init_state"):
            optimizer.init_state()
            optimizer.zero_grad()
            self._state = self._state_dicts()

    def _state_dicts(self) -> dict[str, Any]:
        with rows_left_out():
            return {
                "model": self.model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            }

    def _read_tables(self, saves: Sequence[Mapping[str, SavedTable]]) -> None:
        """Reads the rows of the line, merged, beside those of the tables, and prepares to put them there."""
        for table in self._tables:
            if all(table.key in saved for saved in saves):
                source = MergedTable([saved[table.key] for saved in saves])
                self._staged.append(StagedTable(table, source))
                if not self.rank:
                    where = f"{self.entry.path}(table={table.name!r})"
                    warn_of_options(where, saves[-1][table.key].config, table.config)
        self._commits = [rows.replacing() for rows in self._staged]

    def commit(self, sums: Sequence[Sequence[Mapping[str, int]]]) -> None:
        """Compares the sums of the rows that the ranks have read, and loads the line. Collective."""
        model, optimizer = self.model, self._optimizer
        for rows, by_rank in zip(self._staged, zip(*sums, strict=True), strict=True):
            rows.check_sums(*by_rank)
        # DCP's own planner would ask for the state {} of a static table that lies on another rank.
        planner = LoadPlanner(allow_partial_load=self._is_partial)
        load_files(self._dense, self.line[-1].dense, planner, self.group)
        for rows, take in zip(self._staged, self._commits, strict=True):
            take()
            note_taken(rows.table.lock, rows.table.name)
        loaded = self._dense["optimizer"]
        states = {**self._rows, **loaded["state"]}
        for name in self._lazy.keys() - states.keys():
            del self._lazy[name][optimizer.params[name]]  # it had no state when the entry was saved
        with rows_left_out():
            model.load_state_dict(self._dense["model"])
            optimizer.load_state_dict({**loaded, "state": states})
        set_options(optimizer, self._options)
        optimizer.zero_grad()  # gives FBGEMM the learning rates of static tables


def _saved_tables(entry: Entry) -> dict[str, SavedTable]:
    """Returns the tables of an entry by their keys in the model."""
    tables = open_checkpoint(entry.tables).tables
    return {key.removeprefix("model."): table for key, table in tables.items()}


def _with_new_names(
    saves: Sequence[Mapping[str, SavedTable]],
    saved: Mapping[str, Any],
    rename: Mapping[str, str],
) -> tuple[Sequence[Mapping[str, SavedTable]], dict[str, str], str]:
    """Returns the tables of saves by their keys under other names, the new keys of tensors, and a misfit."""
    try:
        new_keys = renamed_keys(saved, rename, f"{_CALL}.rename")
    except ValueError as error:
        return saves, {}, str(error)
    renamed = [
        {
            f"{key.removesuffix(table.name)}{rename.get(table.name, table.name)}": table
            for key, table in tables.items()
        }
        for tables in saves
    ]
    return renamed, new_keys, ""


def _of_new_names(options: Mapping[str, Any], new_keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns values by parameter, those of renamed tables by the new names of their parameters."""
    pairs = ((key.removeprefix(_STATE), new.removeprefix(_STATE)) for key, new in new_keys.items())
    names = {key.rsplit(".", 2)[0]: new.rsplit(".", 2)[0] for key, new in pairs}
    return {names.get(key, key): value for key, value in options.items()}


def _check_files(line: Sequence[Entry], rank: int, ranks: int) -> None:
    """Raises ValueError if a rank's part of the files that a load reads is damaged, or of another entry."""
    last = line[-1]
    files = [(last, name) for name in sorted(last.digests) if "/" in name]
    files += [(entry, f"{entry.tables.name}/.metadata") for entry in line[:-1]]
    for entry, name in files[rank::ranks]:
        entry.check_long_file(name)


def _check_sums(line: Sequence[Entry], saves: Sequence[Mapping[str, SavedTable]]) -> None:
    """Raises ValueError unless tables have the content sums in the commit files, as the rows must have."""
    for entry, saved in zip(line, saves, strict=True):
        sums = sums_in_files(entry, saved.values())
        for name in sorted({*sums, *entry.sums}):
            if sums.get(name) != entry.sums.get(name):
                raise ValueError(
                    f"{entry.tables}: expected table {name!r} with the content sums of its commit, "
                    f"{entry.sums.get(name)}, got {sums.get(name)}: it is of another entry. {DAMAGED}"
                )


def _fit_of_tables(
    tables: Sequence[Table],
    line: Sequence[Entry],
    saves: Sequence[Mapping[str, SavedTable]],
    is_partial: bool,
) -> tuple[str, bool]:
    """Returns what tables of a line do not fit a model, "" if all fit; and whether a delta can follow."""
    own, is_same = {table.key: table for table in tables}, True
    for entry, saved in zip(line, saves, strict=True):
        if saved.keys() != own.keys():
            is_same = False
            if not is_partial:
                return (
                    f"{entry.path}: expected an entry with the tables {listed(sorted(own))} of the model, "
                    f"got {listed(sorted(saved))}. {_PARTIAL}"
                ), False
        for key in sorted(saved.keys() & own.keys()):
            in_entry, table = saved[key], own[key]
            where = f"{entry.path}(table={table.name!r})"
            try:
                check_config(where, in_entry.config, {**table.config, "table": in_entry.name})
                rule = optimizer_config(table.optimizer, table.cuts)
                check_optimizer(where, in_entry.optimizer or {}, rule)
            except ValueError as error:
                return str(error), False
            is_same &= in_entry.name == table.name  # a delta has the name of the save before it
            scored = has_scores(in_entry)
            is_same &= in_entry.dtype == table.dtype and scored in (None, table.options.has_life)
            is_same &= not _has_more(in_entry, table.options)
            is_same &= with_options_of(in_entry.config, table.config) == in_entry.config
    # A delta would miss the tables that a partial load skips.
    return "", is_same and not is_partial


def _has_more(saved: SavedTable, options: DynamicTableConfig) -> bool:
    """Returns True if waiting ids or times were saved that a table with these options does not keep."""
    has_times = "clock" in saved.names and saved.read("clock").numel()
    return bool(
        (saved.rows_of("waiting") and not options.counts_waiting)
        or (has_times and not is_timed(options.eviction))
    )


def _misfit_of_dense(
    entry: Entry, state: Mapping[str, Any], saved: Mapping[str, Any], is_partial: bool
) -> str:
    """Returns what of the dense part is not in a checkpoint, or has another size; "" if all fits."""
    for key, value in flatten_state_dict(dict(state))[0].items():
        if not isinstance(value, (Tensor, ShardedTensor)):
            continue
        in_entry = saved.get(key)
        if in_entry is None and not is_partial:
            return f"{entry.path}: expected an entry with {key} as the model has, got one without. {_PARTIAL}"
        if isinstance(in_entry, TensorStorageMetadata) and in_entry.size != value.size():
            return (
                f"{entry.path}: expected {key} of size {list(value.size())} as the model has, got "
                f"{list(in_entry.size)}. Restore with the parameters that were saved."
            )
    return ""


def _states_in(saved: Iterable[str]) -> set[str]:
    """Returns the keys of optimizer state among those saved; each begins with the name of a parameter."""
    return {key.removeprefix(_STATE) for key in saved if key.startswith(_STATE)}


def _begins(key: str) -> set[str]:
    """Returns the begins of a key up to a dot, and the key: one of them is the name of a parameter."""
    parts = key.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def _without_place(state: Mapping[str, Any], keys: set[str]) -> set[str]:
    """Returns the keys of saved optimizer state that state dicts have no place for."""
    places = {name for name, held in state["optimizer"]["state"].items() if held}
    return {key for key in keys if places.isdisjoint(_begins(key))}


def _with_states(state: Mapping[str, Any], lazy: Container[str], keys: set[str]) -> dict[str, Any]:
    """Returns state dicts without the lazy state of parameters of which no state is among the keys."""
    saved = set[str]().union(*map(_begins, keys))
    states = state["optimizer"]["state"].items()
    kept = {name: held for name, held in states if name in saved or name not in lazy}
    return {"model": state["model"], "optimizer": {**state["optimizer"], "state": kept}}


def _lazy_states(optimizer: Any) -> dict[str, dict[Any, Any]]:
    """Returns, by names of parameters, the state that optimizers of torch have made in a step."""
    # CombinedOptimizer joins states in a new dict.
    defaults = [
        part.state for part in optimizers_in(optimizer) if isinstance(part.state, defaultdict)
    ]
    named = optimizer.params.items()
    return {name: states for name, parameter in named for states in defaults if parameter in states}
