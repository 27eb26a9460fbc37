"""The fused optimizer of a table: set on its parameter, else in `fused_params`, else the default.

If a sharder and a module both have `fused_params`, the sharder's have priority.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.distributed.utils import (
    merge_fused_params,
    optimizer_type_to_emb_opt_type,
)

from torchrec_dyn.name_lists import listed
from torchrec_dyn.optimizers import PLACEMENT_KEYS, OptimizerKind, RowOptimizer, output_dtype_of

# Options of torch's Adam and AdamW that row optimizers do not have.
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
# Options that change only how torch computes, not the result.
_WITHOUT_EFFECT = ("foreach", "capturable", "fused")
# Options of torch, and FBGEMM's of the same meaning.
_TWICE = {"lr": ("learning_rate",), "betas": ("beta1", "beta2")}


def matching_optimizer(optimizer_class: type[torch.optim.Optimizer]) -> EmbOptimType | str:
    """Returns the row optimizer of a torch class: TorchRec's mapping, and AdamW, which TorchRec lacks."""
    if optimizer_class is torch.optim.AdamW:
        return OptimizerKind.ADAMW.name
    kind = optimizer_type_to_emb_opt_type(optimizer_class)
    assert kind is not None
    return kind


def _as_fused_params(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the options of a torch optimizer under FBGEMM's names. TorchRec's classes already use them."""
    _check_options(options, where)
    unused = (*_WITHOUT_EFFECT, *_UNSUPPORTED)
    spelled = {name: value for name, value in options.items() if name not in unused}
    if "betas" in spelled:
        try:
            spelled["beta1"], spelled["beta2"] = spelled.pop("betas")
        except (TypeError, ValueError):
            raise ValueError(
                f"{where}: expected betas as a pair of numbers, got {options['betas']!r}."
            ) from None
    return spelled


def _check_options(options: Mapping[str, Any], where: str) -> None:
    for name in _UNSUPPORTED:
        if options.get(name, False):
            raise ValueError(
                f"{where}: expected {name}=False, got {options[name]!r}. Row optimizers lack it: remove it."
            )
    for name, others in _TWICE.items():
        if name in options and (twice := [other for other in others if other in options]):
            raise ValueError(
                f"{where}: expected {name} or {' and '.join(others)} on the parameter, got {name} and "
                f"{' and '.join(twice)}. Remove one of them."
            )


def merged_fused_params(
    sharder_params: Mapping[str, Any] | None, module_params: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Merges the sharder's `fused_params` over the module's."""
    sharder, module = dict(sharder_params or {}), dict(module_params or {})
    if "optimizer" in sharder:  # the module's hyper-parameters belong to another
        module = {key: value for key, value in module.items() if key == "output_dtype"}
    return {**module, **sharder}


def chosen_fused_params(
    weight: torch.Tensor, fused_params: Mapping[str, Any] | None, where: str
) -> dict[str, Any] | None:
    """Merges the options that `apply_optimizer_in_backward` set on a placeholder over `fused_params`."""
    classes = getattr(weight, "_optimizer_classes", [])
    kwargs = getattr(weight, "_optimizer_kwargs", [])
    if len(classes) > 1:
        names = [optimizer.__name__ for optimizer in classes]
        raise ValueError(f"{where}: expected one optimizer on the parameter, got {names}.")
    if not classes and not fused_params:
        return None
    on_parameter = _as_fused_params(kwargs[0], where) if classes else {}
    if classes and classes[0] is not None:
        if "optimizer" in on_parameter:
            raise ValueError(
                f"{where}: expected one optimizer on the parameter, got {classes[0].__name__} and "
                f"{on_parameter['optimizer']} among its options. Remove the latter."
            )
        try:
            on_parameter["optimizer"] = matching_optimizer(classes[0])
        except ValueError:
            raise ValueError(
                f"{where}: expected an optimizer class that TorchRec can fuse, got {classes[0].__name__}. "
                "Use one of torchrec.optim, e.g. RowWiseAdagrad, or torch.optim.AdamW."
            ) from None
    # By TorchRec's own function, so that sharded and unsharded tables train in the same way.
    return merge_fused_params(dict(fused_params or {}), on_parameter)


def chosen_optimizer(
    weight: torch.Tensor, fused_params: Mapping[str, Any] | None, where: str
) -> RowOptimizer:
    """Returns the row optimizer of the table with a placeholder: chosen, or FBGEMM's default."""
    chosen = chosen_fused_params(weight, fused_params, where)
    return RowOptimizer.from_fused_params(chosen or {}, where)


def with_fbgemm_dtype(fused_params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a copy of `fused_params` with `output_dtype`, if set, as TorchRec's SparseType."""
    copied = dict(fused_params)
    if copied.get("output_dtype") is not None:
        copied["output_dtype"] = SparseType.from_dtype(output_dtype_of(copied, where))
    return copied


def check_fused_params(fused_params: object, where: str) -> None:
    """Raises ValueError unless `fused_params` are a mapping or None."""
    if fused_params is not None and not isinstance(fused_params, Mapping):
        raise ValueError(
            f"{where}.fused_params: expected a dict, got {fused_params!r}. Write "
            "{'optimizer': ..., 'learning_rate': ...}."
        )


def placement_options(fused_params: Mapping[str, Any] | None) -> list[str]:
    """Returns the keys of `fused_params` that ask for a cache or another place of the rows."""
    given = fused_params or {}
    return sorted(key for key in PLACEMENT_KEYS & given.keys() if given[key] not in (None, False))


def placement_warning(options: Iterable[str], where: str) -> str:
    """Returns the text of the warning that options of `placement_options` and of plans have no effect."""
    return (
        f"{where}: expected no options for a cache or another place of the rows, got {listed(options)}, "
        "which have no effect. Remove them. In a sharded model on GPUs, compute kernel 'fused_uvm_caching' "
        "with CacheParams(load_factor=...) has rows in the host's memory and a cache in the GPU's, if the "
        "table's own config has no storage; DynamicTableConfig(storage=HostMemory(gpu_rows=...)) does the "
        "same. On the CPU, storage=MappedFiles(...) has rows on a disk."
    )
