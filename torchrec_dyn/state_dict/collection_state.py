"""The state dict of a sharded collection: its tables are put in, and taken out and verified, all or none."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    SavedTensor,
    from_bytes,
    numbers_of,
    saved_initializer,
)
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.ranks import gather_results
from torchrec_dyn.state_dict.load_session import LoadSession
from torchrec_dyn.state_dict.loading import ModelEntry
from torchrec_dyn.state_dict.pieces import ShardPieces, check_same_shards
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.state_dict.saving import ModelSource, Told
from torchrec_dyn.state_dict.staged_rows import commit_rows
from torchrec_dyn.state_dict.unsharded import check_shapes
from torchrec_dyn.storage import canonical_order
from torchrec_dyn.table import ROW_DTYPES

_NEEDED = ("weight", "ids")
_BY_ROW = (*_NEEDED, "last_seen", "count", "waiting")
_NAMES = (*_BY_ROW, "clock", "config", "checksum", "cells")


def save_tables(
    destination: MutableMapping[str, Any], prefix: str, tables: Sequence[ShardPieces], where: str
) -> None:
    """Adds the tensors of all tables to a state dict. Collective.

    Args:
        destination: the state dict.
        prefix: of the tables' names.
        tables: of one collection.
        where: the collection, for messages.
    """
    entries: list[ModelEntry] = []

    def tell() -> list[Told | None]:
        entries.extend(ModelEntry(one) for one in tables)
        return [entry.source.tell() for entry in entries]

    told = gather_results(tables[0].group, f"{where}.state_dict", tell)
    for number, entry in enumerate(entries):
        made = entry.source.tensors([one[number] for one in told])
        for name, tensor in made.items():
            destination[f"{prefix}{entry.pieces.name}.{name}"] = tensor


def load_tables(
    state_dict: MutableMapping[str, Any],
    prefix: str,
    tables: Sequence[ShardPieces],
    where: str,
    missing_keys: list[str],
) -> dict[str, Initializer]:
    """Replaces the contents of the tables that a state dict has, and takes them out of it. Collective.

    Args:
        state_dict: keys of other modules are left alone.
        prefix: of the tables' names.
        tables: of one collection.
        where: the collection, for messages.
        missing_keys: gets the keys that are not there.

    Returns:
        The initializers that came along, by table.

    Raises:
        ValueError: on every rank, if something is damaged or does not fit on one; no table has changed then.
    """
    entries: dict[str, ModelEntry] = {}

    def find() -> list[tuple[str, bool]]:
        for one in tables:
            saved = {
                name: state_dict.pop(f"{prefix}{one.name}.{name}")
                for name in _NAMES
                if f"{prefix}{one.name}.{name}" in state_dict
            }
            missing = [f"{prefix}{one.name}.{name}" for name in _NEEDED if name not in saved]
            missing_keys.extend(missing)
            if not missing and not _is_own(saved, one):
                entries[one.name] = _entry(saved, one)
        return [(name, entry.session is None) for name, entry in entries.items()]

    where = f"{where}.load_state_dict"
    everyones = gather_results(tables[0].group, where, find)
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            raise ValueError(
                f"{where}: expected the same tables on every rank, got {everyones[0]} on rank 0 and {theirs} "
                f"on rank {rank}. Give every rank a state dict that was made on all ranks."
            )
    LoadSession([entry for entry in entries.values() if entry.session is None]).verify(where)
    initializers = {}
    for name, entry in entries.items():
        assert entry.session is not None
        entry.session.verify(where)
        if "config" in entry.small:
            saved = from_bytes(entry.pieces.where, entry.small["config"])
            initializers[name] = saved_initializer(entry.pieces.where, saved)
    for name, entry in entries.items():
        clock = entry.small.get("clock")
        for shard, staged in zip(entry.pieces.shards, entry.staged or (), strict=True):
            commit_rows(shard, staged, clock, initializers.get(name), entry.step)
        entry.staged = None
        entry.source = ModelSource(entry.pieces, entry)  # given again, it is the table's own
    return initializers


def _is_own(saved: Mapping[str, Any], pieces: ShardPieces) -> bool:
    """Whether these are the tensors of the table's own state dict, into which nothing was loaded.

    Raises:
        RuntimeError: if the table has changed since.
    """
    weight = saved["weight"]
    entry = weight.entry if isinstance(weight, SavedTensor) else None
    if not isinstance(entry, ModelEntry) or entry.staged is not None:
        return False
    if not entry.pieces.has_shards_of(pieces):
        return False
    if not entry.is_left_out:
        entry.source.check_unchanged()
    return True


def _entry(saved: Mapping[str, Any], pieces: ShardPieces) -> ModelEntry:
    """Gives an entry with all that was saved staged."""
    weight = saved["weight"]
    loaded = weight.entry if isinstance(weight, SavedTensor) else None
    if isinstance(loaded, ModelEntry) and loaded.staged is not None:
        check_same_shards(loaded.pieces, pieces)
        return loaded
    entry = ModelEntry(pieces)
    entry.present = set(saved)
    for name in ("clock", "config", "checksum"):
        if name in saved:
            entry.small[name] = numbers_of(saved[name])
    if isinstance(weight, SavedTensor):
        _stage_parts(entry, saved)
    else:
        _stage_whole(entry, saved)
    return entry


def _stage_parts(entry: ModelEntry, saved: Mapping[str, Any]) -> None:
    """Stages copies of what this rank saved: they fit the same plan on as many ranks."""
    ranges = [(part.offset[0], part.offset[0] + part.size[0]) for part in saved["ids"].parts]
    entry.stage(Places(ranges), saved["weight"].dtype)
    for name in _BY_ROW:
        for offset, block in saved[name].local() if name in saved else ():
            entry.receive(name, offset, block)


def _stage_whole(entry: ModelEntry, saved: Mapping[str, Any]) -> None:
    """Stages this rank's rows out of plain tensors, which hold those of all."""
    ids, weight = saved["ids"], saved["weight"].detach()
    check_shapes(entry.pieces.where, weight, ids, entry.pieces.config["embedding_dim"])
    if weight.dtype not in ROW_DTYPES:
        saved = {**saved, "weight": weight.float()}
    order = canonical_order(ids)
    mine = order[entry.pieces.owns(ids[order])]
    entry.stage(Places([(0, mine.numel())]), saved["weight"].dtype)
    for name in _BY_ROW:
        if name == "waiting" and name in saved:
            entry.receive(name, (0, 0), saved[name])
        elif name in saved:
            rows = saved[name]
            row_bytes = max(1, rows[:1].nbytes)
            for start in range(0, mine.numel(), max(1, CHUNK_BYTES // row_bytes)):
                some = mine[start : start + max(1, CHUNK_BYTES // row_bytes)]
                entry.receive(name, (start, 0), rows[some])
