"""The files of an entry: their digests, and the rename that makes them an entry.

DCP checks nothing that it reads beside dynamic tables, and files of another entry that were copied into one
are whole. So an entry names the digests of its small files and the content sums of its tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint.dense_part import names_of_states
from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    ENTRY,
    MODEL_CHECKSUM,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    SUMMED,
    Entry,
    SavedTensor,
    commit,
    from_words,
    open_checkpoint,
)
from torchrec_dyn.ranks import Table

_DIGEST_BYTES = 16
_READ_AT_ONCE = 1 << 20


def digest_of(data: bytes) -> str:
    """Returns the digest of bytes: BLAKE2b, as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def check_digest(path: Path, found: str, expected: str | None) -> None:
    """Raises ValueError unless the digest of a file is as expected; None: it is not known."""
    if expected not in (None, found):
        raise ValueError(f"{path}: expected digest {expected}, got {found}. {DAMAGED}")


def _digest_of_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open(path, "rb") as file:
        while data := file.read(_READ_AT_ONCE):
            digest.update(data)
    return digest.hexdigest()


def _small_files(folder: Path) -> list[str]:
    """Returns the paths, in the folder of an entry, of the files of DCP that have digests.

    Rows have content sums: of the tables' files only the index is among them.
    """
    names = [one.relative_to(folder) for one in folder.glob("*/.metadata")]
    names += [one.relative_to(folder) for one in folder.glob("dense/*.distcp")]
    return sorted(str(name) for name in names)


def digests_of_files(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """Returns the digests of a rank's part of the small files in the folder of an entry, by path in it."""
    return {name: _digest_of_file(folder / name) for name in _small_files(folder)[rank::ranks]}


def check_files(line: Iterable[Entry], rank: int, ranks: int) -> None:
    """Checks a rank's part of the files that a load of the last entry of a line reads.

    Raises:
        ValueError: a file is damaged, or of another entry.
        OSError: a file cannot be read.
    """
    *before, last = line
    checked = [(last, name) for name in sorted(last.digests) if "/" in name]
    for entry in before:  # of these only the tables are read
        checked += [
            (entry, name) for name in [f"{entry.tables.name}/.metadata"] if name in entry.digests
        ]
    for entry, name in checked[rank::ranks]:
        check_digest(entry.path / name, _digest_of_file(entry.path / name), entry.digests[name])
    if rank == 0:
        for entry in (*before, last):
            _check_sums(entry)


def _check_sums(entry: Entry) -> None:
    """Raises ValueError unless tables are those that were saved.

    The load compares the rows with the content sums that are saved beside them: so these sums are enough.
    """
    saved = open_checkpoint(entry.tables).tables.values()
    found = {
        one.name: sums_as_text(one.sums if entry.is_full else from_words(one.read("result")))
        for one in saved
    }
    for name in sorted({*found, *entry.sums}):
        if found.get(name) != entry.sums.get(name):
            raise ValueError(
                f"{entry.tables}: expected table {name!r} with the content sums of {ENTRY}, "
                f"{entry.sums.get(name)}, got {found.get(name)}: it is of another entry. {DAMAGED}"
            )


def sums_as_text(sums: Mapping[str, int]) -> str:
    """Returns the content sums of a table, by tensor, as an entry has them."""
    return " ".join(f"{sums.get(name, 0):016x}" for name in SUMMED)


def checksums_in(
    state: Mapping[str, Any], tables: Sequence[Table], is_full: bool
) -> dict[str, tuple[Tensor, ...]]:
    """Returns the two checksums of each table in state dicts, by name; of a delta its "result".

    The state dicts are of the model and of its optimizer.

    Raises:
        ValueError: the optimizer has no state of a table, or is of another model.
    """
    both: dict[str, tuple[Tensor, ...]] = {}
    states = state["optimizer"]["state"]
    names = names_of_states(states, tables)
    for table in tables:
        found = [states[name] for name in names[table.name]]
        if len(found) != 1 or not _is_of(table, found[0][f"{table.name}.{OPTIMIZER_CHECKSUM}"]):
            raise ValueError(
                f"{table.where}: expected the optimizer with the state of this table, got "
                f"{'one of another model' if found else 'one without'}. Save `model.fused_optimizer`, or a "
                "CombinedOptimizer with it."
            )
        both[table.name] = (
            (
                state["model"][f"{table.key}.{MODEL_CHECKSUM}"],
                found[0][f"{table.name}.{OPTIMIZER_CHECKSUM}"],
            )
            if is_full
            else (state["model"][f"{table.key}.result"],)
        )
    return both


def words_in(checksums: Mapping[str, Sequence[Tensor]]) -> dict[str, list[list[list[int]]]]:
    """Returns this rank's rows of the checksums of each table, as of `checksums_in`, once it has written."""
    return {table: list(map(_rows_here, tensors)) for table, tensors in checksums.items()}


def _rows_here(words: Tensor) -> list[list[int]]:
    blocks = [words]
    if isinstance(words, SavedTensor):
        blocks = [part.read(0, part.size[0]) for part in words.parts if part.is_saved]
    return [row for block in blocks for row in block.reshape(-1, block.shape[-1]).tolist()]


def sums_of_ranks(words: Sequence[Sequence[list[list[int]]]]) -> dict[str, int]:
    """Returns the content sums of a table from the rows of its checksums on each rank."""
    model, *optimizer = (
        from_words(torch.tensor([row for rows in ranks for row in rows], device="cpu").squeeze(0))
        for ranks in zip(*words, strict=True)
    )
    for sums in optimizer:
        model |= {name: sums[name] for name in OPTIMIZER_TENSORS}
    return model


def _is_of(table: Table, saved: Tensor) -> bool:
    """Returns False if a tensor of an optimizer's state dict is of the table of another model.

    What says the table of a tensor is known of sharded tables only.
    """
    entry = getattr(saved, "entry", None)
    return entry is None or entry.table.has_shards_of(table)


def package_version() -> str:
    """Returns the version of torchrec_dyn that writes an entry."""
    try:
        return metadata.version("torchrec_dyn")
    except metadata.PackageNotFoundError:
        return "unknown"


def publish(entry: Entry, folder: Path) -> Entry:
    """Makes a written folder an entry. On rank 0 only, when all ranks have written.

    Raises:
        OSError: the disk is full, or fails. The folder is no entry then.
    """
    (folder / ENTRY).write_text(entry.as_json())
    for one in [*folder.rglob("*"), folder]:
        commit(one)
    folder.rename(entry.path)
    try:
        commit(entry.path.parent)
    except BaseException:
        with suppress(OSError):
            entry.path.rename(folder)
        raise
    return entry
