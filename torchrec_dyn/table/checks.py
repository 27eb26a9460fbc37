"""Checks of a table's shape, limits and inputs. They run before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life import NO_STEP, check_life
from torchrec_dyn.table.contents import NamedState

if TYPE_CHECKING:
    from torchrec_dyn.table.table import DynamicTable

ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_shape(table: DynamicTable) -> None:
    """Raises ValueError unless a table supports its shape."""
    for field in ("num_embeddings", "embedding_dim", "columns", "row_limit"):
        if getattr(table, field) < 1:
            raise ValueError(
                f"{table.where}.{field}: expected at least 1, got {getattr(table, field)}."
            )
    if table.first_column < 0 or table.first_column + table.columns > table.embedding_dim:
        raise ValueError(
            f"{table.where}: expected columns inside [0, {table.embedding_dim}), got "
            f"[{table.first_column}, {table.first_column + table.columns})."
        )


def checked_device(where: str, dtype: torch.dtype, device: torch.device | str) -> torch.device:
    """Returns a device with its index; raises ValueError unless tables support it, and this dtype.

    Args:
        where: the table, for messages.
        dtype: dtype of the rows.
        device: device of the rows.
    """
    if dtype not in ROW_DTYPES:
        raise ValueError(
            f"{where}: expected rows of float32, float16 or bfloat16, got {dtype}. "
            "Set data_type of the table's config."
        )
    device = torch.device(device)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(
            f"{where}: expected rows on cpu or cuda, got {device}. Keep the collection on the CPU."
        )
    if not ops.has_cuda_kernels():
        raise ValueError(
            f"{where}: expected rows on the CPU, since torchrec_dyn was built without CUDA "
            f"kernels, got {device}. Build it where nvcc is installed, or keep the collection on the CPU."
        )
    try:
        return torch.empty(0, device=device).device
    # A torch without CUDA raises AssertionError.
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{where}: expected a device that torch can use, got {device}: {why}. Install a build of "
            "torch with CUDA on a machine with a GPU, or keep the collection on the CPU."
        ) from error


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def check_room(table: DynamicTable, additional: int) -> None:
    """Raises RuntimeError if `additional` more rows exceed the limit."""
    if additional and table.num_rows + additional > table.row_limit:
        raise RuntimeError(
            f"{table.where} on rank {_rank()}: expected at most {table.row_limit} rows here "
            f"(num_embeddings={table.num_embeddings}), got {table.num_rows} and {additional} new "
            "ids. Raise num_embeddings, or evict rows: DynamicTableConfig(eviction=...)."
        )


def check_step(table: DynamicTable, step: int) -> None:
    """Raises RuntimeError if a step number does not fit into a score (after 4 * 10^9 steps)."""
    if step >= NO_STEP:
        raise RuntimeError(
            f"{table.where}: expected a training step below {NO_STEP}, got {step}. "
            "Load the table's state without its scores and its step."
        )


def check_need(table: DynamicTable, need: int) -> None:
    """Raises RuntimeError if the rows of one batch alone exceed the limit.

    Args:
        table: a table with a policy that replaces rows.
        need: distinct ids of the batch that have a row or were admitted.
    """
    if need > table.row_limit:
        raise RuntimeError(
            f"{table.where} on rank {_rank()}: expected a batch that needs at most "
            f"{table.row_limit} rows here (num_embeddings={table.num_embeddings}), got {need} "
            "distinct ids. Raise num_embeddings, or make the batch smaller."
        )


def check_ids(where: str, ids: Tensor) -> Tensor:
    """Returns ids for an op, contiguous; raises ValueError unless they are [M] int64.

    Args:
        where: the table and method, for messages.
        ids: [M] int64, with any strides.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(
            f"{where}: expected ids [M] of int64, got {list(ids.shape)} of {ids.dtype}. "
            "Convert with ids.long().flatten()."
        )
    return ids.detach().contiguous()


def check_rows(table: DynamicTable, rows: Tensor, count: int, method: str) -> None:
    """Raises ValueError unless rows fit a table.

    Args:
        table: the table.
        rows: [count, D] floating point.
        count: number of ids.
        method: name of the caller, for messages.
    """
    if tuple(rows.shape) != (count, table.columns) or not rows.is_floating_point():
        raise ValueError(
            f"{table.where}.{method}: expected floating point rows of shape "
            f"[{count}, {table.columns}], got {list(rows.shape)} of {rows.dtype}."
        )


def check_state(
    where: str, state: Mapping[str, Tensor], columns: int, states: Sequence[NamedState]
) -> None:
    """Raises ValueError unless a saved form fits a table; optimizer state may be missing.

    Args:
        where: the table, for messages.
        state: the saved form, in any order of ids.
        columns: D, number of columns of the table.
        states: the table's optimizer states.
    """
    if "ids" not in state or "weight" not in state:
        raise ValueError(f"{where}: expected ids and weight, got {sorted(state)}.")
    step = state.get("step", torch.tensor(0, device="cpu"))
    if step.numel() != 1 or not 0 <= int(step) < 1 << 62:
        raise ValueError(f"{where}: expected a step >= 0, got {step.tolist()}.")
    ids = state["ids"]
    check_ids(where, ids)
    if torch.unique(ids).numel() != ids.numel():
        raise ValueError(f"{where}: expected distinct ids, got repeated ones.")
    expected: dict[str, tuple[int, ...]] = {"weight": (ids.numel(), columns)}
    for named in states:
        one_row = () if named.is_rowwise else (named.store.columns,)
        expected[named.name] = (ids.numel(), *one_row)
    for name, shape in expected.items():
        if name in state and tuple(state[name].shape) != shape:
            raise ValueError(
                f"{where}: expected {name} of shape {list(shape)}, got "
                f"{list(state[name].shape)}. Was it saved from another table or optimizer?"
            )
    check_life(where, state, ids)
