"""Saves and loads the state dicts of a collection and of its optimizer, sharded or not.

A load takes plain tensors, copies of this rank's saved tensors, or tensors that DCP has loaded
(load_planner.py). It verifies all tables before it changes any, and then changes one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    MODEL_NAMES,
    OPTIMIZER_CHECKSUM,
    SavedTensor,
    numbers_of,
)
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict.aligned_state import commit_state
from torchrec_dyn.state_dict.awaited_loads import note_saved, note_taken_plain
from torchrec_dyn.state_dict.load_session import LoadSession, TableEntry
from torchrec_dyn.state_dict.loading import ModelEntry, OptimizerEntry
from torchrec_dyn.state_dict.saving import TableSource, saved_tensors

_NEEDED = ("weight", "ids")
_Entry = TypeVar("_Entry", bound=TableEntry)
_leaves_rows_out: ContextVar[bool] = ContextVar("_leaves_rows_out", default=False)


@contextmanager
def rows_left_out() -> Iterator[None]:
    """State dicts that this thread makes in the block read no rows: they have no dynamic tables.

    Those of optimizers have an empty tensor in the place of each tensor of a table.
    """
    token = _leaves_rows_out.set(True)
    try:
        yield
    finally:
        _leaves_rows_out.reset(token)


def save_tables(
    destination: MutableMapping[str, Any], tables: Mapping[str, Table], where: str
) -> None:
    """Adds the tensors of all tables to a state dict. Collective."""
    if _leaves_rows_out.get():
        return
    call = f"{where}.state_dict"
    made = _tensors(call, [*tables.values()], lambda one: ModelEntry(one).renew(), 0)
    for prefix, tensors in zip(tables, made, strict=True):
        destination.update({prefix + name: tensor for name, tensor in tensors.items()})
    for table, tensors in zip(tables.values(), made, strict=True):
        if table.group is None:
            note_saved(tensors["weight"], table.lock, table.name)


def save_optimizer_states(tables: Sequence[Table], call: str) -> dict[str, Tensor]:
    """Returns the tensors of the optimizer state of tables, by "{table}.{name}". Collective.

    `call` is the same on every rank.
    """
    made: Sequence[Mapping[str, Tensor]]
    if _leaves_rows_out.get():
        nothing = torch.empty(0, device="cpu")
        told = ("optimizer_config", "step", OPTIMIZER_CHECKSUM)
        made = [dict.fromkeys((*one.optimizer.state_names, *told), nothing) for one in tables]
    else:
        made = _tensors(call, tables, lambda one: OptimizerEntry(one).renew(), 1)
    return {
        f"{table.name}.{name}": tensor
        for table, tensors in zip(tables, made, strict=True)
        for name, tensor in tensors.items()
    }


def check_is_not_static(prefix: str, saved: Container[str], where: str) -> None:
    """Raises ValueError if what is saved at a prefix that ends in "." is a static table: it has no ids."""
    if f"{prefix}weight" in saved and not any(
        f"{prefix}{one}" in saved for one in ("ids", "config")
    ):
        raise ValueError(
            f"{where}: expected a dynamic table, got a static one. Leave its weight out of the load, and "
            "load its rows with torchrec_dyn.checkpoint.load_static, or make the collection of the "
            "trained one with torchrec_dyn.from_static."
        )


def _tensors(
    call: str, tables: Sequence[Table], source: Callable[[Table], TableSource], which: int
) -> Sequence[Mapping[str, Tensor]]:
    """Returns the tensors of each table: of unsharded tables, which lie on no other rank, plain tensors.

    `which` is 0 for those of the model's state dict, 1 for the optimizer's.
    """
    made = [both[which] for both in saved_tensors(tables, call, source)]
    if tables[0].group is not None:
        return made
    return [
        {name: numbers_of(tensor, table.device.type == "cpu") for name, tensor in tensors.items()}
        for table, tensors in zip(tables, made, strict=True)
    ]


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: numbers_of(tensor) for name, tensor in tensors.items()}


def load_tables(
    state_dict: MutableMapping[str, Any],
    tables: Mapping[str, Table],
    where: str,
    missing_keys: list[str],
) -> dict[str, Initializer]:
    """Loads the tables that a state dict has, and removes their keys from it. Collective.

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
        for prefix, table in tables.items():
            check_is_not_static(prefix, state_dict, f"{table.where}.load_state_dict")
            keys = {name: prefix + name for name in MODEL_NAMES}
            saved = {name: state_dict.pop(key) for name, key in keys.items() if key in state_dict}
            missing = [keys[name] for name in _NEEDED if name not in saved]
            missing_keys.extend(missing)
            if not missing:
                entry = _entry(ModelEntry, table, saved, saved["weight"])
                if entry is not None:
                    entries[table.name] = entry
        return [(name, entry.session is None) for name, entry in entries.items()]

    where = f"{where}.load_state_dict"
    group = next(iter(tables.values())).group
    by_rank = gather_results(group, where, find)
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

    return run_together(group, where, commit)


def stage_table(table: Table, saved: Mapping[str, Tensor]) -> ModelEntry:
    """Returns the verified load of an unsharded table, which is to be committed.

    saved: tensors by name, with "weight" and "ids".

    Raises:
        ValueError: if the table is damaged or does not match the model.
    """
    entry = ModelEntry(table)
    entry.fill(_plain(saved))
    LoadSession([entry]).verify(table.where)
    note_taken_plain(saved["weight"])
    return entry


def load_optimizer_state(table: Table, saved: Mapping[str, Any]) -> None:
    """Replaces the optimizer state of a table. Collective.

    Raises:
        ValueError: on every rank, if the state is damaged or does not match the table, or the ranks give
            state dicts of different loads; nothing has changed then.
    """
    where = f"{table.where}.load_state_dict"
    saved = saved if table.group is not None else _plain(saved)
    found: list[OptimizerEntry | None] = []

    def find() -> tuple[bool, bool]:
        entry = _entry(OptimizerEntry, table, saved, saved["optimizer_config"])
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


def _entry(
    kind: type[_Entry], table: Table, saved: Mapping[str, Any], tensor: Tensor
) -> _Entry | None:
    """Returns an entry with all saved tensors staged.

    None: the tensors are the table's own, and nothing was loaded into them. `tensor` is one of them.

    Raises:
        RuntimeError: if the tensors are the table's own, and the table has changed since.
    """
    loaded = tensor.entry if isinstance(tensor, SavedTensor) else None
    if isinstance(loaded, kind):
        if loaded.is_own(table):
            return None
        if loaded.staged is not None:
            loaded.check_is_for(table)
            return loaded
    entry = kind(table)
    entry.fill(saved)
    return entry
