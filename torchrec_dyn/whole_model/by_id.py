"""One question about a table by id, whatever the plan.

On a collection that is not sharded these are the calls of `collection.table(name)`. On a sharded
one they are collective: every rank calls, with ids of its own choice, perhaps none. The ids go to
the ranks that hold them; what comes back is whole rows in the caller's order. What is wrong on
one rank is an error on every rank.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.distributed import (
    ShardedDynamicEmbeddingBagCollection,
    ShardedDynamicEmbeddingCollection,
    ShardedTableHandle,
    WholeTable,
)
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    TableHandle,
)
from torchrec_dyn.ranks import agree

Collection = (
    DynamicEmbeddingBagCollection
    | DynamicEmbeddingCollection
    | ShardedDynamicEmbeddingBagCollection
    | ShardedDynamicEmbeddingCollection
)
_SHARDED = (ShardedDynamicEmbeddingBagCollection, ShardedDynamicEmbeddingCollection)


def lookup_rows(collection: Collection, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Reads rows by id and changes nothing.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64; any value, repeats too.

    Returns:
        rows: [M, embedding_dim] in the table's dtype; zeros where there is no row.
        found: [M] bool, True where the id has a row.
    """
    return _whole(collection, table, "lookup_rows").lookup(ids)


def assign_rows(collection: Collection, table: str, ids: Tensor, rows: Tensor) -> None:
    """Writes rows by id; an id without one gets one, with fresh optimizer state.

    Of several rows for one id the last one of the highest rank stays.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64.
        rows: [M, embedding_dim] floating point.

    Raises:
        ValueError: if anything does not fit; nothing is changed.
        RuntimeError: if a shard could not take its rows; other ranks may have taken theirs.
    """
    _whole(collection, table, "assign_rows").assign(ids, rows)


def erase_rows(collection: Collection, table: str, ids: Tensor) -> int:
    """Drops rows by id; such an id starts anew when training sees it next.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64; ids without a row are passed over.

    Returns:
        How many ids had a row, those of all ranks together.
    """
    return _whole(collection, table, "erase_rows").erase(ids)


def read_last_seen(collection: Collection, table: str, ids: Tensor) -> Tensor:
    """Tells when training last saw each id.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64.

    Returns:
        [M] int64, training steps (clock values with `ExpireAfter(time=...)`); -1 where an id has
        no row.

    Raises:
        ValueError: if the table has no policy that keeps this.
    """
    return _whole(collection, table, "read_last_seen").last_seen(ids)


def read_counts(collection: Collection, table: str, ids: Tensor) -> Tensor:
    """Tells how often training has seen each id.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64.

    Returns:
        [M] int64; of an id that waits for admission its counter; 0 otherwise.

    Raises:
        ValueError: if the table has no policy that keeps this.
    """
    return _whole(collection, table, "read_counts").count(ids)


def read_ids(collection: Collection, table: str) -> Tensor:
    """Lists all ids that have a row, [R] int64 in unsigned order of the mixed id.

    On a sharded collection every rank gets them all.
    """
    return _whole(collection, table, "read_ids").ids()


def read_num_rows(collection: Collection, table: str) -> int:
    """Counts the rows of the whole table."""
    return _whole(collection, table, "read_num_rows").num_rows


def read_stats(collection: Collection, table: str) -> dict[str, int | float]:
    """Gives the counts of the whole table, the same on every rank.

    Counts, rows, limit and slots are summed over the shards of the first columns, bytes over all
    shards; the mean probe length is that over all rows, the longest the longest of any shard.
    """
    return _whole(collection, table, "read_stats").stats()


def _whole(collection: Collection, table: str, call: str) -> TableHandle | WholeTable:
    """Gives the whole table; that it has none of this name is raised on every rank."""
    try:
        handle = collection.table(table)
    except Exception as fault:
        if isinstance(collection, _SHARDED):
            agree(collection._env.process_group, call, fault)
        if not hasattr(collection, "table"):
            raise ValueError(
                f"{call}: expected a collection of dynamic tables, got "
                f"{type(collection).__name__}. Pass the collection itself, not the model."
            ) from None
        raise
    return handle.whole if isinstance(handle, ShardedTableHandle) else handle
