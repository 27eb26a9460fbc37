"""The served collections, pooled and sequence, with the interfaces of TorchRec's collections.

Legend: B bags of a feature, N ids, D columns of a table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Constant
from torchrec_dyn.modules import FeatureReader, check_keyed, checked_configs, pooled_outputs
from torchrec_dyn.name_lists import listed
from torchrec_dyn.serving.export import check_one_batch_size, traced_features
from torchrec_dyn.serving.lookup import ServedLookup, begins_of, counts_between

# Initial rows follow from the folder, so the init_fn and bounds of a config are not used.
_INITIAL_ROWS = DynamicTableConfig(initializer=Constant(0.0))


class _Served:
    """The parts of both collections: the generation that they serve, and the reading of a batch."""

    _lookup: ServedLookup
    _configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig]
    _read: FeatureReader
    _features: list[str]
    _is_weighted = False

    @property
    def generation(self) -> str:
        """Name of the served generation."""
        return self._lookup.generation.name

    def refresh(self) -> bool:
        """Switches to the newest generation: the next call serves all deltas applied so far.

        Any thread may call it at any time.
        """
        return self._lookup.refresh()

    def ids(self, table: str) -> Tensor:
        """Returns the ids of a table that have a row in the served generation, [N] int64, in any order."""
        names = [config.name for config in self._configs]
        if table not in names:
            raise ValueError(
                f"{type(self).__name__}.ids: expected a table of {listed(names)}, got {table!r}."
            )
        return self._lookup.generation.ids_of(names.index(table))

    def _bags(
        self, features: KeyedJaggedTensor, of_one_size: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
        """Returns ids [N], offsets of all bags, weights [N] or None, and the number of bags by feature."""
        features, where = maybe_td_to_kjt(features, None), type(self).__name__
        check_keyed(features, where)
        self._lookup.check_call(features.values())
        if torch.compiler.is_exporting():
            return traced_features(features, self._features, self._is_weighted, where)
        read = self._read(features)
        if of_one_size:
            check_one_batch_size(features, where)
        return read.ids, read.offsets(), read.weights, read.batch_sizes


class ServingEmbeddingBagCollection(_Served, EmbeddingBagCollectionInterface):
    """A read-only collection that pools the rows of bags, like DynamicEmbeddingBagCollection in evaluation.

    Args:
        folder: directory that `build` made.
        tables: configs of the tables to serve, as in training.
        is_weighted: True if every id of a bag has a weight.
        unseen: rows of unseen ids: "zeros", or "initial" for the initial rows of training.
        verify: True to check the ids and rows of a generation against their content sums before it is served,
            here and in `refresh`.

    Raises:
        ValueError: if a config is invalid, or the directory is damaged or does not serve the config's table.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        unseen: str = "zeros",
        verify: bool = False,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self._configs = checked_configs(tables, EmbeddingBagConfig, where, _INITIAL_ROWS)
        self._is_weighted = is_weighted
        self._lookup = ServedLookup(folder, self._configs, unseen, where, verify, is_weighted)
        self._names, self._columns, self._features = pooled_outputs(self._configs)
        self._read = FeatureReader(self._configs, is_weighted, where)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up the rows of bags and pools them.

        Args:
            features: bags of ids, with the same number of bags for each feature and without inverse_indices;
                other features are ignored.

        Returns:
            [B, sum of D] float32, one key per feature and table, in the order of the tables.

        Raises:
            ValueError: if a feature is missing, the tensors do not match each other, or the batch has
                variable batch sizes per feature (VBE).
        """
        ids, offsets, weights, sizes = self._bags(features, of_one_size=True)
        return KeyedTensor(
            keys=self._names,
            length_per_key=self._columns,
            values=self._lookup.pooled(ids, offsets, weights, sizes[0]),
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configs of the tables, in order."""
        return list(self._configs)

    def is_weighted(self) -> bool:
        """Returns True if bags have weights."""
        return self._is_weighted


class ServingEmbeddingCollection(_Served, EmbeddingCollectionInterface):
    """A read-only collection that returns the row of each id, like DynamicEmbeddingCollection in evaluation.

    Args:
        folder: directory that `build` made.
        tables: configs of the tables to serve, as in training, all with the same embedding_dim.
        need_indices: True if outputs contain the ids, as their weights.
        unseen: rows of unseen ids: "zeros", or "initial" for the initial rows of training.
        verify: True to check the ids and rows of a generation against their content sums before it is served,
            here and in `refresh`.

    Raises:
        ValueError: if a config is invalid, or the directory is damaged or does not serve the config's table.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tables: Sequence[EmbeddingConfig],
        need_indices: bool = False,
        unseen: str = "zeros",
        verify: bool = False,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self._configs = checked_configs(tables, EmbeddingConfig, where, _INITIAL_ROWS)
        self._need_indices = need_indices
        self._lookup = ServedLookup(folder, self._configs, unseen, where, verify)
        self._names_by_table = get_embedding_names_by_table(self._configs)
        self._names, _, self._features = pooled_outputs(self._configs)
        self._read = FeatureReader(self._configs, False, where)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up the rows of ids.

        Args:
            features: ids of the collection's features; other features are ignored.

        Returns:
            A JaggedTensor by feature (and table, if several tables share the feature), with values [ids of
            the feature, D] float32.

        Raises:
            ValueError: if a feature is missing, or the tensors do not match each other.
        """
        ids, offsets, _, sizes = self._bags(features, of_one_size=False)
        lengths, firsts = offsets.diff().split(sizes), offsets[begins_of(sizes)]
        counts = counts_between(firsts, ids)
        values = self._lookup.sequences(ids, firsts).split(counts)
        own: Sequence[Tensor | None] = [None] * len(counts)
        if self._need_indices:
            own = ids.split(counts)
        return {
            name: JaggedTensor(values=rows, lengths=bags, weights=weights)
            for name, rows, bags, weights in zip(self._names, values, lengths, own, strict=True)
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the configs of the tables, in order."""
        return list(self._configs)

    def embedding_dim(self) -> int:
        """Returns the number of columns of every table."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the names of the outputs, table by table."""
        return self._names_by_table

    def need_indices(self) -> bool:
        """Returns True if outputs contain the ids, as their weights."""
        return self._need_indices
