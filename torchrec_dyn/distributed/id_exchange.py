"""Sends ids to the ranks that hold them, rows along with them, and answers back in the caller's order.

Every rank sends ids of its own choice, to every piece of the table that is asked. Where rows are spread an
id goes to its owner in the piece, as in a batch.

Legend: M ids of this rank's caller, K ids sent to this rank, C columns on this rank, D of the whole table.
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
        layout: where the pieces of the table lie.
        group: the ranks.
        pieces: the pieces that are asked, in column order; None: all.

    Attributes:
        arrived: [K] int64, the ids sent to this rank: by sending rank, then in its order.
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
        # All pieces on a rank hold the same range of mixed ids: it has one part.
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
        """Sends each id's row along with it, to each rank the columns that this rank holds. Collective.

        Args:
            rows: [M, D].

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
        """Sends the rows of `arrived` back to the ranks of their callers. Collective.

        Args:
            rows: [K, C], in column order.

        Returns:
            [M, D], in the order of this rank's ids; the same dtype.
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
        """Sends one number for each of `arrived` back, from the first piece alone. Collective.

        Args:
            numbers: [K].

        Returns:
            [M], in the order of this rank's ids; the same dtype.
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
        """Sends send_sizes[r] numbers to rank r, and returns the numbers received, by rank."""
        got = torch.empty(sum(receive_sizes), dtype=sent.dtype)
        # As bytes: backends differ in the dtypes that they carry.
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
    """Returns the positions in `ids`, ascending, of the ids of each part of a piece's rows."""
    if not layout.rows_are_spread:
        return [torch.arange(ids.numel())]
    parts = owners(ids, layout.row_ranks)
    sizes = torch.bincount(parts, minlength=layout.row_ranks)
    return torch.argsort(parts, stable=True).split(sizes.tolist())


def _columns(piece: Piece) -> slice:
    return slice(piece.first_column, piece.first_column + piece.columns)
