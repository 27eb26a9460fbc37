"""Writes an entry, at once or by a thread while training goes on.

What is written is fixed before: a thread writes copies, and its collectives run on a group of its own. So the
training waits only for the copies.
"""

from __future__ import annotations

import shutil
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from torchrec_dyn.checkpoint.dcp_files import drop_frames, save_files
from torchrec_dyn.checkpoint.delta_export import Marker
from torchrec_dyn.checkpoint.entry_files import (
    digests_of_files,
    publish,
    sums_as_text,
    sums_of_ranks,
    words_in,
)
from torchrec_dyn.checkpoint.further_values import SavedValue, write_values
from torchrec_dyn.checkpoint_format import Entry
from torchrec_dyn.ranks import gather_results

_CALL = "Checkpoints.save"


def staged(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a state dict in the memory of the CPU. Not collective."""
    # torch's default stager refuses the ShardedTensors of static tables.
    made: dict[str, Any] = BlockingAsyncStager().stage(state)
    return made


@dataclass(frozen=True)
class EntryWriter:
    """An entry that is not written yet: its parts, and where they go.

    Attributes:
        entry: the entry, without the digests of its files and the sums of its tables.
        folder: the folder to write to, which rank 0 has made.
        parts: state dicts by the name of their folder in the entry.
        checksums: of each table, by name; known when all is written.
        values: further values of this rank.
        options: numbers of the parameter groups.
        group: the ranks; None: one process.
        rank: number of this rank.
        prune: removes what is no longer kept; called on rank 0 when the entry is there.
    """

    entry: Entry
    folder: Path
    parts: Mapping[str, dict[str, Any]]
    checksums: Mapping[str, Sequence[Tensor]]
    values: Mapping[str, SavedValue]
    options: Mapping[str, Mapping[str, Any]]
    group: dist.ProcessGroup | None
    rank: int
    prune: Callable[[Entry], object]

    def write(self) -> Entry:
        """Writes the files, makes them an entry, and returns it. Collective.

        Raises:
            OSError: on every rank, if a file cannot be written. No entry is left, as after any error.
        """
        try:
            return self._write()
        except BaseException:
            if self.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            else:
                # Where ranks do not share the directory, this folder is of this rank alone. It is removed
                # only if it is empty: what other ranks have written to a shared one stays.
                with suppress(OSError):
                    self.folder.rmdir()
            raise

    def clear(self, entry: Entry) -> None:
        """Removes what is no longer kept now that the entry is there. Collective."""
        gather_results(self.group, _CALL, lambda: self._prune(entry) if self.rank == 0 else None)

    def _write(self) -> Entry:
        group, rank, folder = self.group, self.rank, self.folder
        for name, state in self.parts.items():
            save_files(state, folder / name, True, group, _CALL)

        def told() -> tuple[dict[str, str], dict[str, list[list[list[int]]]]]:
            of_rank = write_values(self.values, self.options, folder, rank)
            digests = of_rank | digests_of_files(folder, rank, self.entry.world_size)
            return digests, words_in(self.checksums)

        of_ranks = gather_results(group, _CALL, told)
        digests = {name: one for of_rank, _ in of_ranks for name, one in of_rank.items()}
        sums = {
            table: sums_as_text(sums_of_ranks([words[table] for _, words in of_ranks]))
            for table in self.checksums
        }
        entry = replace(self.entry, digests=digests, sums=sums)
        gather_results(group, _CALL, lambda: publish(entry, folder) if rank == 0 else None)
        return entry

    def _prune(self, entry: Entry) -> None:
        try:
            self.prune(entry)
        except Exception as error:  # the entry is saved: training goes on
            warnings.warn(
                f"{_CALL}: expected older entries that can be removed, got {error!r}. They are tried again "
                "after the next save.",
                stacklevel=2,
            )


def _without_frames(error: BaseException) -> BaseException:
    """Returns an error with its traceback as a text: the frames hold the copies of the rows."""
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    drop_frames(error)
    error.__context__ = None
    error.__cause__ = RuntimeError(f"in the thread of async_save\n{told}")
    return error


class Saving:
    """A save that `Checkpoints.async_save` began, whose files are written while training goes on.

    Attributes:
        pause: seconds for which the training waited: for the save before, and for copies of the rows.
        id: of the entry.
        marker: the marker of the moment of the rows, if the next entry may be a delta.
        entry: the entry; None before it is there.
        is_told: True if `result` has raised the error of the save.
    """

    def __init__(self, writer: EntryWriter, marker: Marker | None) -> None:
        self.pause = 0.0
        self.id, self.marker = writer.entry.id, marker
        self.entry: Entry | None = None
        self.is_told = False
        self._writer: EntryWriter | None = writer
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Writes the entry."""
        assert self._writer is not None
        try:
            self.entry = self._writer.write()  # it is there, whatever comes now
            self._writer.clear(self.entry)
        except BaseException as error:  # it is raised in the thread that waits
            self._error = error if self._thread is None else _without_frames(error)
        finally:
            self._writer = None  # it holds the copies

    def start(self) -> None:
        """Begins to write the entry in a thread."""
        self._thread = threading.Thread(target=self.run, name="Checkpoints.async_save")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True if the entry is there, or the save has failed."""
        return self._writer is None

    def wait(self) -> Saving:
        """Waits until the entry is there, or the save has failed."""
        if self._thread is not None:
            self._thread.join()
        return self

    def result(self) -> Entry:
        """Waits until the entry is there, and returns it.

        Raises:
            OSError, RuntimeError: on every rank, if the save failed.
        """
        self.wait()
        if self._error is not None:
            self.is_told = True
            try:
                raise self._error
            finally:
                if self._thread is None:  # nobody asks again
                    self._error = None  # its frames refer to this save
        assert self.entry is not None
        return self.entry
