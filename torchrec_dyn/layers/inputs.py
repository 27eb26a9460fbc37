"""What a module of one table reads: ids in a dense tensor, a JaggedTensor or a jagged nested tensor.

Legend: N values of the input, K ids to look up, B bags. The last dimension of a dense tensor is a bag.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

Input: TypeAlias = Tensor | JaggedTensor


class InputIds(NamedTuple):
    """The ids to look up, bag by bag.

    Attributes:
        ids: [K] int64.
        lengths: [B] int64, how many of them each bag has.
        kept: [K] int64, where they stand among the values of the input; None: they are all of them.
    """

    ids: Tensor
    lengths: Tensor
    kept: Tensor | None


def is_dense(source: Input) -> bool:
    """Tells whether an input that `read_ids` takes is a dense tensor.

    Args:
        source: the input.
    """
    return not isinstance(source, JaggedTensor) and not source.is_nested


def nested_parts(nested: Any) -> tuple[Tensor, Tensor | None]:
    """Returns where the bags of a jagged nested tensor begin.

    Args:
        nested: a tensor, whose type does not tell these methods.

    Returns:
        offsets: [B + 1], where each bag begins and the last one ends.
        lengths: [B], values of each bag where there are holes behind them, else None.
    """
    return nested.offsets(), nested.lengths()


def values_of(source: Input) -> Tensor:
    """Returns the values of an input that `read_ids` takes, one bag after the other.

    Args:
        source: the input.

    Returns:
        [N], of the dtype of the input.
    """
    # A column of a matrix keeps its strides in any shape of one dimension; gloo sends none such.
    return (source.reshape(-1) if is_dense(source) else source.values()).contiguous()


def read_ids(source: Input, padding_idx: int | None, where: str) -> InputIds:
    """Reads the ids of an input, checking it first.

    Args:
        source: int64 ids; a nested tensor may have holes between its bags, which are passed over.
        padding_idx: an id that is passed over; None: no id is.
        where: the module, for messages.

    Raises:
        ValueError: if it is another kind of input, or its tensors do not fit each other.
    """
    _check_kind(source, where)
    values = values_of(source)
    if values.dtype != torch.int64:
        raise ValueError(
            f"{where}: expected ids of dtype int64, got {values.dtype}. Convert with ids.long()."
        )
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
    """Sums lengths.

    Args:
        lengths: [B] int64.

    Returns:
        [B + 1] int64, where each bag begins and the last one ends.
    """
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _check_kind(source: Input, where: str) -> None:
    """Refuses what is neither a dense tensor nor jagged over one dimension."""
    if isinstance(source, JaggedTensor):
        if source.values().dim() != 1:
            raise ValueError(
                f"{where}: expected a JaggedTensor of one id a value, got values of shape "
                f"{list(source.values().shape)}."
            )
        return
    if not isinstance(source, Tensor):
        raise ValueError(
            f"{where}: expected ids in a Tensor or a JaggedTensor, got {type(source).__name__}. "
            'Of a KeyedJaggedTensor pass one feature, features["name"].'
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
    """Returns lengths [B], where that tells more offsets [B + 1], and which values stand in a bag, [N]."""
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
    least = int(lengths.min()) if lengths.numel() else 0
    # No length above the number of ids: then no sum of them overflows.
    most = int(lengths.max()) if lengths.numel() else 0
    if least < 0 or most > values.numel() or int(lengths.sum()) != values.numel():
        raise ValueError(
            f"{where}: expected lengths that are not negative and add up to the {values.numel()} ids, "
            f"got a least of {least} and a sum of {int(lengths.sum())}."
        )
    return lengths, None, None


def _bags_with_holes(
    offsets: Tensor, lengths: Tensor, values: Tensor, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    room = offsets.diff()
    if not bool(((lengths >= 0) & (lengths <= room)).all()) or not (
        int(offsets[0]) >= 0 and int(offsets[-1]) <= values.numel()
    ):
        raise ValueError(
            f"{where}: expected bags of a nested tensor that lie apart among its {values.numel()} "
            f"values, got offsets {offsets.tolist()} and lengths {lengths.tolist()}."
        )
    places = torch.arange(values.numel(), device=values.device)
    bag = torch.bucketize(places, offsets[1:], right=True)
    ends = torch.nn.functional.pad(offsets[:-1] + lengths, (0, 1))
    keep = (places >= offsets[0]) & (places < ends[bag])
    return lengths, offsets, keep
