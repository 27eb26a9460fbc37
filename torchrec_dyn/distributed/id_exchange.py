"""Sends ids and rows to the ranks that hold the ids, and returns results in the caller's order.

Every rank sends any ids, to every chosen piece of the table. If rows are spread, each id is sent to its owner
in the piece, as in a batch.

All tensors are on the CPU: these calls are rare, and a group of gloo sends them.

Legend: M ids of this rank's caller, K ids sent to this rank, C columns on this rank, D columns of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.ranks import Piece, TableLayout, owners


class IdExchange:
    """The ids of one call, on the ranks that hold them. The constructor is collective.

    Args:
        ids: [M] int64, repeats allowed; M may differ between ranks.
        layout: the pieces of the table and their ranks.
        group: the ranks.
        pieces: the chosen pieces, in column order; None: all.

    Attributes:
        arrived: [K] int64, the ids sent to this rank: by sender, then in the sender's order.
    """

    def __init__(
        self,
        ids: Tensor,
        layout: TableLayout,
        group: dist.ProcessGroup,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        asked = layout.pieces if pieces is None else pieces
        world = range(dist.get_world_size(group))
        self._asked = asked
        self._count = ids.numel()
        self._pieces = [[piece for piece in asked if rank in piece.ranks] for rank in world]
        self._widths = [sum(piece.columns for piece in held) for held in self._pieces]
        by_part = _positions_by_part(ids, layout)
        # All pieces on a rank have the same range of mixed ids, so one list of positions serves all of them.
        self._positions = [
            by_part[held[0].ranks.index(rank)] if held else torch.empty(0, dtype=torch.int64)
            for rank, held in zip(world, self._pieces, strict=True)
        ]
        sent = torch.tensor([positions.numel() for positions in self._positions])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self._sent: list[int] = sent.tolist()
        self._received: list[int] = received.tolist()
        self.arrived = self._all_to_all(ids[torch.cat(self._positions)], self._sent, self._received)

    def send_rows(self, rows: Tensor) -> Tensor:
        """Sends the row of each id to the ranks that hold the id, to each rank its columns. Collective.

        Args:
            rows: [M, D], the rows of this rank's ids.

        Returns:
            [K, C], the rows of `arrived`, in column order.
        """
        messages = [
            torch.cat([rows[positions, _columns(piece)] for piece in held], 1).flatten()
            for positions, held in zip(self._positions, self._pieces, strict=True)
            if held
        ]
        width = self._widths[self._rank]
        sizes = [m * columns for m, columns in zip(self._sent, self._widths, strict=True)]
        got = self._all_to_all(torch.cat(messages), sizes, [k * width for k in self._received])
        return got.view(self.arrived.numel(), width)

    def return_rows(self, rows: Tensor) -> Tensor:
        """Sends the rows of `arrived` back to the senders of the ids. Collective.

        Args:
            rows: [K, C], in column order.

        Returns:
            [M, D], in the order of this rank's ids and in the dtype of `rows`.
        """
        width = self._widths[self._rank]
        sizes = [m * columns for m, columns in zip(self._sent, self._widths, strict=True)]
        got = self._all_to_all(rows.flatten(), [k * width for k in self._received], sizes)
        stitched = rows.new_zeros(self._count, sum(piece.columns for piece in self._asked))
        for rank, answer in enumerate(got.split(sizes)):
            positions, held = self._positions[rank], self._pieces[rank]
            by_piece = answer.view(positions.numel(), self._widths[rank]).split(
                [piece.columns for piece in held], 1
            )
            for piece, columns in zip(held, by_piece, strict=True):
                stitched[positions, _columns(piece)] = columns
        return stitched

    def return_numbers(self, numbers: Tensor) -> Tensor:
        """Sends one number per id back to the senders; only ranks of the first piece send. Collective.

        Args:
            numbers: [K], one number for each id of `arrived`; ignored on ranks without the first piece.

        Returns:
            [M], in the order of this rank's ids and in the dtype of `numbers`.
        """
        first = self._asked[0].ranks
        send_sizes = self._received if self._rank in first else [0] * len(self._received)
        receive_sizes = [m if rank in first else 0 for rank, m in enumerate(self._sent)]
        got = self._all_to_all(numbers[: sum(send_sizes)], send_sizes, receive_sizes)
        stitched = torch.zeros(self._count, dtype=numbers.dtype)
        stitched[torch.cat([self._positions[rank] for rank in sorted(first)])] = got
        return stitched

    def _all_to_all(
        self, sent: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Tensor:
        """Sends send_sizes[r] numbers to rank r, and returns the received numbers, by rank."""
        got = torch.empty(sum(receive_sizes), dtype=sent.dtype)
        # As bytes: backends differ in the dtypes that they can send.
        size = sent.element_size()
        dist.all_to_all_single(
            got.view(torch.uint8),
            sent.contiguous().view(torch.uint8),
            [count * size for count in receive_sizes],
            [count * size for count in send_sizes],
            group=self._group,
        )
        return got


def _positions_by_part(ids: Tensor, layout: TableLayout) -> Sequence[Tensor]:
    """Returns for each rank of a piece the positions in `ids`, ascending, of the ids that it owns."""
    if not layout.rows_are_spread:
        return [torch.arange(ids.numel())]
    parts = owners(ids, layout.row_ranks)
    sizes = torch.bincount(parts, minlength=layout.row_ranks)
    return torch.argsort(parts, stable=True).split(sizes.tolist())


def _columns(piece: Piece) -> slice:
    return slice(piece.first_column, piece.first_column + piece.columns)
