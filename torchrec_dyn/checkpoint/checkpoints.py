"""Checkpoints: a directory of full saves and deltas, from which training continues where it stopped.

An entry has the dynamic tables, the dense part, the optimizer and what the caller adds, all of one moment.
Its commit file is put last, when all other files are there (checkpoint_format/entries.py). The ranks
meet twice in `save`, when all have prepared and when rank 0 commits; and twice in `restore`, when rank 0 has
chosen an entry and when all have prepared its load. Beside that they exchange the data.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_dyn.checkpoint.delta_export import (
    Marker,
    TableChanges,
    changes_since,
    is_marker_of,
    mark,
    rows_state,
)
from torchrec_dyn.checkpoint.dense_part import (
    alike,
    check_optimizer,
    check_ranks,
    check_same,
    checked_names,
    number_of,
    options_of,
    saved_values,
)
from torchrec_dyn.checkpoint.entry_writing import (
    Saving,
    clear_before,
    copied,
    dense_state,
    package_version,
    remove_folders,
    remove_older,
    sources_of,
    write_entry,
)
from torchrec_dyn.checkpoint.forgetting import (
    Forgotten,
    checked_ids,
    erase,
    ids_in_entry,
    ids_in_model,
    places_of,
    search,
    union_of,
)
from torchrec_dyn.checkpoint.restoring import (
    Choice,
    LineLoad,
    NewNames,
    Restored,
    choice_of,
    new_names,
)
from torchrec_dyn.checkpoint_format import (
    LOCK,
    WRITTEN,
    Entry,
    Place,
    PlaceLike,
    SavedChain,
    StorePath,
    lasting_place_of,
    outdated,
    read_chain,
    remove_entries,
)
from torchrec_dyn.ranks import Table, background_group, gather_results, run_together
from torchrec_dyn.state_dict import TableSource
from torchrec_dyn.storage import lacks_memory
from torchrec_dyn.whole_model import drop_load, sharding_types, tables_of

_SAVE, _RESTORE, _FORGET = "Checkpoints.save", "Checkpoints.restore", "Checkpoints.forget"
_SAME_STEP = "Save when all ranks have trained the same steps, and give their number."


class Checkpoints:
    """A directory of checkpoints of one training job: full saves and deltas, with the dense part.

    One job writes at a time; any number of processes may read. Each rank makes its own object. A call that
    reads the directory raises OSError if the file system fails to list it. Folders without a commit file are
    saves that were not finished: the next save removes them. Folders that cannot be judged (a read error,
    another format, not ours) are never removed and not counted.

    Args:
        path: the directory, on a file system that all ranks share. The first save makes it. A relative path
            is resolved once, in the constructor. Or a URL of fsspec, such as "s3://bucket/run".
        keep: number of full saves to keep, with the deltas after them.
        full_every: every `full_every`-th save is full, the others are deltas. 1: all saves are full, and no
            changes of tables are recorded.

    Raises:
        ValueError: if a number is below 1, the path has a zero byte or is not a path, or fsspec has no driver
            for the URL.
    """

    def __init__(self, path: PlaceLike, *, keep: int = 2, full_every: int = 1) -> None:
        for name, value in (("keep", keep), ("full_every", full_every)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Checkpoints: expected {name} of at least 1, got {value!r}.")
        if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
            raise ValueError(
                f"Checkpoints: expected the path of a directory, got {path!r}. Give a str or a Path."
            )
        self.path = lasting_place_of(path)  # os.chdir must not lead away from the lock
        self._keep, self._full_every = keep, full_every
        self._marker: Marker | None = None  # of the last entry, if the next may be a delta
        self._line: list[Entry] = []  # a full save and the deltas to the last entry
        # The highest sequence that this object knows of; None after a restore that failed.
        self._highest: int | None = 0
        self._saving: Saving | None = None  # in the background
        self._lock: filelock.BaseFileLock | None = None

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.path)!r}, keep={self._keep}, full_every={self._full_every})"

    def entries(self) -> list[Entry]:
        """Returns the committed entries, oldest first; not collective."""
        return list(read_chain(self.path).entries)

    def latest(self) -> Entry | None:
        """Returns the newest entry that can be restored, or None; not collective."""
        chain = read_chain(self.path)
        return next((entry for entry in reversed(chain.entries) if chain.line_of(entry)), None)

    def at(self, step: int) -> Entry:
        """Returns the newest entry of a step; not collective.

        Raises:
            ValueError: if there is no entry of this step.
        """
        return read_chain(self.path).at(step)

    def line_of(self, entry: Entry) -> list[Entry]:
        """Returns the full save and the deltas up to an entry, in order; not collective.

        Raises:
            ValueError: if one of them is missing.
        """
        line = read_chain(self.path).line_of(entry)
        if line is None:
            raise ValueError(
                f"{entry.path}: expected the full save and deltas before it, got a directory without one. "
                "Use an earlier entry."
            )
        return line

    def close(self) -> None:
        """Waits for a background save, stops recording changes, and lets another job write.

        Raises:
            OSError, RuntimeError: on every rank, if the background save failed.
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
        """Saves the model as it is now, and removes entries that are no longer kept. Collective.

        A save that fails leaves no entry; the next save includes its changes.

        Args:
            model: DistributedModelParallel, or a module with dynamic tables in one process.
            optimizer: the optimizer of all parameters: `model.fused_optimizer`, or TorchRec's
                CombinedOptimizer of it and the dense optimizer.
            step: step number, the same on every rank, for `restore` and `at`.
            extra: further values by name: objects with `state_dict` (a scheduler, a StatefulDataLoader,
                `Positions`), or values that torch.load reads with `weights_only=True`. Each rank passes its
                own.
            full: True for a full save whatever `full_every` is.

        Returns:
            The entry.

        Raises:
            ValueError: on every rank, if another job has written here since the last save or restore, the
                ranks do not share the directory or pass different steps, the optimizer is not an optimizer of
                TorchRec, or its state dict lacks some of its state.
            RuntimeError: on every rank, if another job holds the directory.
            OSError: on every rank, if a file cannot be written or the directory cannot be read.
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
        """Saves the model as it is now, like `save`, but writes the files while training goes on. Collective.

        The call returns when the rows to save are copied: all rows for a full save, the changed rows for a
        delta. The next call of `save`, `async_save`, `restore`, `forget` or `close` waits until the files are
        written, and raises the error of the save on every rank. The arguments are those of `save`.

        Returns:
            The save, with the time for which training waited.

        Raises:
            ValueError: on every rank, as in `save`, or if the model is not on all ranks of the default group.
            OSError, RuntimeError: as in `save`, if it fails before files are written.
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
        saving.is_told = all(gather_results(tables[0].group, call, lambda: saving.wait().is_told))
        self._end(saving)

    def _end(self, saving: Saving) -> None:
        """Updates the chain after a save; raises its error if `Saving.result` did not."""
        self._saving = None
        entry = saving.wait().entry
        if entry is not None:
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
        """Prepares a save: checks the arguments, opens the directory and fixes the rows. Collective."""
        tables = tables_of(model, _SAVE)
        group, rank = tables[0].group, tables[0].rank
        self._wait(tables, _SAVE)
        marker, is_due = self._marker, full or len(self._line) % self._full_every == 0
        if is_due or marker is None or not is_marker_of(marker, tables):
            marker = None
        kind = "full" if marker is None else "delta"
        prepared: list[Any] = []

        def prepare() -> tuple[Any, ...]:
            check_optimizer(optimizer, _SAVE)
            number, (values, digests) = number_of(step, _SAVE), saved_values(extra, _SAVE)
            for table in tables:
                table.lock.check_at_rest()  # torn tables are not saved
            chain = SavedChain(self.path) if rank else self._open()
            clear_before(chain)
            dense, names = dense_state(model, optimizer, tables)
            sources, after = self._sources(model, tables, marker)
            prepared.extend((dense, names, sources, after, values, chain))
            begun = self._next(chain, kind)
            counts = [source.counts() for source in sources]
            return begun, number, kind, digests, options_of(optimizer), counts

        begun, steps, kinds, digests, options, counts = zip(
            *gather_results(group, _SAVE, prepare), strict=True
        )
        check_same(_SAVE, "step", steps, _SAME_STEP)
        check_same(
            _SAVE,
            "kind of save",
            kinds,
            "Give the same arguments and convert tables on every rank.",
        )
        dense, names, sources, after, values, chain = prepared
        rows = rows_state(tables, sources, counts, names)
        if in_background:
            rows, dense = run_together(group, _SAVE, lambda: (copied(rows), copied(dense)))
        sequence, identity, name, now = begun[0]
        entry = Entry(
            path=self.path / name,
            kind=kind,
            sequence=sequence,
            id=identity,
            parent=self._line[-1].id if self._line else None,
            chain=self._line[-1].chain if self._line else identity,
            step=steps[0],
            time=now,
            world_size=len(steps),
            sums={},
            extra=alike(digests),
            version=package_version(),
            plan=sharding_types(model, _SAVE),
            digests={},
        )
        numbers = {key: values for rank_options in options for key, values in rank_options.items()}
        if in_background and group is not None:
            group = background_group(group)
        return Saving(
            after,
            partial(
                write_entry,
                entry,
                rows,
                dense,
                values,
                numbers,
                group,
                rank,
                self._maker(rank),
            ),
            partial(remove_older, chain, self._keep),
        )

    def _sources(
        self, model: nn.Module, tables: Sequence[Table], marker: Marker | None
    ) -> tuple[Sequence[TableChanges] | Sequence[TableSource], Marker | None]:
        """Returns what saves the tables of this rank, and the marker of this moment."""
        if marker is not None:
            return changes_since(tables, marker)
        after = mark(model) if self._full_every > 1 else None
        return sources_of(tables), after

    def _open(self, makes: bool = False) -> SavedChain:
        """Takes the lock, and returns the directory if the next entry may be written. On rank 0 only.

        A directory that does not exist is made by the first save, when the arguments of all ranks are right.
        """
        if isinstance(self.path, StorePath):
            if not self.path.is_written:
                raise ValueError(
                    f"{self.path}: expected a URL of {', '.join(WRITTEN)} to save to, got another, whose "
                    "driver may let two writers create one file. Save to one of these, or to a path."
                )
        else:
            if makes:
                self.path.mkdir(parents=True, exist_ok=True)
            if self._lock is None and self.path.is_dir():
                self._lock = self._taken_lock(self.path)
        chain = read_chain(self.path)
        if chain.highest != self._highest:
            after = "a restore" if self._highest is None else f"save {self._highest}"
            raise ValueError(
                f"{self.path}: expected to write after {after}, got a directory with save {chain.highest}. "
                "Call restore first, or give another directory."
            )
        return chain

    def _maker(self, rank: int) -> Callable[[], object] | None:
        """Returns what makes the directory before files are written; None if it is there, or a store."""
        is_there = rank or self._lock is not None or isinstance(self.path, StorePath)
        return None if is_there else partial(self._open, makes=True)

    @staticmethod
    def _taken_lock(path: Path) -> filelock.BaseFileLock:
        lock = filelock.FileLock(path / LOCK, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise RuntimeError(
                f"{path}: expected one job that writes, got a lock that another one holds. "
                "Wait until it has ended, or give another directory."
            ) from None
        return lock

    def _next(self, chain: SavedChain, kind: str) -> tuple[int, str, str, float]:
        """Returns sequence, id and folder name of the next entry, and the time of this moment."""
        sequence, identity = chain.highest + 1, secrets.token_hex(16)
        name = f"{kind}-{sequence:08}"
        # In a store another writer may be at work; on a disk there may be a folder that could not be removed.
        if isinstance(self.path, StorePath) or (self.path / name).exists():
            name = f"{name}-{identity[:8]}"
        return sequence, identity, name, time.time()

    def restore(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        leave_out: Collection[str] = (),
        allow_partial_load: bool = False,
        on_damage: str = "raise",
        rename: Mapping[str, str] | None = None,
    ) -> Restored | None:
        """Loads the newest entry, on any number of ranks and under any plan. Collective.

        Rows are converted to the dtype of the table, and policies may differ. Gradients are dropped. The next
        save continues the chain of the entry; it is full if the tables have changed.

        Args:
            model: as in `save`.
            optimizer: as in `save`.
            step: step whose newest entry is loaded; None: the newest entry of the directory.
            extra: objects with `load_state_dict` to load too, by the names that were given to `save`.
            leave_out: names given to `save` whose values are not to be loaded, such as values that each rank
                had of its own, saved on another number of ranks.
            allow_partial_load: True to load only the tables, parameters and optimizer state that are both in
                the entry and in the model; the rest of the model stays as it is.
            on_damage: "raise": a damaged entry, or a newer folder that cannot be judged, is an error that
                names the newest entry before it. "previous": that entry is loaded instead, but no earlier
                entry.
            rename: new names of tables by their saved names, the same on every rank. Rows, optimizer state
                and deltas load into the tables with the new names. The next save is then full.

        Returns:
            What was loaded; None if the directory has no entry.

        Raises:
            ValueError: on every rank, if the entry is damaged or of another model, there is no entry of
                `step`, or values of `extra` that differed between ranks were saved on another number of ranks
                and are not left out.
            MemoryError, RuntimeError: on every rank, if a rank has too little memory for the load.
            OSError: on every rank, if the directory cannot be read.
        """
        tables = tables_of(model, _RESTORE)
        group, rank = tables[0].group, tables[0].rank
        self._wait(tables, _RESTORE)

        def choose() -> tuple[list[str], NewNames, Choice | None]:
            check_optimizer(optimizer, _RESTORE)
            names = checked_names(extra or {}, leave_out, on_damage)
            return names, new_names(rename, tables), None if rank else choice_of(self.path, step)

        ranks = gather_results(group, _RESTORE, choose)
        given, renames, choices = zip(*ranks, strict=True)
        check_same(_RESTORE, "rename", renames, "Give every rank the same names.")
        left_out = {name for names in given for name in names}
        assert choices[0] is not None
        lines, fault, highest = choices[0]
        self._marker, self._line, self._highest = None, [], None
        skipped = [fault] if fault else []
        if not lines and not skipped:
            self._highest = highest
            return None
        last_try = (2 if on_damage == "previous" else 1) - len(skipped)
        error: BaseException | None = None
        for entry, line in lines[:last_try]:
            check_ranks(entry, len(ranks), left_out)
            load = LineLoad(model, optimizer, tables, entry, line, allow_partial_load, renames[0])
            error = self._damage_in(load, extra or {})
            if error is None:
                self._continue(load, highest)
                wanted = {name: load.values[name] for name in load.values if name not in left_out}
                return Restored(entry.step, wanted, entry, skipped)
            skipped.append(f"{entry.path.name}: {' '.join(str(error).split())}")
            if rank == 0:
                entry.note_failed()
        way_out = "No other was tried."
        for before, _ in lines[last_try:][:1]:
            way_out = (
                f"The newest before it is {before.path.name}: call restore(step={before.step}), or "
                'restore(on_damage="previous").'
            )
        raise ValueError(
            f"{self.path}: expected an entry that can be loaded, got {' '.join(skipped)} {way_out}"
        ) from error

    def _continue(self, load: LineLoad, highest: int) -> None:
        """Makes the next save continue the chain of an entry that was loaded. Collective."""
        self._marker = mark(load.model) if self._full_every > 1 and load.is_same else None
        self._line, self._highest = list(load.line), highest
        if load.rank == 0:
            load.entry.note_restored(highest)

    def _damage_in(self, load: LineLoad, objects: Mapping[str, Any]) -> BaseException | None:
        """Loads an entry; returns the error if it is damaged. Collective."""
        try:
            prepare = partial(load.prepare, objects)
            ranks = gather_results(load.group, _RESTORE, prepare)
            misfits, without_place, sums = zip(*ranks, strict=True)
            misfit = load.misfit_in(misfits, without_place)
            if not misfit:
                load.commit(sums)
        except (Exception, CheckpointException) as error:
            drop_load(load.model)
            # A store that gives no answer says nothing about the entry.
            is_silent = isinstance(self.path, StorePath) and isinstance(error, OSError)
            if lacks_memory(error) or is_silent:
                raise
            return error
        if misfit:
            raise ValueError(misfit)
        for name, target in objects.items():
            target.load_state_dict(load.values[name])
        return None

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

        Erases their rows, optimizer state, scores and counters, saves the model in full, and removes all
        other entries, including those of other branches. The dense part does not change, although these ids
        have trained it.

        Args:
            model: as in `save`.
            optimizer: as in `save`.
            ids: ids by table name, [M] int64; each rank may pass different ids.
            step: as in `save`.
            extra: as in `save`.

        Returns:
            The places of each id before the call.

        Raises:
            ValueError: on every rank, if there is no such table, ids are not [M] int64, or as in `save`;
                nothing has changed then.
            RuntimeError, OSError: on every rank, as in `save`, or if a folder cannot be removed. Call
                `forget` again.
        """
        tables = tables_of(model, _FORGET)
        group, rank = tables[0].group, tables[0].rank
        self._wait(tables, _FORGET)

        def check() -> tuple[Any, dict[str, list[int]]]:
            """Raises what `save` would, before ids are gone."""
            check_optimizer(optimizer, _FORGET)
            saved_values(extra or {}, _FORGET)
            number, numbers = number_of(step, _FORGET), checked_ids(tables, ids)
            dense_state(model, optimizer, tables)
            return number, numbers

        steps, named = zip(*gather_results(group, _FORGET, check), strict=True)
        check_same(_FORGET, "step", steps, _SAME_STEP)
        wanted = union_of(named)

        def find() -> tuple[list[Place], Any]:
            if rank:
                return [], ({}, [])
            chain = self._open()
            if chain.skipped:
                raise ValueError(
                    f"{_FORGET}: expected folders that can be read, got {' '.join(chain.skipped)} It may "
                    "have the ids: remove it first."
                )
            folders = [*(entry.path for entry in chain.entries), *chain.unfinished]
            return folders, search(chain.entries, wanted)

        before, (in_entries, unread) = gather_results(group, _FORGET, find)[0]
        in_model = ids_in_model(tables, wanted)
        erase(tables, wanted)
        entry = self.save(model, optimizer, step=step, extra=extra, full=True)

        def clear() -> None:
            if rank == 0:
                chain = read_chain(self.path)
                others = [other for other in chain.entries if other.id != entry.id]
                remove_entries(others, ignore_errors=False)
                remove_folders(chain.unfinished, ignore_errors=False)

        run_together(group, _FORGET, clear)
        left = ids_in_model(tables, wanted)
        saved = gather_results(group, _FORGET, lambda: {} if rank else ids_in_entry(entry, wanted))
        if any(left.values()) or any(saved[0].values()):
            raise RuntimeError(
                f"{_FORGET}: expected ids that are gone, got {left} in the model and {saved[0]} in "
                "the entry. Call it between two steps, in the thread that trains."
            )
        return Forgotten(entry, places_of(wanted, in_model, in_entries), unread, before)

    def prune(self) -> list[Place]:
        """Removes folders that are no longer kept. Not collective; only for the job that writes.

        The newest `keep` full saves stay, with all later entries. An entry from which training was restored
        stays until there are `keep` full saves after the restore. A save that failed to load is not counted,
        and nothing is removed until there are `keep` full saves after it.

        Returns:
            The folders that were removed.
        """
        if self._saving is not None:
            self._saving.wait()
        entries = outdated(read_chain(self.path).entries, self._keep)
        remove_entries(entries)
        return [entry.path for entry in entries]
