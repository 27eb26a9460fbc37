"""Checks of a table's device and inputs. They run before anything is changed.

`where` is the table, or the table and the method, for messages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.config import HostMemory, MappedFiles
from torchrec_dyn.life import check_life
from torchrec_dyn.storage import check_directory

ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def checked_device(where: str, dtype: torch.dtype, device: torch.device | str) -> torch.device:
    """Returns a device with its index; raises ValueError unless tables support it, and this dtype of rows."""
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


def present_gpu(device: torch.device | str) -> torch.device:
    """Returns a device with its index: "cuda" is the current GPU of this thread, now and not at first use."""
    place = torch.device(device)
    if place.type != "cuda" or place.index is not None:
        return place
    try:
        return torch.empty(0, device=place).device
    except (RuntimeError, AssertionError):
        return place  # tables say what is missing when they make their first row


def check_storage(
    where: str, storage: HostMemory | MappedFiles | None, device: torch.device
) -> None:
    """Raises ValueError unless the rows of a table on this device can be where its config wants them."""
    if not isinstance(storage, MappedFiles):
        return
    if device.type != "cpu":
        raise ValueError(
            f"{where}: expected rows on the CPU, since its storage is MappedFiles, got {device}. Keep the "
            "collection on the CPU, or give DynamicTableConfig(storage=HostMemory(gpu_rows))."
        )
    check_directory(where, storage.directory)


def check_ids(where: str, ids: Tensor) -> Tensor:
    """Returns ids for an op, contiguous; raises ValueError unless they are ids [M] of int64."""
    _check_tensor(where, "ids", ids)
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(
            f"{where}: expected ids [M] of int64, got {list(ids.shape)} of {ids.dtype}. "
            "Convert with ids.long().flatten()."
        )
    return ids.detach().contiguous()


def check_rows(where: str, rows: Tensor, shape: tuple[int, int]) -> None:
    """Raises ValueError unless they are rows [M, D] of floating point numbers; `shape` is M, D."""
    _check_tensor(where, "rows", rows)
    if tuple(rows.shape) != shape or not rows.is_floating_point():
        raise ValueError(
            f"{where}: expected floating point rows of shape "
            f"{list(shape)}, got {list(rows.shape)} of {rows.dtype}."
        )


def _check_tensor(where: str, what: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise ValueError(
            f"{where}: expected {what} as a tensor, got {type(given).__name__}. "
            "Convert with torch.as_tensor()."
        )
    if given.is_meta:
        raise ValueError(f"{where}: expected {what} with values, got {what} on the meta device.")


def check_state(
    where: str,
    state: Mapping[str, Tensor],
    columns: int,
    state_shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises ValueError unless a saved form fits a table of D columns; optimizer state may be missing.

    state: the saved form, in any order of ids. state_shapes: the shape of one row of each optimizer state.
    """
    if "ids" not in state or "weight" not in state:
        raise ValueError(f"{where}: expected ids and weight, got {sorted(state)}.")
    ids = state["ids"]
    check_ids(where, ids)
    if torch.unique(ids).numel() != ids.numel():
        raise ValueError(f"{where}: expected distinct ids, got repeated ones.")
    _check_shape_of(where, "weight", state["weight"], (ids.numel(), columns))
    step = state.get("step", torch.tensor(0, device="cpu"))
    if step.numel() != 1 or not 0 <= int(step) < 1 << 62:
        raise ValueError(f"{where}: expected a step >= 0, got {step.tolist()}.")
    for name, of_row in state_shapes.items():
        if name in state:
            _check_shape_of(where, name, state[name], (ids.numel(), *of_row))
    check_life(where, state, ids)


def _check_shape_of(where: str, name: str, saved: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(saved.shape) != shape:
        raise ValueError(
            f"{where}: expected {name} of shape {list(shape)}, got "
            f"{list(saved.shape)}. Was it saved from another table or optimizer?"
        )
