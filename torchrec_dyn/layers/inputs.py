"""The input of a module of one table: ids in a dense, jagged or jagged nested tensor, and their weights.

Legend: N values of the input, K ids to look up, B bags. The last dimension of a dense tensor is the bag.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_dyn.config import DynamicTableConfig
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
    """Returns offsets [B + 1] of a jagged nested tensor, and lengths [B] if it has holes between bags."""
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
        offsets, bag_lengths = nested_parts(source)
        if bag_lengths is not None:
            return _bags_with_holes(offsets.long(), bag_lengths.long(), values, where)
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
    """Checks and returns the weights of an input that `read_ids` accepted: [N] float32, differentiable.

    weights: in the shape of the ids, with the same bags if nested; for a JaggedTensor, which may contain
    weights itself, one per value; or None.
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
    if not _fit(source, weights):
        shape = values_of(source).shape if isinstance(source, JaggedTensor) else source.shape
        raise ValueError(
            f"{where}: expected weights of the shape of the ids, {list(shape)}, got "
            f"{list(weights.shape)}."
        )
    return values_of(weights).float()


def _fit(source: Input, weights: Tensor) -> bool:
    if isinstance(source, JaggedTensor):
        return weights.shape == source.values().shape
    if source.is_nested:
        return weights.is_nested and _have_same_bags(source, weights)
    return weights.shape == source.shape


def _have_same_bags(ids: Tensor, weights: Tensor) -> bool:
    if weights.layout != torch.jagged or weights.values().shape != ids.values().shape:
        return False
    (offsets, lengths), (others, other_lengths) = nested_parts(ids), nested_parts(weights)
    if lengths is None or other_lengths is None:
        return lengths is other_lengths and torch.equal(offsets, others)
    return torch.equal(offsets, others) and torch.equal(lengths, other_lengths)


def check_unscored(options: DynamicTableConfig, where: str) -> None:
    """Raises ValueError if a table scores ids by weights, which its lookup does not get."""
    if options.scores_weights:
        raise ValueError(
            f"{where}: expected an eviction that needs no weights, since this module looks up ids without "
            "their weights, got LowestScore. Use LeastFrequentlyUsed, or a DynamicEmbeddingBagCollection."
        )
