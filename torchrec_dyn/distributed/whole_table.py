"""One sharded table over all ranks.

Every method is collective: all ranks call it, each with any ids, perhaps none. A fault on one rank is raised
on all ranks. The calls by id are specified in whole_model/by_id.py.

Legend: M ids of this rank, K ids sent to this rank, C columns on this rank, R rows of the table, D columns of
the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.distributed.id_exchange import IdExchange
from torchrec_dyn.ranks import Piece, TableLayout, gather_results, run_together
from torchrec_dyn.storage import TableLock, canonical_order, run_to_end, to_host
from torchrec_dyn.table import DynamicTable

_T = TypeVar("_T")
Stats = dict[str, int | float]
OF_EVERY_SHARD = ("step", "forwards")  # counters that are the same in every shard: not summed


class WholeTable:
    """Reads and edits a sharded table by id, on all ranks.

    Args:
        where: the collection and the table, for messages.
        layout: the pieces of the table and their ranks.
        shards: this rank's column shards in column order; may be empty.
        embedding_dim: number of columns, D.
        dtype: dtype of the rows.
        group: the ranks; it sends tensors of the CPU.
        device: device of the rows and of the tensors that methods return; arguments may be on any device.
    """

    def __init__(
        self,
        where: str,
        layout: TableLayout,
        shards: Sequence[DynamicTable],
        embedding_dim: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._where = where
        self._layout = layout
        self._shards = list(shards)
        self._embedding_dim = embedding_dim
        self._dtype = dtype
        self._group = group
        self._device = device
        self._first = layout.pieces[0]
        holds_first = dist.get_rank(group) in self._first.ranks
        self._first_shards = self._shards[:1] if holds_first else []

    @property
    def num_rows(self) -> int:
        """Rows in use on all ranks. Collective."""
        counts = self._gather("num_rows", lambda: sum(one.num_rows for one in self._first_shards))
        return sum(counts[rank] for rank in self._first.ranks)

    def ids(self) -> Tensor:
        """Returns all ids of the table, [R] int64 in unsigned order of mix64(id), on every rank."""
        call, first = f"{self._where}.ids", self._first.ranks
        held: list[Tensor] = []

        def read() -> int:
            held.extend(to_host(shard.ids()) for shard in self._first_shards)
            return sum(ids.numel() for ids in held)

        counts = gather_results(self._group, call, read)

        def place() -> Sequence[Tensor]:
            parts = torch.empty(sum(counts), dtype=torch.int64, device="cpu").split(counts)
            for ids in held:
                parts[dist.get_rank(self._group)].copy_(ids)
            return parts

        parts = run_together(self._group, call, place)
        for rank, part in enumerate(parts):
            if counts[rank]:
                dist.broadcast(part, dist.get_global_rank(self._group, rank), group=self._group)

        def join() -> Tensor:
            # With 2D parallelism the group has further copies of the table; their ids are not used.
            together = torch.cat([part for rank, part in enumerate(parts) if rank in first])
            return together[canonical_order(together)].to(self._device)

        return run_together(self._group, call, join)

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id. As `torchrec_dyn.lookup_rows`."""
        exchange = self._send("lookup", ids)
        found: list[Tensor] = []

        def read() -> Tensor:
            rows, mask = read_rows(self._shards, exchange.arrived, self._dtype, self._device)
            found.append(to_host(mask))
            return to_host(rows)

        return exchange.return_rows(read), exchange.return_numbers(found.pop)

    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns each id's last occurrence in training. As `torchrec_dyn.read_last_seen`."""
        return self._first_numbers("last_seen", ids, DynamicTable.last_seen)

    def count(self, ids: Tensor) -> Tensor:
        """Returns each id's number of occurrences. As `torchrec_dyn.read_counts`."""
        return self._first_numbers("count", ids, DynamicTable.count)

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id, on all column shards. As `torchrec_dyn.assign_rows`."""
        exchange = self._send("assign", ids, rows)
        arrived = exchange.send_rows(lambda: to_host(rows.detach().to(self._dtype)))

        def write() -> None:
            parts = arrived.split([shard.columns for shard in self._shards], 1)
            edits = [partial(shard.assign, exchange.arrived) for shard in self._shards]
            of_shards = zip(edits, parts, strict=True)
            _edit_all([partial(edit, part.contiguous()) for edit, part in of_shards])

        self._gather("assign", write)

    def erase(self, ids: Tensor) -> int:
        """Removes ids, on all column shards. As `torchrec_dyn.erase_rows`."""
        exchange = self._send("erase", ids)
        edits = [partial(shard.erase, exchange.arrived) for shard in self._shards]
        counted = len(self._first_shards)
        return sum(self._gather("erase", lambda: sum(_edit_all(edits)[:counted])))

    def set_frozen(self, is_frozen: bool) -> None:
        """Freezes or unfreezes all shards at the same training step, or no shard.

        Raises:
            ValueError: on every rank, if some rank makes another call, or the training steps of the ranks
                differ; nothing has changed then.
        """
        verb = "freeze" if is_frozen else "unfreeze"
        of_ranks = self._gather(verb, lambda: [shard.step for shard in self._shards])
        steps = {rank: of_shards[0] for rank, of_shards in enumerate(of_ranks) if of_shards}
        if len(set(steps.values())) > 1:
            raise ValueError(
                f"{self._where}.{verb}: expected every rank at the same training step, got "
                f"{steps} by rank. Call it on all ranks between the same two batches."
            )
        for shard in self._shards:
            shard.is_frozen = is_frozen

    def stats(self) -> Stats:
        """Returns the counts of the whole table, the same on every rank. As `torchrec_dyn.read_stats`."""
        of_ranks = self._gather("stats", lambda: [shard.stats() for shard in self._shards])
        holders = {rank for piece in self._layout.pieces for rank in piece.ranks}
        return _whole_stats(
            [of_ranks[rank][0] for rank in self._first.ranks],
            sum(shard["bytes"] for rank in holders for shard in of_ranks[rank]),
        )

    def _send(
        self,
        verb: str,
        ids: Tensor,
        rows: Tensor | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> IdExchange:
        """Checks the arguments of every rank, then sends the ids to the ranks that hold them."""

        def checked() -> Tensor:
            fault = _fault_of_ids(ids)
            if rows is not None:
                fault = fault or _fault_of_rows(rows, ids.numel(), self._embedding_dim)
            if fault:
                raise ValueError(fault)
            return to_host(ids.detach().contiguous())

        call = f"{self._where}.{verb}"
        return IdExchange(call, checked, self._layout, self._group, self._device, pieces)

    def _first_numbers(
        self, verb: str, ids: Tensor, read: Callable[[DynamicTable, Tensor], Tensor]
    ) -> Tensor:
        """Returns one number for each id, read from the shards with the first columns."""
        exchange = self._send(verb, ids, pieces=[self._first])

        def numbers() -> Tensor:
            here = [to_host(read(shard, exchange.arrived)) for shard in self._first_shards]
            return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *here])

        return exchange.return_numbers(numbers)

    def _gather(self, verb: str, work: Callable[[], _T]) -> list[_T]:
        """Runs this rank's part of a call, locked, and returns the results of all ranks.

        An exception of any rank is raised on every rank.
        """

        def locked_work() -> _T:
            with self._shards[0].lock if self._shards else TableLock():
                return work()

        return gather_results(self._group, f"{self._where}.{verb}", locked_work)


def _edit_all(edits: Sequence[Callable[[], _T]]) -> list[_T]:
    """Runs the same edit of each column shard: after an interrupt (Ctrl-C) all shards have the same ids.

    Args:
        edits: functions with the same effect if they run twice.
    """
    results: dict[int, _T] = {}

    def action(number: int, _: bool) -> None:
        results[number] = edits[number]()

    run_to_end(*(partial(action, number) for number in range(len(edits))))
    return [results[number] for number in range(len(edits))]


def read_rows(
    shards: Sequence[DynamicTable], ids: Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Reads rows of one rank's shards of a table and changes nothing. Not collective.

    Args:
        shards: shards of the table in column order; may be empty.
        ids: [K] int64.
        dtype: dtype of the rows.
        device: device of the rows and of the results.

    Returns:
        rows: [K, C] in column order; zeros for an id without a row.
        found: [K] bool, True if the id has a row here.
    """
    if not shards:
        not_found = torch.zeros(ids.numel(), dtype=torch.bool, device=device)
        return torch.empty(ids.numel(), 0, dtype=dtype, device=device), not_found
    with shards[0].lock:  # all column shards at one moment
        read = [shard.lookup(ids) for shard in shards]
    return torch.cat([rows for rows, _ in read], dim=1), read[0][1]


def _whole_stats(row_shards: Sequence[Stats], all_bytes: int | float) -> Stats:
    """Joins the counts of a table's shards.

    Column shards have the same ids and get the same batches, so only the shards with the first columns are
    used. Entries that are not named in this function are counts; they are summed.

    Args:
        row_shards: stats of the shards with the first columns.
        all_bytes: bytes of all shards of the table.
    """
    whole: Stats = {name: sum(shard[name] for shard in row_shards) for name in row_shards[0]}
    for name in OF_EVERY_SHARD:
        whole[name] = max(shard[name] for shard in row_shards)
    whole["bytes"] = all_bytes
    whole["load"] = whole["rows"] / whole["slots"] if whole["slots"] else 0.0
    probed = sum(shard["probe_length_mean"] * shard["rows"] for shard in row_shards)
    whole["probe_length_mean"] = probed / whole["rows"] if whole["rows"] else 0.0
    whole["probe_length_max"] = max(shard["probe_length_max"] for shard in row_shards)
    return whole


def _fault_of_ids(ids: Tensor) -> str:
    if not isinstance(ids, Tensor):
        return f"expected ids as a tensor, got {type(ids).__name__}."
    if ids.dtype != torch.int64:
        return f"expected ids of dtype int64, got {ids.dtype}. Convert with ids.long()."
    if ids.is_meta:
        return "expected ids with values, got ids on the meta device."
    return "" if ids.dim() == 1 else f"expected ids [M], got {list(ids.shape)}."


def _fault_of_rows(rows: Tensor, count: int, embedding_dim: int) -> str:
    if not isinstance(rows, Tensor):
        return f"expected rows as a tensor, got {type(rows).__name__}."
    if tuple(rows.shape) != (count, embedding_dim):
        return f"expected rows [{count}, {embedding_dim}], got {list(rows.shape)}."
    if rows.is_meta:
        return "expected rows with values, got rows on the meta device."
    return "" if rows.is_floating_point() else f"expected floating point rows, got {rows.dtype}."
