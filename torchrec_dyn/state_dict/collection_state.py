"""Saves and loads the state dicts of a sharded collection and of its optimizer.

A load takes plain tensors, copies of this rank's saved tensors, or tensors that DCP has loaded
(load_planner.py). It changes all tables or no table.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torchrec_dyn.checkpoint_format import CHUNK_BYTES, MODEL_NAMES, SavedTensor, numbers_of
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict.aligned_state import commit_state
from torchrec_dyn.state_dict.load_session import LoadSession
from torchrec_dyn.state_dict.loading import ModelEntry, OptimizerEntry, row_ranges_of
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.state_dict.saving import saved_tensors
from torchrec_dyn.state_dict.unsharded import check_shapes
from torchrec_dyn.storage import canonical_order
from torchrec_dyn.table import ROW_DTYPES

_NEEDED = ("weight", "ids")


def save_tables(
    destination: MutableMapping[str, Any], prefix: str, tables: Sequence[Table], where: str
) -> None:
    """Adds the tensors of all tables to a state dict. Collective.

    Args:
        destination: the state dict.
        prefix: prefix of the tables' names.
        tables: tables of one collection.
        where: the collection, for messages.
    """
    made = saved_tensors(
        tables[0].group, f"{where}.state_dict", tables, lambda one: [ModelEntry(one).renew()]
    )
    for table, tensors in zip(tables, made, strict=True):
        for name, tensor in tensors.items():
            destination[f"{prefix}{table.name}.{name}"] = tensor


def load_tables(
    state_dict: MutableMapping[str, Any],
    prefix: str,
    tables: Sequence[Table],
    where: str,
    missing_keys: list[str],
) -> dict[str, Initializer]:
    """Loads the tables that a state dict has, and removes their keys from it. Collective.

    Args:
        state_dict: the state dict; keys of other modules are not changed.
        prefix: prefix of the tables' names.
        tables: tables of one collection.
        where: the collection, for messages.
        missing_keys: list to which missing keys are appended.

    Returns:
        The saved initializers, by table name.

    Raises:
        ValueError: on every rank, if a table is damaged or does not match the model on any rank; no table has
            changed then.
        RuntimeError: on every rank, if some rank fails in another way, as without memory. Each shard of a
            table then has its contents from before the call, or those of the state dict.
    """
    entries: dict[str, ModelEntry] = {}

    def find() -> list[tuple[str, bool]]:
        for table in tables:
            keys = {name: f"{prefix}{table.name}.{name}" for name in MODEL_NAMES}
            saved = {name: state_dict.pop(key) for name, key in keys.items() if key in state_dict}
            missing = [keys[name] for name in _NEEDED if name not in saved]
            missing_keys.extend(missing)
            if not missing:
                entry = _model_entry(saved, table)
                if entry is not None:
                    entries[table.name] = entry
        return [(name, entry.session is None) for name, entry in entries.items()]

    where = f"{where}.load_state_dict"
    by_rank = gather_results(tables[0].group, where, find)
    for rank, found in enumerate(by_rank):
        if found != by_rank[0]:
            raise ValueError(
                f"{where}: expected the same tables on every rank, got {by_rank[0]} on rank 0 and {found} "
                f"on rank {rank}. Give every rank a state dict that was made on all ranks."
            )
    LoadSession([entry for entry in entries.values() if entry.session is None]).verify(where)
    for entry in entries.values():
        assert entry.session is not None
        entry.session.verify(where)

    def commit() -> dict[str, Initializer]:
        saved = {name: entry.initializer() for name, entry in entries.items()}
        for entry in entries.values():
            entry.commit()
        return {name: one for name, one in saved.items() if one is not None}

    return run_together(tables[0].group, where, commit)


def _model_entry(saved: Mapping[str, Any], table: Table) -> ModelEntry | None:
    """Returns an entry with all saved tensors staged.

    None: the tensors are the table's own, and nothing was loaded into them.

    Raises:
        RuntimeError: if the tensors are the table's own, and the table has changed since.
    """
    weight = saved["weight"]
    loaded = weight.entry if isinstance(weight, SavedTensor) else None
    if isinstance(loaded, ModelEntry):
        if loaded.is_own(table):
            return None
        if loaded.staged is not None:
            loaded.table.check_model(table)
            return loaded
    entry = ModelEntry(table)
    entry.present = set(saved)
    for name in entry.small_names:
        if name in saved:
            entry.small[name] = numbers_of(saved[name])
    if not isinstance(weight, SavedTensor):
        _stage_whole(entry, saved)
        return entry
    # Copies of this rank's saved tensors: they need the same plan on the same number of ranks.
    entry.stage(Places(row_ranges_of(saved["ids"])), weight.dtype)
    for name in entry.names:
        for offset, block in saved[name].local() if name in saved else ():
            entry.receive(name, offset, block)
    return entry


def _stage_whole(entry: ModelEntry, saved: Mapping[str, Any]) -> None:
    """Stages this rank's rows of plain tensors, which hold the rows of all ranks."""
    ids, weight = saved["ids"], saved["weight"].detach()
    check_shapes(entry.table.where, weight, ids, entry.table.embedding_dim)
    if weight.dtype not in ROW_DTYPES:
        saved = {**saved, "weight": weight.float()}
    order = canonical_order(ids)
    mine = order[entry.table.owns(ids[order])]
    entry.stage(Places([(0, mine.numel())]), saved["weight"].dtype)
    for name in entry.names:
        if name == "waiting" and name in saved:
            entry.receive(name, (0, 0), saved[name])
        elif name in saved:
            rows = saved[name]
            step = max(1, CHUNK_BYTES // max(1, rows[:1].nbytes))
            for start in range(0, mine.numel(), step):
                some = mine[start : start + step].to(rows.device)
                entry.receive(name, (start, 0), rows[some])


def save_optimizer_state(table: Table) -> dict[str, SavedTensor]:
    """Returns the tensors of a table's optimizer state, by name. Collective.

    Args:
        table: the table.
    """
    call = f"{table.where}.state_dict"
    return saved_tensors(table.group, call, [table], lambda one: [OptimizerEntry(one).renew()])[0]


def load_optimizer_state(table: Table, saved: Mapping[str, Any]) -> None:
    """Replaces the optimizer state of a table. Collective.

    Args:
        table: the table.
        saved: saved tensors by name.

    Raises:
        ValueError: on every rank, if the state is damaged or does not match the table, or the ranks give
            state dicts of different loads; nothing has changed then.
    """
    where = f"{table.where}.load_state_dict"
    found: list[OptimizerEntry | None] = []

    def find() -> tuple[bool, bool]:
        entry = _optimizer_entry(saved, table)
        found.append(entry)
        return entry is not None, entry is not None and entry.session is not None

    by_rank = gather_results(table.group, where, find)
    for rank, kinds in enumerate(by_rank):
        if kinds != by_rank[0]:
            raise ValueError(
                f"{where}: expected optimizer state of the same load on every rank, got another state dict "
                f"on rank {rank} than on rank 0. Give every rank a state dict that was made on all ranks."
            )
    (entry,) = found
    if entry is None:
        return
    if entry.session is not None:
        entry.session.verify(where)
    commit_state(entry, where)


def _optimizer_entry(saved: Mapping[str, Any], table: Table) -> OptimizerEntry | None:
    """Returns an entry with all saved tensors staged, or None, as `_model_entry` does."""
    config = saved["config"]
    loaded = config.entry if isinstance(config, SavedTensor) else None
    if isinstance(loaded, OptimizerEntry):
        if loaded.is_own(table):
            return None
        if loaded.staged is not None:
            loaded.check_is_for(table)
            return loaded
    entry = OptimizerEntry(table)
    entry.fill(saved)
    return entry
