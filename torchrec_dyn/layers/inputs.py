"""The input of a module of one table: ids in a dense, jagged or jagged nested tensor, and their weights.

Legend: N values of the input, K ids to look up, B bags. The last dimension of a dense tensor is the bag.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_dyn.layers.row_pooling import pooled_rows
from torchrec_dyn.modules import as_int64, check_not_traced

Input: TypeAlias = Tensor | JaggedTensor


class InputIds(NamedTuple):
    """The ids to look up, bag by bag."""

    ids: Tensor  # [K] int64
    lengths: Tensor  # [B] int64, number of ids in each bag
    kept: Tensor | None  # [K] int64, positions of the ids among the N values; None: all are ids


def is_dense(source: Input) -> bool:
    """Returns True if an input that `read_ids` accepts is a dense tensor."""
    return not isinstance(source, JaggedTensor) and not source.is_nested


def nested_parts(nested: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the bags of a jagged nested tensor; it is an Any because class Tensor lacks these methods.

    Returns offsets: [B + 1], the begin of each bag and the end of the last bag.
    Returns lengths: [B], number of values in each bag if there are holes between bags, else None.
    """
    return nested.offsets(), nested.lengths()


def values_of(source: Input) -> Tensor:
    """Returns the values of an input that `read_ids` accepts, bag after bag: [N] in its dtype."""
    # A column of a matrix keeps its strides when it is reshaped to one dimension. gloo cannot send that.
    return (source.reshape(-1) if is_dense(source) else source.values()).contiguous()


def read_ids(source: Input, padding_idx: int | None, where: str) -> InputIds:
    """Checks an input and returns the ids other than `padding_idx`, as int64.

    Holes between the bags of a nested tensor are skipped.
    """
    _check_kind(source, where)
    values = as_int64(values_of(source), where)
    lengths, offsets, keep = _bags(source, values, where)
    if padding_idx is not None:
        is_id = values != padding_idx
        keep = is_id if keep is None else keep & is_id
    if keep is None:
        return InputIds(values, lengths, None)
    if offsets is None:
        offsets = bag_begins(lengths)
    kept_before = bag_begins(keep.long())
    kept = keep.nonzero().squeeze(1)
    return InputIds(values[kept], kept_before[offsets].diff(), kept)


def bag_begins(lengths: Tensor) -> Tensor:
    """Returns the begin of each bag and the end of the last, [B + 1] int64, of lengths [B] int64."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _check_kind(source: Input, where: str) -> None:
    """Raises ValueError unless an input is a dense tensor or jagged over one dimension."""
    check_not_traced(source, where)
    if isinstance(source, JaggedTensor):
        if source.values().dim() != 1:
            raise ValueError(
                f"{where}: expected a JaggedTensor with values [N], got values of shape "
                f"{list(source.values().shape)}."
            )
        return
    if not isinstance(source, Tensor):
        raise ValueError(
            f"{where}: expected ids in a Tensor or a JaggedTensor, got {type(source).__name__}. "
            'Pass one feature of a KeyedJaggedTensor: features["name"].'
        )
    if source.is_nested:
        if source.layout != torch.jagged:
            raise ValueError(
                f"{where}: expected a nested tensor of layout torch.jagged, got {source.layout}. "
                "Make it with layout=torch.jagged."
            )
        if source.dim() != 2:
            raise ValueError(
                f"{where}: expected a nested tensor [bags, ids], got {source.dim()} dimensions."
            )
    elif source.layout != torch.strided:
        raise ValueError(
            f"{where}: expected a dense tensor of ids, got layout {source.layout}. "
            "Make it dense, or a JaggedTensor."
        )


def _bags(source: Input, values: Tensor, where: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns lengths [B]; with holes also offsets [B + 1] and a mask of the values in bags, [N] bool."""
    if is_dense(source):
        length = source.shape[-1] if source.dim() else 1
        bags = source.shape[:-1].numel()
        return torch.full((bags,), length, device=values.device), None, None
    if isinstance(source, JaggedTensor):
        lengths = source.lengths().long()
    else:
        offsets, of_bags = nested_parts(source)
        if of_bags is not None:
            return _bags_with_holes(offsets.long(), of_bags.long(), values, where)
        lengths = offsets.diff().long()
    least = most = total = 0
    if lengths.numel():  # on a GPU one wait
        least, most, total = torch.stack([*torch.aminmax(lengths), lengths.sum()]).tolist()
    # If no length exceeds the number of ids, the sum of the lengths cannot overflow.
    if least < 0 or most > values.numel() or total != values.numel():
        raise ValueError(
            f"{where}: expected lengths >= 0 that add up to the {values.numel()} ids, "
            f"got a minimum of {least} and a sum of {total}."
        )
    return lengths, None, None


def _bags_with_holes(
    offsets: Tensor, lengths: Tensor, values: Tensor, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    room = offsets.diff()
    are_inside = ((lengths >= 0) & (lengths <= room)).all() & (offsets[0] >= 0)
    if not bool(are_inside & (offsets[-1] <= values.numel())):
        raise ValueError(
            f"{where}: expected bags of a nested tensor that do not overlap and are within its "
            f"{values.numel()} values, got offsets {offsets.tolist()} and lengths {lengths.tolist()}."
        )
    places = torch.arange(values.numel(), device=values.device)
    bag = torch.bucketize(places, offsets[1:], right=True)
    ends = torch.nn.functional.pad(offsets[:-1] + lengths, (0, 1))
    keep = (places >= offsets[0]) & (places < ends[bag])
    return lengths, offsets, keep


def read_weights(source: Input, weights: Tensor | None, where: str) -> Tensor | None:
    """Checks and returns the weights of an input that `read_ids` accepted.

    weights: in the shape of the ids, with the same bags if nested; for a JaggedTensor, which may contain
    some, one per value; or None.

    Returns [N] float32, differentiable; None if there are no weights.
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
        fits = weights.is_nested and _have_same_bags(source, weights)
    else:
        fits = weights.shape == source.shape
    if not fits:
        shape = values_of(source).shape if isinstance(source, JaggedTensor) else source.shape
        raise ValueError(
            f"{where}: expected weights of the shape of the ids, {list(shape)}, got "
            f"{list(weights.shape)}."
        )
    return values_of(weights).float()


def _have_same_bags(ids: Tensor, weights: Tensor) -> bool:
    if weights.layout != torch.jagged or weights.values().shape != ids.values().shape:
        return False
    (offsets, lengths), (other, of_weights) = nested_parts(ids), nested_parts(weights)
    if lengths is None or of_weights is None:
        return lengths is of_weights and torch.equal(offsets, other)
    return torch.equal(offsets, other) and torch.equal(lengths, of_weights)


def shares(weights: Tensor, lengths: Tensor) -> Tensor:
    """Divides each weight by the sum of its bag, so that a weighted sum becomes a weighted mean.

    weights: [K] float32; lengths: [B] int64, number of ids in each bag.

    Returns [K] float32; zeros, with zero gradients, in a bag whose weights sum to 0.
    """
    bag = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=weights.device), lengths, output_size=weights.numel()
    )
    total = _sums_by_bag(weights, bag, lengths)
    is_zero = (total == 0)[bag]
    # A divisor of zero would make the gradient NaN even where the quotient is not used.
    return torch.where(is_zero, 0.0, weights / total.where(total != 0, 1.0)[bag])


def _sums_by_bag(weights: Tensor, bag: Tensor, lengths: Tensor) -> Tensor:
    """Returns the sum of the weights of each bag, [B] float32; the same bits on every device."""
    if weights.is_cpu:
        return weights.new_zeros(lengths.numel()).index_add(0, bag, weights)
    # On CUDA `index_add` adds in any order. Segments of rows are added in order, segments of numbers in
    # another order than on the CPU; so each weight is a row of one column.
    return pooled_rows(weights.unsqueeze(1), lengths, None, False).squeeze(1)
