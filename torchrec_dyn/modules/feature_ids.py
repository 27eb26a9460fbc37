"""Reads a KeyedJaggedTensor: checks it and selects the ids of chosen features, in a chosen order.

The lengths of a batch on a GPU are checked when the host first reads their sums: with the first numbers of
the lookup (lookup/first_read.py), or earlier, where a caller needs the sums.

Legend: F features read, N ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.lookup import UnreadCounts
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ops import complete_cumsum


@dataclass(frozen=True)
class FeatureIds:
    """The checked ids of some features, one feature after the other.

    Shapes: ids [N] int64, lengths [sum of batch_sizes], weights and scores [N] float32, batch_sizes [F].
    `given_counts` are the ids of each feature, or how to read them; `bag` is the length of every bag if it
    is known to be the same; `given_offsets` are the offsets if they were computed for the counts.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None
    batch_sizes: list[int]
    given_counts: list[int] | UnreadCounts
    bag: int | None
    given_offsets: Tensor | None = None
    scores: Tensor | None = None

    @property
    def counts(self) -> list[int]:
        """The number of ids of each feature, [F]."""
        given = self.given_counts
        return given.get() if isinstance(given, UnreadCounts) else given

    @property
    def varies(self) -> bool:
        """True if features differ in the number of bags."""
        return len(set(self.batch_sizes)) > 1

    def offsets(self) -> Tensor:
        """Returns the begin of each bag and the end of the last bag, [sum of batch_sizes + 1] int64.

        Do not write to it: batches of equal bags share one tensor.
        """
        if self.given_offsets is not None:
            return self.given_offsets
        if self.bag is not None:
            return _equal_offsets(self.lengths.numel(), self.bag, self.lengths.device)
        return complete_cumsum(self.lengths)

    def feature_offsets(self) -> Tensor:
        """Returns the begin of each feature and the end of the last feature, [F + 1] int64."""
        if isinstance(self.given_counts, UnreadCounts):
            return self.given_counts.begins
        begins = torch.tensor([0, *accumulate(self.counts)], device="cpu")
        return begins.to(self.ids.device, non_blocking=True)

    def select(self, positions: Sequence[int]) -> FeatureIds:
        """Returns the features at these positions; a position may be repeated."""
        return FeatureIds(
            ids=_picked(self.ids, self.counts, positions),
            lengths=_picked(self.lengths, self.batch_sizes, positions),
            weights=None if self.weights is None else _picked(self.weights, self.counts, positions),
            batch_sizes=[self.batch_sizes[i] for i in positions],
            given_counts=[self.counts[i] for i in positions],
            bag=self.bag,
            scores=None if self.scores is None else _picked(self.scores, self.counts, positions),
        )


@lru_cache(maxsize=8)
def _equal_offsets(bags: int, bag: int, device: torch.device) -> Tensor:
    # Cached for later batches. So one-hot features never need a cumulative sum.
    return torch.arange(bags + 1, device=device) * bag


def _picked(values: Tensor, sizes: list[int], positions: Sequence[int]) -> Tensor:
    """Joins parts of a tensor; consecutive parts are returned as a view, without a copy."""
    if all(after == before + 1 for before, after in pairwise(positions)):
        begin = sum(sizes[: min(positions, default=0)])
        return values[begin : begin + sum(sizes[i] for i in positions)]
    parts = torch.split(values, sizes)
    return torch.cat([parts[i] for i in positions])


class FeatureReader:
    """Reads the features of a collection's tables, in table order; a feature may belong to several tables.

    With `weighted`, bags have weights; with `scored`, some table scores its ids by the weights of a batch.
    """

    def __init__(
        self,
        feature_names: Sequence[Sequence[str]],
        weighted: bool,
        where: Sequence[str],
        scored: bool = False,
    ) -> None:
        self._feature_names = feature_names
        self._weighted = weighted
        self._scored = scored
        self._where = list(where)
        self._collection = where[0].partition("(")[0]
        # Keys of the last batch and positions of our features among them; None: all features, in the order of
        # the batch. One attribute, because several threads may read batches.
        self._last: tuple[list[str] | None, list[int] | None] = (None, None)

    def __call__(self, features: KeyedJaggedTensor) -> FeatureIds:
        """Checks a batch and returns its ids, in table order; it may have more features, in any order."""
        if not isinstance(features, KeyedJaggedTensor):
            if isinstance(features, LazyAwaitable):  # of a module that sends the batch
                features = features.wait()
            check_keyed(features, self._collection)
        keys = features.keys()
        known, positions = self._last
        if keys != known:
            positions = self._find(keys)
            self._last = (list(keys), positions)
        read = _read_features(features, self._weighted, self._collection, self._scored)
        return read if positions is None else read.select(positions)

    def _find(self, keys: Sequence[str]) -> list[int] | None:
        index = {key: position for position, key in enumerate(keys)}
        for names, table in zip(self._feature_names, self._where, strict=True):
            for name in names:
                if name not in index:
                    raise ValueError(f"{table}: expected feature '{name}', got features {keys}.")
        read = [name for names in self._feature_names for name in names]
        check_keys_once(keys, read, self._collection)
        positions = [index[name] for name in read]
        return None if positions == list(range(len(keys))) else positions


def check_keyed(features: object, where: str) -> None:
    """Raises ValueError if a batch is no KeyedJaggedTensor, e.g. a tensor or a dict."""
    check_not_traced(features, where)
    if not isinstance(features, KeyedJaggedTensor):
        raise ValueError(
            f"{where}: expected a KeyedJaggedTensor, got {type(features).__name__}. Name the features of the "
            "ids: KeyedJaggedTensor(keys, values, lengths=lengths)."
        )


def check_not_traced(ids: object, where: str) -> None:
    """Raises ValueError if torch.fx traces the module: a lookup depends on the ids."""
    if isinstance(ids, torch.fx.Proxy):
        raise ValueError(
            f"{where}: expected ids, got a Proxy of torch.fx, which cannot trace a lookup. Make the class of "
            "the module a leaf: torchrec.fx.symbolic_trace(model, leaf_modules=[type(module).__name__])."
        )


def check_keys_once(keys: Sequence[str], features: Iterable[str], where: str) -> None:
    """Raises ValueError if the keys of a batch have one of the features that a collection reads twice."""
    if len(set(keys)) == len(keys):
        return
    repeated = sorted(name for name in set(features) if keys.count(name) > 1)
    if repeated:
        raise ValueError(
            f"{where}: expected each feature once in a batch, got features {listed(repeated)} repeatedly "
            f"in keys {listed(keys)}. Rename one of them, or join their bags."
        )


def checked_features(
    features: KeyedJaggedTensor, weighted: bool, where: str, scored: bool = False
) -> FeatureIds:
    """Checks that the tensors of a batch match, and returns the ids of all features, in their order."""
    return _read_features(features, weighted, where, scored, reads_counts=True)


def _read_features(
    features: KeyedJaggedTensor,
    weighted: bool,
    where: str,
    scored: bool,
    reads_counts: bool = False,
) -> FeatureIds:
    """Returns the ids of all features; lengths on a GPU are checked when the counts are read."""
    ids = as_int64(features.values(), where)
    if ids.dim() != 1:
        raise ValueError(f"{where}: expected values [N], got values of shape {list(ids.shape)}.")
    weights, scores = _weights(features, weighted, scored, where)
    lengths, batch_sizes = _lengths(features, where)
    stated = features.offsets_or_none() if lengths.numel() else None
    if stated is not None and stated.numel() != lengths.numel() + 1:
        raise _offsets_that_differ(where)
    counts: list[int] | UnreadCounts
    bag, offsets = None, None
    if lengths.numel() and not lengths.is_cpu and not reads_counts:
        offsets = complete_cumsum(lengths)
        counts = _unread_counts(lengths, offsets, stated, batch_sizes, ids.numel(), where)
    else:
        counts, bag = _checked_counts(lengths, stated, batch_sizes, ids.numel(), where)
    return FeatureIds(ids, lengths, weights, batch_sizes, counts, bag, offsets, scores)


def _lengths(features: KeyedJaggedTensor, where: str) -> tuple[Tensor, list[int]]:
    """Returns the number of ids of each bag, [bags of all features], and of bags of each feature, [F]."""
    lengths, batch_sizes = features.lengths(), _batch_sizes(features, where)
    if lengths.dim() != 1:  # [F, B], which TorchRec's collections take, too
        lengths = lengths.reshape(-1)
    if lengths.numel() != sum(batch_sizes):
        raise ValueError(
            f"{where}: expected {sum(batch_sizes)} lengths for {len(batch_sizes)} features "
            f"of {batch_sizes} bags, got {lengths.numel()}."
        )
    return lengths, batch_sizes


def _checked_counts(
    lengths: Tensor, stated: Tensor | None, batch_sizes: Sequence[int], ids: int, where: str
) -> tuple[list[int], int | None]:
    """Returns the ids of each feature, [F], and of every bag if all have as many.

    Shapes: lengths [bags of all features], stated [bags + 1] the offsets of the batch, if it has them.
    """
    shortest = longest = 0
    if lengths.numel() and not lengths.is_cpu:
        return _counts_read_at_once(lengths, stated, batch_sizes, ids, where), None
    if lengths.numel():
        shortest, longest = map(int, torch.aminmax(lengths))
    if shortest == longest:
        counts = [longest * bags for bags in batch_sizes]
    elif len(set(batch_sizes)) == 1:
        counts = lengths.reshape(len(batch_sizes), -1).sum(1).tolist()
    else:
        counts = [int(part.sum()) for part in torch.split(lengths, list(batch_sizes))]
    _check_sums(where, ids, counts, (shortest, longest))
    if stated is not None and not torch.equal(stated.long(), complete_cumsum(lengths)):
        raise _offsets_that_differ(where)
    return counts, longest if shortest == longest else None


def _counts_read_at_once(
    lengths: Tensor, stated: Tensor | None, batch_sizes: Sequence[int], ids: int, where: str
) -> list[int]:
    """As `_checked_counts`, with one wait for the GPU."""
    if len(set(batch_sizes)) == 1:
        counts = lengths.reshape(len(batch_sizes), -1).sum(1)
    else:
        counts = torch.stack([part.sum() for part in torch.split(lengths, list(batch_sizes))])
    differ = [] if stated is None else [(stated != complete_cumsum(lengths)).any()]
    numbers = torch.hstack([counts, *torch.aminmax(lengths), *differ]).tolist()
    counted, bounds = numbers[: len(batch_sizes)], numbers[len(batch_sizes) :]
    _check_sums(where, ids, counted, bounds)
    return counted


def _weights(
    features: KeyedJaggedTensor, weighted: bool, scored: bool, where: str
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the weights of a batch in its bags and as scores, [N] float32; None where they are not used."""
    weights = features.weights_or_none() if weighted or scored else None
    if weights is None:
        if weighted:
            raise ValueError(
                f"{where}: expected weights for weighted bags, got none. "
                "Pass weights in the KeyedJaggedTensor, or create the collection with is_weighted=False."
            )
        return None, None
    if not weights.is_floating_point():
        raise ValueError(f"{where}: expected weights of a floating dtype, got {weights.dtype}.")
    ids = features.values()
    if weights.shape != ids.shape:
        raise ValueError(
            f"{where}: expected one weight per id, got {weights.numel()} for {ids.numel()} ids."
        )
    weights = weights.float()
    return weights if weighted else None, weights.detach() if scored else None


def _batch_sizes(features: KeyedJaggedTensor, where: str) -> list[int]:
    """Returns the number of bags of each feature, [F]."""
    sizes, name = features.stride_per_key(), "stride"
    if features.variable_stride_per_key():
        name = "stride_per_key_per_rank"
        others = [sum(sizes_by_rank) for sizes_by_rank in features.stride_per_key_per_rank()]
    else:
        others = [features.stride()] * len(sizes)
    if sizes != others:
        raise ValueError(
            f"{where}: expected one number of bags of each feature, got {listed(sizes)} by "
            f"stride_per_key and {listed(others)} by {name}. Leave stride_per_key out of the "
            "KeyedJaggedTensor."
        )
    return sizes


def _offsets_that_differ(where: str) -> ValueError:
    return ValueError(
        f"{where}: expected offsets that begin at 0 and agree with the lengths of a batch, got others. Pass "
        "lengths or offsets to the KeyedJaggedTensor, not both."
    )


def as_int64(ids: Tensor, where: str) -> Tensor:
    """Returns ids [N] as int64: themselves, int32 ids in a new tensor, or the bits of uint64 ids."""
    if ids.dtype == torch.int64:
        return ids
    if ids.dtype == torch.int32:
        return ids.long()
    if ids.dtype == torch.uint64:
        return ids.view(torch.int64)
    raise ValueError(
        f"{where}: expected ids of dtype int64, int32 or uint64, got {ids.dtype}. Convert with ids.long()."
    )


def _check_sums(where: str, ids: int, counts: Sequence[int], bounds: Sequence[int]) -> None:
    """Raises ValueError unless the lengths of a batch with so many ids are valid.

    counts [F] are their sums, bounds the least and the greatest; a third number is 1 if offsets differ.
    """
    least, most, *differ = bounds
    # No length may exceed the number of ids: so sums do not overflow, and offsets ascend.
    if least < 0 or most > ids or sum(counts) != ids:
        raise ValueError(
            f"{where}: expected lengths that are not negative and add up to the {ids} ids, "
            f"got a minimum of {least} and a sum of {sum(counts)}."
        )
    if any(differ):
        raise _offsets_that_differ(where)


def _unread_counts(
    lengths: Tensor,
    offsets: Tensor,
    stated: Tensor | None,
    batch_sizes: list[int],
    ids: int,
    where: str,
) -> UnreadCounts:
    """Returns the counts of a batch on a GPU, which check its lengths when they are read."""
    if len(set(batch_sizes)) == 1:
        begins = offsets[:: batch_sizes[0]]
    else:
        bags = torch.tensor([0, *accumulate(batch_sizes)], device="cpu")
        begins = offsets[bags.to(offsets.device, non_blocking=True)]
    differ = [] if stated is None else [(stated != offsets).any()]
    words = torch.hstack([begins, *torch.aminmax(lengths), *differ])
    return UnreadCounts(words, len(batch_sizes), partial(_check_sums, where, ids))
