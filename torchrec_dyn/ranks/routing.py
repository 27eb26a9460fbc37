"""Routing by id: the owner of an id among the ranks that share a table's rows, and exchanges with the owners.

Each of S ranks owns one contiguous range of the mixed ids. With B = (2**64 - 1) // S the owner of an id is
`mix64(id) // B` (unsigned). The owner of the last mixed ids, from B*S on (at most S ids), is `mixed % S`.
`ops.sort_by_owner` computes this; the input dists call it (sharding/dists.py).

Legend: M ids of this rank's caller, K ids sent to this rank, C columns on this rank, D columns of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.config import DynamicTableConfig, HostMemory
from torchrec_dyn.policies import Counting
from torchrec_dyn.ranks.agreement import exchange, gather_results
from torchrec_dyn.ranks.layout import Piece, TableLayout


def ids_per_rank(ranks: int) -> int:
    """Returns the number of mixed ids that each of `ranks` ranks owns; 0 stands for all 2**64."""
    return 0 if ranks == 1 else (2**64 - 1) // ranks


def mixed_ranges(part: int, ranks: int) -> list[range]:
    """Returns the mixed ids, unsigned, that one of `ranks` ranks owns."""
    if ranks == 1:
        return [range(1 << 64)]
    block = ids_per_rank(ranks)
    last = range(ranks * block, 1 << 64)
    own = [range(mixed, mixed + 1) for mixed in last if mixed % ranks == part]
    return [range(part * block, (part + 1) * block), *own]


def row_limit(num_embeddings: int, ranks: int) -> int:
    """Returns the row limit of one of `ranks` ranks that share `num_embeddings` rows.

    Ids do not split evenly: the number of ids on a rank is binomial, with a standard deviation below
    sqrt(N/S). The limit is N/S plus eight times sqrt(N/S), and at most N.
    """
    share = num_embeddings / ranks
    if ranks == 1:
        return num_embeddings
    return min(num_embeddings, math.ceil(share + 8 * math.sqrt(share)))


def config_of_share(config: DynamicTableConfig, ranks: int) -> DynamicTableConfig:
    """Returns the options of one of `ranks` ranks that share a table: of counters and frames its share."""
    if isinstance(config.storage, HostMemory):
        config = replace(config, storage=HostMemory(-(-config.storage.gpu_rows // ranks)))
    admission = config.admission
    if not isinstance(admission, Counting) or admission.counters is None:
        return config
    share = copy(admission)
    object.__setattr__(share, "counters", row_limit(admission.counters, ranks))  # may be frozen
    return replace(config, admission=share)


def owners(ids: Tensor, ranks: int) -> Tensor:
    """Returns the owner of each of ids [N] int64, in [0, ranks), computed by the op that routes batches."""
    lengths = torch.tensor([ids.numel()], device=ids.device)
    _, per_owner, _, where = ops.sort_by_owner(ids, lengths, None, ranks, positions=True)
    return torch.bucketize(where, per_owner.cumsum(0), right=True)


class IdExchange:
    """The ids of one call, on the ranks that hold them. The constructor and all methods are collective.

    The constructor is a meeting: `ids` checks the arguments of this rank, and returns its ids [M] int64 on
    the CPU. The other methods only send. Results are on `device`.

    `arrived` [K] int64 are the ids sent to this rank: by sender, then in the sender's order.
    """

    def __init__(
        self,
        call: str,
        ids: Callable[[], Tensor],
        layout: TableLayout,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._group, self._device, self._layout = group, device, layout
        self._rank = dist.get_rank(group)
        # All pieces on a rank have the same range of mixed ids: one part of the ids serves all of them.
        parts: list[int | None] = [None] * dist.get_world_size(group)
        self._pieces: list[list[Piece]] = [[] for _ in parts]
        for piece in layout.pieces:
            for part, rank in enumerate(piece.ranks):
                parts[rank] = part
                self._pieces[rank].append(piece)
        self._widths = [sum(piece.columns for piece in held) for held in self._pieces]

        def route() -> list[int]:
            self._ids = ids()
            nowhere = torch.empty(0, dtype=torch.int64, device="cpu")
            by_part = _positions_by_part(self._ids, layout)
            self._positions = [nowhere if part is None else by_part[part] for part in parts]
            return [positions.numel() for positions in self._positions]

        sizes = gather_results(group, call, route)
        self._sent = sizes[self._rank]
        self._received = [counts[self._rank] for counts in sizes]
        by_rank = self._ids[torch.cat(self._positions)]
        self.arrived = exchange(group, by_rank, self._sent, self._received)

    def send(self, by_piece: Sequence[Tensor]) -> list[Tensor]:
        """Sends numbers of this rank's ids, [M, C] for each piece, to the ranks of the pieces.

        Returns those of `arrived`, [K, C] for each piece of this rank.
        """
        widths = {
            piece: values.shape[1]
            for piece, values in zip(self._layout.pieces, by_piece, strict=True)
        }
        rows = dict(zip(self._layout.pieces, by_piece, strict=True))
        by_rank = [[widths[piece] for piece in held] for held in self._pieces]
        messages = torch.cat(
            [
                torch.cat([rows[piece][positions] for piece in held], 1).flatten()
                for positions, held in zip(self._positions, self._pieces, strict=True)
                if held
            ]
        )
        sizes = [m * sum(columns) for m, columns in zip(self._sent, by_rank, strict=True)]
        own = by_rank[self._rank]
        received = exchange(self._group, messages, sizes, [k * sum(own) for k in self._received])
        parts = received.view(sum(self._received), sum(own)).split(own, 1)
        return [part.contiguous() for part in parts]

    def return_rows(self, rows: Tensor) -> Tensor:
        """Sends the rows of `arrived`, [K, C] on the CPU, back to the senders; returns theirs, [M, D]."""
        width = self._widths[self._rank]
        sizes = [m * columns for m, columns in zip(self._sent, self._widths, strict=True)]
        send_sizes = [k * width for k in self._received]
        received = exchange(self._group, rows.flatten(), send_sizes, sizes)
        columns = sum(piece.columns for piece in self._layout.pieces)
        stitched = received.new_zeros(self._ids.numel(), columns)
        for rank, answer in enumerate(received.split(sizes)):
            positions, held = self._positions[rank], self._pieces[rank]
            by_piece = answer.view(positions.numel(), self._widths[rank]).split(
                [piece.columns for piece in held], 1
            )
            for piece, values in zip(held, by_piece, strict=True):
                stitched[positions, piece.span] = values
        return stitched.to(self._device)

    def return_numbers(self, numbers: Tensor) -> Tensor:
        """Sends numbers of `arrived`, [K], from the first piece back to the senders; returns theirs, [M]."""
        first = set(self._layout.pieces[0].ranks)
        send_sizes = self._received if self._rank in first else [0] * len(self._received)
        receive_sizes = [m if rank in first else 0 for rank, m in enumerate(self._sent)]
        sent = numbers[: sum(send_sizes)]
        received = exchange(self._group, sent, send_sizes, receive_sizes)
        stitched = received.new_zeros(self._ids.numel())
        stitched[torch.cat([self._positions[rank] for rank in sorted(first)])] = received
        return stitched.to(self._device)


def _positions_by_part(ids: Tensor, layout: TableLayout) -> Sequence[Tensor]:
    """Returns for each rank of a piece the positions in `ids`, ascending, of the ids that it owns."""
    if not layout.rows_are_spread:
        return [torch.arange(ids.numel(), device="cpu")]
    parts = owners(ids, layout.row_ranks)
    sizes = torch.bincount(parts, minlength=layout.row_ranks)
    return torch.argsort(parts, stable=True).split(sizes.tolist())
