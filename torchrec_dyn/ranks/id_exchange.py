"""Sends ids and rows to the ranks that hold the ids, and returns results in the caller's order.

Every rank sends any ids, to every chosen piece of the table. If rows are spread, each id is sent to its owner
in the piece, as in a batch.

All tensors are on the CPU: these calls are rare, and a group of gloo sends them.

Legend: M ids of this rank's caller, K ids sent to this rank, C columns on this rank, D columns of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.ranks.agreement import exchange, gather_results, run_together
from torchrec_dyn.ranks.layout import Piece, TableLayout
from torchrec_dyn.ranks.routing import owners


class IdExchange:
    """The ids of one call, on the ranks that hold them. The constructor and all methods are collective.

    If this rank's part of a method fails on some rank, the method raises on every rank; see `ranks.agree`.

    Args:
        call: table and method, the same on every rank.
        ids: function that returns this rank's ids, [M] int64 on the CPU, repeats allowed; M may differ
            between ranks.
        layout: the pieces of the table and their ranks.
        group: the ranks.
        device: device of the tensors that `return_rows` and `return_numbers` return.
        pieces: the chosen pieces, in column order; None: all.

    Attributes:
        arrived: [K] int64, the ids sent to this rank: by sender, then in the sender's order.
    """

    def __init__(
        self,
        call: str,
        ids: Callable[[], Tensor],
        layout: TableLayout,
        group: dist.ProcessGroup,
        device: torch.device,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        self._call, self._group, self._device = call, group, device
        self._rank = dist.get_rank(group)
        asked = layout.pieces if pieces is None else pieces
        self._asked = asked
        # All pieces on a rank have the same range of mixed ids: one part of the ids serves all of them.
        parts: list[int | None] = [None] * dist.get_world_size(group)
        self._pieces: list[list[Piece]] = [[] for _ in parts]
        for piece in asked:
            for part, rank in enumerate(piece.ranks):
                parts[rank] = part
                self._pieces[rank].append(piece)
        self._widths = [sum(piece.columns for piece in held) for held in self._pieces]
        by_rank: list[Tensor] = []

        def route() -> list[int]:
            mine = ids()
            nowhere = torch.empty(0, dtype=torch.int64, device="cpu")
            by_part = _positions_by_part(mine, layout)
            self._positions = [nowhere if part is None else by_part[part] for part in parts]
            self._count = mine.numel()
            by_rank.append(mine[torch.cat(self._positions)])
            return [positions.numel() for positions in self._positions]

        sent = gather_results(group, call, route)
        self._sent: list[int] = sent[self._rank]
        self._received: list[int] = [of_rank[self._rank] for of_rank in sent]
        self.arrived = self._exchange(by_rank.pop, self._sent, self._received)

    def send_rows(self, rows: Callable[[], Tensor]) -> Tensor:
        """Sends the row of each id to the ranks that hold the id, to each rank its columns.

        Args:
            rows: function that returns the rows of this rank's ids, [M, D] on the CPU.

        Returns:
            [K, C], the rows of `arrived`, in column order.
        """

        def messages() -> Tensor:
            given = rows()
            return torch.cat(
                [
                    torch.cat([given[positions, _columns(piece)] for piece in held], 1).flatten()
                    for positions, held in zip(self._positions, self._pieces, strict=True)
                    if held
                ]
            )

        width = self._widths[self._rank]
        sizes = [m * columns for m, columns in zip(self._sent, self._widths, strict=True)]
        got = self._exchange(messages, sizes, [k * width for k in self._received])
        return got.view(sum(self._received), width)

    def return_rows(self, rows: Callable[[], Tensor]) -> Tensor:
        """Sends the rows of `arrived` back to the senders of the ids.

        Args:
            rows: function that returns these rows, [K, C] in column order, on the CPU.

        Returns:
            [M, D], in the order of this rank's ids and in the dtype of `rows`.
        """
        width = self._widths[self._rank]
        sizes = [m * columns for m, columns in zip(self._sent, self._widths, strict=True)]
        send_sizes = [k * width for k in self._received]
        got = self._exchange(lambda: rows().flatten(), send_sizes, sizes)

        def stitch() -> Tensor:
            stitched = got.new_zeros(self._count, sum(piece.columns for piece in self._asked))
            for rank, answer in enumerate(got.split(sizes)):
                positions, held = self._positions[rank], self._pieces[rank]
                by_piece = answer.view(positions.numel(), self._widths[rank]).split(
                    [piece.columns for piece in held], 1
                )
                for piece, columns in zip(held, by_piece, strict=True):
                    stitched[positions, _columns(piece)] = columns
            return stitched.to(self._device)

        return run_together(self._group, self._call, stitch)

    def return_numbers(self, numbers: Callable[[], Tensor]) -> Tensor:
        """Sends one number per id back to the senders; only ranks of the first piece send.

        Args:
            numbers: function that returns one number for each id of `arrived`, [K] on the CPU; ranks without
                the first piece return any tensor of the same dtype.

        Returns:
            [M], in the order of this rank's ids and in the dtype of `numbers`.
        """
        first = set(self._asked[0].ranks)
        send_sizes = self._received if self._rank in first else [0] * len(self._received)
        receive_sizes = [m if rank in first else 0 for rank, m in enumerate(self._sent)]
        got = self._exchange(lambda: numbers()[: sum(send_sizes)], send_sizes, receive_sizes)

        def stitch() -> Tensor:
            stitched = got.new_zeros(self._count)
            stitched[torch.cat([self._positions[rank] for rank in sorted(first)])] = got
            return stitched.to(self._device)

        return run_together(self._group, self._call, stitch)

    def _exchange(
        self, make: Callable[[], Tensor], send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Tensor:
        return exchange(self._group, self._call, make, send_sizes, receive_sizes)


def _positions_by_part(ids: Tensor, layout: TableLayout) -> Sequence[Tensor]:
    """Returns for each rank of a piece the positions in `ids`, ascending, of the ids that it owns."""
    if not layout.rows_are_spread:
        return [torch.arange(ids.numel(), device="cpu")]
    parts = owners(ids, layout.row_ranks)
    sizes = torch.bincount(parts, minlength=layout.row_ranks)
    return torch.argsort(parts, stable=True).split(sizes.tolist())


def _columns(piece: Piece) -> slice:
    return slice(piece.first_column, piece.first_column + piece.columns)
