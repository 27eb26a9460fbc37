"""Reads and edits the rows of one table by id, whatever the plan. The contract of these calls stands here.

*On a collection that is not sharded* they are the methods of `collection.table(name)`.

*On a sharded one* they are collective: every rank calls, each with ids of its own choice, perhaps none. The
ids travel to the ranks that hold them; whole rows come back in the caller's order. A fault on one rank is
raised on every rank.

*Ids* are a tensor [M] int64. Any value, any order and repeats are legal; M may differ between ranks.
Other ids are a ValueError, and nothing has changed then.

No call counts as a training step or takes part in autograd, and only `assign_rows` gives a row to an unseen
id. Frozen tables are read and edited like any other.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.distributed import ShardedTableHandle, WholeTable
from torchrec_dyn.modules import TableHandle
from torchrec_dyn.ranks import agree
from torchrec_dyn.whole_model.tables import Collection, ShardedCollection


def lookup_rows(collection: Collection, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Reads rows by id and changes nothing: an unseen id stays unseen, nothing is counted.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64, any values in any order, repeats too.

    Returns:
        rows: [M, embedding_dim] in the table's dtype, a copy in the order of `ids`; zeros for an id without
            a row, whatever the table's initializer.
        found: [M] bool, True where the id has a row. An id that waits for admission has none.

    Raises:
        ValueError: if there is no such table, or `ids` are not [M] int64.
    """
    return _whole(collection, table, "lookup_rows").lookup(ids)


def assign_rows(collection: Collection, table: str, ids: Tensor, rows: Tensor) -> None:
    """Writes rows by id; an id without a row gets one, without asking the admission policy.

    A new row has fresh optimizer state and, where the table keeps scores, the present step and count 0; if
    the id waited for admission, its counter ends. Of a row that is there only the weights change: optimizer
    state and scores stay. Of several rows for one id the last stays, and of several ranks' rows those of the
    highest rank. A table with an eviction policy may exceed its limit until the next training forward.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64, any values in any order, repeats too.
        rows: [M, embedding_dim] floating point, converted to the table's dtype, to nearest.

    Raises:
        ValueError: if there is no such table, or `ids` or `rows` do not fit; nothing has changed.
        RuntimeError: if new ids exceed the limit of a table without an eviction policy, or memory is out.
            Shards that could take their rows may have written them.
    """
    _whole(collection, table, "assign_rows").assign(ids, rows)


def erase_rows(collection: Collection, table: str, ids: Tensor) -> int:
    """Removes ids with their rows, optimizer state, scores and counters.

    Training treats such an id as unseen from then on. A forward whose backward has yet to run keeps its
    rows: their late gradients reach no id.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64, any values in any order; repeats and ids without a row are passed over.

    Returns:
        How many distinct ids had a row, over all ranks, the same on every rank.

    Raises:
        ValueError: if there is no such table, or `ids` are not [M] int64; nothing has changed.
    """
    return _whole(collection, table, "erase_rows").erase(ids)


def read_last_seen(collection: Collection, table: str, ids: Tensor) -> Tensor:
    """Returns when training last saw each id; changes nothing.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64, any values in any order, repeats too.

    Returns:
        [M] int64 in the order of `ids`: training steps (clock values with `ExpireAfter(time=...)`), those
        of its making for a row that was assigned and not seen since; -1 for an id without a row, also for
        one that waits for admission.

    Raises:
        ValueError: if there is no such table, `ids` are not [M] int64, or the table has no policy that
            keeps this.
    """
    return _whole(collection, table, "read_last_seen").last_seen(ids)


def read_counts(collection: Collection, table: str, ids: Tensor) -> Tensor:
    """Returns how often training has seen each id, repeats within a batch included; changes nothing.

    Args:
        collection: sharded or not.
        table: its name.
        ids: [M] int64, any values in any order, repeats too.

    Returns:
        [M] int64 in the order of `ids`: occurrences since the id got its row or began to wait for
        admission; 0 for an id that has no row and does not wait.

    Raises:
        ValueError: if there is no such table, `ids` are not [M] int64, or the table has no policy that
            keeps this.
    """
    return _whole(collection, table, "read_counts").count(ids)


def read_ids(collection: Collection, table: str) -> Tensor:
    """Returns all ids that have a row, [R] int64 in canonical order: by mixed id, unsigned.

    The same on every rank: on a sharded collection every rank receives them all.

    Args:
        collection: sharded or not.
        table: its name.

    Raises:
        ValueError: if there is no such table.
    """
    return _whole(collection, table, "read_ids").ids()


def read_num_rows(collection: Collection, table: str) -> int:
    """Returns the number of rows of the whole table, the same on every rank."""
    return _whole(collection, table, "read_num_rows").num_rows


def read_stats(collection: Collection, table: str) -> dict[str, int | float]:
    """Returns the counts of the whole table, the same on every rank.

    Counts, rows, limit and slots are summed over the shards of the first columns, bytes over all
    shards; the mean probe length is that over all rows, the longest the longest of any shard.
    """
    return _whole(collection, table, "read_stats").stats()


def _whole(collection: Collection, table: str, call: str) -> TableHandle | WholeTable:
    """Returns the whole table; a name that is none of its tables is raised on every rank."""
    try:
        handle = collection.table(table)
    except Exception as fault:
        if isinstance(collection, ShardedCollection):
            agree(collection._env.process_group, call, fault)
        if not hasattr(collection, "table"):
            raise ValueError(
                f"{call}: expected a collection of dynamic tables, got "
                f"{type(collection).__name__}. Pass the collection itself, not the model."
            ) from None
        raise
    return handle.whole if isinstance(handle, ShardedTableHandle) else handle
