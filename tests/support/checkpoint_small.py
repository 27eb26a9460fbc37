"""Small cases of saving and loading: one or a few tables of 8 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import quietly
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_training import collection_of, shard
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.state_dict.load_planner import LoadPlanner

LRU = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
AGED = dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(steps=10))
COUNTED = dyn.DynamicTableConfig(admission=dyn.AdmitAfter(5))


def case(
    world: int = 1,
    kind: str = "table_wise",
    names: tuple[str, ...] = ("t",),
    config: dyn.DynamicTableConfig | None = None,
    rows: int = 100,
    **options: Any,
) -> Case:
    """Returns a case of tables of 8 columns."""
    optimizer = options.pop("optimizer", "EXACT_ADAGRAD")
    thirds = [([0], 0, 3), ([1], 3, 3), ([0], 6, 2)]
    plan = (
        shard_by_hand("column_wise", thirds, rows)
        if kind == "three_columns"
        else usual_plan(kind, 8, world, world, 0, rows)
    )
    tables = [
        Table(name, [f"f_{name}"], plan, 8, rows=rows, config=config, **options) for name in names
    ]
    return Case(tables, fused_params={"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1})


def sharded(of: Case) -> Any:
    return shard(of, collection_of(of))


def unsharded(of: Case) -> Any:
    return collection_of(of, fused_params=of.fused_params)


def step(model: Any, *ids: list[int], names: tuple[str, ...] = ("t",)) -> None:
    """Runs a training step; `ids` has one list of ids per table."""
    values = torch.tensor([one for some in ids for one in some], dtype=torch.int64)
    features = KeyedJaggedTensor(
        [f"f_{name}" for name in names], values, lengths=torch.ones_like(values)
    )
    outputs = list(model(features).to_dict().values())
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])


def read(state: dict[str, Any], path: str, **options: Any) -> dict[str, Any]:
    quietly(dcp.load, state, checkpoint_id=path, planner=LoadPlanner(**options))
    return state


def on_one(function: Any, tmp_path: Path) -> Any:
    return workers.run(function, str(tmp_path / "saved"), world_size=1)[0]
