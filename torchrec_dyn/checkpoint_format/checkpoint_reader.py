"""Reads the dynamic tables of a checkpoint, or of a delta, without a model and without a process group.

torch.distributed.checkpoint (DCP) wrote the checkpoint. DCP saves `.metadata` as a pickle: open only
checkpoints whose origin you trust. Tensors are loaded with `weights_only=True`, which runs no code.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_dyn.checkpoint_format import saved_config
from torchrec_dyn.checkpoint_format.chunked_tensor import ChunkedTensor
from torchrec_dyn.checkpoint_format.content_sums import (
    DAMAGED,
    MODEL_CHECKSUM,
    OPTIMIZER_CHECKSUM,
)
from torchrec_dyn.checkpoint_format.file_writer import naming
from torchrec_dyn.checkpoint_format.place_reader import PlaceReader
from torchrec_dyn.checkpoint_format.places import Place, PlaceLike, names_in, place_of, sizes_in
from torchrec_dyn.checkpoint_format.saved_table import SavedTable
from torchrec_dyn.name_lists import listed

# A table, and the state of its optimizer, have tensors of these names and dtypes.
_TABLE, _OPTIMIZER = {"config", MODEL_CHECKSUM}, {"optimizer_config", OPTIMIZER_CHECKSUM}
_DTYPES = {
    **dict.fromkeys(("config", "optimizer_config"), torch.uint8),
    **dict.fromkeys((MODEL_CHECKSUM, OPTIMIZER_CHECKSUM), torch.int64),
}


AnyPlace = TypeVar("AnyPlace", Path, Place)


@dataclass(frozen=True)
class SavedCheckpoint:
    """The tables that `open_checkpoint` found.

    Attributes:
        path: directory of the checkpoint, or its place in a store.
        tables: tables by their key in the checkpoint, e.g. "model.sparse.ebc.embedding_bags.user".
        ownerless: keys of optimizer states that belong to no table here, or could belong to several tables.
    """

    path: Place
    tables: dict[str, SavedTable]
    ownerless: tuple[str, ...]

    @property
    def is_delta(self) -> bool:
        """True if the checkpoint contains changes only."""
        return any(table.is_delta for table in self.tables.values())


def open_checkpoint(path: PlaceLike, table: str | None = None) -> SavedCheckpoint:
    """Finds the dynamic tables of a checkpoint and reads their configs.

    Model and optimizer state may have any keys in the saved state dict. Lengths of files and shapes are
    checked here; configs and rows are checked by their content sums when they are read.

    Args:
        path: the directory, or URL, that was given to `torch.distributed.checkpoint.save`.
        table: name or key of the tables to open, of which there may be none; None: all tables.

    Returns:
        The checkpoint and its tables.

    Raises:
        ValueError: if the directory is not a checkpoint, or is torn, damaged or of another format.
        OSError: if a file cannot be read.
    """
    folder = place_of(path)
    reader, metadata = open_files(folder)
    saved: dict[str, dict[str, TensorStorageMetadata]] = defaultdict(dict)
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            prefix, _, name = key.rpartition(".")
            saved[prefix][name] = tensor
    keys = [key for key, tensors in saved.items() if _are_among(_TABLE, tensors)]
    optimizers = [key for key, tensors in saved.items() if _are_among(_OPTIMIZER, tensors)]
    owners, ownerless = _owners(optimizers, keys)
    tables = {}
    for key in keys:
        if table in (None, key, _name_of(key)):
            prefixes = filter(None, (key, owners.get(key)))
            tables[key] = _open_table(reader, key, {prefix: saved[prefix] for prefix in prefixes})
    return SavedCheckpoint(folder, tables, tuple(ownerless))


def _are_among(names: set[str], tensors: Mapping[str, TensorStorageMetadata]) -> bool:
    return all(
        name in tensors and tensors[name].properties.dtype == _DTYPES[name] for name in names
    )


def open_table(path: PlaceLike, name: str | None, where: str) -> SavedTable:
    """Returns the table with this name or key, None: the only one; raises ValueError if there is not one."""
    tables = [*open_checkpoint(path, name).tables.values()]
    if len(tables) != 1:
        asked = "one table" if name is None else f"one table '{name}'"
        keys = [table.key for table in tables]
        got = keys or f"tables {listed(sorted(open_checkpoint(path).tables))}"
        raise ValueError(f"{where}: expected {asked}, got {got}. Give the key of one table.")
    return tables[0]


def open_files(path: PlaceLike) -> tuple[PlaceReader, Metadata]:
    """Returns DCP's reader of a checkpoint, and the metadata; ValueError if it is no whole checkpoint."""
    folder = place_of(path)
    sizes = sizes_in(folder)
    _check_is_checkpoint(folder, sizes)
    reader, ends = PlaceReader(folder), defaultdict[str, int](int)
    try:
        with naming(folder / ".metadata"):
            metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        for entry in metadata.storage_data.values():
            name, end = entry.relative_path, entry.offset + entry.length
            ends[name] = max(ends[name], end)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of a damaged pickle any
        raise ValueError(
            f"{folder}: expected .metadata that can be read, got {type(error).__name__}: {error}. {DAMAGED}"
        ) from error
    for name, end in ends.items():
        file = file_inside(folder, name, DAMAGED)
        size = (sizes if name == file.name else sizes_in(file.parent)).get(file.name)
        if size is None:
            raise ValueError(f"{folder}: expected the file {name}, got none. {DAMAGED}")
        if size < end:
            raise ValueError(
                f"{folder}: expected {end} bytes in {name}, got {size}: it is truncated. {DAMAGED}"
            )
    return reader, metadata


def _check_is_checkpoint(folder: Place, files: Collection[str]) -> None:
    if ".metadata" in files:
        return
    names = names_in(folder)
    is_folder = bool(names) or folder.is_dir()
    if is_folder and all(name.endswith((".distcp", ".metadata.tmp")) for name in names):
        raise ValueError(
            f"{folder}: expected a checkpoint with .metadata, got none. It is torn: its save never "
            "finished. Use an earlier checkpoint."
        )
    raise ValueError(
        f"{folder}: expected a checkpoint of torch.distributed.checkpoint, got "
        f"{'a directory without .metadata' if is_folder else 'no directory'}. "
        "Give the directory of a checkpoint."
    )


def file_inside(folder: AnyPlace, name: Any, remedy: str, pattern: str = r"[^\0]+") -> AnyPlace:
    """Returns the path of a file in a directory, or below, whose name a file has; else ValueError."""
    is_name = isinstance(name, str) and re.fullmatch(pattern, name)
    parts = PurePath(name).parts if is_name else ()
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise ValueError(
            f"{folder}: expected the name of a file inside the directory, got {name!r:.100}. {remedy}"
        )
    return folder / name


def _owners(optimizers: Sequence[str], tables: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the key of the optimizer state of each table that has one, and those without a table.

    The optimizer state "optimizer.state.sparse.ebc.embedding_bags.user.weight.user" has the path
    "sparse.ebc.embedding_bags.user" between "state" and "weight". It belongs to the table whose key ends with
    this path, or whose key is an end of this path: users may put different keys before the two state dicts.
    If several tables match, the longest match wins, then the table that shares the most keys from the start.
    """
    by_name: dict[str, list[str]] = defaultdict(list)
    for table in tables:  # a table that matches has the last word of the path
        by_name[_name_of(table)].append(table)
    claims: dict[str | None, list[str]] = defaultdict(list)
    for key in optimizers:
        words = key.split(".")[:-2]
        claims[_owner(words, by_name.get("".join(words[-1:]), ()))].append(key)
    owners = {table: keys[0] for table, keys in claims.items() if table and len(keys) == 1}
    owned = {*owners.values()}
    return owners, [key for key in optimizers if key not in owned]


def _owner(words: list[str], tables: Sequence[str]) -> str | None:
    matches = sorted((_match(words, table.split(".")), table) for table in tables)
    best = [table for match, table in matches if match and match == matches[-1][0]]
    return best[0] if len(best) == 1 else None


def _match(words: list[str], table: list[str]) -> tuple[int, ...]:
    """Returns how many words a path and a table's key share at the end, and at the start; () if none."""
    end = _shared_start(words[::-1], table[::-1])
    is_whole = end == len(table) or "state" in words[-end - 1 : -1]
    return (end, _shared_start(words, table)) if is_whole else ()


def _shared_start(words: list[str], others: list[str]) -> int:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False))
    return sum(1 for _ in pairs)


def _name_of(key: str) -> str:
    return key.rpartition(".")[2]


def _open_table(
    reader: PlaceReader, key: str, saved: Mapping[str, Mapping[str, TensorStorageMetadata]]
) -> SavedTable:
    """Returns a table and its optimizer state; saved: metadata by prefix and name."""
    where = f"table '{key}' in {reader.path}"
    tensors = {
        name: ChunkedTensor.in_files(
            f"'{prefix}.{name}' in {reader.path}", reader, f"{prefix}.{name}", tensor
        )
        for prefix, by_name in saved.items()
        for name, tensor in by_name.items()
    }
    config = _read_config(where, tensors["config"], ("table", "embedding_dim"))
    if config["table"] != _name_of(key):
        raise ValueError(
            f"{where}: expected a config of this table, got a config of {config['table']!r}. "
            f"{saved_config.RENAMED}"
        )
    rule = None
    if "optimizer_config" in tensors:
        rule = _read_config(f"optimizer of {where}", tensors["optimizer_config"], ("optimizer",))
    return SavedTable(where, key, config, rule, tensors)


def _read_config(where: str, saved: ChunkedTensor, fields: tuple[str, ...]) -> dict[str, Any]:
    config = saved_config.from_bytes(where, saved.whole())
    if any(field not in config for field in fields):
        raise ValueError(
            f"{where}: expected a config with {' and '.join(fields)}, got {config}. {DAMAGED}"
        )
    return config
