"""The weights that come with the ids of a module of one table.

Legend: N values of the input, K ids looked up, B bags.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_dyn.layers.inputs import Input, nested_parts, values_of


def read_weights(source: Input, weights: Tensor | None, where: str) -> Tensor | None:
    """Reads the weights of an input that `read_ids` took.

    Args:
        source: the ids; a JaggedTensor may carry weights itself.
        weights: of the shape of the ids, jagged alike if they are nested; of a JaggedTensor one per value.
        where: the module, for messages.

    Returns:
        [N] float32, differentiable, or None where there are none.

    Raises:
        ValueError: if they do not fit the ids, or are given twice.
    """
    own = source.weights_or_none() if isinstance(source, JaggedTensor) else None
    if own is not None and weights is not None:
        raise ValueError(
            f"{where}: expected weights once, got them in the JaggedTensor and as `weights`. "
            "Leave one of them out."
        )
    weights = own if weights is None else weights
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{where}: expected weights of a floating dtype, got {got}.")
    if isinstance(source, JaggedTensor):
        fits = weights.shape == source.values().shape
    elif source.is_nested:
        fits = weights.is_nested and _are_jagged_alike(source, weights)
    else:
        fits = weights.shape == source.shape
    if not fits:
        shape = values_of(source).shape if isinstance(source, JaggedTensor) else source.shape
        raise ValueError(
            f"{where}: expected weights of the shape of the ids, {list(shape)}, got "
            f"{list(weights.shape)}."
        )
    return values_of(weights).float()


def _are_jagged_alike(ids: Tensor, weights: Tensor) -> bool:
    if weights.layout != torch.jagged or weights.values().shape != ids.values().shape:
        return False
    (offsets, lengths), (other, of_weights) = nested_parts(ids), nested_parts(weights)
    if lengths is None or of_weights is None:
        return lengths is of_weights and torch.equal(offsets, other)
    return torch.equal(offsets, other) and torch.equal(lengths, of_weights)


def shares(weights: Tensor, lengths: Tensor) -> Tensor:
    """Divides each weight by the sum of its bag, so that a weighted sum becomes a weighted mean.

    Args:
        weights: [K] float32.
        lengths: [B] int64, ids of each bag.

    Returns:
        [K] float32; zeros, with zero gradients, in a bag whose weights sum to 0.
    """
    bag = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=weights.device), lengths, output_size=weights.numel()
    )
    total = weights.new_zeros(lengths.numel()).index_add(0, bag, weights)
    is_nothing = (total == 0)[bag]
    # The division must not see a zero: its gradient would be NaN even where it is not taken.
    return torch.where(is_nothing, 0.0, weights / total.where(total != 0, 1.0)[bag])
