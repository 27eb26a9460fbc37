"""Saves and loads the state dicts of a collection and of its optimizer, sharded or not.

A load takes plain tensors, copies of this rank's saved tensors, or tensors that DCP has loaded
(load_planner.py). It verifies all tables before it changes any, and then changes one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    MODEL_NAMES,
    OPTIMIZER_CHECKSUM,
    SavedTensor,
    add_sums,
    numbers_of,
)
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict.loading import (
    CheckedPart,
    LoadTarget,
    TableLoad,
    begin_session,
    note_taken,
)
from torchrec_dyn.state_dict.saving import runs_of, saved_tensors
from torchrec_dyn.state_dict.whole_tensors import fill

_NEEDED = ("weight", "ids")
_left_out: ContextVar[list[Table] | None] = ContextVar("_left_out", default=None)


@contextmanager
def rows_left_out() -> Iterator[list[Table]]:
    """State dicts that this thread makes or loads in the block have no dynamic tables.

    Those of optimizers have an empty tensor in the place of each tensor of a table; yields these tables.
    """
    tables: list[Table] = []
    token = _left_out.set(tables)
    try:
        yield tables
    finally:
        _left_out.reset(token)


def are_rows_left_out() -> bool:
    """Returns True in a block of `rows_left_out`."""
    return _left_out.get() is not None


def save_tables(
    destination: MutableMapping[str, Any], tables: Mapping[str, Table], where: str
) -> None:
    """Adds the tensors of all tables to a state dict. Collective."""
    if are_rows_left_out():
        return
    saved = _tensors(f"{where}.state_dict", [*tables.values()], is_optimizer=False)
    for prefix, tensors in zip(tables, saved, strict=True):
        destination.update({prefix + name: tensor for name, tensor in tensors.items()})


def save_optimizer_states(tables: Sequence[Table], call: str) -> dict[str, Tensor]:
    """Returns the tensors of the optimizer state of tables, by "{table}.{name}". Collective."""
    saved: Sequence[Mapping[str, Tensor]]
    if (left_out := _left_out.get()) is not None:
        left_out += tables
        nothing = torch.empty(0, device="cpu")
        others = ("optimizer_config", "step", OPTIMIZER_CHECKSUM)
        saved = [
            dict.fromkeys((*table.optimizer.state_names, *others), nothing) for table in tables
        ]
    else:
        saved = _tensors(call, tables, is_optimizer=True)
    return {
        f"{table.name}.{name}": tensor
        for table, tensors in zip(tables, saved, strict=True)
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
    call: str, tables: Sequence[Table], is_optimizer: bool
) -> Sequence[Mapping[str, Tensor]]:
    """Returns the tensors of each table: of unsharded tables, which lie on no other rank, plain tensors."""
    both = saved_tensors(tables, call, lambda table: LoadTarget(table, is_optimizer).source())
    made = [of_table[is_optimizer] for of_table in both]
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
) -> None:
    """Loads the tables that a state dict has, and removes their keys from it. Collective."""

    def find() -> list[TableLoad]:
        loads = []
        for prefix, table in tables.items():
            check_is_not_static(prefix, state_dict, f"{table.where}.load_state_dict")
            keys = {name: prefix + name for name in MODEL_NAMES}
            saved = {name: state_dict.pop(key) for name, key in keys.items() if key in state_dict}
            missing = [keys[name] for name in _NEEDED if name not in saved]
            missing_keys.extend(missing)
            if not missing:
                loads += _load_of(table, saved, saved["weight"], False)
        return loads

    group = next(iter(tables.values())).group
    if not are_rows_left_out():
        verify_and_commit(group, f"{where}.load_state_dict", find)


def stage_table(table: Table, saved: Mapping[str, Tensor]) -> TableLoad:
    """Returns the load of an unsharded table, which is to be committed; saved: tensors by name."""
    load = TableLoad(table)
    fill(load, _plain(saved))
    verify(None, table.where, lambda: [load])
    return load


def load_optimizer_state(table: Table, saved: Mapping[str, Any]) -> None:
    """Replaces the optimizer state of a table, and its rows if they were read with it. Collective."""
    if are_rows_left_out():
        return
    where = f"{table.where}.load_state_dict"
    saved = saved if table.group is not None else _plain(saved)

    def find() -> list[TableLoad]:
        return _load_of(table, saved, saved["optimizer_config"], True)

    verify_and_commit(table.group, where, find)


def _load_of(
    table: Table, saved: Mapping[str, Any], tensor: Tensor, is_optimizer: bool
) -> list[TableLoad]:
    """Returns the load of a table from the tensors of a state dict, of which `tensor` is the first.

    [] if they are the table's own; RuntimeError if they were, and the table has changed since.
    """
    target = tensor.entry if isinstance(tensor, SavedTensor) else None
    if isinstance(target, LoadTarget) and target.is_optimizer == is_optimizer:
        if target.is_own(table):
            return []
        if target.load is not None and target.staged is not None:
            if not target.table.has_shards_of(table):
                raise ValueError(
                    f"{table.where}: expected tensors of this model's own state dict, got tensors of "
                    "another model's. Make the state dict with this model, then call dcp.load."
                )
            return [target.load]
    load = TableLoad(table, has_rows=not is_optimizer, has_state=is_optimizer)
    fill(load, saved)
    return [load]


def verify(
    group: dist.ProcessGroup | None, where: str, find: Callable[[], Sequence[TableLoad]]
) -> Sequence[TableLoad]:
    """Verifies the loads that `find` gives, with all read with them, and prepares them. Collective."""
    loads: list[TableLoad] = []
    pending: list[TableLoad] = []

    def check() -> tuple[list[tuple[str, bool]], list[CheckedPart]]:
        loads.extend(find())
        kinds = [(load.table.name, load.session is not None) for load in loads]
        begin_session([load for load in loads if load.session is None])
        together = {id(load): load for first in loads for load in first.session or ()}
        pending.extend(
            load for load in together.values() if not load.is_verified and load.table.group is group
        )
        return kinds, [load.check() for load in pending]

    by_rank = gather_results(group, where, check)
    for rank, (kinds, _) in enumerate(by_rank):
        if kinds != by_rank[0][0]:
            raise ValueError(
                f"{where}: expected the same tables on every rank, got {by_rank[0][0]} on rank 0 and {kinds} "
                f"on rank {rank}. Give every rank a state dict that was made on all ranks."
            )
    if not loads:
        return []
    parts = zip(*(rank_parts for _, rank_parts in by_rank), strict=True)
    checked = [[*zip(*load_parts, strict=True)] for load_parts in parts]  # of each load, by rank
    sums = [rank_sums for _, rank_sums, _, _ in checked]
    if any(not load.has_rows for load in pending):

        def sums_of_state() -> list[dict[str, int]]:
            return [
                {} if load.has_rows else load.sums_of_state(*runs_of(shares, load.table.part))
                for load, (_, _, _, shares) in zip(pending, checked, strict=True)
            ]

        state_sums = zip(*gather_results(group, where, sums_of_state), strict=True)
        sums = [(*rows, *state) for rows, state in zip(sums, state_sums, strict=True)]

    def compare() -> None:
        for load, (words, _, steps, _), rank_sums in zip(pending, checked, sums, strict=True):
            load.compare(words, add_sums(*rank_sums))
            load.step = max(steps)
            load.is_verified = True
        for load in loads:
            load.prepare()

    run_together(group, where, compare)
    return loads


def verify_and_commit(
    group: dist.ProcessGroup | None, where: str, find: Callable[[], Sequence[TableLoad]]
) -> None:
    """Verifies the loads that `find` returns, and commits them. Collective."""
    for load in verify(group, where, find):
        load.commit()
        note_taken(load.lock, load.table.name)
