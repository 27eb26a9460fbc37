"""The contestants of bench_eviction.py: a full table under a policy, and streams with and without new ids.

Half of the table's rows have known ids: the stream repeats them, and no policy evicts them. The ids of the
other half were seen once, long ago, so the policy evicts them first. The last id of each bag is new: 10
percent of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from axes import Workload, counts, offsets, raw_ids
from contestants import OPTIMIZER
from layouts import TableGroup, TableShard
from torch import Tensor

import torchrec_dyn as dyn

NEVER = 2**31  # steps: an age that no row of a benchmark reaches
FREED = 64  # a full table frees at least limit / FREED rows at once
TICK = 60  # units by which a clock moves in every step


@dataclass(frozen=True)
class Case:
    """A policy of a full table.

    Attributes:
        name: name in the results.
        config: config of the table.
        admitted_at: the occurrence at which an id gets its row.
    """

    name: str
    config: dyn.DynamicTableConfig
    admitted_at: int = 1


LEAST_RECENT = Case("LRU", dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed()))
NO_POLICY = Case("no policy", dyn.DynamicTableConfig())


def cases(rows: int) -> list[Case]:
    """Returns the policies for a full table of `rows` rows."""
    recent, frequent = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
    aged = (dyn.ExpireAfter(steps=NEVER), recent)
    after = dyn.AdmitAfter(2, counters=rows // 10)
    return [
        LEAST_RECENT,
        Case("LFU", dyn.DynamicTableConfig(eviction=frequent)),
        Case("ExpireAfter + LRU", dyn.DynamicTableConfig(eviction=aged)),
        Case("AdmitAfter(2) + LRU", dyn.DynamicTableConfig(admission=after, eviction=recent), 2),
    ]


class Stepped:
    """One table that is trained batch by batch.

    Args:
        workload: workload of one table; its ids are the known ids.
        case: the policy.
        limit: limit of the table.

    Attributes:
        ticks: True if a clock moves by TICK before each step.
    """

    def __init__(self, workload: Workload, case: Case, limit: int) -> None:
        self.case = case
        self.table = TableShard(
            name="table",
            num_embeddings=limit,
            embedding_dim=workload.dim,
            optimizer=OPTIMIZER,
            config=case.config,
        )
        self.group = TableGroup([self.table], [1], "sum")
        self.offsets, self.counts = offsets(workload), counts(workload)
        self.grad = torch.randn(workload.batch, workload.dim) * 1e-3
        self.ticks = False
        self._fed = workload.ids_per_step
        self._next = 0

    def step(self, ids: Tensor) -> None:
        """Trains on one batch.

        Args:
            ids: [ids per step] int64.
        """
        if self.ticks:
            self.table.set_time((self.table.step + 1) * TICK)
        self.group(ids, self.offsets, training=True, counts=self.counts).backward(self.grad)

    def feed(self, numbers: Tensor, occurrences: int) -> None:
        """Runs training forwards without a backward over new ids, as many per step as in a batch.

        Args:
            numbers: [M] int64, numbers that `raw_ids` turns into ids.
            occurrences: occurrences of each id.
        """
        with torch.no_grad():
            for part in numbers.split(self._fed):
                ids = raw_ids(part).repeat(occurrences)
                self.group(ids, torch.tensor([0, ids.numel()]), training=True)

    def fill(self, known: int) -> Stepped:
        """Fills the table to its limit, known ids last and seen most often; returns self."""
        limit, at = self.table.row_limit, self.case.admitted_at
        self.feed(torch.arange(known, limit), at)
        self.feed(torch.arange(known), at + 1)
        self._next = limit
        admission = self.case.config.admission
        if isinstance(admission, dyn.AdmitAfter):  # the counters are full too
            self.feed(self.fresh(admission.counters or limit), 1)
        assert self.table.num_rows == limit, f"{self.table.num_rows} rows of {limit}"
        return self

    def fresh(self, count: int) -> Tensor:
        """Returns the numbers of `count` ids not used before, [count] int64."""
        self._next += count
        return torch.arange(self._next - count, self._next)

    def new_ids_a_step(self, batch: int) -> int:
        """Returns the number of ids that get a row in a step of `batch` new ids."""
        return batch if self.case.admitted_at == 1 else batch // 3

    def with_new(self, batches: list[Tensor], steps: int, bag: int) -> list[Tensor]:
        """Returns batches of known ids in which the last id of each bag is new.

        If an id must occur twice to get a row, two thirds of the new ids of a step occur for the first
        time. Half of them occur again in the next step, as its other third. The rest never occur again.

        Args:
            batches: batches of known ids, used in turn, [ids per step] int64 each.
            steps: number of batches to return.
            bag: ids per bag.
        """
        made = []
        size = batches[0].numel() // bag
        back = torch.empty(0, dtype=torch.int64)
        if self.case.admitted_at > 1:
            back = self.fresh(size // 3)
            self.feed(back, 1)
        for step in range(steps):
            first = self.fresh(size - back.numel())
            ids = batches[step % len(batches)].clone()
            ids.view(-1, bag)[:, -1] = raw_ids(torch.cat([first, back])[torch.randperm(size)])
            made.append(ids)
            back = first[: back.numel()]
        return made


def expiring(limit: int, workload: Workload, unit: str) -> tuple[Stepped, Stepped, list[Tensor]]:
    """Returns two tables whose rows expire, and batches of their known ids.

    The batches run over all known ids in a random order, so that no known id expires.

    Args:
        limit: limit of each table.
        workload: workload of one table.
        unit: unit of the age: "steps", or "time" for a clock that moves in every step.

    Returns:
        A table that was trained on new ids until as many rows expire in a step as are inserted; a table
        without new ids; and the batches.
    """
    often = workload.batch * (workload.bag - 1)  # the last id of a bag may be new
    walk = workload.rows // often
    numbers = torch.randperm(walk * often)
    last = torch.randint(0, walk * often, (walk, workload.batch, 1))
    batches = torch.cat([numbers.view(walk, workload.batch, workload.bag - 1), last], dim=2)
    ids = list(raw_ids(batches.flatten()).view(walk, -1))
    age = walk + walk // 2 + 20
    after = dyn.ExpireAfter(steps=age) if unit == "steps" else dyn.ExpireAfter(time=age * TICK)
    case = Case(f"ExpireAfter({unit}=)", dyn.DynamicTableConfig(eviction=after))
    tables = []
    for _ in range(2):
        table = Stepped(workload, case, limit)
        table.ticks = unit == "time"
        table.feed(numbers, 1)
        table.fresh(limit)
        tables.append(table)
    # Whole walks over the known ids, so that the next walk can start at its first batch.
    for batch in tables[0].with_new(ids, walk * math.ceil((age + 2) / walk), workload.bag):
        tables[0].step(batch)
    return tables[0], tables[1], ids


def steps_of(limit: int, new: int) -> int:
    """Returns a number of steps that holds a whole number of evictions: at least 3 evictions and 48 steps.

    Args:
        limit: rows of the full table.
        new: ids that get a row in a step.
    """
    between = max(1.0, limit // FREED / new)
    return math.ceil(max(3, math.ceil(48 / between)) * between)
