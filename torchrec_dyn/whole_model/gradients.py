"""Gradients of a whole model between backward and `step()`: clipping by norm, and loss scaling.

For tables with deferred updates (`fused_params={"defer_updates": True}`): their gradients wait for `step()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler as TorchGradScaler
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardedModule, ShardingType

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.ranks import gather_results
from torchrec_dyn.whole_model.tables import (
    ShardedCollection,
    collections_of,
    groups_of,
    optimizers_of,
)

_Groups = list[tuple[dist.ProcessGroup | None, list[TableGroup]]]


@not_compiled
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Clips the gradients of a model by their norm over dense parameters and dynamic rows together.

    Call it like `torch.nn.utils.clip_grad_norm_`, after backward and before `optimizer.step()`: if the norm
    of all gradients is above `max_norm`, all are multiplied by `max_norm / (norm + 1e-6)`. The gradient of a
    dynamic row is the sum that its optimizer would use, over all micro-batches. Each row counts once, on the
    rank that holds it, and each column shard counts its columns. Dense parameters are the same on all ranks
    of `group` and count once. Static sharded tables update their rows in backward, so they are not counted,
    as in torch.

    Collective: all ranks of `group` call it. It needs memory for the row sums of one table group at a time, 4
    bytes for each column of each distinct row, and reads the result on the host.

    Args:
        model: DistributedModelParallel, or any module with dynamic collections. All of its dynamic tables
            have `fused_params={"defer_updates": True}`.
        max_norm: the largest norm.
        norm_type: p of the norm, above 0; may be infinity.
        error_if_nonfinite: True to raise an error if the norm is NaN or infinite.
        group: the ranks that have the same dense parameters; None: those over which the model is sharded.
            With `Replicas`, whose dense gradients are averaged over all replicas, pass all ranks
            (`dist.group.WORLD`): the rows of each replica then count, and the norm is the same everywhere.

    Returns:
        The norm before clipping, [] float32 on the CPU.

    Raises:
        ValueError: if updates are not deferred, the model has static tables of the compute kernel "dense"
            that are not replicated, an argument is not valid, or `group` lacks ranks of the model.
        RuntimeError: with `error_if_nonfinite`, if the norm is NaN or infinite; no gradient has changed.
    """
    where = "clip_grad_norm_"
    power, most = _checked_numbers(norm_type, max_norm, where)
    grouped = _deferring_groups(model, where, group)
    _check_no_sharded_gradients(model, where)
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    grads = [grad for grad in grads if grad.numel()]
    total = _total_norm(grads, grouped, power, where)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"{where}: expected a finite norm of the gradients, got {total}. Look for the loss or the input "
            "that is not finite, or pass error_if_nonfinite=False."
        )
    factor = most / (total + 1e-6)
    if not factor >= 1.0:
        for grad in grads:
            grad.mul_(factor)
        for table_group in chain(*(groups for _, groups in grouped)):
            table_group.scale_updates(factor)
    return torch.tensor(total, dtype=torch.float32, device="cpu")


def _checked_numbers(norm_type: float, max_norm: float, where: str) -> tuple[float, float]:
    try:
        power, most = float(norm_type), float(max_norm)
    except (TypeError, ValueError, OverflowError):
        power = most = math.nan
    if not power > 0 or math.isnan(most) or most < 0:
        raise ValueError(
            f"{where}: expected norm_type > 0 and max_norm >= 0, got {norm_type!r} and {max_norm!r}."
        )
    return power, most


def _total_norm(grads: list[Tensor], grouped: _Groups, power: float, where: str) -> float:
    """Returns the norm of dense gradients and of the rows of all ranks. Collective."""
    parts = [float(_whole(torch.linalg.vector_norm(grad, power))) for grad in grads]
    for process_group, groups in grouped:
        parts += gather_results(process_group, where, partial(_norm, groups, power))
    return _combined(parts, power)


def _unscaled(groups: list[TableGroup], factor: float, is_infinite: bool) -> bool:
    """Multiplies the gradients of the groups; returns True if one is not finite, or `is_infinite`."""
    are_finite = [group.unscale_updates(factor) for group in groups]
    return is_infinite or not all(are_finite)


def _norm(groups: list[TableGroup], power: float) -> float:
    return _combined([float(group.norm_of_updates(power)) for group in groups], power)


def _combined(norms: list[float], power: float) -> float:
    """Returns the norm of all numbers from norms of parts; NaN if one is."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if math.isinf(power) or largest in (0.0, math.inf):
        return largest
    # Divided first: a power of a large norm may be too large for a float.
    return largest * math.fsum((norm / largest) ** power for norm in norms) ** (1.0 / power)


def _whole(norm: Tensor) -> Tensor:
    """Returns the norm of a whole DTensor, which torch gives as one DTensor; other norms as they are."""
    full: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)
    return norm if full is None else full()


def _deferring_groups(
    model: nn.Module, where: str, group: dist.ProcessGroup | None = None
) -> _Groups:
    """Returns the table groups of each collection, with the ranks that decide: its own, or `group`."""
    grouped: _Groups = []
    for path, collection in collections_of(model, where):
        if not all(optimizer.defer_updates for optimizer in optimizers_of(collection)):
            raise ValueError(
                f"{where}: expected deferred updates of the tables of {path or type(collection).__name__}, "
                "got tables that backward updates: their gradients are gone. Set "
                "fused_params={'defer_updates': True, ...}."
            )
        own, groups = groups_of(collection)
        if group is not None:
            _check_has_ranks(group, own, where)
        grouped.append((group or own, groups))
    return grouped


def _check_has_ranks(group: dist.ProcessGroup, own: dist.ProcessGroup | None, where: str) -> None:
    ranks = dist.get_process_group_ranks(group) if dist.get_rank(group) >= 0 else []
    needed = [dist.get_rank()] if own is None else dist.get_process_group_ranks(own)
    if outside := sorted({*needed} - {*ranks}):
        raise ValueError(
            f"{where}: expected a group with all ranks of the model, got {ranks} without {outside}. Pass the "
            "group of all ranks that have the same dense parameters."
        )


def _static_tables(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns the paths of the sharded static tables of a model, with their shardings."""
    return [
        (f"{path}.{name}", sharding)
        for path, module in model.named_modules()
        if isinstance(module, ShardedModule)
        and not any(isinstance(inner, ShardedCollection) for inner in module.modules())
        for name, sharding in (getattr(module, "module_sharding_plan", None) or {}).items()
    ]


def _check_no_sharded_gradients(model: nn.Module, where: str) -> None:
    for path, sharding in _static_tables(model):
        is_dense = sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
        if is_dense and sharding.sharding_type != ShardingType.DATA_PARALLEL.value:
            raise ValueError(
                f"{where}: expected static tables that are fused or data_parallel, got {path} "
                "with the kernel dense, whose gradients are spread over ranks. Use another kernel."
            )


def _check_no_fused_tables(model: nn.Module, where: str) -> None:
    for path, sharding in _static_tables(model):
        if sharding.compute_kernel != EmbeddingComputeKernel.DENSE.value:
            raise ValueError(
                f"{where}: expected static tables that are data_parallel, got {path} with the kernel "
                f"{sharding.compute_kernel}, whose backward updates the rows by gradients with the scale in "
                "them. Make the table dynamic or data_parallel, or train in bfloat16 without a scaler."
            )


class GradScaler(TorchGradScaler):
    """torch's GradScaler for a model with deferred row updates.

    Row gradients are divided by the scale together with the gradients of the dense parameters. If any
    gradient of the optimizer is NaN or infinite on any rank of `group`, `step` skips the rows and the dense
    part on all of them. bfloat16 needs no scaler.

    Pass a single optimizer of rows and dense parameters, e.g. a CombinedOptimizer, and call `zero_grad()`
    after each step: it drops the gradients of a skipped step. All ranks of `group` call `unscale_` and
    `step`, which are collective.

    Args:
        model: a model with dynamic collections, all with `fused_params={"defer_updates": True}`.
        device: as in `torch.amp.GradScaler`.
        group: as in `clip_grad_norm_`.
        **options: other arguments of `torch.amp.GradScaler`.

    Raises:
        ValueError: if `device` is neither cpu nor cuda; for an enabled scaler, if updates are not deferred,
            `group` lacks ranks of the model, or the model has static tables that backward updates.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str = "cuda",
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if str(device).split(":")[0] not in ("cpu", "cuda"):
            raise ValueError(
                f"GradScaler.device: expected 'cpu' or 'cuda', got {device!r}. "
                "Write the type of the model's device."
            )
        super().__init__(device, **options)
        self._model, self._group = model, group
        if self._enabled:
            _deferring_groups(model, "GradScaler", group)
            _check_no_fused_tables(model, "GradScaler")

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        where = "GradScaler.unscale_"
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        dense_is_infinite = any(map(bool, flags.values()))
        unscale = partial(_unscaled, factor=float(inv_scale), is_infinite=dense_is_infinite)
        are_infinite: list[bool] = []
        for _, collection in collections_of(self._model, where):
            if held.isdisjoint(map(id, collection.fused_optimizer.params.values())):
                continue
            own, groups = groups_of(collection)
            are_infinite += gather_results(self._group or own, where, partial(unscale, groups))
        if are_infinite:
            flags.setdefault(found_inf.device, found_inf)
            for flag in flags.values():
                flag.fill_(float(any(are_infinite)))
        return flags
