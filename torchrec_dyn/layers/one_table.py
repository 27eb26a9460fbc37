"""The common part of modules of one table: the table, its optimizer, its clock."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.distributed import ShardedTableHandle
from torchrec_dyn.modules import TableHandle, check_id, check_size


class OneTable(nn.Module):
    """A module that holds a collection of one table; abstract, subclasses set the attributes.

    Attributes:
        name: of the table, and of its only feature.
        collection: of this table; sharded or not.
    """

    name: str
    collection: Any

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the rows; param_groups[0]["lr"] is their learning rate."""
        return self.collection.fused_optimizer

    @property
    def table(self) -> TableHandle | ShardedTableHandle:
        """A handle on the table; of a sharded one it reads this rank's shard."""
        return self.collection.table(self.name)

    def set_time(self, time: int) -> None:
        """Sets the clock of `ExpireAfter(time=...)`; collective where the table is sharded.

        Args:
            time: an integer from 0 on, in the unit of the policy; it never goes back.
        """
        self.collection.set_time(time)


def check_table(
    embedding_dim: int, num_embeddings: int, padding_idx: int | None, where: str
) -> None:
    """Checks the arguments that all modules of one table have.

    Args:
        embedding_dim: columns of a row.
        num_embeddings: the limit on the rows.
        padding_idx: an id that is read as padding, or None.
        where: the module, for messages.

    Raises:
        ValueError: if one is impossible.
    """
    check_size(embedding_dim, "embedding_dim", where)
    check_size(num_embeddings, "num_embeddings", where)
    check_id(padding_idx, "padding_idx", where)
