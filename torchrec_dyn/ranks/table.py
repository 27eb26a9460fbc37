"""Table: one table over all ranks that have it, and its column shards on this rank.

Saving, loading, moves to another plan and calls by id take this object. The calls by id, specified in
whole_model/by_id.py, are collective: all ranks call them, each with any ids, perhaps none. A fault on one
rank is raised on all ranks. The calls of an unsharded table, a group of one rank, are those of its shard.

Legend: M ids of this rank, K ids sent to this rank, C columns on this rank, R rows of the table, D columns of
the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks.agreement import exchange, gather_results, run_together
from torchrec_dyn.ranks.id_exchange import IdExchange
from torchrec_dyn.ranks.layout import Piece, TableLayout
from torchrec_dyn.ranks.routing import ids_per_rank, owners
from torchrec_dyn.storage import (
    CanonicalRows,
    IdMap,
    TableLock,
    canonical_order,
    changes,
    locked,
    run_to_end,
    to_host,
    turn_of,
)
from torchrec_dyn.table import (
    TableShard,
    check_draw,
    check_ids,
    draw_places,
    ids_at,
    stamp_of,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
Stats = dict[str, int | float]
OF_EVERY_SHARD = ("step", "forwards")  # counters that are the same in every shard: not summed


def collective(
    method: Callable[Concatenate[Table, _P], _T],
) -> Callable[Concatenate[Table, _P], _T]:
    """Returns a call on the whole table; of an unsharded table the call of this name on its shard."""

    @wraps(method)
    def on_all_ranks(self: Table, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self.group is not None:
            return method(self, *args, **kwargs)
        on_shard: Callable[..., _T] = getattr(self.shards[0], method.__name__)
        return on_shard(*args, **kwargs)

    return on_all_ranks


@dataclass(eq=False)
class Table:
    """One table over all ranks that have it.

    Attributes:
        name: the table's name.
        where: the collection and the table, for messages.
        layout: the pieces of the table and their ranks.
        shards: this rank's column shards in column order; may be empty.
        rank: number of this rank.
        group: the ranks; it sends tensors of the CPU. None: the table is not sharded.
        lock: lock of the collection on this rank, which stays the same when tables move.
        device: device of the rows and of the tensors that methods return; arguments may be on any device.
        config: `saved_config.table_config` of the table.
        options: the table's options.
        optimizer: the optimizer of the rows.
        key: key of the table in the model's state dict, e.g. "sparse.ebc.embedding_bags.user"; "" if the
            model is not known.
        initializers: the initializers that loads have set, by table of the collection.
        maps: chosen ids and rows of each shard, for deltas (checkpoint/delta_export.py); None: all rows.
    """

    name: str
    where: str
    layout: TableLayout
    shards: Sequence[TableShard]
    rank: int
    group: dist.ProcessGroup | None
    lock: TableLock
    device: torch.device
    config: dict[str, Any]
    options: DynamicTableConfig
    optimizer: RowOptimizer
    key: str = ""
    initializers: dict[str, Initializer] = field(default_factory=dict)
    maps: tuple[IdMap, ...] | None = None

    @classmethod
    def of_one(cls, shard: TableShard, where: str, config: dict[str, Any]) -> Table:
        """Returns the unsharded table of a shard with all columns: a group of one rank."""
        layout = TableLayout((Piece(0, shard.embedding_dim, (0,)),), False)
        return cls(
            shard.name, where, layout, [shard], 0, None, shard.lock, shard.device, config,
            shard.config, shard.optimizer,
        )  # fmt: skip

    def follow(self, other: Table) -> None:
        """Sets this object to another, after the table has moved: handles and users hold it."""
        self.__dict__.update(other.__dict__)

    # This rank's part of the table.

    @property
    def part(self) -> int | None:
        """The number of this rank among the ranks that share the rows; None if it holds no rows."""
        for piece in self.layout.pieces:
            if self.shards and piece.first_column == self.shards[0].first_column:
                return piece.ranks.index(self.rank)
        return None

    @property
    def has_first_column(self) -> bool:
        """True if this rank has the first column shard, the only shard that saves ids and scores."""
        return bool(self.shards) and self.shards[0].first_column == 0

    @property
    def cuts(self) -> list[int]:
        """The first column of each column shard of the table, and the end of the last."""
        return [*(piece.first_column for piece in self.layout.pieces), self.embedding_dim]

    @property
    def column_ranges(self) -> list[tuple[int, int]]:
        """The first column of each shard on this rank, and the column after its last."""
        return [(one.first_column, one.first_column + one.columns) for one in self.shards]

    @property
    def embedding_dim(self) -> int:
        """D."""
        last = self.layout.pieces[-1]
        return last.first_column + last.columns

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        dtype: torch.dtype = getattr(torch, self.config["rows"])
        return dtype

    def has_shards_of(self, other: Table) -> bool:
        """Returns True if both have the same shard objects of the same table of the same collection."""
        # A rank without shards of the table has equal lists for any two collections.
        is_same_table = self.lock is other.lock and self.name == other.name
        return is_same_table and list(self.shards) == list(other.shards)

    def check_model(self, model: Table) -> None:
        """Raises ValueError if tensors loaded for these shards are passed to another model."""
        if not self.has_shards_of(model):
            raise ValueError(
                f"{model.where}: expected tensors loaded into this model's own state dict, got tensors of "
                "another model's state dict. Make the state dict with this model, then call dcp.load."
            )

    def owns(self, ids: Tensor) -> Tensor:
        """Returns a mask of the ids [M] int64 that belong to this rank, [M] bool."""
        if not self.layout.rows_are_spread:
            return torch.full(ids.shape, bool(self.shards), device=ids.device)
        part = -1 if self.part is None else self.part
        return torch.eq(owners(ids.contiguous(), self.layout.row_ranks), part)

    def canonical(self, shard: TableShard) -> CanonicalRows:
        """Returns the rows of a shard in canonical order; valid until the shard changes."""
        id_map = shard.id_map if self.maps is None else self.maps[list(self.shards).index(shard)]
        return CanonicalRows(id_map, self.where, lambda: stamp_of(shard))

    @locked  # all column shards at one moment
    def rows_here(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by ids [K] int64 from this rank's shards and changes nothing. Not collective.

        Returns:
            rows: [K, C] in column order; zeros for an id without a row.
            found: [K] bool, True if the id has a row here.
        """
        if not self.shards:
            ids = check_ids(f"{self.where}.lookup", ids)
            not_found = torch.zeros(ids.numel(), dtype=torch.bool, device=self.device)
            return torch.empty(ids.numel(), 0, dtype=self.dtype, device=self.device), not_found
        read = [shard.lookup(ids) for shard in self.shards]
        if len(read) == 1:
            return read[0]
        return torch.cat([rows for rows, _ in read], dim=1), read[0][1]

    # The whole table. All of these are collective.

    @property
    def _first(self) -> Piece:
        return self.layout.pieces[0]

    @property
    def _first_shards(self) -> Sequence[TableShard]:
        return self.shards[:1] if self.has_first_column else []

    @property
    def _sharded_over(self) -> dist.ProcessGroup:
        assert self.group is not None
        return self.group

    @property
    def num_rows(self) -> int:
        """Rows in use on all ranks. Collective."""
        counts = self._gather("num_rows", lambda: sum(one.num_rows for one in self._first_shards))
        return sum(counts)

    @collective
    def ids(self) -> Tensor:
        """Returns all ids of the table, [R] int64 in unsigned order of mix64(id), on every rank."""
        call, group = f"{self.where}.ids", self._sharded_over
        held: list[Tensor] = []

        def read() -> int:
            held.extend(to_host(shard.ids()) for shard in self._first_shards)
            return sum(ids.numel() for ids in held)

        counts = gather_results(group, call, read)

        def place() -> Sequence[Tensor]:
            parts = torch.empty(sum(counts), dtype=torch.int64, device="cpu").split(counts)
            for ids in held:
                parts[self.rank].copy_(ids)
            return parts

        parts = run_together(group, call, place)
        for rank, part in enumerate(parts):
            if counts[rank]:
                dist.broadcast(part, dist.get_global_rank(group, rank), group=group)

        def join() -> Tensor:
            together = torch.cat(tuple(parts))
            return together[canonical_order(together)].to(self.device)

        return run_together(group, call, join)

    @collective
    def sample_ids(self, n: int, seed: int) -> Tensor:
        """Draws ids with a row, the same on every rank. As `torchrec_dyn.sample_ids`."""
        call, first, group = f"{self.where}.sample_ids", self._first.ranks, self._sharded_over
        of_ranks = self._gather("sample_ids", lambda: (n, seed, *self._counted_for_draws()))
        asked = [of_rank[:2] for of_rank in of_ranks]
        if any(other != asked[0] for other in asked):
            raise ValueError(
                f"{call}: expected the same n and seed on every rank, got {asked} by rank."
            )
        # In canonical order: the ranges of the ranks follow each other, and then the last ids of all.
        begins = [0, *accumulate(of_ranks[rank][2] for rank in first)]
        after = [number for rank in first for number in of_ranks[rank][3]]
        last = torch.tensor(after, dtype=torch.int64, device="cpu")
        rows = begins[-1] + last.numel()
        check_draw(call, n, seed, rows)
        places = draw_places(rows, n, seed)
        part_of = torch.bucketize(places, torch.tensor(begins[1:], device="cpu"), right=True)
        drawn = torch.bincount(part_of, minlength=len(first))[: len(first)].tolist()
        sizes = [0] * len(of_ranks)
        for rank, count in zip(first, drawn, strict=True):
            sizes[rank] = count

        def mine() -> Tensor:
            if not self.has_first_column:
                return places[:0]
            part = first.index(self.rank)
            with turn_of(self):
                ids = to_host(ids_at(self.shards[0], places[part_of == part] - begins[part]))
            return ids.repeat(len(sizes))

        found = exchange(group, call, mine, [sizes[self.rank]] * len(sizes), sizes).split(sizes)

        def placed() -> Tensor:
            ids = torch.empty_like(places)
            for part, rank in enumerate(first):
                ids[part_of == part] = found[rank]
            is_last = part_of == len(first)
            ids[is_last] = last[canonical_order(last)][places[is_last] - begins[-1]]
            return ids.to(self.device)

        return run_together(group, call, placed)

    def _counted_for_draws(self) -> tuple[int, list[int]]:
        """Returns the number of ids here in the range of this rank, and its ids after all ranges."""
        if not self.has_first_column:
            return 0, []
        shard, ranks = self.shards[0], self.layout.row_ranks
        if ranks == 1:
            return shard.num_rows, []
        after = to_host(self.canonical(shard).from_mixed(ids_per_rank(ranks) * ranks)).tolist()
        return shard.num_rows - len(after), after

    @collective
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id. As `torchrec_dyn.lookup_rows`."""
        exchange = self._send("lookup", ids)
        found: list[Tensor] = []

        def read() -> Tensor:
            rows, mask = self.rows_here(exchange.arrived)
            found.append(to_host(mask))
            return to_host(rows)

        return exchange.return_rows(read), exchange.return_numbers(found.pop)

    @collective
    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns each id's last occurrence in training. As `torchrec_dyn.read_last_seen`."""
        return self._first_numbers("last_seen", ids, TableShard.last_seen)

    @collective
    def count(self, ids: Tensor) -> Tensor:
        """Returns each id's number of occurrences. As `torchrec_dyn.read_counts`."""
        return self._first_numbers("count", ids, TableShard.count)

    @collective
    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id, on all column shards. As `torchrec_dyn.assign_rows`."""
        exchange = self._send("assign", ids, rows)
        arrived = exchange.send_rows(lambda: to_host(rows.detach().to(self.dtype)))

        def write() -> None:
            parts = arrived.split([shard.columns for shard in self.shards], 1)
            edits = [partial(shard.assign, exchange.arrived) for shard in self.shards]
            of_shards = zip(edits, parts, strict=True)
            _edit_all([partial(edit, part.contiguous()) for edit, part in of_shards])

        self._gather("assign", write)

    @collective
    def erase(self, ids: Tensor) -> int:
        """Removes ids, on all column shards. As `torchrec_dyn.erase_rows`."""
        exchange = self._send("erase", ids)
        edits = [partial(shard.erase, exchange.arrived) for shard in self.shards]
        counted = len(self._first_shards)
        return sum(self._gather("erase", lambda: sum(_edit_all(edits)[:counted])))

    def set_frozen(self, is_frozen: bool, frozen: set[str]) -> None:
        """Freezes or unfreezes all shards at the same training step, or no shard.

        `frozen` are the names of the frozen tables of the collection; it gets or loses this name.

        Raises:
            ValueError: on every rank, if some rank makes another call, or the training steps of the shards
                differ; nothing has changed then.
        """
        verb = "freeze" if is_frozen else "unfreeze"
        of_ranks = self._gather(verb, lambda: [shard.step for shard in self.shards])
        steps = {rank: of_shards for rank, of_shards in enumerate(of_ranks) if of_shards}
        if len({step for of_shards in of_ranks for step in of_shards}) > 1:
            raise ValueError(
                f"{self.where}.{verb}: expected every shard at the same training step, got "
                f"{steps} by rank. Call it on all ranks between the same two batches; if an interrupt came "
                "into a batch, load a checkpoint first."
            )
        self._mark_frozen(is_frozen, frozen)

    @locked
    @changes
    def _mark_frozen(self, is_frozen: bool, frozen: set[str]) -> None:
        def mark(_: bool) -> None:
            for shard in self.shards:
                shard.is_frozen = is_frozen
            (frozen.add if is_frozen else frozen.discard)(self.name)

        run_to_end(mark)

    @collective
    def stats(self) -> Stats:
        """Returns the counts of the whole table, the same on every rank. As `torchrec_dyn.read_stats`."""
        of_ranks = self._gather("stats", lambda: [shard.stats() for shard in self.shards])
        return _whole_stats(
            [of_ranks[rank][0] for rank in self._first.ranks],
            [shard for of_rank in of_ranks for shard in of_rank],
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
                fault = fault or _fault_of_rows(rows, ids.numel(), self.embedding_dim)
            if fault:
                raise ValueError(fault)
            return to_host(ids.detach().contiguous())

        call = f"{self.where}.{verb}"
        return IdExchange(call, checked, self.layout, self._sharded_over, self.device, pieces)

    def _first_numbers(
        self, verb: str, ids: Tensor, read: Callable[[TableShard, Tensor], Tensor]
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
            with turn_of(self):
                return work()

        return gather_results(self.group, f"{self.where}.{verb}", locked_work)


def _edit_all(edits: Sequence[Callable[[], _T]]) -> list[_T]:
    """Runs the same edit of each column shard: after an interrupt (Ctrl-C) all shards have the same ids.

    An edit has the same effect if it runs twice.
    """
    results: dict[int, _T] = {}

    def action(number: int, _: bool) -> None:
        results[number] = edits[number]()

    run_to_end(*(partial(action, number) for number in range(len(edits))))
    return [results[number] for number in range(len(edits))]


def _whole_stats(row_shards: Sequence[Stats], shards: Sequence[Stats]) -> Stats:
    """Joins the counts of a table's shards.

    Column shards have the same ids and get the same batches, so only the shards with the first columns are
    used, but for what depends on columns. Entries that are not named in this function are counts; they are
    summed.

    `row_shards` are the stats of the shards with the first columns, `shards` those of all shards.
    """
    whole: Stats = {name: sum(shard[name] for shard in row_shards) for name in row_shards[0]}
    for name in OF_EVERY_SHARD:
        whole[name] = max(shard[name] for shard in row_shards)
    for name in ("bytes", "nonfinite"):
        whole[name] = sum(shard[name] for shard in shards)
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
