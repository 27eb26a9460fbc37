"""The dynamic tables of a model, sharded or not, as deltas see them: in one form.

The dynamic collections of a model, sharded or not.

What this rank holds of one table of a collection, sharded or not.

Legend: M ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_dyn.checkpoint_format import SavedTensor, numbers_of
from torchrec_dyn.distributed import (
    ShardedDynamicEmbeddingBagCollection,
    ShardedDynamicEmbeddingCollection,
)
from torchrec_dyn.modules import DynamicEmbeddingBagCollection, LocalTable
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.policies import AdmitAfter
from torchrec_dyn.ranks import Piece, TableLayout, owners
from torchrec_dyn.state_dict import (
    ModelSource,
    OptimizerSource,
    ShardPieces,
    ShardSource,
    saved_tensors,
)
from torchrec_dyn.storage import IdMap
from torchrec_dyn.table import DynamicTable
from torchrec_dyn.whole_model.by_id import Collection


def collections_of(model: nn.Module, where: str) -> Iterator[tuple[str, Collection]]:
    """Yields the dynamic collections of a model with their paths, in one order on all ranks.

    Args:
        model: DistributedModelParallel, any module, or a collection.
        where: who asks, for messages.

    Raises:
        ValueError: at the end, if there is none.
    """
    found = False
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, Collection):
            found = True
            yield path, module
    if not found:
        raise ValueError(
            f"{where}: expected a model with a dynamic collection, got {type(model).__name__} "
            "without one. Make its collections dynamic first, e.g. with make_dynamic."
        )


_SHARDED = (ShardedDynamicEmbeddingBagCollection, ShardedDynamicEmbeddingCollection)


@dataclass(frozen=True)
class RowsHere:
    """The rows of one table on this rank.

    Attributes:
        shards: in column order, all with the same ids; empty where this rank holds none.
        group: the ranks, None of a collection that is not sharded.
        part: which of the ranks that share the rows this one is.
        parts: how many share them.
    """

    shards: Sequence[DynamicTable]
    group: dist.ProcessGroup | None
    part: int = 0
    parts: int = 1

    @property
    def rank(self) -> int:
        """This rank, 0 where there is only one."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def of(self, ids: Tensor) -> Tensor:
        """Gives the ids that belong here, in their order.

        Args:
            ids: [M] int64.
        """
        if not self.shards:
            return ids[:0]
        return ids if self.parts == 1 else ids[torch.eq(owners(ids, self.parts), self.part)]


def rows_here(collection: Collection) -> dict[str, RowsHere]:
    """Finds what this rank holds of each table; not collective.

    Args:
        collection: sharded or not.
    """
    if isinstance(collection, _SHARDED):
        return {
            one.name: RowsHere(one.shards, one.group, one.part or 0, one.ranks)
            for one in collection._shards.pieces()
        }
    pooled = isinstance(collection, DynamicEmbeddingBagCollection)
    tables = collection.embedding_bags if pooled else collection.embeddings
    return {
        name: RowsHere([one.rows()], None)
        for name, one in tables.items()
        if isinstance(one, LocalTable)
    }


@dataclass(frozen=True)
class ModelTable:
    """One dynamic table.

    Attributes:
        key: where the model's state dict has it: "sparse.ebc.embedding_bags.user".
        pieces: what this rank holds.
        optimizer: how its rows learn.
        group: the ranks; None: the table is whole in this process.
    """

    key: str
    pieces: ShardPieces
    optimizer: RowOptimizer
    group: dist.ProcessGroup | None

    @property
    def name(self) -> str:
        """The table's name."""
        return self.pieces.name


def tables_of(model: nn.Module, call: str) -> list[ModelTable]:
    """Lists the dynamic tables of a model, in one order on all ranks.

    Args:
        model: DistributedModelParallel, any module, or a collection.
        call: who asks, for messages.

    Raises:
        ValueError: if there is none, if some are sharded and some are not, or if two have one name.
    """
    tables: list[ModelTable] = []
    for path, module in get_unwrapped_module(model).named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, ShardedDynamicEmbeddingBagCollection):
            tables += _sharded(f"{prefix}embedding_bags.", module)
        elif isinstance(module, ShardedDynamicEmbeddingCollection):
            tables += _sharded(f"{prefix}embeddings.", module)
        elif isinstance(module, LocalTable):
            tables.append(_local(path, module))
    names = [table.name for table in tables]
    if not tables or len(set(names)) < len(names):
        raise ValueError(
            f"{call}: expected a model with dynamic tables, each of its own name, got tables {names}."
        )
    local = [table.name for table in tables if table.group is None]
    if 0 < len(local) < len(tables):
        raise ValueError(
            f"{call}: expected dynamic tables that are all sharded or all not, got {local} unsharded beside "
            "others. Pass the collections one by one."
        )
    return tables


def _sharded(
    prefix: str, module: ShardedDynamicEmbeddingBagCollection | ShardedDynamicEmbeddingCollection
) -> list[ModelTable]:
    shards = module._shards
    return [
        ModelTable(f"{prefix}{one.name}", one, shards.optimizer_of(one.name), one.group)
        for one in shards.pieces()
    ]


def _local(path: str, table: LocalTable) -> ModelTable:
    config, rows = table.config, table.rows()
    pieces = ShardPieces(
        config.name,
        table.where,
        TableLayout((Piece(0, config.embedding_dim, (0,)),), False),
        [rows],
        0,
        None,  # type: ignore[arg-type]  # nobody asks for the group of one rank
        table.saved_config(),
        rows.optimizer,
        table.dynamic.has_life,
        isinstance(table.dynamic.admission, AdmitAfter),
    )
    return ModelTable(path, pieces, rows.optimizer, None)


@dataclass(frozen=True)
class SavedForm:
    """What a table, or some of its rows, would save.

    Attributes:
        model: tensors in the model's state dict, by name.
        optimizer: tensors in the optimizer's state dict, by name.
    """

    model: dict[str, SavedTensor]
    optimizer: dict[str, SavedTensor]

    @property
    def sums(self) -> tuple[Tensor, Tensor]:
        """The words of both checksums."""
        return numbers_of(self.model["checksum"]), numbers_of(self.optimizer["checksum"])


def saved_forms(tables: Sequence[ModelTable], call: str) -> list[SavedForm]:
    """Sums the contents of tables and makes what they would save. Collective.

    Args:
        tables: of a model.
        call: the same on every rank.
    """

    def sources() -> list[ShardSource]:
        both = [
            (ModelSource(one.pieces, None), OptimizerSource(one.pieces, None)) for one in tables
        ]
        return [source for of_table in both for source in of_table]

    made = saved_tensors(tables[0].group, call, sources)
    return [SavedForm(*of_table) for of_table in zip(made[::2], made[1::2], strict=True)]


def map_of(ids: Tensor, rows: Tensor) -> IdMap:
    """Makes a map of some ids.

    Args:
        ids: [M] int64, distinct.
        rows: [M] int64.
    """
    made = IdMap(ids.numel())
    made.reserve(ids.numel())
    made.insert(ids, rows)
    return made
