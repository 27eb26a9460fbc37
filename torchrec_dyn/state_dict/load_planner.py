"""LoadPlanner: with it, torch.distributed.checkpoint (DCP) loads tables of any saved size.

DCP itself reads into tensors of the saved size. The planner makes one `TableLoad` of the tensors of each
sharded table, of the model's and the optimizer's state dict, and passes to it what is read. The model does
not change before `load_state_dict`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    MODEL_NAMES,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    ChunkedTensor,
    PlaceLike,
    PlaceReader,
    SavedTensor,
    check_new_names,
    checked_rename,
    marked,
    open_files,
    renamed_keys,
)
from torchrec_dyn.state_dict.collection_state import check_is_not_static
from torchrec_dyn.state_dict.loading import LoadTarget, TableLoad, begin_session, note_begun


class LoadPlanner(DefaultLoadPlanner):
    """The load planner for `torch.distributed.checkpoint.load` of a state dict with dynamic tables.

    Pass it to the load, then load the state dict into the model::

        dcp.load(state_dict, checkpoint_id=path, planner=LoadPlanner())
        dmp.load_state_dict(state_dict["model"])

    DCP's own planner loads everything else.

    Args:
        *options: positional arguments of DCP's planner.
        rename: new names of tables by their saved names, e.g. {"user": "member"}. Rows, optimizer state,
            scores, counters and clocks load into the tables with the new names, verified as always. An id
            that is new after the load gets the initial row of the new name.
        path: directory or URL of the checkpoint. With it, each rank finds its rows from a few of the saved
            ids and reads no other rows, which is faster. Without it, DCP's reader loads all rows on each
            rank, chunk by chunk, and the rank keeps its own rows.
        **named: keyword arguments of DCP's planner, such as `allow_partial_load`.
    """

    _names: dict[str, tuple[TableLoad, str]]  # of the tensors of sharded tables, by key
    _loads: list[TableLoad]
    _left: Counter[TableLoad]  # blocks that DCP has not read yet
    _empty: set[str]  # keys of unsharded tables that are not in the checkpoint
    _deltas: set[str]  # names of tables of which only the changes were saved
    _saved_keys: dict[str, str]  # of renamed tables, by key in the state dict
    _unmarked: Counter[str]  # blocks that DCP has not read yet of configs that get the saved name
    _given: STATE_DICT_TYPE  # the state dict, and where each tensor is in it
    _paths: dict[str, Any]

    def __init__(
        self,
        *options: Any,
        path: PlaceLike | None = None,
        rename: Mapping[str, str] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*options, **named)
        self._path = path
        self._rename = checked_rename(rename, "LoadPlanner.rename")
        self._saved_names = {new: old for old, new in self._rename.items()}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Finds the tensors of each table in the checkpoint."""
        assert metadata is not None
        self._names, self._empty = {}, set()
        metadata = self._with_new_keys(metadata)
        saved = metadata.state_dict_metadata
        self._deltas = {key.split(".")[-2] for key in saved if key.endswith(".base")}
        flat, paths = flatten_state_dict(state_dict)
        self._given, self._paths = state_dict, paths
        tables: set[str] = set()
        loads: dict[tuple[int, str], TableLoad] = {}
        for fqn, value in flat.items():
            if isinstance(value, SavedTensor) and isinstance(value.entry, LoadTarget):
                self._add(fqn, value.entry, loads, saved)
                tables.add(value.entry.table.name)
            elif isinstance(value, Tensor) and _is_of_unsharded_table(fqn, flat):
                tables.add(fqn.split(".")[-2])
                resized = self._resized(fqn, value, saved)
                if resized is not None:
                    set_element(state_dict, paths[fqn], resized)
        check_new_names(self._rename, tables, "LoadPlanner.rename")
        files = None
        if self._path is not None:
            files, _ = open_files(self._path)
        self._loads = [load for load in loads.values() if self._begin(load, saved, files)]
        begin_session(self._loads)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _with_new_keys(self, metadata: Metadata) -> Metadata:
        """Returns metadata with the new keys of renamed tables; notes the saved keys."""
        saved = metadata.state_dict_metadata
        new_keys = renamed_keys(saved, self._rename, "LoadPlanner.rename")
        self._saved_keys = {new: key for key, new in new_keys.items()}
        renamed = {new_keys.get(key, key): tensor for key, tensor in saved.items()}
        return replace(metadata, state_dict_metadata=renamed)

    def _resized(self, fqn: str, value: Tensor, saved: Mapping[str, Any]) -> Tensor | None:
        """Returns a new tensor for one of an unsharded table, of the saved size; None if it has that size.

        It is empty if no tensor is saved: a checkpoint may lack tensors without numbers.
        """
        (prefix, _, name), tensor = fqn.rpartition("."), saved.get(fqn)
        _check_is_dynamic(prefix, saved, self._deltas)
        if not _was_dynamic(prefix, saved):
            return None
        _check_chunks(fqn, tensor)
        if isinstance(tensor, TensorStorageMetadata):
            is_right = tensor.size == value.size() and tensor.properties.dtype == value.dtype
            if is_right and not isinstance(value, SavedTensor):
                return None
            return torch.empty(tensor.size, dtype=tensor.properties.dtype, device="cpu")
        if fqn not in saved:
            self._empty.add(fqn)
        size = (2, 0) if name == "clock" else (0, *value.shape[1:])
        return torch.empty(size, dtype=value.dtype, device="cpu")

    def _add(
        self,
        fqn: str,
        target: LoadTarget,
        loads: dict[tuple[int, str], TableLoad],
        saved: Mapping[str, Any],
    ) -> None:
        """Adds a tensor to the load of its table, whichever state dict has it."""
        table, (prefix, _, name) = target.table, fqn.rpartition(".")
        _check_is_dynamic(prefix, saved, self._deltas)
        _check_chunks(fqn, saved.get(fqn))
        # Tables of two collections may have the same name.
        load = loads.setdefault((id(table.lock), table.name), TableLoad(table, False))
        load.saved_name = self._saved_names.get(table.name, table.name)
        if load.keys.setdefault(name, fqn) != fqn:
            raise ValueError(
                f"{table.where}: expected its tensors once in a state dict, got '{load.keys[name]}' and "
                f"'{fqn}'. Load each state dict of a table by its own dcp.load."
            )
        if target not in load.targets:
            load.targets.append(target)

    def _begin(self, load: TableLoad, saved: Mapping[str, Any], files: PlaceReader | None) -> bool:
        """Begins the load of a table; False if a partial load has found none of its tensors."""
        present = {
            name: saved[fqn]
            for name, fqn in load.keys.items()
            if isinstance(saved.get(fqn), TensorStorageMetadata)
        }
        if not load.choose_targets(present if self.allow_partial_load else load.keys):
            return False
        for name, fqn in load.keys.items():
            self._names[fqn] = load, name
        tensors: dict[str, ChunkedTensor] = {}
        for name, tensor in present.items():
            key, is_searched = load.keys[name], name in ("ids", "waiting")
            if files is not None:
                saved_key = self._saved_keys.get(key, key)
                where = f"'{saved_key}' in {self._path}"
                tensors[name] = ChunkedTensor.in_files(where, files, saved_key, tensor)
            else:
                tensors[name] = ChunkedTensor(
                    f"{load.table.where}, {name}",
                    key,
                    tensor.size,
                    tensor.properties.dtype,
                    is_read_once=not is_searched,
                )
        load.begin(tensors)
        return True

    def create_local_plan(self) -> LoadPlan:
        """Returns the reads of this rank: of a dynamic table, the rows that this rank holds."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        ours = {*self._names, *self._empty}
        others = {fqn: value for fqn, value in self.state_dict.items() if fqn not in ours}
        plan = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        if self._path is None:
            for fqn, (load, name) in self._names.items():
                if name in load.tensors:
                    chunks, tensor = load.wanted(name), cast(TensorStorageMetadata, saved[fqn])
                    plan.items += create_read_items_for_chunk_list(fqn, tensor, chunks)
        return replace(plan, items=[*map(self._as_saved, plan.items)])

    def _as_saved(self, item: ReadItem) -> ReadItem:
        """Returns an item that reads a tensor by the key under which it was saved."""
        index = item.storage_index
        if index.fqn not in self._saved_keys:
            return item
        return replace(item, storage_index=replace(index, fqn=self._saved_keys[index.fqn]))

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Reads the rows that DCP does not read, and returns the plan as DCP's planner does.

        DCP calls it on all ranks, or on none: if a rank cannot make its plan, the load fails before.
        """
        for load in self._loads:
            if load.has_rows:
                note_begun(load)
        self._count(new_plan)
        for load in self._loads:
            if not self._left[load]:
                load.stage()
        return super().finish_plan(new_plan)

    def _count(self, plan: LoadPlan) -> None:
        """Counts the blocks that DCP reads of each load, and of configs that get the saved name."""
        read = [item.dest_index.fqn for item in plan.items]
        self._left = Counter(self._names[fqn][0] for fqn in read if fqn in self._names)
        ends = (".config", ".optimizer_config")
        self._unmarked = Counter(
            fqn
            for fqn in read
            if fqn in self._saved_keys and fqn not in self._names and fqn.endswith(ends)
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns the tensor into which a block is read."""
        fqn = read_item.dest_index.fqn
        if fqn not in self._names:
            return super().resolve_tensor(read_item)
        load, name = self._names[fqn]
        return load.tensors[name].new_block(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Passes a block that was read to the load of its table."""
        fqn = read_item.dest_index.fqn
        if fqn not in self._names:
            super().commit_tensor(read_item, tensor)
            self._mark(fqn)
            return
        load, name = self._names[fqn]
        load.tensors[name].put(_offset_of(read_item), tensor)
        self._left[load] -= 1
        if not self._left[load]:
            load.stage()

    def _mark(self, fqn: str) -> None:
        """Marks the config of an unsharded table, once it is read, with the name under which it was saved."""
        self._unmarked.subtract([fqn] if fqn in self._unmarked else [])
        if fqn in self._unmarked and not self._unmarked[fqn]:
            old = self._saved_keys[fqn].split(".")[-2]
            set_element(self._given, self._paths[fqn], marked(self.state_dict[fqn], old))


def _offset_of(read_item: ReadItem) -> tuple[int, ...]:
    """Returns the place of an item's first number in the whole tensor."""
    begin = read_item.dest_index.offset or ()
    return tuple(a + b for a, b in zip(begin, read_item.dest_offsets, strict=True))


def _is_of_unsharded_table(fqn: str, flat: Mapping[str, Any]) -> bool:
    """Returns True if a tensor belongs to an unsharded table, by its name and the tensors beside it."""
    prefix, _, name = fqn.rpartition(".")
    for names in (MODEL_NAMES, ("optimizer_config", *OPTIMIZER_TENSORS, OPTIMIZER_CHECKSUM)):
        if name in names:
            beside = [flat.get(f"{prefix}.{other}") for other in (names[0], names[-1])]
            dtypes = [getattr(tensor, "dtype", None) for tensor in beside]
            return dtypes == [torch.uint8, torch.int64]
    return False


def _was_dynamic(prefix: str, saved: Mapping[str, Any]) -> bool:
    """Returns True if a dynamic table, or its optimizer state, was saved."""
    configs = [saved.get(f"{prefix}.{name}") for name in ("config", "optimizer_config")]
    return any(
        isinstance(config, TensorStorageMetadata) and config.properties.dtype == torch.uint8
        for config in configs
    )


def _check_is_dynamic(prefix: str, saved: Mapping[str, Any], deltas: Container[str]) -> None:
    """Raises ValueError if a static table was saved, or only the changes of a table."""
    check_is_not_static(f"{prefix}.", saved, f"'{prefix}' of the checkpoint")
    if prefix.rpartition(".")[2] in deltas:
        raise ValueError(
            f"'{prefix}' of the checkpoint: expected a full checkpoint, got a delta, which has the changed "
            "rows only. Load the full checkpoint before it, then call "
            "torchrec_dyn.checkpoint.apply_delta with each delta after it, in order."
        )


def _check_chunks(fqn: str, saved: Any) -> None:
    """Raises ValueError unless the chunks have all numbers of a tensor: else room is made for any number."""
    if isinstance(saved, TensorStorageMetadata):
        total = math.prod(saved.size)
        numbers = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        if numbers != total:
            raise ValueError(
                f"'{fqn}' of the checkpoint: expected {total} numbers in its chunks, got {numbers}. {DAMAGED}"
            )
