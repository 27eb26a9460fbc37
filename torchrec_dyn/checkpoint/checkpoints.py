"""Checkpoints: a directory of full saves and deltas, from which training continues where it stopped.

An entry has the dynamic tables, the dense part, the optimizer and what the caller adds, all of one moment. It
is published by a rename when all of its files are on the disk (checkpoint_format/saved_chain.py).
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_dyn.checkpoint.dcp_files import drop_frames
from torchrec_dyn.checkpoint.delta_export import Marker, collect_changes, is_marker_of, mark
from torchrec_dyn.checkpoint.dense_part import check_has_all, check_optimizer, dense_state
from torchrec_dyn.checkpoint.entry_files import checksums_in, package_version
from torchrec_dyn.checkpoint.entry_fit import MisfitError
from torchrec_dyn.checkpoint.entry_load import (
    Restored,
    is_lack_of_memory,
    lines_to_load,
    load_entry,
)
from torchrec_dyn.checkpoint.entry_writing import EntryWriter, Saving, staged
from torchrec_dyn.checkpoint.forgetting import (
    Forgotten,
    checked_ids,
    erase,
    ids_in_entry,
    ids_in_model,
    places_of,
    search,
)
from torchrec_dyn.checkpoint.further_values import (
    SavedValue,
    alike,
    check_ranks,
    check_same_step,
    checked_names,
    digests_of,
    hand_over,
    number_of,
    options_of,
    saved_values,
)
from torchrec_dyn.checkpoint.pruning import WRITING, entry_folders, outdated, remove, remove_hidden
from torchrec_dyn.checkpoint_format import LOCK, Entry, SavedChain, new_id, read_chain
from torchrec_dyn.ranks import Table, background_group, gather_results, run_together, settle
from torchrec_dyn.whole_model import drop_load, sharding_types, tables_of

_SAVE, _RESTORE, _FORGET = "Checkpoints.save", "Checkpoints.restore", "Checkpoints.forget"


def _checked(
    optimizer: Any, step: Any, extra: Mapping[str, Any], call: str
) -> tuple[Any, dict[str, SavedValue]]:
    """Returns the step and the saved form of the further values, as this rank gives them."""
    check_optimizer(optimizer, call)
    return number_of(step, call), saved_values(extra, call)


class Checkpoints:
    """A directory of checkpoints of one training job: full saves and deltas, with the dense part.

    One job writes at a time; any number of processes may read. Each rank makes an object of its own. A call
    that reads the directory raises OSError if the file system fails to list it, and OSError or MemoryError
    if there is no file number or memory for an entry; a collective one as `restore` says.

    Args:
        path: the directory, on a file system that all ranks see. The first save makes it. A relative path
            is resolved here, once.
        keep: number of full saves that are kept, with the deltas after them.
        full_every: every `full_every`-th save is full, the others are deltas. 1: all are full, and no changes
            of tables are recorded.

    Raises:
        ValueError: a number is below 1, or the path is a URL, has a zero byte, or is no path.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 2, full_every: int = 1) -> None:
        for name, value in (("keep", keep), ("full_every", full_every)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Checkpoints: expected {name} of at least 1, got {value!r}.")
        if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
            raise ValueError(
                f"Checkpoints: expected the path of a directory, got {path!r}. Give a str or a Path."
            )
        # Path would make a folder of the working directory of a URL, and has one slash of its two.
        if re.match("[a-z][a-z0-9+.-]+:/", str(path)):
            raise ValueError(
                f"Checkpoints: expected a directory of a file system, got {str(path)!r}. Mount it."
            )
        self.path = Path(path).absolute()  # os.chdir must not lead away from the lock
        self._keep, self._full_every = keep, full_every
        self._marker: Marker | None = None  # of the last entry, if the next may be a delta
        self._line: list[Entry] = []  # a full save and the deltas to the last entry
        # The highest sequence that this object knows of; None after a restore that failed.
        self._highest: int | None = 0
        self._failed: set[str] = set()  # ids of entries whose save failed
        self._damaged: set[str] = set()  # ids of full saves that could not be loaded
        self._saving: Saving | None = None  # in the background
        self._chain: SavedChain | None = None  # on rank 0: the directory when the last save began
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
        return read_chain(self.path).at(step)

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
        """Waits for a save in the background, ends the recording of changes, and lets another job write.

        Raises:
            OSError, RuntimeError: on every rank, if the save in the background failed.
        """
        try:
            if self._saving is not None:
                self._end(self._saving)
        finally:
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

        A save that fails leaves no entry; the next one has its changes, too.

        Args:
            model: DistributedModelParallel, or a module with dynamic tables in one process.
            optimizer: the optimizer of all parameters: `model.fused_optimizer`, or TorchRec's
                CombinedOptimizer of it and the dense one.
            step: number of the step, the same on every rank, for `restore` and `at`.
            extra: further values by name: objects with `state_dict` (a scheduler, a StatefulDataLoader,
                `Positions`), or values that torch.load reads with `weights_only=True`. Each rank gives its
                own.
            full: True for a full save whatever `full_every` is.

        Returns:
            The entry.

        Raises:
            ValueError: on every rank, if another job has written here since the last save or restore, the
                ranks do not share the directory or give different steps, the optimizer is none of TorchRec's,
                or its state dict lacks some of its state.
            RuntimeError: on every rank, if another job has the directory.
            OSError: on every rank, if a file cannot be written, or as of `restore`.
        """
        saving = self._start(model, optimizer, step, extra or {}, full, in_background=False)
        saving.run()
        self._end(saving)
        return saving.result()

    def async_save(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        full: bool = False,
    ) -> Saving:
        """Saves the model as it is now, as `save`, but writes the files while training goes on. Collective.

        The call returns when the rows that are to be saved are copied: of a full save all, of a delta those
        that changed. The next call of `save`, `async_save`, `restore`, `forget` or `close` waits until the
        files are written, and raises the error of the save on every rank. The arguments are those of `save`.

        Returns:
            The save, which tells for how long the training waited.

        Raises:
            ValueError: on every rank, also if the model is not on all ranks of the default group.
            OSError, RuntimeError: as of `save`, where it fails before files are written.
        """
        began = time.perf_counter()
        saving = self._start(model, optimizer, step, extra or {}, full, in_background=True)
        self._saving = saving
        saving.start()
        saving.pause = time.perf_counter() - began
        return saving

    def _wait(self, tables: Sequence[Table], call: str) -> None:
        """Waits for a save in the background; raises its error if a rank was not told. Collective."""
        saving = self._saving
        if saving is None:
            return
        told = gather_results(tables[0].group, call, lambda: saving.wait().is_told)
        saving.is_told = all(told)
        self._end(saving)

    def _end(self, saving: Saving) -> None:
        """Takes over where a save has led to; raises its error if nobody was told."""
        self._saving = None
        entry = saving.wait().entry
        if entry is None:
            self._failed.add(saving.id)
        else:
            self._line = [entry] if entry.is_full else [*self._line, entry]
            self._highest, self._marker = entry.sequence, saving.marker
        if not saving.is_told:
            saving.result()

    def _start(
        self,
        model: nn.Module,
        optimizer: Any,
        step: int,
        extra: Mapping[str, Any],
        full: bool,
        in_background: bool,
    ) -> Saving:
        """Fixes what is to be saved: reads the rows, of a save in the background, else opens them."""
        tables = tables_of(model, _SAVE)
        group, rank = tables[0].group, tables[0].rank
        self._wait(tables, _SAVE)
        marker = self._marker
        step, values = run_together(group, _SAVE, lambda: _checked(optimizer, step, extra, _SAVE))
        told = gather_results(group, _SAVE, lambda: (step, options_of(optimizer)))
        check_same_step([of_rank for of_rank, _ in told], _SAVE)
        options = [one for _, of_rank in told for one in of_rank.items()]
        of_group = group if group is None or not in_background else background_group(group)

        def begin() -> tuple[bool, dict[str, str | None], tuple[int, str, float] | None]:
            for table in tables:
                table.lock.check_at_rest()  # torn tables are not saved
            is_due = full or len(self._line) % self._full_every == 0
            is_due = is_due or marker is None or not is_marker_of(marker, tables)
            return is_due, digests_of(values), self._begin() if rank == 0 else None

        of_ranks = gather_results(group, _SAVE, begin)
        sequence, identity, began = of_ranks[0][2]  # type: ignore[misc]
        folder = self.path / f"{WRITING}{sequence:08}-{identity}"
        is_full = any(is_due for is_due, *_ in of_ranks)

        def fix() -> tuple[dict[str, dict[str, Any]], Any, Marker | None]:
            if is_full:
                made = mark(model) if self._full_every > 1 else None
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                check_has_all(state["optimizer"], optimizer)
                parts = {"state": state}
                checksums = checksums_in(state, tables, True)
            else:
                assert marker is not None
                changes = collect_changes(model, folder / "changes", marker)
                dense = dense_state(model, optimizer, tables)
                parts = {"changes": changes.state, "dense": dense}
                made = changes.marker
                checksums = checksums_in(changes.state, tables, False)
            if in_background:
                parts = {name: staged(one) for name, one in parts.items()}
                checksums = staged(checksums)  # last: the rows have been read
            return parts, checksums, made

        try:
            parts, checksums, made = settle(group, _SAVE, fix)
        except BaseException:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
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
            sums={},
            extra=alike([digests for _, digests, _ in of_ranks]),
            version=package_version(),
            plan=sharding_types(model, _SAVE),
        )
        chain, keep, damaged = self._chain, self._keep, frozenset(self._damaged)
        root = identity if is_full else self._line[0].id

        def prune(entry: Entry) -> None:
            assert chain is not None
            remove(outdated(replace(chain, entries=[*chain.entries, entry]), keep, root, damaged))

        writer = EntryWriter(
            entry, folder, parts, checksums, values, dict(options), of_group, rank, prune
        )
        return Saving(writer, made)

    def _begin(self) -> tuple[int, str, float]:
        """Returns sequence, id and time of the next entry. On rank 0 only."""
        self._chain = chain = self._claim()
        sequence, now = chain.highest + 1, time.time()
        identity = new_id(self._line[-1].id if self._line else None)
        (self.path / f"{WRITING}{sequence:08}-{identity}").mkdir()
        return sequence, identity, now

    def _claim(self) -> SavedChain:
        """Takes the lock, and returns the directory if the next entry may be written. On rank 0 only."""
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
        remove_hidden(self.path, ignore_errors=True)
        chain = read_chain(self.path)
        if left := [entry.path for entry in chain.entries if entry.id in self._failed]:
            remove(left)  # the disk failed after their rename, and again when it was to be undone
            chain = read_chain(self.path)
        if chain.highest != self._highest:
            after = "a restore" if self._highest is None else f"save {self._highest}"
            raise ValueError(
                f"{self.path}: expected to write after {after}, got a directory with save {chain.highest}. "
                "Call restore first, or give another directory."
            )
        return chain

    def restore(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        leave_out: Collection[str] = (),
        allow_partial_load: bool = False,
    ) -> Restored | None:
        """Loads the newest entry that is whole, on any number of ranks under any plan. Collective.

        Rows are converted to the dtype of the table, and policies may differ. Gradients are dropped. The next
        save continues its chain; it is full if the tables have changed.

        Args:
            model: as in `save`.
            optimizer: as in `save`.
            step: loads the newest entry of this step instead.
            extra: objects with `load_state_dict`, by the names that were given to `save`; they are loaded,
                too.
            leave_out: names that were given to `save` whose values are not wanted back, such as those that
                each of another number of ranks had of its own.
            allow_partial_load: True to load the tables, parameters and optimizer state that are in the entry
                and in the model; others of the model stay as they are.

        Returns:
            What was loaded; None if the directory has no entry.

        Raises:
            ValueError: on every rank, if no entry can be loaded (with the error of the newest), if none is of
                the step, if values of `extra` that differed between ranks were saved on another number of
                ranks and are not left out, or if the newest whole entry is of another model: no older one is
                loaded instead then.
            RuntimeError: on every rank, if a rank has no memory for the load, or rank 0 none to list the
                directory; in a job without a process group, the latter is a MemoryError.
            OSError: on every rank, if the directory cannot be read, or there is no file number for it.
        """
        tables = tables_of(model, _RESTORE)
        group, rank = tables[0].group, tables[0].rank
        self._wait(tables, _RESTORE)

        def check() -> list[str]:
            check_optimizer(optimizer, _RESTORE)
            return checked_names(extra or {}, leave_out)

        left_out = set().union(*gather_results(group, _RESTORE, check))
        self._marker, self._line, self._highest = None, [], None
        lines = lines_to_load(self.path, step) if rank == 0 else None
        skipped: list[str] = []
        fault: BaseException | None = None
        while True:
            of_ranks = gather_results(
                group, _RESTORE, lambda: None if lines is None else next(lines)
            )
            line, told, highest = of_ranks[0]  # type: ignore[misc]
            skipped += told
            if not line:
                break
            entry = line[-1]
            check_ranks(entry, len(of_ranks), left_out)
            try:
                values, is_same = load_entry(model, optimizer, tables, line, allow_partial_load)
            except MisfitError:
                raise
            except (Exception, CheckpointException) as error:
                with suppress(ValueError):
                    drop_load(model)
                if is_lack_of_memory(error):
                    raise RuntimeError(
                        f"{_RESTORE}: expected memory for {entry.path}, got too little ({error}): the model "
                        "may have changed in part. Free memory or use more ranks, and call it again."
                    ) from error
                skipped.append(f"{entry.path.name}: {' '.join(str(error).split())}")
                drop_frames(error)
                fault = fault or error
                if entry.is_full:
                    self._damaged.add(entry.id)
            else:
                break
        if not line:
            if fault is None and not skipped:
                self._highest = highest
                return None
            raise ValueError(
                f"{self.path}: expected an entry that can be loaded, got none. {' '.join(skipped)}"
            ) from fault
        values = {name: value for name, value in values.items() if name not in left_out}
        run_together(group, _RESTORE, lambda: hand_over(values, extra or {}))
        made = mark(model) if self._full_every > 1 and is_same else None
        self._marker, self._line, self._highest = made, line, highest
        self._damaged.discard(line[0].id)
        return Restored(entry.step, values, entry, skipped)

    def forget(
        self,
        model: nn.Module,
        optimizer: Any,
        ids: Mapping[str, Tensor],
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
    ) -> Forgotten:
        """Removes ids from the model and from the directory. Collective.

        Rows, optimizer state, scores and counters are erased, the model is saved in full, and all other
        entries are removed, also of other branches. The dense part stays as the ids have trained it.

        Args:
            model: as in `save`.
            optimizer: as in `save`.
            ids: by name of a table [M] int64; each rank may name others.
            step: as in `save`.
            extra: as in `save`.

        Returns:
            Where each id was.

        Raises:
            ValueError: on every rank, if there is no such table, ids are not [M] int64, or as of `save`;
                nothing has changed then.
            RuntimeError, OSError: on every rank, as of `save`, or if a folder cannot be removed. Call it
                again.
        """
        tables = tables_of(model, _FORGET)
        group, rank = tables[0].group, tables[0].rank
        self._wait(tables, _FORGET)
        # What `save` refuses is refused before ids are gone.
        check = partial(_checked, optimizer, step, extra or {}, _FORGET)
        check_same_step(gather_results(group, _FORGET, lambda: check()[0]), _FORGET)
        wanted = checked_ids(tables, ids)
        settle(group, _FORGET, lambda: dense_state(model, optimizer, tables))

        def find() -> tuple[list[Path], Any]:
            entries = [] if rank else self._claim().entries
            return [] if rank else entry_folders(self.path), search(entries, wanted)

        before, (in_entries, unread) = gather_results(group, _FORGET, find)[0]
        in_model = ids_in_model(tables, wanted)
        erase(model, tables, wanted)
        entry = self.save(model, optimizer, step=step, extra=extra, full=True)

        def clear() -> None:
            if rank == 0:
                remove(one for one in entry_folders(self.path) if one != entry.path)
                remove_hidden(self.path, ignore_errors=False)

        run_together(group, _FORGET, clear)
        left = ids_in_model(tables, wanted)
        saved = gather_results(group, _FORGET, lambda: {} if rank else ids_in_entry(entry, wanted))
        if any(left.values()) or any(saved[0].values()):
            raise RuntimeError(
                f"{_FORGET}: expected ids that are gone, got {left} in the model and {saved[0]} in "
                "the entry. Call it between two steps, in the thread that trains."
            )
        return Forgotten(entry, places_of(wanted, in_model, in_entries), unread, before)

    def prune(self) -> list[Path]:
        """Removes what is no longer kept; not collective, for the job that writes.

        The newest `keep` full saves stay, and what they lead to; those that could not be loaded, or whose
        files are too short, are not counted. These, deltas without their full save and torn folders stay
        until `keep` others are there and all that is kept is newer. What the file system fails to read now
        stays.

        Returns:
            The folders that were removed.
        """
        if self._saving is not None:
            self._saving.wait()
        root = self._line[0].id if self._line else None
        return remove(outdated(read_chain(self.path), self._keep, root, self._damaged))
