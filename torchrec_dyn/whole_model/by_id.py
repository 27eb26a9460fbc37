"""Reads and edits the rows of one table by id, under any plan. This is the contract of all these functions.

*On an unsharded collection* they are equal to the methods of `collection.table(name)`.

*On a sharded collection* they are collective: every rank must call them, each with its own ids, M = 0
included. The ids are sent to the ranks that hold them. Whole rows are returned in the caller's order. An
error on one rank is raised on every rank.

*Devices*: arguments may be on any device. Results are on the device of the table's rows.

*Ids* are a tensor [M] int64. Any values, any order and repeats are valid; M may differ between ranks.
Other ids raise ValueError; nothing has changed then.

`mixed_ids` and `owner_ranks` compute where the row of an id is, and are not collective.

No function counts as a training step or takes part in autograd, and only `assign_rows` gives a row to an
unseen id. Frozen tables are read and edited like other tables.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_dyn import ops
from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.ranks import owners
from torchrec_dyn.table import check_ids
from torchrec_dyn.whole_model.tables import checked_collection, table_in


@not_compiled
def lookup_rows(collection: nn.Module, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of ids. Changes nothing: an unseen id stays unseen, and nothing is counted.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        ids: [M] int64, any values in any order, with or without repeats.

    Returns:
        The pair (rows, found).

        - rows: [M, embedding_dim] in the table's dtype, a copy in the order of `ids`; zeros for an id without
          a row, whatever the table's initializer.
        - found: [M] bool, True for an id with a row. A waiting id has no row.

    Raises:
        ValueError: if there is no such table, or `ids` are not [M] int64.
    """
    return table_in(collection, table, "lookup_rows").lookup_rows(ids)


@not_compiled
def assign_rows(collection: nn.Module, table: str, ids: Tensor, rows: Tensor) -> None:
    """Writes rows by id. An id without a row gets a row; the admission policy is not applied.

    A new row has fresh optimizer state and, if the table keeps scores, the current step and count 0. If the
    id was waiting for admission, its counter is removed. For an id that already has a row only the weights
    change; optimizer state and scores do not. If an id is repeated, its last row is written. If several
    ranks pass the same id, the row of the highest rank is written. A table that evicts when it is full may
    exceed its limit until the next training forward; a table with `ExpireAfter` alone may not.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        ids: [M] int64, any values in any order, with or without repeats.
        rows: [M, embedding_dim] floating point, rounded to nearest in the table's dtype.

    Raises:
        ValueError: if there is no such table, or `ids` or `rows` are not valid; nothing has changed then.
        RuntimeError: if new ids exceed the limit of a table that does not evict when it is full, or memory
            is exhausted. Shards without this error may have written their rows.
    """
    table_in(collection, table, "assign_rows").assign(ids, rows)


@not_compiled
def erase_rows(collection: nn.Module, table: str, ids: Tensor) -> int:
    """Removes ids with their rows, optimizer state, scores and counters.

    After that, training treats these ids as unseen. A forward whose backward has not run yet keeps its
    rows; their late gradients update no id.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        ids: [M] int64, any values in any order; repeats and ids without a row are ignored.

    Returns:
        Number of distinct ids that had a row, over all ranks; the same on every rank.

    Raises:
        ValueError: if there is no such table, or `ids` are not [M] int64; nothing has changed then.
    """
    return table_in(collection, table, "erase_rows").erase(ids)


@not_compiled
def read_last_seen(collection: nn.Module, table: str, ids: Tensor) -> Tensor:
    """Returns the step or time of each id's last occurrence in training. Changes nothing.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        ids: [M] int64, any values in any order, with or without repeats.

    Returns:
        [M] int64 in the order of `ids`: training steps, or clock values with `ExpireAfter(time=...)` or a
        half-life in time. For a row that was assigned and not seen since, the step or time of its assignment.
        -1 for an id without a row, including a waiting id. With a half-life in time and no `ExpireAfter`, an
        id last seen more than 40 half-lives ago may have a later time: the earliest that the clock still
        keeps.

    Raises:
        ValueError: if there is no such table, `ids` are not [M] int64, or the table has no policy.
    """
    return table_in(collection, table, "read_last_seen").read_last_seen(ids)


@not_compiled
def read_counts(collection: nn.Module, table: str, ids: Tensor) -> Tensor:
    """Returns the number of occurrences of each id in training, repeats in a batch included. Changes nothing.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        ids: [M] int64, any values in any order, with or without repeats.

    Returns:
        [M] int64 in the order of `ids`: occurrences since the id got its row or began to wait for
        admission; 0 for an id that has no row and does not wait. Under `LowestScore`, the sum of their
        weights in units for an id with a row. With a half-life, the present number, rounded half up.

    Raises:
        ValueError: if there is no such table, `ids` are not [M] int64, or the table has no policy.
    """
    return table_in(collection, table, "read_counts").read_counts(ids)


@not_compiled
def read_ids(collection: nn.Module, table: str) -> Tensor:
    """Returns all ids that have a row, [R] int64 in canonical order: by mixed id, unsigned.

    The result is the same on every rank: each rank of a sharded collection receives all ids.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.

    Raises:
        ValueError: if there is no such table.
    """
    return table_in(collection, table, "read_ids").read_ids()


@not_compiled
def sample_ids(collection: nn.Module, table: str, n: int, seed: int) -> Tensor:
    """Draws ids that have a row, uniformly and with replacement, e.g. as negative samples (see the guide).

    A table draws the same ids for the same seed, whatever its plan and history, and every rank gets all of
    them. Each call lists the ids of the table once, in order and in parts, which takes 0.1 s per million rows
    on two busy cores; so draw for many steps at once.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        n: number of ids, at least 1; the same on every rank.
        seed: an int64, the same on every rank; use a different seed in each call.

    Returns:
        [n] int64, in the order of the draws.

    Raises:
        ValueError: if there is no such table, it has no rows, or `n` or `seed` is not valid or not the same
            on every rank.
    """
    return table_in(collection, table, "sample_ids").sample_ids(n, seed)


@not_compiled
def read_num_rows(collection: nn.Module, table: str) -> int:
    """Returns the number of rows of the whole table, the same on every rank.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.

    Raises:
        ValueError: if there is no such table.
    """
    return table_in(collection, table, "read_num_rows").read_num_rows()


@not_compiled
def read_stats(collection: nn.Module, table: str) -> dict[str, int | float]:
    """Returns the statistics of the whole table, the same on every rank.

    Counts, rows, limit and slots are sums over the shards of the first columns. Bytes are the sum over
    all shards. The mean probe length is the mean over all rows of the first columns, the longest probe
    length is the maximum over their shards.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.

    Raises:
        ValueError: if there is no such table.
    """
    return table_in(collection, table, "read_stats").read_stats()


def mixed_ids(ids: Tensor) -> Tensor:
    """Returns the mixed ids, which decide the owner of an id and its place in the table.

    Mixing is a bijection: two ids never have the same mixed id. It is the same for all tables, plans and
    versions. Source: the output function of SplitMix64, see csrc/mix64.h.

    Args:
        ids: int64 of any shape.

    Returns:
        int64 in the shape of `ids`: the 64 bits of the mixed ids. Row-wise plans and the canonical order
        read these bits as unsigned numbers.

    Raises:
        ValueError: if `ids` are not int64.
    """
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"mixed_ids.ids: expected an int64 tensor, got {got}. Convert with .long()."
        )
    return ops.mix64(ids.reshape(-1)).view(ids.shape)


def owner_ranks(collection: nn.Module, table: str, ids: Tensor) -> Tensor:
    """Returns the ranks that own each id, whether it has a row or not. Not collective; reads only the plan.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        ids: [M] int64, any values in any order, with or without repeats.

    Returns:
        [M, P] int64, the rank of each of the P column shards of the table, in column order. P is 1 if columns
        are not cut. Zeros for an unsharded table.

    Raises:
        ValueError: if there is no such table, or `ids` are not [M] int64.
    """
    ids = check_ids("owner_ranks", ids)
    layout = checked_collection(collection, "owner_ranks").table(table).layout
    # [P, ranks that share the rows]
    ranks = torch.tensor([piece.ranks for piece in layout.pieces], device=ids.device)
    if not layout.rows_are_spread:
        return ranks.T.expand(ids.numel(), -1).contiguous()
    return ranks[:, owners(ids, layout.row_ranks)].T.contiguous()
