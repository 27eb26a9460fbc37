"""Trains a sharded collection whose rows have a life beside unsharded collections on the same global batches.

Every table is compared with unsharded collections of that table alone: one collection, or one for each rank
that shares the rows, with that rank's limit and only that rank's share of the ids. After a step every shard
must equal its unsharded collection bit for bit: ids, rows, optimizer state, scores, counters, clock and
counts. So column shards agree, and nothing depends on the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from life_cases import stream_stats
from sharded_cases import EXTREME_IDS, Case, Table
from sharded_training import check_same, collection_of, outputs_by_name, shard, tables_of
from torchrec import KeyedJaggedTensor

from torchrec_dyn.ranks.routing import config_of_share, owners, row_limit
from torchrec_dyn.table.shard import TableShard

NOT_BY_COLUMN = {"waiting", "clock"}


@dataclass
class Batch:
    """This rank's batch, the global batch, and the places of this rank's outputs in the global outputs."""

    mine: KeyedJaggedTensor
    together: KeyedJaggedTensor
    spans: dict[str, slice]


def make_batch(case: Case, bags: list[list[list[list[int]]]]) -> Batch:
    """Returns a batch of bags of ids, given by rank, feature (in the order of `case.features()`) and bag."""
    rank, spans = dist.get_rank(), {}
    for number, feature in enumerate(case.features()):
        of_ranks = [features[number] for features in bags]
        sizes = [len(one) if case.pooled else sum(map(len, one)) for one in of_ranks]
        spans[feature] = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    together = [[bag for rank in of_ranks for bag in rank] for of_ranks in zip(*bags, strict=True)]
    return Batch(_features(case, bags[rank]), _features(case, together), spans)


def _features(case: Case, bags: list[list[list[int]]]) -> KeyedJaggedTensor:
    flat = [bag for feature in bags for bag in feature]
    ids = torch.tensor([one for bag in flat for one in bag], dtype=torch.int64)
    scored = any(table.config and table.config.scores_weights for table in case.tables)
    return KeyedJaggedTensor(
        keys=case.features(),
        values=ids,
        # By id: a rank's batch and the global batch have the same. In units of 1/256 some are halves.
        weights=(ids % 977).float() / 512 if scored else None,
        lengths=torch.tensor([len(bag) for bag in flat]),
    )


def drifting_batch(case: Case, step: int) -> Batch:
    """Returns a batch of ids that are first new, then popular, then rare; some have 0 or 1 ids per bag."""
    generator = torch.Generator().manual_seed(step)
    longest = 0 if step % 17 == 16 else 1 if step % 5 == 4 else case.longest_bag
    newest = 60 + 15 * step

    def bag() -> list[int]:
        length = int(torch.randint(longest + 1, (), generator=generator))
        kind, age = torch.rand(2, length, generator=generator)
        drawn = newest - torch.where(kind < 0.85, 90 * age**2, newest * age).long()
        extreme = torch.tensor(EXTREME_IDS)[(age * len(EXTREME_IDS)).long()]
        return torch.where(kind < 0.9, drawn, extreme).tolist()

    ranks, features = range(dist.get_world_size()), case.features()
    return make_batch(case, [[[bag() for _ in range(4)] for _ in features] for _ in ranks])


class Parts:
    """The unsharded collections of one table, one for each part of its rows."""

    def __init__(self, case: Case, table: Table) -> None:
        shards = table.plan.sharding_spec.shards  # type: ignore[union-attr]
        self.count = len({one.shard_offsets[0] for one in shards})
        config = table.config and config_of_share(table.config, self.count)
        share = replace(table, rows=row_limit(table.rows, self.count), config=config)
        self.case, self.name = replace(case, tables=[share]), table.name
        # A part knows no maximum of whole bags: it gives rows.
        self.of_rows = table.pooling == "MAX" and self.count > 1
        if self.of_rows:
            rows = replace(share, pooling="SUM")
            self.case = replace(case, tables=[rows], pooled=False)
        self.features = list(table.features)
        self.collections = [
            collection_of(self.case, fused_params=case.fused_params) for _ in range(self.count)
        ]

    def table(self, part: int) -> TableShard:
        return self.collections[part].local_tables()[self.name]

    def share(self, ids: torch.Tensor, part: int) -> torch.Tensor:
        """Returns a mask [M] of the ids [M] that one part owns."""
        if self.count == 1:
            return torch.ones_like(ids, dtype=torch.bool)
        return torch.eq(owners(ids, self.count), part)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[dict[str, torch.Tensor], Any]:
        """Returns the outputs of all parts together, and the data for `backward`."""
        whole: dict[str, torch.Tensor] = {}
        taken = []
        for part, collection in enumerate(self.collections):
            kept = self.share(batch.values(), part)
            outputs = outputs_by_name(self.case, collection(_only(batch, kept)))
            places = {
                feature: kept.split(batch.length_per_key())[batch.keys().index(feature)]
                for feature in self.features
            }
            taken.append((outputs, places))
            for feature in self.features:
                output = outputs[feature].detach()
                if not self.case.pooled:
                    place = places[feature]
                    output = output.new_zeros(len(place), output.shape[1]).masked_scatter(
                        place[:, None], output
                    )
                whole[feature] = whole[feature] + output if part else output
        if self.of_rows:
            pooled = {f: Largest(rows, batch[f].offsets()) for f, rows in whole.items()}
            return {f: one.output.detach() for f, one in pooled.items()}, (taken, pooled)
        return whole, taken

    def backward(self, taken: Any, grads: dict[str, torch.Tensor]) -> None:
        """Runs the backward of all parts with gradients of the whole outputs."""
        if self.of_rows:
            taken, pooled = taken
            grads = {feature: one.backward(grads[feature]) for feature, one in pooled.items()}
        for outputs, places in taken:
            of_part = [grads[f] if self.case.pooled else grads[f][places[f]] for f in self.features]
            torch.autograd.backward([outputs[f] for f in self.features], of_part)


class Largest:
    """The largest values of bags of rows, by torch."""

    def __init__(self, rows: torch.Tensor, offsets: torch.Tensor) -> None:
        self.rows = rows.requires_grad_()
        ids = torch.arange(len(rows))
        self.output = torch.nn.functional.embedding_bag(
            ids, self.rows, offsets, mode="max", include_last_offset=True
        )

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the rows."""
        self.output.backward(grad)
        assert self.rows.grad is not None
        return self.rows.grad


def _only(batch: KeyedJaggedTensor, kept: torch.Tensor) -> KeyedJaggedTensor:
    """Returns the same bags with only the kept ids."""
    bags = torch.repeat_interleave(torch.arange(len(batch.lengths())), batch.lengths())
    lengths = torch.bincount(bags[kept], minlength=len(batch.lengths()))
    weights = batch.weights_or_none()
    weights = None if weights is None else weights[kept]
    return KeyedJaggedTensor(batch.keys(), batch.values()[kept], weights, lengths=lengths)


@dataclass
class Forward:
    """One training forward on both sides, before its backward."""

    number: int
    outputs: dict[str, torch.Tensor]
    whole: dict[str, dict[str, torch.Tensor]]
    taken: dict[str, Any]
    spans: dict[str, slice]


class Beside:
    """A sharded collection and, for every table, its unsharded parts."""

    def __init__(self, case: Case, unsharded: Any = None) -> None:
        self.case = case
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.parts = {table.name: Parts(case, table) for table in case.tables}
        self.forwards = 0
        if unsharded is None:
            self.shard(collection_of(case))

    def shard(self, unsharded: Any) -> None:
        self.model = shard(self.case, unsharded)
        self.collection = self.model.module.collection
        self.shards = tables_of(self.collection)

    def feed_parts(self, batch: Batch) -> Forward:
        self.forwards += 1
        whole, taken = {}, {}
        for name, parts in self.parts.items():
            whole[name], taken[name] = parts.forward(batch.together)
        return Forward(self.forwards, {}, whole, taken, batch.spans)

    def forward(self, batch: Batch) -> Forward:
        """Runs a forward on both sides; the outputs must be the same."""
        forward = self.feed_parts(batch)
        forward.outputs = outputs_by_name(self.case, self.model(batch.mine))
        self._same_outputs(forward)
        return forward

    def _same_outputs(self, forward: Forward) -> None:
        for name, feature, output in self.named(forward.outputs):
            expected = forward.whole[name][feature][forward.spans[feature]]
            # The order of partial sums of more than two ranks depends on the transport.
            exact = self.case.exact and (not self.case.pooled or self.parts[name].count < 3)
            what = f"forward {forward.number}, output {feature} of {name}"
            check_same(replace(self.case, exact=exact), output, expected, what)

    def named(self, outputs: dict[str, torch.Tensor]) -> list[tuple[str, str, torch.Tensor]]:
        names = [(t.name, feature) for t in self.case.tables for feature in t.features]
        features = [feature for _, feature in names]
        return [
            (name, f, outputs[f if features.count(f) == 1 else f"{f}@{name}"]) for name, f in names
        ]

    def grads(self, forward: Forward) -> dict[tuple[str, str], torch.Tensor]:
        """Returns fixed gradients of the whole outputs by table and feature."""
        generator = torch.Generator().manual_seed(forward.number)
        return {
            (name, feature): torch.rand(whole.shape, generator=generator) - 0.5
            for name, of_table in forward.whole.items()
            for feature, whole in of_table.items()
        }

    def backward(self, forward: Forward) -> None:
        grads = self.grads(forward)
        named = self.named(forward.outputs)
        mine = [grads[name, feature][forward.spans[feature]] for name, feature, _ in named]
        torch.autograd.backward([output for *_, output in named], mine)
        self.teach_parts(forward, grads)

    def teach_parts(self, forward: Forward, grads: dict[tuple[str, str], torch.Tensor]) -> None:
        for name, parts in self.parts.items():
            of_parts = {f: grads[name, f] / self.world for f in parts.features}
            parts.backward(forward.taken[name], of_parts)

    def step(self, batch: Batch) -> None:
        """Trains both sides on a batch; asserts that all ids of tables without admission have rows then."""
        self.backward(self.forward(batch))
        for one in self.shards:
            if one.config.admission is not None or one.config.features:
                continue
            parts = self.parts[one.name]
            ids = torch.cat([batch.together[feature].values() for feature in parts.features])
            ids = ids[parts.share(ids, self.part_of(one))]
            last_seen, _ = one.life.scores.read(one.id_map.lookup(ids))  # type: ignore[union-attr]
            assert last_seen.eq(one.step).all(), f"{one.name}: an id of the batch has no row"

    def set_time(self, time: int) -> None:
        """Sets the clocks; the last rank has the latest time."""
        self.collection.set_time(time if self.rank == self.world - 1 else max(0, time - 1))
        self.set_time_of_parts(time)

    def set_time_of_parts(self, time: int) -> None:
        for parts in self.parts.values():
            for collection in parts.collections:
                collection.set_time(time)

    def edit(self, ids: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Assigns `rows`, [ids, columns of every table], on both sides; without rows erases the ids."""
        for name, parts in self.parts.items():
            handle, mine = self.collection.table(name), slice(self.rank, None, self.world)
            if rows is None:
                handle.erase(ids[mine])
            else:
                handle.assign(ids[mine], rows[mine])
            for part, collection in enumerate(parts.collections):
                kept = parts.share(ids, part)
                table = collection.table(name)
                if rows is None:
                    table.erase(ids[kept])
                else:
                    table.assign(ids[kept], rows[kept])

    def check(self, stats: bool = True) -> None:
        """Asserts that every shard on this rank equals its unsharded part, counts included."""
        for one in self.shards:
            table = self.parts[one.name].table(self.part_of(one))
            what = f"forward {self.forwards}, {one.name} from column {one.first_column}"
            got, expected = one.export_state(), table.export_state()
            assert got.keys() == expected.keys()
            columns = slice(one.first_column, one.first_column + one.columns)
            for name, value in expected.items():
                if value.dim() == 2 and name not in NOT_BY_COLUMN:
                    value = value[:, columns]
                whole = replace(self.case, exact=self.case.exact or not value.is_floating_point())
                check_same(whole, got[name], value, f"{what}: {name}")
            assert not stats or stream_stats(one) == stream_stats(table), what

    def part_of(self, one: TableShard) -> int:
        """Returns the number of the part of its table's rows that a shard of this rank holds."""
        plan = next(table.plan for table in self.case.tables if table.name == one.name)
        shards = zip(plan.sharding_spec.shards, plan.ranks or (), strict=True)  # type: ignore[union-attr]
        ranges = [
            (meta.shard_offsets[0], rank)
            for meta, rank in shards
            if meta.shard_offsets[1] == one.first_column
        ]
        return [rank for _, rank in sorted(ranges)].index(self.rank)
