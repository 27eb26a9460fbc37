"""One rank of many, simulated in one process: torch's fake process group, with the words of the peers.

The fake group sends nothing. Its peers repeat what this rank says, and that would be wrong where ranks tell
what they hold: their rows of each table. There the words of a peer are made from the words of this rank and
from the plan, since every rank runs the same code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torchrec.distributed import comm

from torchrec_dyn.ranks import TableLayout, agreement
from torchrec_dyn.state_dict.places import Share
from torchrec_dyn.state_dict.saving import Counts

NODE = 8  # ranks of a node
_BACKEND = "simulated"  # TorchRec leaves out parts of a collection in a group of the backend "fake"


class Peers:
    """The peers of a simulated rank.

    Attributes:
        layouts: the layouts of the tables of a call, in its order; set before a state dict is made.
        agreements: number of agreements so far.
        sent: bytes that this rank has sent in agreements.
        received: bytes that it has received.
        seconds: CPU seconds in which words of peers were made: no rank would spend them.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.layouts: Sequence[TableLayout] = ()
        self.agreements = self.sent = self.received = 0
        self.seconds = 0.0

    def words(self, mine: bytes) -> list[bytes]:
        """Returns the words of all ranks from those of this rank."""
        begin = time.process_time()
        value = pickle.loads(mine) if mine else None
        self.sent += len(mine)
        if isinstance(value, list) and any(isinstance(one, Counts) for one in value):
            of_ranks = [pickle.dumps(self._counts(value, rank)) for rank in range(self.ranks)]
        else:
            of_ranks = [mine] * self.ranks
        self.received += sum(map(len, of_ranks))
        self.seconds += time.process_time() - begin
        return of_ranks

    def _counts(self, mine: Sequence[Counts | None], rank: int) -> list[Counts | None]:
        """Returns the counts of a peer: of its tables, with the numbers of one of this rank's tables."""
        if rank == self.rank:
            return list(mine)
        like = next(one for one in mine if one is not None)
        counts: list[Counts | None] = []
        for layout in self.layouts:
            parts = [piece.ranks.index(rank) for piece in layout.pieces if rank in piece.ranks]
            if not parts:
                counts.append(None)
                continue
            waits = rank in layout.pieces[0].ranks and like.waiting is not None
            counts.append(
                like._replace(
                    share=Share(parts[0], like.share.rows, []),
                    waiting=Share(parts[0], like.waiting.rows, []) if waits else None,
                )
            )
        return counts


@contextlib.contextmanager
def simulated_rank(rank: int, ranks: int) -> Iterator[Peers]:
    """Makes this process one rank of many for the block, without its peers."""
    peers = Peers(rank, ranks)

    def gathered(group: dist.ProcessGroup, report: tuple[Any, Any, bytes]) -> list[Any]:
        call, error, result = report
        head = len(pickle.dumps((call, error, b"")))
        peers.agreements, peers.sent = peers.agreements + 1, peers.sent + head
        peers.received += head * ranks
        return [(call, error, of_peer) for of_peer in peers.words(result)]

    def made(common: Any, options: Any) -> FakeProcessGroup:
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)

    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, made, extended_api=True, devices=["cpu"])
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(min(NODE, ranks))}),
        mock.patch.object(dist.distributed_c10d, "_store_based_barrier"),  # nobody else comes
        mock.patch.object(agreement, "_gather", gathered),
    ):
        dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=rank, world_size=ranks)
        try:
            yield peers
        finally:
            dist.destroy_process_group()
            comm._INTRA_PG = comm._CROSS_PG = None
