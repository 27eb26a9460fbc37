"""Side: one table on one rank as a replica, with what a sync needs of the contents at the last sync.

Nothing here sends anything; tensors that are returned are on the CPU. The column shards of a rank have the
same ids and scores, so those of the first shard are read.

Legend: K ids, M ids with a row, R sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from torchrec_dyn.life import BY_ROW, Clock, RowLife, Scores
from torchrec_dyn.policies import making_room
from torchrec_dyn.ranks import Table
from torchrec_dyn.replicas.merge import (
    COUNTER,
    ERASED,
    HAS_ROW,
    LOST,
    ROW,
    WAITS,
    IdStates,
    Verdict,
    decide,
    mean_of,
    packed,
    unpacked,
)
from torchrec_dyn.storage import locked, to_host, turn_of
from torchrec_dyn.table import TableShard, append, beside, merge

_NO_COUNTERS = torch.empty(3, 0, dtype=torch.int64, device="cpu")


class Side:
    """One table on this rank. The rank has shards of it, and every replica has the same contents now.

    A record is what is averaged of a row: the weights and every optimizer state of every shard.
    """

    def __init__(self, table: Table) -> None:
        self.table, self.lock, self.device = table, table.lock, table.device  # for `locked`
        self._scores: Scores | None = None
        self._begin_with_all()
        self._removed = self._erased = self._counters[0]  # ids, since the last sync
        self._rows: list[TableShard] = []  # the merged rows, beside the shards

    @locked
    def _begin_with_all(self) -> None:
        """Takes the present contents as those of the last sync."""
        first = self._first
        if first.life is not None:
            self._scores = Scores(first.life.scores.store.shift, first.device)
            for _, rows in first.id_map.pieces():
                self._note_scores(first.life, rows)
        self._begin()

    @property
    def _first(self) -> TableShard:
        return self.table.shards[0]

    def _note_scores(self, life: RowLife, rows: Tensor) -> None:
        """Notes the present scores of rows [M] int64 as those of the last sync."""
        assert self._scores is not None
        self._scores.store.reserve(self._first.row_numbers.high_water_mark)
        self._scores.write(rows, *life.scores.read(rows))

    def _begin(self) -> None:
        """Takes the present contents as those of the last sync, but for scores, which are noted by row."""
        first = self._first
        self._version = first.version(keeps_erased=True)
        self._generations = [shard.generation for shard in self.table.shards]
        waiting = first.waiting
        self._counters = _NO_COUNTERS.to(first.device)
        if waiting is not None:
            counters = waiting.export()
            self._counters = counters[:, counters[0].argsort()]

    @locked
    def check_same(self, present: Table | None) -> None:
        """Raises ValueError unless `present`, in the model, is this table, only trained and edited."""
        generations = [shard.generation for shard in self.table.shards]
        is_logged = self._first.changes is self._version.log
        is_there = present is not None and present.has_shards_of(self.table)
        if not is_there or not is_logged or generations != self._generations:
            raise ValueError(
                f"{self.table.where}: expected a table that was only trained and edited since the last sync, "
                "got one that was loaded, converted, copied or moved to another plan. Make a new Replicas "
                "when all replicas have the same contents."
            )

    def check_closed(self) -> None:
        """Raises ValueError if a forward is open, whose backward would write to merged rows."""
        if len(self._first.forwards):
            raise ValueError(
                f"{self.table.where}: expected no open forward, got {len(self._first.forwards)}. Call sync "
                "after the backward, with deferred updates after the optimizer's step(), and before the next "
                "forward; drop outputs that get no backward. A pipeline that looks up ahead must end first."
            )

    @property
    def step(self) -> int:
        """The number of training forwards."""
        return self._first.step

    @property
    @locked
    def clock(self) -> Tensor:
        """The clock, [2, K] int64 as saved; without a life or a time [2, 0]."""
        life = self._first.life
        return Clock().export() if life is None else life.clock.export()

    @property
    def has_life(self) -> bool:
        """True if the table keeps scores."""
        return self._first.life is not None

    # Reads for a sync.

    @locked
    def find_changes(self) -> Tensor:
        """Returns the ids that have changed in any way since the last sync, [K] int64 on the CPU."""
        first, log = self._first, self._version.log
        changed, _ = log.changed_rows(self._version, first.id_map)
        self._removed = log.removed_ids(self._version, first.id_map)  # have no row now
        self._erased = log.erased_ids(self._version)
        self._rows = [beside(shard) for shard in self.table.shards]
        parts = [changed, self._removed, self._erased, self._changed_counters()]
        return to_host(torch.unique(torch.cat(parts)))

    def _changed_counters(self) -> Tensor:
        """Returns the ids whose counter is not as it was, or is gone, [K] int64."""
        waiting = self._first.waiting
        if waiting is None:
            return self._counters[0]
        now = waiting.export()
        last_seen, counts = self._counters_before(now[0])
        is_same = (last_seen == now[1]) & (counts == now[2])
        is_gone = ~torch.isin(self._counters[0], now[0])
        return torch.cat([now[0][~is_same], self._counters[0][is_gone]])

    def _counters_before(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last_seen and counts of the counters of ids [K] int64 at the last sync; 0 for none."""
        known, last_seen, counts = self._counters
        if not known.numel():
            return torch.zeros_like(ids), torch.zeros_like(ids)
        places = torch.searchsorted(known, ids).clamp_(max=known.numel() - 1)
        is_known = known[places] == ids
        return torch.where(is_known, last_seen[places], 0), torch.where(is_known, counts[places], 0)

    @locked
    def states_of(self, ids: Tensor) -> IdStates:
        """Returns the states of ids [K] int64 on this side, tensors [K]; after `find_changes`."""
        first = self._first
        ids = ids.to(first.device)
        rows = first.id_map.lookup(ids)
        has_row, is_erased = rows >= 0, torch.isin(ids, self._erased)
        is_lost = torch.isin(ids, self._removed) & ~is_erased
        flags = HAS_ROW * has_row + ERASED * is_erased + LOST * is_lost
        words = earlier = torch.zeros_like(ids)
        if first.life is not None and self._scores is not None:
            is_new = self._version.log.has_come_since(rows, self._version)
            is_kept = has_row & ~is_new
            words = torch.where(has_row, packed(*first.life.scores.read(rows)), 0)
            before = self._scores.read(torch.where(is_kept, rows, -1))
            earlier = torch.where(is_kept, packed(*before), 0)
            if first.life.waiting is not None:
                last_seen, counts = first.life.waiting.read(first.life.waiting.id_map.lookup(ids))
                waits = ~has_row & (last_seen >= 0)
                flags += WAITS * waits
                words = torch.where(waits, packed(last_seen, counts), words)
                # A row begins with the occurrences that were counted before, unless it sums weights.
                begins = waits | (has_row & is_new if first.life.unit is None else waits)
                before = self._counters_before(ids)
                goes_on = begins & ~is_erased & (before[1] <= unpacked(words)[1])
                earlier = torch.where(goes_on, packed(*before), earlier)
        return IdStates(to_host(flags.to(torch.uint8)), to_host(words), to_host(earlier))

    @locked
    def decide(self, id_states: Sequence[IdStates], clock: Clock | None) -> Verdict:
        """Returns the verdict on K ids from their states on all sides; clock: merged, if they differ."""
        together = IdStates(*(torch.stack(parts) for parts in zip(*id_states, strict=True)))
        life, step = self._first.life, self.step

        def as_of(steps: Tensor, last_seen: Tensor, counts: Tensor) -> Tensor:
            if life is None:
                return counts
            steps = steps.expand_as(last_seen).contiguous()
            return life.counts_as_of(
                steps, last_seen.contiguous(), counts, step, clock or life.clock
            )

        return decide(together, as_of, life is not None and life.unit is None)

    # Rows.

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return sum(store.row_bytes for shard in self.table.shards for store in shard.stores)

    @property
    def record_tensors(self) -> int:
        """Number of tensors of records."""
        return sum(len(shard.stores) for shard in self.table.shards)

    @locked
    def records(self, ids: Tensor) -> list[Tensor]:
        """Returns the records of ids [M] int64, which have rows: [M, columns] of each store."""
        records: list[Tensor] = []
        for shard in self.table.shards:
            rows = shard.id_map.lookup(ids.to(shard.device))
            records += [to_host(store.read(rows)) for store in shard.stores]
        return records

    @locked
    def mean(
        self, ids: Tensor, records: Sequence[Sequence[Tensor]], gives: Tensor, takes_part: Tensor
    ) -> list[Tensor]:
        """Returns the means of the records of ids [M] int64; gives and takes_part [R, M] as of `mean_of`."""
        by_store, means = zip(*records, strict=True), []
        for shard in self.table.shards:
            fresh, rows = beside(shard), torch.arange(len(ids), device=shard.device)
            fresh.reserve(len(ids))
            shard.initial_rows.write(ids.to(shard.device), rows, fresh.weights, fresh.states)
            initial = [to_host(store.read(rows)) for store in fresh.stores]
            means += [
                mean_of(sides, of_new, gives, takes_part)
                for of_new, sides in zip(initial, by_store, strict=False)
            ]
        return means

    # What becomes of it.

    @locked
    def check_limit(self, ids: Tensor, kinds: Tensor) -> None:
        """Raises RuntimeError if ids [K] of kinds [K] uint8 go over the limit, and no policy evicts."""
        first = self._first
        has_row = to_host(first.id_map.lookup(ids.to(first.device))) >= 0
        gets_row = kinds == ROW
        rows = (
            first.id_map.num_ids
            + int((gets_row & ~has_row).sum())
            - int((has_row & ~gets_row).sum())
        )
        if rows > first.row_limit and not (first.life is not None and first.life.replaces):
            raise RuntimeError(
                f"{self.table.where}: expected at most {first.row_limit} rows here (num_embeddings="
                f"{first.num_embeddings}) in the union of the replicas, got {rows}. Raise num_embeddings, or "
                f"evict rows: DynamicTableConfig({making_room(first.config.eviction)})."
            )

    @locked
    def append(self, ids: Tensor, words: Tensor, records: Sequence[Tensor]) -> None:
        """Adds merged rows to those beside the shards: ids and scores [M] int64, and records."""
        chunk, left = {"ids": ids, **dict(zip(BY_ROW, unpacked(words), strict=True))}, iter(records)
        for shard, rows in zip(self.table.shards, self._rows, strict=True):
            names = ("weight", *shard.optimizer.state_names)
            append(rows, {**chunk, **{name: next(left) for name in names}})

    @locked
    def prepare(
        self, ids: Tensor, kinds: Tensor, words: Tensor, clock: Clock | None
    ) -> Callable[[], None]:
        """Prepares to write the appended rows, counters by the verdicts on ids [K], and a merged clock."""
        ids, kinds = ids.to(self.device), kinds.to(self.device)
        waits, removed = kinds == COUNTER, ids[kinds != ROW]
        counters = torch.stack([ids[waits], *unpacked(words.to(self.device)[waits])])
        changes, lowest = [], []
        for shard, rows in zip(self.table.shards, self._rows, strict=True):
            rows.step, life = shard.step, shard.life
            if life is not None and rows.life is not None:
                rows.life.is_unscored = life.is_unscored
                rows.life.clock = Clock.load((clock or life.clock).export())
                if life.waiting is not None and rows.life.waiting is not None:
                    present = life.waiting.export()
                    present = present[:, ~torch.isin(present[0], ids)]
                    rows.life.waiting.write(*torch.cat([present, counters], 1))
            changes.append(merge(shard, rows, removed))
            lowest.append(_lowest_by_own(shard, rows, ids))

        def write() -> None:
            first = self._first
            with turn_of(self):
                for shard, change, gone in zip(self.table.shards, changes, lowest, strict=True):
                    change()
                    _cut(shard, gone)
                if first.life is not None:
                    places = first.id_map.lookup(ids)
                    self._note_scores(first.life, places[places >= 0])
                self._rows = []
                self._begin()

        return write


def _lowest_by_own(shard: TableShard, rows: TableShard, ids: Tensor) -> Tensor | None:
    """Returns the ids that the user's own policy evicts once rows beside a shard replace those of ids [K].

    None without such a policy. Found before the commit: an error of the user's code changes nothing.
    """
    if shard.life is None or rows.life is None or not shard.life.scores_by_own:
        return None
    replaced = shard.id_map.lookup(ids)
    surplus = shard.id_map.num_ids - int((replaced >= 0).sum()) + rows.id_map.num_ids
    surplus -= shard.row_limit
    if surplus <= 0:
        return ids[:0]
    life = copy(shard.life.caught_up(rows.step, shard.row_numbers.high_water_mark))
    life.clock = rows.life.clock
    parts = [(life, shard.searched, replaced), (rows.life, rows.searched, None)]
    return life.lowest_merged(surplus, rows.next_step, parts)


def _cut(shard: TableShard, gone: Tensor | None) -> None:
    """Evicts the lowest rows of a full table, those of ids `gone` if there are any, and surplus counters."""
    life = shard.life
    if life is None:
        return
    surplus, step = shard.id_map.num_ids - shard.row_limit, shard.next_step
    if gone is not None:
        shard.remove(gone, shard.id_map.lookup(gone), "evicted_full")
    elif life.replaces and surplus > 0:
        lowest = life.lowest_exactly(surplus, step, shard.searched)
        shard.remove(*lowest, "evicted_full")
    if life.waiting is not None:
        before = len(life.waiting)
        life.drop_surplus_counters(shard.step, shard.id_map.num_ids)
        shard.counters["counters_dropped"] += before - len(life.waiting)
