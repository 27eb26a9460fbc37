"""LoadPlanner: with it, torch.distributed.checkpoint (DCP) loads tables of any saved size.

DCP itself reads into tensors of the saved size. The planner gets the blocks to read from the entry of each
dynamic table, and passes the blocks read to the entry. The model does not change before `load_state_dict`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
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
    MODEL_TENSORS,
    OPTIMIZER_CHECKSUM,
    OPTIMIZER_TENSORS,
    ROW_TENSORS,
    ChunkedTensor,
    SavedTensor,
    check_config_is_whole,
    compare_sums,
    content_sum,
    from_words,
    sum_of_small,
)
from torchrec_dyn.state_dict.awaited_loads import note_begun, note_read_plain, note_resized
from torchrec_dyn.state_dict.collection_state import check_is_not_static
from torchrec_dyn.state_dict.load_session import LoadSession, TableEntry
from torchrec_dyn.state_dict.loading import ModelEntry
from torchrec_dyn.state_dict.own_places import own_places
from torchrec_dyn.state_dict.row_reads import RowReads


class LoadPlanner(DefaultLoadPlanner):
    """The load planner for `torch.distributed.checkpoint.load` of a state dict with dynamic tables.

    Pass it to the load, then load the state dict into the model::

        dcp.load(state_dict, checkpoint_id=path, planner=LoadPlanner())
        dmp.load_state_dict(state_dict["model"])

    Everything else is loaded as DCP's own planner loads it.

    Args:
        *options: the arguments of DCP's planner.
        path: directory of the checkpoint. With it each rank finds its rows by a few of the saved ids, reads
            no others, and reads them straight into their places, which is faster. Without it DCP's reader
            loads them chunk by chunk, and some more at either end, as the saved index tells them.
        **named: the named arguments of DCP's planner, as `allow_partial_load`.
    """

    _files: FileSystemReader | None  # of the path
    _begun: list[TableEntry]  # entries of sharded tables
    _names: dict[str, str]  # names of the tensors of sharded tables, by key
    _empty: set[str]  # keys of unsharded tables that are not in the checkpoint
    _plain: set[str]  # all keys of unsharded tables
    _left: int  # items that are not read yet
    _reads: dict[tuple[int, str], RowReads]  # reads of rows that DCP does not make, by table

    def __init__(
        self, *options: Any, path: str | os.PathLike[str] | None = None, **named: Any
    ) -> None:
        super().__init__(*options, **named)
        self._path = path

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Finds the tensors of each table in the checkpoint."""
        assert metadata is not None
        self._names, self._empty, self._plain, self._reads = {}, set(), set(), {}
        saved = metadata.state_dict_metadata
        flat, paths = flatten_state_dict(state_dict)
        found: dict[str, tuple[TableEntry, dict[str, TensorStorageMetadata]]] = {}
        for fqn, value in flat.items():
            of_saved = saved.get(fqn)
            if isinstance(value, SavedTensor) and value.entry is not None:
                _check_chunks(fqn, of_saved)
                prefix, _, self._names[fqn] = fqn.rpartition(".")
                # `apply_delta` reads deltas into entries that belong to no state dict.
                if value.entry.is_of_state_dict and prefix not in found:
                    _check_is_no_delta(prefix, saved)
                    check_is_not_static(f"{prefix}.", saved, f"'{prefix}' of the checkpoint")
                _, tensors = found.setdefault(prefix, (value.entry, {}))
                if isinstance(of_saved, TensorStorageMetadata):
                    tensors[self._names[fqn]] = of_saved
            elif isinstance(value, Tensor) and _is_of_unsharded_table(fqn, flat):
                prefix, _, name = fqn.rpartition(".")
                check_is_not_static(f"{prefix}.", saved, f"'{prefix}' of the checkpoint")
                if not _is_dynamic(prefix, saved):
                    continue
                self._plain.add(fqn)
                _check_chunks(fqn, of_saved)
                _check_is_no_delta(prefix, saved)
                resized = _resized(value, name, of_saved)
                if resized is not None:
                    note_resized(value, resized)
                    set_element(state_dict, paths[fqn], resized)
                if of_saved is None:
                    self._empty.add(fqn)
        begun = []
        self._files, places = None, {}
        if self._path is not None:
            self._files = FileSystemReader(self._path)
            self._files.set_up_storage_reader(metadata, is_coordinator=True)
            places = own_places(self._files, found)
        for prefix, (entry, tensors) in found.items():
            if tensors or not self.allow_partial_load:
                entry.begin(tensors, *places.get(prefix, ()))
                begun.append(entry)
            else:
                entry.leave_out()
        self._begun = begun
        LoadSession(begun)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Returns the reads of this rank: of a dynamic table, the rows that this rank holds."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        ours = {*self._names, *self._empty}
        others = {fqn: value for fqn, value in self.state_dict.items() if fqn not in ours}
        plan = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        files = self._files
        for fqn, name in self._names.items():
            of_saved = saved.get(fqn)
            if isinstance(of_saved, TensorStorageMetadata):
                entry: TableEntry = self.state_dict[fqn].entry
                if files is not None and name in entry.names and name != "waiting":
                    table = id(entry.table.lock), entry.table.name
                    rows = ChunkedTensor(f"'{fqn}' in {self._path}", files, fqn, of_saved)
                    self._reads.setdefault(table, RowReads()).add(entry, name, rows)
                    continue
                chunks = entry.wanted(name)
                plan.items += create_read_items_for_chunk_list(fqn, of_saved, chunks)
        return plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Reads the rows that DCP does not read, and returns the plan as DCP's planner does.

        DCP calls it on all ranks, or on none: if a rank cannot make its plan, the load fails before.
        """
        for entry in self._begun:
            if isinstance(entry, ModelEntry) and entry.is_of_state_dict:
                note_begun(entry)
        self._left = len(new_plan.items)
        for reads in self._reads.values():
            reads.read()
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads an item that is not a tensor."""
        super().load_bytes(read_item, value)
        self._count()

    def _count(self) -> None:
        """Counts a loaded item; verifies unsharded tables after the last item.

        Sharded tables are verified later, over all ranks.
        """
        assert self.metadata is not None
        self._left -= 1
        if not self._left:
            loaded = {fqn: self.state_dict[fqn] for fqn in self._plain}
            _verify_unsharded(loaded, self.metadata.state_dict_metadata)
            for tensor in loaded.values():
                note_read_plain(tensor)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns the tensor into which a block is read."""
        fqn = read_item.dest_index.fqn
        if fqn not in self._names:
            return super().resolve_tensor(read_item)
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata[fqn]
        assert isinstance(saved, TensorStorageMetadata)
        name, offset = self._names[fqn], _offset_of(read_item)
        entry, dtype = self.state_dict[fqn].entry, saved.properties.dtype
        return entry.target(name, offset, read_item.lengths, dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Passes a block that was read to the entry of its table."""
        fqn = read_item.dest_index.fqn
        if fqn not in self._names:
            super().commit_tensor(read_item, tensor)
            self._count()
            return
        self.state_dict[fqn].entry.receive(self._names[fqn], _offset_of(read_item), tensor)
        self._count()


def _offset_of(read_item: ReadItem) -> tuple[int, ...]:
    """Returns the place of an item's first number in the whole tensor."""
    begin = read_item.dest_index.offset or ()
    return tuple(a + b for a, b in zip(begin, read_item.dest_offsets, strict=True))


def _is_of_unsharded_table(fqn: str, flat: Mapping[str, Any]) -> bool:
    """Returns True if a tensor belongs to an unsharded table, by its name and the tensors beside it.

    The size of such a tensor depends on the contents of the table.
    """
    prefix, _, name = fqn.rpartition(".")
    for names in (MODEL_NAMES, ("optimizer_config", *OPTIMIZER_TENSORS, OPTIMIZER_CHECKSUM)):
        both = [flat.get(f"{prefix}.{one}") for one in (names[0], names[-1])]
        if name in names:
            return [getattr(one, "dtype", None) for one in both] == [torch.uint8, torch.int64]
    return False


def _is_dynamic(prefix: str, saved: Mapping[str, Any]) -> bool:
    """Returns True if a dynamic table, or its optimizer state, was saved."""
    configs = [saved.get(f"{prefix}.{name}") for name in ("config", "optimizer_config")]
    return any(
        isinstance(config, TensorStorageMetadata) and config.properties.dtype == torch.uint8
        for config in configs
    )


def _check_is_no_delta(prefix: str, saved: Mapping[str, Any]) -> None:
    """Raises ValueError if only the changes of a table were saved: the other rows would be lost."""
    if f"{prefix}.base" in saved:
        raise ValueError(
            f"'{prefix}' of the checkpoint: expected a full checkpoint, got a delta, which has the changed "
            "rows only. Load the full checkpoint before it, then call "
            "torchrec_dyn.checkpoint.apply_delta with each delta after it, in order."
        )


def _check_chunks(fqn: str, saved: Any) -> None:
    """Raises ValueError unless the chunks have all numbers of a tensor: else room is made for any number."""
    if isinstance(saved, TensorStorageMetadata):
        total, found = math.prod(saved.size), sum(math.prod(one.sizes) for one in saved.chunks)
        if found != total:
            raise ValueError(
                f"'{fqn}' of the checkpoint: expected {total} numbers in its chunks, got {found}. {DAMAGED}"
            )


def _resized(value: Tensor, name: str, saved: Any) -> Tensor | None:
    """Returns a new tensor of the saved size; None if the present tensor has that size.

    If no tensor is saved, the new tensor is empty: a checkpoint may lack tensors without numbers.
    """
    if isinstance(saved, TensorStorageMetadata):
        is_right = saved.size == value.size() and saved.properties.dtype == value.dtype
        if is_right and not isinstance(value, SavedTensor):
            return None
        return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
    size = (2, 0) if name == "clock" else (0, *value.shape[1:])
    return torch.empty(size, dtype=value.dtype, device="cpu")


def _verify_unsharded(loaded: Mapping[str, Tensor], saved: Mapping[str, object]) -> None:
    """Raises ValueError if an unsharded table or its optimizer state is damaged, before any is loaded.

    loaded: tensors by key of the checkpoint, of unsharded tables only; `saved` has any value by every key.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in loaded.items():
        prefix, _, name = key.rpartition(".")
        groups.setdefault(prefix, {})[name] = tensor

    def check(prefix: str, order: tuple[str, ...], ids: Tensor) -> None:
        tensors, table = groups[prefix], prefix.rpartition(".")[2]
        checksum = "checksum" if order == MODEL_TENSORS else OPTIMIZER_CHECKSUM
        if checksum not in tensors:
            return
        saved_sums = from_words(tensors[checksum])
        check_config_is_whole(prefix, table, tensors, saved_sums)
        sums = {
            name: content_sum(table, name, ids, tensors[name])
            if name in ROW_TENSORS
            else sum_of_small(table, name, tensors[name])
            for name in order
            if name in tensors
        }
        # A tensor that is in the checkpoint and was not read cannot be compared.
        names = [name for name in order if name in sums or f"{prefix}.{name}" not in saved]
        compare_sums(prefix, saved_sums, names, sums)

    ids_of: dict[str, list[Tensor]] = {}
    for prefix, tensors in groups.items():
        if "ids" in tensors and "config" in tensors:
            check(prefix, MODEL_TENSORS, tensors["ids"])
            ids_of.setdefault(prefix.rpartition(".")[2], []).append(tensors["ids"])
    for prefix, tensors in groups.items():
        ids = ids_of.get(prefix.rpartition(".")[2], [])
        if "step" in tensors and len(ids) == 1:  # else the load of the optimizer state verifies it
            check(prefix, OPTIMIZER_TENSORS, ids[0])
