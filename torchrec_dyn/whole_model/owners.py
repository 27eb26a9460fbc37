"""Computes where the row of an id is: its mixed id, and the ranks that hold it under the plan of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_dyn import ops
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import owners
from torchrec_dyn.whole_model.tables import tables_in


def mixed_ids(ids: Tensor) -> Tensor:
    """Returns the mixed ids, the words that choose the owner of an id and its place in the table.

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
    _check("mixed_ids", ids)
    return ops.mix64(ids.reshape(-1)).view(ids.shape)


def owner_ranks(collection: nn.Module, table: str, ids: Tensor) -> Tensor:
    """Returns the ranks that hold each id, whether it has a row or not. Not collective: reads only the plan.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        ids: [M] int64, any values in any order, with or without repeats.

    Returns:
        [M, P] int64, the rank of each of the P column shards of the table, in column order. P is 1 where
        columns are not cut. Unsharded: zeros.

    Raises:
        ValueError: if there is no such table, or `ids` are not [M] int64.
    """
    _check("owner_ranks", ids)
    if ids.dim() != 1:
        raise ValueError(f"owner_ranks.ids: expected ids [M], got {list(ids.shape)}.")
    tables = tables_in(collection, call="owner_ranks")
    if table not in tables:
        raise ValueError(
            f"owner_ranks.table: expected a table of the collection, {listed(sorted(tables))}, got '{table}'."
        )
    layout = tables[table].layout
    # [P, ranks that share the rows]
    ranks = torch.tensor([piece.ranks for piece in layout.pieces], device=ids.device)
    if not layout.rows_are_spread:
        return ranks.T.expand(ids.numel(), -1).contiguous()
    return ranks[:, owners(ids, layout.row_ranks)].T.contiguous()


def _check(where: str, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{where}.ids: expected an int64 tensor, got {got}. Convert with .long().")
