"""Reads a KeyedJaggedTensor: checks its form and selects the ids of chosen features, in a chosen order.

The lookup checks the lengths of a batch where it reads them. Who needs their sums before has them checked
here.

Legend: F features read, N ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.name_lists import listed
from torchrec_dyn.ops import complete_cumsum


@dataclass
class FeatureIds:
    """The ids of some features, one feature after the other.

    Shapes: ids [N] int64, lengths [sum of batch_sizes], `stated` [sum of batch_sizes + 1] the offsets that
    the batch states beside them, weights and scores [N] float32, batch_sizes [F]. `varies`: True if features
    differ in the number of bags. `where` begins errors.
    """

    ids: Tensor
    lengths: Tensor
    stated: Tensor | None
    weights: Tensor | None
    batch_sizes: list[int]
    varies: bool
    where: str
    scores: Tensor | None = None
    _counts: list[int] | None = field(default=None, repr=False)
    _begins: Tensor | None = field(default=None, repr=False)

    @property
    def counts(self) -> list[int]:
        """The number of ids of each feature, [F], after checks of lengths and offsets. A GPU's host waits."""
        if self._counts is None:
            if self._begins is None:
                self._counts, _ = self._checked_counts()
            else:
                self._counts = self._begins.diff().tolist()
        return self._counts

    def counts_by_rank(self, lengths: Tensor, ranks: int) -> list[int]:
        """Returns the number of ids for each rank and feature, [ranks * F], and notes the checked counts.

        lengths [ranks * bags]: of these ids, sorted by rank.
        """
        sums = _sums_of_runs(lengths, self.batch_sizes * ranks)
        self._counts, by_rank = self._checked_counts(sums)
        return by_rank

    def _checked_counts(self, *others: Tensor) -> tuple[list[int], list[int]]:
        """Returns the counts and other numbers, all by one read."""
        features, ids = len(self.batch_sizes), self.ids.numel()
        read = [_sums_of_runs(self.lengths, self.batch_sizes), *others]
        end = sum(one.numel() for one in read)
        if self.lengths.numel():
            read += torch.aminmax(self.lengths)
            if self.stated is not None:
                read.append((self.stated != complete_cumsum(self.lengths)).any())
        numbers = torch.hstack(read).tolist()  # a GPU's host waits once
        counts, (least, most, *differ) = numbers[:features], numbers[end:] or (0, 0)
        # No length may exceed the number of ids: so sums do not overflow, and offsets ascend.
        if least < 0 or most > ids or sum(counts) != ids:
            raise ValueError(
                f"{self.where}: expected lengths that are not negative and add up to the {ids} ids, "
                f"got a minimum of {least} and a sum of {sum(counts)}."
            )
        if any(differ):
            raise _offsets_that_differ(self.where)
        return counts, numbers[features:end]

    def note_begins(self, begins: Tensor) -> None:
        """Notes where the ids of each feature begin, [F + 1] int64 on the CPU, which a lookup has read."""
        self._begins = begins

    def offsets(self) -> Tensor:
        """Returns the checked begin of each bag, and the end of the last, [sum of batch_sizes + 1] int64."""
        _ = self.counts
        return complete_cumsum(self.lengths)

    def select(self, positions: Sequence[int]) -> FeatureIds:
        """Returns the features at these positions; a position may be repeated."""
        counts, sizes = self.counts, [self.batch_sizes[i] for i in positions]
        return FeatureIds(
            ids=_picked(self.ids, counts, positions),
            lengths=_picked(self.lengths, self.batch_sizes, positions),
            stated=None,
            weights=None if self.weights is None else _picked(self.weights, counts, positions),
            batch_sizes=sizes,
            varies=len(set(sizes)) > 1,
            where=self.where,
            scores=None if self.scores is None else _picked(self.scores, counts, positions),
            _counts=[counts[i] for i in positions],
        )


def _sums_of_runs(lengths: Tensor, sizes: list[int]) -> Tensor:
    """Returns the sums of runs of lengths, one after the other, [runs]; sizes [runs]."""
    if len(set(sizes)) > 1:
        return torch.stack([part.sum() for part in torch.split(lengths, sizes)])
    return lengths.reshape(len(sizes), -1).sum(1)


def _picked(values: Tensor, sizes: list[int], positions: Sequence[int]) -> Tensor:
    """Joins parts of a tensor; consecutive parts are returned as a view, without a copy."""
    if all(after == before + 1 for before, after in pairwise(positions)):
        begin = sum(sizes[: min(positions, default=0)])
        return values[begin : begin + sum(sizes[i] for i in positions)]
    parts = torch.split(values, sizes)
    return torch.cat([parts[i] for i in positions])


@dataclass(eq=False)
class FeatureReader:
    """Reads the features of a collection's tables, in table order; a feature may belong to several tables."""

    configs: Sequence[BaseEmbeddingConfig]
    weighted: bool
    where: str
    scored: bool = False

    def __post_init__(self) -> None:
        # Keys of the last batch and positions of our features among them; None: all features, in the order of
        # the batch. One attribute, because several threads may read batches.
        self._last: tuple[list[str] | None, list[int] | None] = (None, None)

    def __call__(self, features: KeyedJaggedTensor) -> FeatureIds:
        """Checks a batch and returns its ids, in table order; it may have more features, in any order."""
        if not isinstance(features, KeyedJaggedTensor):
            if isinstance(features, LazyAwaitable):  # of a module that sends the batch
                features = features.wait()
            check_keyed(features, self.where)
        keys = features.keys()
        known, positions = self._last
        if keys != known:
            positions = self._find(keys)
            self._last = (list(keys), positions)
        read = read_features(features, self.weighted, self.where, self.scored)
        return read if positions is None else read.select(positions)

    def _find(self, keys: Sequence[str]) -> list[int] | None:
        index = {key: position for position, key in enumerate(keys)}
        pairs = [(config.name, name) for config in self.configs for name in config.feature_names]
        for table, name in pairs:
            if name not in index:
                raise ValueError(
                    f"{self.where}(table='{table}'): expected feature '{name}', got features {keys}."
                )
        read = [name for _, name in pairs]
        check_keys_once(keys, read, self.where)
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


def read_features(
    features: KeyedJaggedTensor, weighted: bool, where: str, scored: bool = False
) -> FeatureIds:
    """Checks that the tensors of a batch match, and returns the ids of all features, in their order."""
    ids, weights, scores = features.values(), None, None
    if ids.dtype != torch.int64:
        ids = as_int64(ids, where)
    if ids.dim() != 1:
        raise ValueError(f"{where}: expected values [N], got values of shape {list(ids.shape)}.")
    if weighted or scored:
        weights, scores = _weights(features, weighted, scored, where)
    lengths, batch_sizes = features.lengths(), features.stride_per_key()
    varies = len(set(batch_sizes)) > 1
    if varies or features.variable_stride_per_key():
        _check_batch_sizes(features, where)
    if lengths.dim() != 1:  # [F, B], which TorchRec's collections take, too
        lengths = lengths.reshape(-1)
    if lengths.numel() != sum(batch_sizes):
        raise ValueError(
            f"{where}: expected {sum(batch_sizes)} lengths for {len(batch_sizes)} features "
            f"of {batch_sizes} bags, got {lengths.numel()}."
        )
    stated = features.offsets_or_none()
    if stated is not None:
        stated = _checked_offsets(stated, lengths, where)
    return FeatureIds(ids, lengths, stated, weights, batch_sizes, varies, where, scores)


def _weights(
    features: KeyedJaggedTensor, weighted: bool, scored: bool, where: str
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the weights of a batch in its bags and as scores, [N] float32; None where they are not used."""
    weights = features.weights_or_none()
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


def _check_batch_sizes(features: KeyedJaggedTensor, where: str) -> None:
    """Raises ValueError if a batch states two numbers of bags of a feature."""
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


def _checked_offsets(offsets: Tensor, lengths: Tensor, where: str) -> Tensor | None:
    """Returns the offsets that a batch states beside its lengths; None without bags."""
    if not lengths.numel():
        return None
    if offsets.numel() != lengths.numel() + 1:
        raise _offsets_that_differ(where)
    return offsets


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
