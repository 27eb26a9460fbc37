"""Table: one table over all ranks that have it, which is what `collection.table(name)` returns.

It reads this rank's column shards, and reads and edits the whole table; saving, loading and moves to another
plan take it, too. Calls on the whole table are collective: all ranks call them, each with any ids, perhaps
none. An unsharded table is that of a group of one rank.

A collective call meets once, with its arguments, and a change a second time, before it is committed
(`agreement`).

Legend: M ids of this rank, K ids sent to this rank, C columns on this rank, R rows, D columns of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks.agreement import gather_results
from torchrec_dyn.ranks.layout import Piece, TableLayout
from torchrec_dyn.ranks.routing import IdExchange, ids_per_rank, owners
from torchrec_dyn.storage import (
    CanonicalRows,
    IdMap,
    TableLock,
    canonical_order,
    commit,
    locked,
    to_host,
    turn_of,
)
from torchrec_dyn.table import (
    TableShard,
    check_draw,
    check_ids,
    check_rows,
    draw_places,
    ids_at,
    stamp_of,
)

_T = TypeVar("_T")
Stats = dict[str, int | float]
OF_EVERY_SHARD = ("step", "forwards")  # counters that are the same in every shard: not summed


@dataclass(eq=False, repr=False)
class Table:
    """A table over all ranks that have it. A handle stays valid when its table is converted, loaded or moved.

    Reading inserts nothing. No call counts as a training step or takes part in autograd.

    On a sharded table, the calls below read this rank's shard; `assign`, `erase`, `freeze` and `unfreeze` are
    collective: every rank calls them, with any ids or none. On an unsharded table they read the whole table.

    Attributes:
        name: the table's name.
        initializers: the initializers that loads have set, by table of the collection.
        features: the names of the features that read the table.
    """

    name: str
    where: str  # the collection and the table, for messages
    layout: TableLayout
    shards: Sequence[TableShard]  # this rank's column shards in column order; may be empty
    rank: int
    group: dist.ProcessGroup | None  # sends tensors of the CPU; None: the table is not sharded
    lock: TableLock  # of the collection on this rank; it stays the same when tables move
    device: torch.device  # of rows and results; arguments may be on any device
    config: dict[str, Any]  # `saved_config.table_config` of the table
    options: DynamicTableConfig
    optimizer: RowOptimizer
    key: str = ""  # in the model's state dict, e.g. "sparse.ebc.embedding_bags.user"; "": not known
    # Chosen ids and rows of each shard, for deltas; None: all.
    maps: tuple[IdMap, ...] | None = None
    features: tuple[str, ...] = ()
    # Names of the frozen tables of a sharded collection.
    frozen: set[str] = field(default_factory=set)
    # Of an unsharded table: frozen if it requires no gradient.
    placeholder: nn.Parameter | None = None
    initializers: dict[str, Initializer] = field(default_factory=dict)

    @classmethod
    def of_one(cls, shard: TableShard, where: str, config: dict[str, Any]) -> Table:
        """Returns the unsharded table of a shard with all columns: a group of one rank."""
        layout = TableLayout((Piece(0, shard.embedding_dim, (0,)),), False)
        return cls(
            shard.name, where, layout, [shard], 0, None, shard.lock, shard.device, config,
            shard.config, shard.optimizer,
        )  # fmt: skip

    def follow(self, other: Table) -> None:
        """Sets this object to another, after the table has moved: users hold it."""
        self.__dict__.update(other.__dict__)

    def __repr__(self) -> str:
        where = "" if self.group is None else " on this rank"
        rows = sum(shard.id_map.num_ids for shard in self.shards[:1])  # of a torn table, too
        return f"TableHandle(name='{self.name}', num_rows={rows}{where})"

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
    def columns(self) -> tuple[tuple[int, int], ...]:
        """The ranges of columns on this rank, as (first column, number of columns)."""
        return tuple((shard.first_column, shard.columns) for shard in self.shards)

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

    # Reads of this rank's part; not collective.

    @property
    @not_compiled
    def num_rows(self) -> int:
        """Number of rows in use on this rank; several column shards count once."""
        return sum(shard.num_rows for shard in self.shards[:1])

    @not_compiled
    def ids(self) -> Tensor:
        """Returns the ids on this rank, [R] int64 in canonical order: by mixed id, unsigned."""
        for shard in self.shards:
            return shard.ids()
        return torch.empty(0, dtype=torch.int64, device=self.device)

    @not_compiled
    @locked  # all column shards at one moment
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id, like `torchrec_dyn.lookup_rows`, from this rank's shard: rows are [M, C]."""
        shards = list(self.shards)
        if not shards:
            ids = check_ids(f"{self.where}.lookup", ids)
            not_found = torch.zeros(ids.numel(), dtype=torch.bool, device=self.device)
            return torch.empty(ids.numel(), 0, dtype=self.dtype, device=self.device), not_found
        read = [shard.lookup(ids) for shard in shards]
        if len(read) == 1:
            return read[0]
        return torch.cat([rows for rows, _ in read], dim=1), read[0][1]

    @not_compiled
    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns the step or time of each id's last occurrence in training.

        Like `torchrec_dyn.read_last_seen`, for this rank's shard.
        """
        for shard in self.shards:
            return shard.last_seen(ids)
        return torch.full_like(check_ids(f"{self.where}.last_seen", ids), -1, device=self.device)

    @not_compiled
    def count(self, ids: Tensor) -> Tensor:
        """Returns each id's number of occurrences, like `torchrec_dyn.read_counts`, for this rank's shard."""
        for shard in self.shards:
            return shard.count(ids)
        return torch.zeros_like(check_ids(f"{self.where}.count", ids), device=self.device)

    @not_compiled
    def stats(self) -> Stats:
        """Returns the statistics of this rank's shard, or of its first shard if it has several column shards.

        Like `torchrec_dyn.read_stats`; on a rank without a shard only "rows" and "limit", both 0.
        """
        for shard in self.shards:
            return shard.stats()
        return {"rows": 0, "limit": 0}

    # Changes of the whole table; collective if it is sharded.

    @not_compiled
    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id on all ranks, like `torchrec_dyn.assign_rows`."""
        if self.group is None:
            with self.lock:  # the rows of another optimizer do not replace these rows meanwhile
                self.shards[0].assign(ids, rows)
            return
        exchange = self._send(
            "assign", ids, lambda: check_rows("rows", rows, (ids.numel(), self.embedding_dim))
        )
        whole = to_host(rows.detach().to(self.dtype))
        parts = exchange.send([whole[:, piece.span] for piece in self.layout.pieces])

        def prepare() -> tuple[None, list[Callable[[], None]]]:
            return None, [
                shard.prepare_assign(exchange.arrived, part)
                for shard, part in zip(self.shards, parts, strict=True)
            ]

        self._change("assign", prepare)

    @not_compiled
    def erase(self, ids: Tensor) -> int:
        """Removes ids on all ranks and returns how many had a row, like `torchrec_dyn.erase_rows`."""
        if self.group is None:
            with self.lock:
                return self.shards[0].erase(ids)
        exchange = self._send("erase", ids)

        def prepare() -> tuple[int, list[Callable[[], None]]]:
            prepared = [shard.prepare_erase(exchange.arrived) for shard in self.shards]
            erased = [count for count, _ in prepared] if self.has_first_column else []
            return sum(erased[:1]), [remove for _, remove in prepared]

        return sum(self._change("erase", prepare))

    @property
    def is_frozen(self) -> bool:
        """True if the table is frozen: training reads it as evaluation does. The same on every rank."""
        if self.placeholder is not None:
            return not self.placeholder.requires_grad
        return self.name in self.frozen

    @not_compiled
    def freeze(self) -> None:
        """Freezes the table: until `unfreeze`, training reads it as evaluation does.

        From the next forward on no id is added, removed or counted, and the step, rows, scores and optimizer
        state do not change. Weights of bags still get gradients. The backward of an earlier forward
        still updates rows. `assign`, `erase`, loading and `set_time` work as before. Copies of the table are
        frozen too; checkpoints do not record that a table is frozen. On an unsharded table `freeze` is
        equivalent to `requires_grad_(False)` on the table's parameter.

        Raises:
            ValueError: on every rank, if some rank makes another call, or the ranks have trained the table
                for different numbers of forwards; nothing has changed then.
        """
        self._set_frozen(True)

    @not_compiled
    def unfreeze(self) -> None:
        """Unfreezes the table: from the next training forward on, training updates it again.

        Step, scores and optimizer state continue from their present values.

        Raises:
            ValueError: as `freeze`.
        """
        self._set_frozen(False)

    def _set_frozen(self, is_frozen: bool) -> None:
        if self.placeholder is not None:
            self.placeholder.requires_grad_(not is_frozen)
            return
        verb = "freeze" if is_frozen else "unfreeze"
        steps = self._gather(verb, lambda: [shard.step for shard in self.shards])
        if len(set(chain(*steps))) > 1:
            raise ValueError(
                f"{self.where}.{verb}: expected every shard at the same training step, got {steps} by rank. "
                "Call it on all ranks between the same two batches; if an interrupt came into a batch, "
                "load a checkpoint first."
            )
        with turn_of(self), commit(self):
            for shard in self.shards:
                shard.is_frozen = is_frozen
            (self.frozen.add if is_frozen else self.frozen.discard)(self.name)

    def _change(
        self, verb: str, prepare: Callable[[], tuple[_T, list[Callable[[], None]]]]
    ) -> list[_T]:
        """Prepares a change of the shards, meets, and commits it. Returns the results of all ranks."""
        stamps: list[Any] = []
        commits: list[Callable[[], None]] = []

        def prepared() -> _T:
            result, commits[:] = prepare()
            stamps.extend(map(_stamp, self.shards))
            return result

        results = self._gather(verb, prepared)
        with turn_of(self), commit(self):
            if stamps != [*map(_stamp, self.shards)]:
                _, commits = prepare()  # another thread has changed the shards meanwhile
            for commit_shard in commits:
                commit_shard()
        return results

    # Reads of the whole table: of an unsharded one as above, else collective.

    def read_num_rows(self) -> int:
        """Rows in use on all ranks. Like `torchrec_dyn.read_num_rows`."""
        return sum(
            self._gather("num_rows", lambda: sum(shard.num_rows for shard in self._first_shards))
        )

    def read_ids(self) -> Tensor:
        """Returns all ids of the table, [R] int64, on every rank. Like `torchrec_dyn.read_ids`."""
        if self.group is None:
            return self.ids()
        held: list[Tensor] = []

        def read() -> int:
            held.extend(to_host(shard.ids()) for shard in self._first_shards)
            return sum(ids.numel() for ids in held)

        counts = self._gather("ids", read)
        parts = torch.empty(sum(counts), dtype=torch.int64, device="cpu").split(counts)
        for ids in held:
            parts[self.rank].copy_(ids)
        for rank, part in enumerate(parts):
            if counts[rank]:
                dist.broadcast(part, dist.get_global_rank(self.group, rank), group=self.group)
        together = torch.cat(tuple(parts))
        return together[canonical_order(together)].to(self.device)

    def sample_ids(self, n: int, seed: int) -> Tensor:
        """Draws ids with a row, the same on every rank. Like `torchrec_dyn.sample_ids`."""
        if self.group is None:
            return self.shards[0].sample_ids(n, seed)
        first = self.layout.pieces[0].ranks
        asked, counts, after = zip(
            *self._gather("sample_ids", lambda: ((n, seed), *self._counted_for_draws())),
            strict=True,
        )
        if len(set(asked)) > 1:
            raise ValueError(
                f"{self.where}.sample_ids: expected the same n and seed on every rank, got {[*asked]} "
                "by rank."
            )
        # In canonical order: the ranges of the ranks follow each other, and then the last ids of all.
        begins = [0, *accumulate(counts[rank] for rank in first)]
        last = torch.tensor([*chain(*after)], dtype=torch.int64, device="cpu")
        rows = begins[-1] + last.numel()
        check_draw(f"{self.where}.sample_ids", n, seed, rows)
        places = draw_places(rows, n, seed)
        part_of = torch.bucketize(places, torch.tensor(begins[1:], device="cpu"), right=True)
        ids = torch.zeros_like(places)
        if self.has_first_column:
            part = first.index(self.rank)
            own = part_of == part
            with turn_of(self):
                ids[own] = to_host(ids_at(self.shards[0], places[own] - begins[part]))
        dist.all_reduce(ids, group=self.group)
        is_last = part_of == len(first)
        ids[is_last] = last[canonical_order(last)][places[is_last] - begins[-1]]
        return ids.to(self.device)

    def lookup_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id. Like `torchrec_dyn.lookup_rows`."""
        if self.group is None:
            return self.lookup(ids)
        exchange = self._send("lookup", ids)
        rows, mask = self.lookup(exchange.arrived)
        return exchange.return_rows(to_host(rows)), exchange.return_numbers(to_host(mask))

    def read_last_seen(self, ids: Tensor) -> Tensor:
        """Returns each id's last occurrence in training. Like `torchrec_dyn.read_last_seen`."""
        return self._first_numbers("last_seen", ids, self.last_seen)

    def read_counts(self, ids: Tensor) -> Tensor:
        """Returns each id's number of occurrences. Like `torchrec_dyn.read_counts`."""
        return self._first_numbers("count", ids, self.count)

    def read_stats(self) -> Stats:
        """Returns the counts of the whole table, the same on every rank. Like `torchrec_dyn.read_stats`."""
        if self.group is None:
            return self.stats()
        stats = self._gather("stats", lambda: [shard.stats() for shard in self.shards])
        return _whole_stats(
            [stats[rank][0] for rank in self.layout.pieces[0].ranks], [*chain(*stats)]
        )

    @property
    def _first_shards(self) -> Sequence[TableShard]:
        return self.shards[:1] if self.has_first_column else []

    def _counted_for_draws(self) -> tuple[int, list[int]]:
        """Returns the number of ids here in the range of this rank, and its ids after all ranges."""
        if not self.has_first_column:
            return 0, []
        shard, ranks = self.shards[0], self.layout.row_ranks
        if ranks == 1:
            return shard.num_rows, []
        after = to_host(self.canonical(shard).from_mixed(ids_per_rank(ranks) * ranks)).tolist()
        return shard.num_rows - len(after), after

    def _send(
        self, verb: str, ids: Tensor, check: Callable[[], object] = lambda: None
    ) -> IdExchange:
        """Meets with checked arguments, then sends the ids to the ranks that hold them."""

        def checked() -> Tensor:
            self.lock.check_at_rest()
            own = check_ids("ids", ids)
            check()
            return to_host(own)

        assert self.group is not None
        return IdExchange(f"{self.where}.{verb}", checked, self.layout, self.group, self.device)

    def _first_numbers(self, verb: str, ids: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns one number for each id, read from the shards with the first columns."""
        if self.group is None:
            return read(ids)

        def check() -> None:
            for shard in self.shards:
                shard.life_for(verb)

        exchange = self._send(verb, ids, check)
        return exchange.return_numbers(to_host(read(exchange.arrived)))

    def _gather(self, verb: str, work: Callable[[], _T]) -> list[_T]:
        """Runs this rank's part of a call, locked, then meets; returns the results of all ranks."""

        def locked_work() -> _T:
            with turn_of(self):
                return work()

        return gather_results(self.group, f"{self.where}.{verb}", locked_work)


def _stamp(shard: TableShard) -> tuple[int, ...]:
    """Returns numbers that change with what an edit has prepared: also where free rows are released."""
    return *stamp_of(shard), shard.row_numbers.num_free


def _whole_stats(row_shards: Sequence[Stats], shards: Sequence[Stats]) -> Stats:
    """Joins the counts of a table's shards: of those with the first columns, as all have the same ids.

    `shards` are the stats of all shards. Entries that are not named in this function are counts; they are
    summed.
    """
    whole: Stats = {name: sum(shard[name] for shard in row_shards) for name in row_shards[0]}
    for name in (*OF_EVERY_SHARD, "probe_length_max"):
        whole[name] = max(shard[name] for shard in row_shards)
    for name in ("bytes", "nonfinite"):
        whole[name] = sum(shard[name] for shard in shards)
    probed = sum(shard["probe_length_mean"] * shard["rows"] for shard in row_shards)
    whole["load"] = whole["rows"] / max(1, whole["slots"])
    whole["probe_length_mean"] = probed / max(1, whole["rows"])
    return whole
