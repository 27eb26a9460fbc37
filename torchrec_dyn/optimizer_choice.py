"""Which fused optimizer trains a table: its parameter's, else `fused_params`, else the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.utils import (
    convert_to_fbgemm_types,
    merge_fused_params,
    optimizer_type_to_emb_opt_type,
)

from torchrec_dyn.optimizers import RowOptimizer

# What FBGEMM trains with when nobody chose: EXACT_SGD, learning rate 0.01.
# Source: SplitTableBatchedEmbeddingBagsCodegen.__init__ in
# fbgemm_gpu/split_table_batched_embeddings_ops_training.py.
DEFAULT_FUSED_PARAMS: Mapping[str, Any] = {"learning_rate": 0.01}


def chosen_fused_params(
    weight: torch.Tensor, fused_params: Mapping[str, Any] | None, where: str
) -> dict[str, Any] | None:
    """Merges what `apply_optimizer_in_backward` left on a parameter over `fused_params`.

    The merge is TorchRec's own, so that a table trains sharded as it does unsharded.

    Args:
        weight: the table's placeholder parameter, [num_embeddings, embedding_dim].
        fused_params: the module's, or None.
        where: the table, for messages.

    Returns:
        None where neither the parameter nor `fused_params` says anything.

    Raises:
        ValueError: if the parameter has two optimizers, or one that no row optimizer corresponds
            to.
    """
    classes = getattr(weight, "_optimizer_classes", [])
    kwargs = getattr(weight, "_optimizer_kwargs", [])
    if len(classes) > 1:
        names = [optimizer.__name__ for optimizer in classes]
        raise ValueError(f"{where}: expected one optimizer on the parameter, got {names}.")
    if not classes and not fused_params:
        return None
    on_parameter = dict(kwargs[0]) if classes else {}
    if classes and classes[0] is not None:
        try:
            on_parameter["optimizer"] = optimizer_type_to_emb_opt_type(classes[0])
        except ValueError:
            raise ValueError(
                f"{where}: expected an optimizer class that TorchRec can fuse, got "
                f"{classes[0].__name__}. "
                "Use one of torchrec.optim, e.g. RowWiseAdagrad."
            ) from None
    return merge_fused_params(dict(fused_params or {}), on_parameter)


def chosen_optimizer(
    weight: torch.Tensor, fused_params: Mapping[str, Any] | None, where: str
) -> RowOptimizer:
    """Gives the row optimizer of one table; FBGEMM's default where nobody chose.

    Args:
        weight: the table's placeholder parameter, [num_embeddings, embedding_dim].
        fused_params: the module's, or None.
        where: the table, for messages.

    Raises:
        ValueError: if the choice is not supported.
    """
    chosen = chosen_fused_params(weight, fused_params, where)
    if chosen is None:
        chosen = dict(DEFAULT_FUSED_PARAMS)
    return RowOptimizer.from_fused_params(chosen, where)


def chosen_output_dtype(fused_params: Mapping[str, Any] | None) -> torch.dtype:
    """Gives the dtype of the outputs: float32 unless `output_dtype` says otherwise."""
    output_dtype = convert_to_fbgemm_types(dict(fused_params or {})).get("output_dtype")
    if output_dtype is None or isinstance(output_dtype, torch.dtype):
        return output_dtype or torch.float32
    return output_dtype.as_dtype()
