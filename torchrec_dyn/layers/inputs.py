"""The input of modules of one table: ids and weights in dense, jagged or nested tensors, and their bags.

`BagReader` reads bags. It has no parameters, so TorchRec's pipelines may run it ahead.

Legend: N values of the input, K ids to look up, B bags, T the length of a tile, D columns. The last dimension
of a dense tensor is the bag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup import largest_rows
from torchrec_dyn.modules import FeatureIds, FeatureReader, as_int64, check_not_traced
from torchrec_dyn.storage import host_numbers

Input: TypeAlias = Tensor | JaggedTensor


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


def read_ids(
    source: Input, padding_idx: int | None, where: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Checks an input and returns its ids [K], not padding nor holes, their number by bag [B], and positions.

    The positions [K] are those of the ids among the N values; None: all are ids.
    """
    _check_kind(source, where)
    values = as_int64(values_of(source), where)
    lengths, offsets, keep = _bags(source, values, where)
    if padding_idx is not None:
        is_id = values != padding_idx
        keep = is_id if keep is None else keep & is_id
    if keep is None:
        return values, lengths, None
    if offsets is None:
        offsets = bag_begins(lengths)
    kept_before = bag_begins(keep.long())
    kept = keep.nonzero().squeeze(1)
    return values[kept], kept_before[offsets].diff(), kept


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
    """Checks and returns the weights of an input that `read_ids` accepted: [N] float32, differentiable."""
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
    if not source.is_nested:
        return weights.shape == source.shape
    if not weights.is_nested or weights.layout != torch.jagged:
        return False
    if weights.values().shape != source.values().shape:
        return False
    parts = zip(nested_parts(source), nested_parts(weights), strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in parts)


def check_unscored(options: DynamicTableConfig, where: str) -> None:
    """Raises ValueError if a table scores ids by weights, which its lookup does not get."""
    if options.scores_weights:
        raise ValueError(
            f"{where}: expected an eviction that needs no weights, since this module looks up ids without "
            "their weights, got LowestScore. Use LeastFrequentlyUsed, or a DynamicEmbeddingBagCollection."
        )


class InputBags(NamedTuple):
    """The bags of an input."""

    ids: Tensor  # [K] int64
    lengths: Tensor  # [B] int64
    weights: Tensor | None  # [K] float32; None for unweighted bags
    shape: torch.Size  # of the output, without its last dimension


def one_bag(name: str, ids: Tensor) -> KeyedJaggedTensor:
    """Returns ids [K] int64 as a feature of one bag: sequence collections need as many bags on every rank."""
    lengths = torch.full((1,), ids.numel(), device=ids.device)
    return KeyedJaggedTensor([name], ids, lengths=lengths, stride=1)


class Part(NamedTuple):
    """The ids of one table, to be looked up one by one."""

    group: str  # of tables that share a collection
    features: list[str]
    ids: Tensor  # [sum of counts] int64, feature after feature
    counts: list[int]


def one_bag_each(parts: Sequence[Part]) -> dict[str, KeyedJaggedTensor]:
    """Returns the ids of each group; all ids of a feature are one bag, so features may differ in bags."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    return {
        group: KeyedJaggedTensor(
            keys=[name for part in members for name in part.features],
            values=torch.cat([part.ids for part in members]),
            lengths=host_numbers([count for part in members for count in part.counts]).to(
                members[0].ids.device, non_blocking=True
            ),
            stride=1,
        )
        for group, members in groups.items()
    }


def read_bags(features: KeyedJaggedTensor, read: FeatureReader) -> FeatureIds:
    """Checks a batch of bags whose rows are pooled outside their collection, and returns its ids."""
    found = read(maybe_td_to_kjt(features, None))
    if found.varies and features.inverse_indices_or_none() is None:
        raise ValueError(
            f"{read.where}: expected as many bags for each feature, got {found.batch_sizes}. "
            "Pass inverse_indices in the KeyedJaggedTensor."
        )
    return found


class BagReader(nn.Module):
    """A module that converts bags to a feature; it has the arguments of DynamicEmbeddingBag.

    With "mean", weights are divided by their sum in the bag, with "tile" bags are cut to T ids. With
    `sends_rows` the feature has no weights: they are used on the rank of the batch.
    """

    def __init__(
        self,
        name: str,
        mode: str,
        tile_length: int | None,
        is_weighted: bool,
        sends_rows: bool,
        padding_idx: int | None,
        where: str,
    ) -> None:
        super().__init__()
        self._name, self._mode, self._tile_length = name, mode, tile_length
        self._is_weighted, self._sends_rows = is_weighted, sends_rows
        self._padding_idx, self._where = padding_idx, where

    def forward(
        self, source: Input, weights: Tensor | None, is_sharded: bool
    ) -> tuple[KeyedJaggedTensor, InputBags]:
        """Returns the feature, and its bags; weights: in the shape of the ids, or None."""
        bags = self._bags(source, weights)
        if bags.weights is not None and self._mode == "mean":
            bags = bags._replace(weights=shares(bags.weights, bags.lengths))
        if self._tile_length is not None:
            bags = _cut(bags, self._tile_length)
        if self._sends_rows:
            return one_bag(self._name, bags.ids), bags
        needs_gradients = bags.weights is not None and bags.weights.requires_grad
        if is_sharded and needs_gradients and torch.is_grad_enabled():
            raise ValueError(
                f"{self._where}: expected weights without requires_grad, because a sharded pooled "
                "collection returns no gradients of weights, got weights with requires_grad. "
                "Make the module with weight_gradients=True, or detach them."
            )
        features = KeyedJaggedTensor(
            [self._name],
            bags.ids,
            weights=bags.weights,
            lengths=bags.lengths,
            stride=bags.lengths.numel(),
        )
        return features, bags

    def _bags(self, source: Input, weights: Tensor | None) -> InputBags:
        ids, lengths, kept = read_ids(source, self._padding_idx, self._where)
        if is_dense(source) and not source.dim():
            raise ValueError(
                f"{self._where}: expected ids [..., bag], got a tensor of no dimensions. "
                "A bag of one id is ids.view(1)."
            )
        id_weights = read_weights(source, weights, self._where)
        if id_weights is not None and not self._is_weighted:
            raise ValueError(
                f"{self._where}: expected no weights, got {id_weights.numel()}. "
                "Make the module with is_weighted=True."
            )
        if id_weights is not None and kept is not None:
            id_weights = id_weights[kept]
        if id_weights is None and self._is_weighted:
            id_weights = torch.ones(ids.numel(), dtype=torch.float32, device=ids.device)
        shape = source.shape[:-1] if is_dense(source) else lengths.shape
        return InputBags(ids, lengths, id_weights, shape)


def places_in_bags(lengths: Tensor, ids: int) -> tuple[Tensor, Tensor]:
    """Returns the bag of each of so many ids, and its place there, [K] each, of bags of lengths [B]."""
    bags = torch.arange(lengths.numel(), device=lengths.device)
    bag = torch.repeat_interleave(bags, lengths, output_size=ids)
    return bag, torch.arange(ids, device=lengths.device) - bag_begins(lengths)[bag]


def _cut(bags: InputBags, tile_length: int) -> InputBags:
    """Returns the first T ids of each bag."""
    _, place = places_in_bags(bags.lengths, len(bags.ids))
    kept = (place < tile_length).nonzero().squeeze(1)
    return bags._replace(
        ids=bags.ids[kept],
        lengths=bags.lengths.clamp(max=tile_length),
        weights=None if bags.weights is None else bags.weights[kept],
    )


def pooled_rows(rows: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
    """Returns the pooled rows of bags, [B, columns]: float32 sums, rounded once; zeros for an empty bag.

    rows [N, columns], bag after bag; lengths [B], checked; weights [N], the factor of each row, or None.
    """
    terms = rows.float() if weights is None else rows.float() * weights[:, None]
    if lengths.numel() == 0:  # in the graph: other ranks wait for the backward of this rank
        return terms.to(rows.dtype)
    # `unsafe`: torch does not check the lengths again. The host would wait for this check.
    pooled = torch.segment_reduce(terms, "sum", lengths=lengths, axis=0, unsafe=True)
    return (pooled / lengths.clamp(min=1)[:, None] if mean else pooled).to(rows.dtype)


def pooled_by(pooling: str, rows: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the pooled rows of bags, [B, columns], as `pooled_rows`; "max" takes no weights."""
    if pooling == "max":
        return largest_rows(rows, bag_begins(lengths))
    return pooled_rows(rows, lengths, weights, mean=pooling == "mean")


def shares(weights: Tensor, lengths: Tensor) -> Tensor:
    """Divides each weight [K] by the sum of its bag, of lengths [B] int64; zeros if that is 0."""
    bag, _ = places_in_bags(lengths, weights.numel())
    # A weight is a row of one column: rows are added in the same order on every device.
    total = pooled_rows(weights.unsqueeze(1), lengths, None, mean=False).squeeze(1)
    is_zero = (total == 0)[bag]
    # A divisor of zero would make the gradient NaN even where the quotient is not used.
    return torch.where(is_zero, 0.0, weights / total.where(total != 0, 1.0)[bag])
