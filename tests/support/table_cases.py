"""Tables and batches for tests of the core."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from oracle import EXTREME_IDS, ids_at_home
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup import Batch, TableGroup
from torchrec_dyn.optimizers import RULES, OptimizerKind, RowOptimizer
from torchrec_dyn.table.shard import TableShard

# A map starts with 64 slots and doubles: with key 0 these ids share homes before and after it grows.
CROWDED_IDS = [*ids_at_home(60, 64, 12), *ids_at_home(0, 64, 6), *ids_at_home(124, 128, 12)]
HARD_IDS = list(dict.fromkeys([*EXTREME_IDS, *range(2, 12), *CROWDED_IDS]))
hard_ids = st.sampled_from(HARD_IDS) | st.integers(-(2**63), 2**63 - 1)


def ids_of(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def make_table(kind: OptimizerKind = OptimizerKind.EXACT_SGD, **options) -> TableShard:
    """Returns a table; by default of 4 columns and at most 1000 rows."""
    optimizer = options.pop("optimizer", None) or RowOptimizer(kind=kind, learning_rate=0.1)
    given = {"name": "t", "num_embeddings": 1000, "embedding_dim": 4, "optimizer": optimizer}
    ours = ("initializer", "seed", "unseen", "admission", "eviction")
    config = {k: options.pop(k) for k in ours if k in options}
    return with_public_keys(TableShard(config=DynamicTableConfig(**config), **(given | options)))


def with_public_keys(table: TableShard) -> TableShard:
    """Returns a table without ids, whose maps have key 0: `HARD_IDS` share slots."""
    table.id_map.key = 0
    if table.life is not None and table.life.waiting is not None:
        table.life.waiting.id_map.key = 0
    return table


def without_probes(stats: dict[str, int | float]) -> dict[str, int | float]:
    """Returns stats without the probe lengths.

    They differ between tables, whose maps have other keys, and after an id has come and gone.
    """
    return {name: value for name, value in stats.items() if not name.startswith("probe_length")}


class Group(TableGroup):
    """A group whose batches are given as tensors, with offsets."""

    def __call__(self, ids, offsets, weights=None, *, training, ahead=None, **others):
        batch = Batch(ids, offsets=offsets, weights=weights, training=training, **others)
        return super().__call__(batch, ahead)

    def prefetch(self, ids, offsets):
        super().prefetch(Batch(ids, offsets=offsets))

    def prefetch_step(self, ids, offsets, **others):
        return super().prefetch_step(Batch(ids, offsets=offsets, **others))


def make_group(*tables: TableShard, pooling: str = "sum", features=None, **options) -> Group:
    return Group(tables, features or [1] * len(tables), pooling, **options)


def bags_of(*bags: list[int]) -> tuple[Tensor, Tensor]:
    """Returns (ids, offsets) of bags given as lists."""
    lengths = torch.tensor([0, *map(len, bags)])
    return ids_of(*(number for bag in bags for number in bag)), lengths.cumsum(0)


def random_bags(seed: int, bags: int, longest: int, pool: int) -> tuple[Tensor, Tensor]:
    """Returns (ids, offsets) of bags of 0 to `longest` ids out of `pool` different ids; one bag is empty."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (bags,), generator=draw)
    lengths[bags // 2 : bags // 2 + 1] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, pool, (int(offsets[-1]),), generator=draw)
    return ids * 7919 - 1000, offsets


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Returns True if two exported states are bit-equal."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(bits(one[name]), bits(other[name]))
        for name in one
    )


def bits(values: Tensor) -> Tensor:
    """Returns the bytes of values, so that NaN equals NaN and 0.0 differs from -0.0."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """NaN is NaN, whatever its bits: a GPU has one, x86 keeps the sign and the payload."""
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(bits(got.nan_to_num(0.0)), bits(expected.nan_to_num(0.0)))


def prepared_rows(library, weights, layout, on_device, initial=(None, None, [])):
    """Returns prepared tables, which have no ids, on the device of a tensor."""
    nothing, tables = on_device.new_empty(0, 2, dtype=torch.int64), len(layout)
    moved, rule = (
        torch.tensor([[-1, 0]] * tables).view(-1, 2),
        RULES[OptimizerKind.EXACT_SGD].number,
    )
    slots = [nothing] * tables
    rows = slots, moved, weights, [], layout, rule, [], []
    return library.prepare_tables(*rows, *initial, [], None)


def weights_grad(library, grad, rows, offsets, weights, layout, segments, mean):
    """Returns the gradient of the bag weights by the op of prepared tables."""
    handle = prepared_rows(library, weights, layout, rows)
    return library.weights_grad_prepared(grad, rows, None, offsets, segments, handle, mean)
