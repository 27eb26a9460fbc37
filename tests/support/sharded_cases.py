"""Cases of sharded training: tables, explicit plans and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardMetadata

from torchrec_dyn import DynamicTableConfig

SEQUENCE = ["table_wise", "row_wise", "column_wise"]
WHOLE_ROWS = ["table_wise", "column_wise", "table_column_wise"]
SPREAD_ROWS = ["row_wise", "table_row_wise", "grid_shard"]  # ranks add up outputs: not to the bit
POOLED = [*WHOLE_ROWS, *SPREAD_ROWS]
# All plans of both kinds of collections, several in one collection: sharding types, options of a case.
EVERY_PLAN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "whole rows": (WHOLE_ROWS, {}),
    "spread rows": (SPREAD_ROWS, {"exact": False}),
    "sequences": (SEQUENCE, {"pooled": False}),
}
EXTREME_IDS = [0, 1, -1, 2**63 - 1, -(2**63), 10**15, -(10**12), 2**32, 2**31]
FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}


def shard_by_hand(
    kind: str,
    pieces: Sequence[tuple[list[int], int, int]],
    rows: int = 1000,
    device: str = "cpu",
) -> ParameterSharding:
    """Returns a plan of pieces (ranks that share the rows, first column, width), in the given order.

    TorchRec's own tables read the device; dynamic tables do not.
    """
    shards, ranks = [], []
    for piece_ranks, first, width in pieces:
        block = -(-rows // len(piece_ranks))
        for part, rank in enumerate(piece_ranks):
            begin = min(rows, part * block)
            size = min(rows, begin + block) - begin
            shards.append(ShardMetadata([begin, first], [size, width], f"rank:{rank}/{device}"))
            ranks.append(rank)
    return ParameterSharding(kind, "fused", ranks, EnumerableShardingSpec(shards))


def usual_plan(
    kind: str,
    dim: int,
    world: int,
    local: int,
    turn: int = 0,
    rows: int = 1000,
    device: str = "cpu",
) -> ParameterSharding:
    """Returns a plan of one sharding type like the planner's; `turn` shifts it to other ranks."""
    half, node = dim // 2, turn % (world // local) * local
    on_node = list(range(node, node + local))
    other = [(rank + local) % world for rank in on_node]
    pieces: dict[str, list[tuple[list[int], int, int]]] = {
        "table_wise": [([turn % world], 0, dim)],
        "row_wise": [(list(range(world)), 0, dim)],
        "column_wise": [([turn % world], 0, half), ([(turn + 1) % world], half, half)],
        "table_row_wise": [(on_node, 0, dim)],
        "table_column_wise": [([on_node[0]], 0, half), ([on_node[-1]], half, half)],
        "grid_shard": [(on_node, 0, half), (other, half, half)],
    }
    return shard_by_hand(kind, pieces[kind], rows, device)


@dataclass
class Table:
    """One table of a case: a short form of TorchRec's config, its plan, and its dynamic config."""

    name: str
    features: list[str]
    plan: ParameterSharding
    dim: int = 8
    pooling: str = "SUM"
    data_type: str = "FP32"
    rows: int = 1000
    config: DynamicTableConfig | None = None


@dataclass
class Case:
    """A collection, its plan, and its training batches."""

    tables: list[Table]
    pooled: bool = True
    exact: bool = True
    weighted: bool = False
    steps: int = 2  # the second shows what the first wrote
    batch_sizes: Sequence[int] | None = None  # per rank
    variable: bool = False  # a batch size per feature
    longest_bag: int = 4
    known_ids: int = 40
    fused_params: dict[str, Any] = field(default_factory=lambda: dict(FUSED_PARAMS))
    qcomm: str | None = None
    tolerance: float = 1e-5
    backward: bool = True
    dedup: bool = False

    def features(self) -> list[str]:
        """Returns every feature once, not in the order of the tables."""
        names = dict.fromkeys(name for table in self.tables for name in table.features)
        return sorted(names, reverse=True)


def three_tables(
    kinds: Sequence[str], world: int, local: int, dims: Sequence[int] = (8, 8, 8), **options: Any
) -> list[Table]:
    """Returns tables of one, of several, and of a shared feature; their plans take the kinds in turn."""
    features, rows = (["a"], ["b", "c"], ["a", "d"]), options.get("rows", 1000)
    return [
        Table(
            f"t{i}",
            features[i],
            usual_plan(kinds[i % len(kinds)], dims[i], world, local, i, rows),
            dims[i],
            **options,
        )
        for i in range(3)
    ]


def case_of_plans(
    name: str, world: int = 4, local: int = 2, data_type: str = "FP32", **options: Any
) -> Case:
    """Returns a collection of two tables for each plan of a line of EVERY_PLAN; all share a feature."""
    kinds, usual = EVERY_PLAN[name]
    dims = (8, 4, 12) if usual.get("pooled", True) else (8, 8, 8)
    tables = [
        Table(
            f"{kind} {k}",
            [f"f{i}", "shared"][:: 1 - 2 * k],
            usual_plan(kind, dims[i], world, local, i + k),
            dims[i],
            data_type=data_type,
        )
        for i, kind in enumerate(kinds)
        for k in range(2)
    ]
    return Case(tables, **{**usual, **options})
