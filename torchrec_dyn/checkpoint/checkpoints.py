"""Checkpoints: a directory of full saves and deltas, from which training continues where it stopped.

An entry has the dynamic tables, the dense part, the optimizer and what the caller adds, all of one moment. It
is published by a rename when all of its files are on the disk (checkpoint_format/saved_chain.py).
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_dyn.checkpoint.delta_apply import apply_delta
from torchrec_dyn.checkpoint.delta_export import Marker, export_delta, mark
from torchrec_dyn.checkpoint.dropped_load import drop_load
from torchrec_dyn.checkpoint.further_values import (
    alike,
    check_ranks,
    digests_of,
    hand_over,
    options_of,
    read_values,
    set_options,
    saved_values,
    write_values,
)
from torchrec_dyn.checkpoint.save_files import save_files
from torchrec_dyn.checkpoint_format import (
    ENTRY,
    LOCK,
    Entry,
    SavedChain,
    commit,
    open_files,
    read_chain,
)
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import LoadPlanner, rows_left_out
from torchrec_dyn.storage import unsigned
from torchrec_dyn.whole_model import tables_of

_SAVE, _RESTORE = "Checkpoints.save", "Checkpoints.restore"
_WRITING, _PRUNED = ".writing-", ".pruned-"


class Restored(NamedTuple):
    """What `Checkpoints.restore` has loaded.

    Attributes:
        step: the step that was given to `save`.
        extra: the further values of this rank by name; of an object its state dict.
        entry: the entry.
        skipped: a line for each newer entry that could not be used, and why.
    """

    step: int
    extra: dict[str, Any]
    entry: Entry
    skipped: list[str]


class Checkpoints:
    """A directory of checkpoints of one training job: full saves and deltas, with the dense part.

    One job writes at a time; any number of processes may read. Each rank makes an object of its own.

    Args:
        path: the directory, on a file system that all ranks see. The first save makes it.
        keep: number of full saves that are kept, with the deltas after them.
        full_every: every `full_every`-th save is full, the others are deltas. 1: all are full, and no changes
            of tables are recorded.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 2, full_every: int = 1) -> None:
        for name, value in (("keep", keep), ("full_every", full_every)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Checkpoints: expected {name} of at least 1, got {value!r}.")
        self.path = Path(path)
        self._keep, self._full_every = keep, full_every
        self._marker: Marker | None = None  # of the last entry, if the next may be a delta
        self._line: list[Entry] = []  # a full save and the deltas to the last entry
        self._highest = 0  # the highest sequence that this object knows of
        self._lock: filelock.BaseFileLock | None = None

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.path)!r}, keep={self._keep}, full_every={self._full_every})"

    def entries(self) -> list[Entry]:
        """Returns the whole entries, oldest first; not collective."""
        return read_chain(self.path).entries

    def latest(self) -> Entry | None:
        """Returns the newest entry that can be restored, or None; not collective."""
        chain = read_chain(self.path)
        return next((one for one in reversed(chain.entries) if chain.line_of(one)), None)

    def at(self, step: int) -> Entry:
        """Returns the newest entry of a step; not collective.

        Raises:
            ValueError: no entry is of this step.
        """
        return _entry_at(read_chain(self.path), step)

    def line_of(self, entry: Entry) -> list[Entry]:
        """Returns the full save and the deltas that lead to an entry, in order; not collective.

        Raises:
            ValueError: one of them is missing.
        """
        line = read_chain(self.path).line_of(entry)
        if line is None:
            raise ValueError(
                f"{entry.path}: expected the full save and deltas before it, got a directory without one. "
                "Use an earlier entry."
            )
        return line

    def close(self) -> None:
        """Ends the recording of changes, and lets another job write."""
        self._marker = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        full: bool = False,
    ) -> Entry:
        """Saves the model as it is now, and removes entries that are not kept. Collective.

        A save that fails leaves no entry; the next one is full.

        Args:
            model: DistributedModelParallel, or a module with dynamic tables in one process.
            optimizer: the optimizer of all parameters: `model.fused_optimizer`, or TorchRec's
                CombinedOptimizer of it and the dense one.
            step: number of the step, for `restore` and `at`.
            extra: further values by name: objects with `state_dict` (a scheduler, a StatefulDataLoader,
                `Positions`), or values that torch.load reads with `weights_only=True`. Each rank gives its
                own.
            full: True for a full save whatever `full_every` is.

        Returns:
            The entry.

        Raises:
            ValueError: on every rank, if another job has written here since the last save or restore.
            RuntimeError: on every rank, if another job has the directory.
            OSError: on every rank, if a file cannot be written.
        """
        tables = tables_of(model, _SAVE)
        group, rank = tables[0].group, tables[0].rank
        marker, self._marker = self._marker, None
        is_due = full or len(self._line) % self._full_every == 0 or marker is None
        values = run_together(group, _SAVE, lambda: saved_values(extra or {}))
        options = [
            one
            for of_rank in gather_results(group, _SAVE, lambda: options_of(optimizer))
            for one in of_rank.items()
        ]
        of_ranks = gather_results(
            group, _SAVE, lambda: (is_due, digests_of(values), self._begin() if rank == 0 else None)
        )
        sequence, identity, began = of_ranks[0][2]  # type: ignore[misc]
        folder = self.path / f"{_WRITING}{sequence:08}-{identity}"
        try:
            is_full = any(due for due, *_ in of_ranks)
            if not is_full:
                assert marker is not None
                try:
                    made = export_delta(model, folder / "changes", since=marker)
                except ValueError:  # on every rank: a table was converted, or is another object
                    is_full = True
            if not is_full:
                save_files(_dense_state(model, optimizer, tables), folder / "dense", True, group)
            else:
                made = mark(model)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save_files(state, folder / "state", True, group)
            kind = "full" if is_full else "delta"
            entry = Entry(
                path=self.path / f"{kind}-{sequence:08}",
                kind=kind,
                sequence=sequence,
                id=identity,
                parent=self._line[-1].id if self._line else None,
                step=step,
                time=began,
                world_size=len(of_ranks),
                sums=_sums_of(made),
                extra=alike([digests for _, digests, _ in of_ranks]),
                version=_version(),
            )
            run_together(group, _SAVE, lambda: write_values(values, dict(options), folder, rank))
            gather_results(group, _SAVE, lambda: _publish(entry, folder) if rank == 0 else None)
        except BaseException:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._line = [entry] if is_full else [*self._line, entry]
        self._highest = sequence
        self._marker = made if self._full_every > 1 else None
        gather_results(group, _SAVE, lambda: self.prune() if rank == 0 else None)
        return entry

    def _begin(self) -> tuple[int, str, float]:
        """Returns sequence, id and time of the next entry. On rank 0 only."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            lock = filelock.FileLock(self.path / LOCK, timeout=0, thread_local=False)
            try:
                lock.acquire()
            except filelock.Timeout:
                raise RuntimeError(
                    f"{self.path}: expected one job that writes, got a lock that another one holds. "
                    "Wait until it has ended, or give another directory."
                ) from None
            self._lock = lock
        for pattern in (_WRITING, _PRUNED):
            for left in self.path.glob(f"{pattern}*"):
                shutil.rmtree(left, ignore_errors=True)
        highest = read_chain(self.path).highest
        if highest != self._highest:
            raise ValueError(
                f"{self.path}: expected to write after save {self._highest}, got a directory with "
                f"save {highest}. Call restore first, or give another directory."
            )
        sequence, now = highest + 1, time.time()
        identity = secrets.token_hex(16)
        (self.path / f"{_WRITING}{sequence:08}-{identity}").mkdir()
        return sequence, identity, now

    def restore(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Restored | None:
        """Loads the newest entry that is whole, on any number of ranks under any plan. Collective.

        The next save continues its chain.

        Args:
            model: as in `save`.
            optimizer: as in `save`.
            step: loads the newest entry of this step instead.
            extra: objects with `load_state_dict`, by the names that were given to `save`; they are loaded,
                too.

        Returns:
            What was loaded; None if the directory has no entry.

        Raises:
            ValueError: on every rank, if no entry can be loaded (with the error of the newest), if none is of
                the step, or if values that differed between ranks were saved on another number of ranks.
        """
        tables = tables_of(model, _RESTORE)
        group, rank = tables[0].group, tables[0].rank
        found = gather_results(
            group, _RESTORE, lambda: self._candidates(step) if rank == 0 else None
        )
        lines, skipped, highest = found[0]  # type: ignore[misc]
        self._marker, self._line, self._highest = None, [], highest
        fault: BaseException | None = None
        for line in lines:
            entry = line[-1]
            check_ranks(entry, len(found))
            try:
                values = _load(model, optimizer, tables, line)
            except (ValueError, RuntimeError, OSError, CheckpointException) as error:
                with suppress(ValueError):
                    drop_load(model)
                skipped.append(f"{entry.path.name}: {' '.join(str(error).split())}")
                fault = fault or error
            else:
                self._line = line
                break
        if not self._line:
            if fault is None and not skipped:
                return None
            raise ValueError(
                f"{self.path}: expected an entry that can be loaded, got none. {' '.join(skipped)}"
            ) from fault
        run_together(group, _RESTORE, lambda: hand_over(values, extra or {}))
        if self._full_every > 1:
            self._marker = mark(model)
        return Restored(entry.step, values, entry, skipped)

    def _candidates(self, step: int | None) -> tuple[list[list[Entry]], list[str], int]:
        """Returns the lines that may be loaded, best first, the report, and the highest sequence."""
        chain = read_chain(self.path)
        entries = chain.entries[::-1] if step is None else [_entry_at(chain, step)]
        lines, skipped = [], list(chain.skipped) if step is None else []
        for entry in entries:
            line = chain.line_of(entry)
            if line is None:
                skipped.append(f"{entry.path.name}: an entry before it is missing")
            else:
                lines.append(line)
        return lines, skipped, chain.highest

    def prune(self) -> list[Path]:
        """Removes the entries that no kept full save leads to; not collective, for the job that writes.

        Returns:
            The folders that were removed.
        """
        chain = read_chain(self.path)
        kept = {entry.id for entry in [one for one in chain.entries if one.is_full][-self._keep :]}
        # Newer full saves may be damaged, or of another branch.
        kept |= {entry.id for entry in self._line[:1]}
        removed = []
        for entry in chain.entries:
            line = chain.line_of(entry)
            if line is not None and line[0].id not in kept:
                aside = self.path / f"{_PRUNED}{entry.path.name}-{entry.id}"
                entry.path.rename(aside)  # so that no reader takes a half of it
                shutil.rmtree(aside, ignore_errors=True)
                removed.append(entry.path)
        return removed


def _entry_at(chain: SavedChain, step: int) -> Entry:
    found = [entry for entry in chain.entries if entry.step == step]
    if not found:
        steps = sorted({entry.step for entry in chain.entries})
        raise ValueError(f"{chain.path}: expected a step among {steps}, got {step}.")
    return found[-1]


def _version() -> str:
    try:
        return metadata.version("torchrec_dyn")
    except metadata.PackageNotFoundError:
        return "unknown"


def _sums_of(marker: Marker) -> dict[str, str]:
    """Returns the content sums of the tables at a marker, as text, by name."""
    return {
        name: " ".join(f"{unsigned(word):016x}" for words in one.sums for word in words.tolist())
        for name, one in marker._tables.items()
    }


def _dense_state(model: nn.Module, optimizer: Any, tables: Sequence[Table]) -> dict[str, Any]:
    """Returns the state dicts without the dynamic tables. Collective where static tables are sharded."""
    with rows_left_out():
        return _without_tables(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tables
        )


def _without_tables(state: Mapping[str, Any], tables: Sequence[Table]) -> dict[str, Any]:
    """Returns the entries of state dicts that are of no dynamic table."""
    keys = tuple(f"{table.key}." for table in tables)
    of_optimizer = {
        name: value
        for name, value in state["optimizer"]["state"].items()
        if not name.endswith(tuple(f"{key}weight" for key in keys))
    }
    return {
        "model": {k: v for k, v in state["model"].items() if not k.startswith(keys)},
        "optimizer": {**state["optimizer"], "state": of_optimizer},
    }


def _load(
    model: nn.Module,
    optimizer: Any,
    tables: Sequence[Table],
    line: Sequence[Entry],
) -> dict[str, Any]:
    """Loads a full save and the deltas after it; returns the further values of this rank. Collective."""
    group, rank = tables[0].group, tables[0].rank
    values, options = run_together(group, _RESTORE, lambda: read_values(line[-1], rank))
    state = _places_to_load(model, optimizer, tables, line)
    alone = {"process_group": group, "no_dist": group is None}
    dcp.load(state, checkpoint_id=line[0].tables, planner=LoadPlanner(), **alone)
    if len(line) > 1:
        dense = _without_tables(state, tables)
        dcp.load(dense, checkpoint_id=line[-1].dense, **alone)
        states = {**state["optimizer"]["state"], **dense["optimizer"]["state"]}
        state["model"].update(dense["model"])
        state["optimizer"].update({**dense["optimizer"], "state": states})
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    set_options(optimizer, options)
    for delta in line[1:]:
        apply_delta(model, delta.tables)
    return values


def _places_to_load(
    model: nn.Module, optimizer: Any, tables: Sequence[Table], line: Sequence[Entry]
) -> dict[str, Any]:
    """Returns state dicts with a place for each saved state of the optimizer. Collective.

    torch's optimizers make their state in the first step, and DCP reads only what has a place. So an
    optimizer without state takes a step of zeros, whose results the load replaces.

    Raises:
        ValueError: on every rank, if saved state has no place: it is of another optimizer.
    """

    def missing(state: Mapping[str, Any]) -> list[str]:
        there = tuple(
            f"optimizer.state.{name}." for name, one in state["optimizer"]["state"].items() if one
        )
        of_tables = tuple(f"{table.key}.weight." for table in tables)
        return [
            key
            for folder in {line[0].tables, line[-1].dense}
            for key in open_files(folder)[1].state_dict_metadata
            if key.startswith("optimizer.state.")
            and not key.startswith(there)
            and not any(one in key for one in of_tables)
        ]

    def check(state: Mapping[str, Any]) -> None:
        if left := missing(state):
            raise ValueError(
                f"{line[-1].path}: expected an optimizer with state for {left[0]}, got one without. Restore "
                "with the optimizers and parameters that were saved."
            )

    group = tables[0].group
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    lacks = gather_results(group, _RESTORE, lambda: bool(missing(state)))
    if any(lacks) and hasattr(optimizer, "init_state"):
        optimizer.init_state()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    run_together(group, _RESTORE, lambda: check(state))
    return state


def _publish(entry: Entry, folder: Path) -> None:
    """Makes a written folder an entry. On rank 0 only, when all ranks have written."""
    (folder / ENTRY).write_text(entry.as_json())
    for one in [*folder.rglob("*"), folder]:
        commit(one)
    folder.rename(entry.path)
    commit(entry.path.parent)
