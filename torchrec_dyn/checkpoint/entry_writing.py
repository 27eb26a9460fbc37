"""Writes an entry, at once or by a thread while training goes on.

What is written is fixed before: a thread writes copies, and its collectives run on a group of its own. So the
training waits only for the copies.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from torchrec_dyn.checkpoint.dcp_files import TableWriter, check_is_shared, save_part
from torchrec_dyn.checkpoint.delta_export import Marker
from torchrec_dyn.checkpoint.dense_part import (
    check_has_all,
    names_of_states,
    split_state,
    write_values,
)
from torchrec_dyn.checkpoint_format import (
    SUMMED,
    Entry,
    Place,
    SavedChain,
    SavedTable,
    StorePath,
    commit_entry,
    open_checkpoint,
    outdated,
    remove_all,
    remove_entries,
)
from torchrec_dyn.ranks import Table, gather_results
from torchrec_dyn.state_dict import TableSource, rows_left_out
from torchrec_dyn.storage import turn_of

_CALL = "Checkpoints.save"


def package_version() -> str:
    """Returns the version of torchrec_dyn that writes an entry."""
    try:
        return metadata.version("torchrec_dyn")
    except metadata.PackageNotFoundError:
        return "unknown"


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a state dict in the memory of the CPU."""
    # torch's default stager refuses the ShardedTensors of static tables.
    return BlockingAsyncStager().stage(state)


def sources_of(tables: Sequence[Table]) -> list[TableSource]:
    """Returns the sources of all rows of tables."""
    sources = []
    for table in tables:
        with turn_of(table):
            sources.append(TableSource(table))
    return sources


def dense_state(
    model: nn.Module, optimizer: Any, tables: Sequence[Table]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the state dicts without the dynamic tables, and the names of these in the optimizer's."""
    with rows_left_out() as tables_of_optimizer:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    check_has_all(state["optimizer"], optimizer)
    names = names_of_states(state["optimizer"]["state"], tables)
    for table in tables:
        is_own = any(table.has_shards_of(other) for other in tables_of_optimizer)
        if len(names[table.name]) != 1 or not is_own:
            raise ValueError(
                f"{table.where}: expected the optimizer with the state of this table, got "
                f"{'one of another model' if names[table.name] else 'one without'}. Save "
                "`model.fused_optimizer`, or a CombinedOptimizer with it."
            )
    return split_state(state, tables)[1], {name: names[name][0] for name in names}


def sums_in_files(entry: Entry, tables: Iterable[SavedTable]) -> dict[str, str]:
    """Returns the content sums of the tables in the files of an entry, by name, as the entry has them."""
    texts = {}
    for table in tables:
        sums = table.sums if entry.is_full else table.sums_at("result")
        texts[table.name] = " ".join(f"{sums.get(name, 0):016x}" for name in SUMMED)
    return texts


def write_entry(
    entry: Entry,
    rows: dict[str, Any],
    dense: dict[str, Any],
    values: Mapping[str, bytes],
    options: Mapping[str, Mapping[str, Any]],
    group: dist.ProcessGroup | None,
    rank: int,
    make_directory: Callable[[], object] | None,
) -> Entry:
    """Writes the files, commits the entry, and returns it; leaves none after an error. Collective."""
    beside = partial(write_values, values, options, entry.extra_of(rank))
    writer = TableWriter(entry.dense, write_beside=beside)
    rows_writer = TableWriter(entry.tables, before=make_directory)
    commits = False
    try:
        save_part(rows, rows_writer, group)
        save_part(dense, writer, group)
        commits = True
        # Rank 0 knows the digests that all ranks have made.
        committed = gather_results(
            group,
            _CALL,
            lambda: None if rank else _commit(entry, {**writer.digests, **rows_writer.digests}),
        )[0]
    except BaseException:
        with suppress(OSError):
            _clear(entry, commits)
        raise
    assert committed is not None
    return committed


def _clear(entry: Entry, commits: bool) -> None:
    """Removes the files of a save that failed, unless a store may have committed it."""
    # It may have the commit file although it gave an error; its next save removes the files.
    if commits and isinstance(entry.path, StorePath):
        return
    if commits:
        with suppress(FileNotFoundError):
            if entry.id.encode() in entry.commit.read_bytes():  # not that of another writer
                entry.commit.unlink()
    remove_folders([entry.path])


def _commit(entry: Entry, digests: Mapping[str, str]) -> Entry:
    """Puts the commit file, when all other files are there."""
    entry = _completed(entry, digests)
    commit_entry(entry)
    return entry


def _completed(entry: Entry, digests: Mapping[str, str]) -> Entry:
    """Returns an entry whose files are all there, with their digests and sums."""
    folder = entry.path
    check_is_shared(folder / name for name in digests)
    sums = sums_in_files(entry, open_checkpoint(entry.tables).tables.values())
    return replace(entry, digests=digests, sums=sums)


def remove_folders(folders: Iterable[Place], ignore_errors: bool = True) -> None:
    """Removes folders of saves that were not committed."""
    for folder in folders:
        remove_all(folder, ignore_errors)


def clear_before(chain: SavedChain) -> None:
    """Removes what killed saves have left, for its room, where a lock says that nobody writes there."""
    if not isinstance(chain.path, StorePath):
        remove_folders(chain.unfinished)


def remove_older(chain: SavedChain, keep: int, entry: Entry) -> None:
    """Removes what is no longer kept now that an entry is there; `chain` is that before it, on rank 0."""
    try:
        remove_entries(outdated([*chain.entries, entry], keep))
        # In a store their writers may have been at work until now: none can commit this sequence any more.
        remove_folders(folder for folder in chain.unfinished if folder != entry.path)
    except Exception as error:  # the entry is saved: training goes on
        warnings.warn(
            f"{_CALL}: expected older entries that can be removed, got {error!r}. They are tried again "
            "after the next save.",
            stacklevel=2,
        )


class Saving:
    """A save begun by `Checkpoints.async_save`, whose files are written while training goes on.

    Attributes:
        pause: seconds for which training waited for the previous save and for the copies of the rows.
        marker: the marker at the moment of the rows, if the next entry may be a delta.
        entry: the entry; None until it exists.
        is_told: True if `result` has raised the error of the save.
    """

    def __init__(
        self, marker: Marker | None, write: Callable[[], Entry], clear: Callable[[Entry], None]
    ) -> None:
        self.pause = 0.0
        self.marker = marker
        self.entry: Entry | None = None
        self.is_told = False
        self._clear = clear
        self._write: Callable[[], Entry] | None = write
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Writes the entry."""
        assert self._write is not None
        try:
            self.entry = self._write()  # it is there, whatever comes now
            self._clear(self.entry)
        except BaseException as error:  # it is raised in the thread that waits
            self._error = error
        finally:
            self._write = None  # it holds the copies

    def start(self) -> None:
        """Begins to write the entry in a thread."""
        self._thread = threading.Thread(target=self.run, name="Checkpoints.async_save")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True if the entry exists or the save has failed."""
        return self._write is None

    def wait(self) -> Saving:
        """Waits until the entry is there, or the save has failed."""
        if self._thread is not None:
            self._thread.join()
        return self

    def result(self) -> Entry:
        """Waits until the entry exists, and returns it.

        Raises:
            OSError, RuntimeError: on every rank, if the save failed.
        """
        self.wait()
        if self._error is not None:
            self.is_told = True
            raise self._error
        assert self.entry is not None
        return self.entry
