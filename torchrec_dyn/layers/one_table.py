"""The common part of modules of one table: table handle, optimizer and clock."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules import TableHandle, check_id, check_size


class OneTable(nn.Module):
    """A module that holds a collection of one table. Abstract: subclasses set the attributes."""

    name: str  # of the table and of its only feature
    collection: Any  # sharded or not

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the rows; `param_groups[0]["lr"]` is its learning rate."""
        return self.collection.fused_optimizer

    @property
    def table(self) -> TableHandle:
        """A handle on the table; for a sharded table it reads this rank's shard."""
        return self.collection.table(self.name)

    def set_time(self, time: int) -> None:
        """Sets the clock of policies that count in time. Collective if the table is sharded.

        Args:
            time: an integer, 0 or more, in the unit of the policy; never below the previous time.
        """
        self.collection.set_time(time)


def check_unscored(options: DynamicTableConfig | None, where: str) -> None:
    """Raises ValueError if a table scores ids by weights, which its lookup does not get."""
    if options is not None and not isinstance(options, DynamicTableConfig):
        raise ValueError(
            f"{where}.dynamic: expected a DynamicTableConfig or None, got {options!r}. Pass the config of "
            "the one table itself."
        )
    if options is not None and options.scores_weights:
        raise ValueError(
            f"{where}: expected an eviction that needs no weights, since this module looks up ids without "
            "their weights, got LowestScore. Use LeastFrequentlyUsed, or a DynamicEmbeddingBagCollection."
        )


def check_table(
    embedding_dim: int, num_embeddings: int, padding_idx: int | None, where: str
) -> None:
    """Raises ValueError if a common argument of modules of one table is invalid."""
    check_size(embedding_dim, "embedding_dim", where)
    check_size(num_embeddings, "num_embeddings", where)
    check_id(padding_idx, "padding_idx", where)
