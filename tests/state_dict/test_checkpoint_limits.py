"""Loading never drops, evicts or fails for a limit; the next training step restores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import workers
from checkpoint_cases import contents, load, save
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_training import collection_of, shard
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn

KEY = "model/collection.embedding_bags.t."
MANY, FEW = 1000, 20


def model_of(limit: int, counters: int) -> Any:
    """A model of one table that evicts the least recently used and admits at the second sight."""
    config = dyn.DynamicTableConfig(
        admission=dyn.AdmitAfter(2, counters=counters), eviction=dyn.LeastRecentlyUsed()
    )
    plan = usual_plan("table_wise", 8, 1, 1, rows=limit)
    fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
    case = Case([Table("t", ["f"], plan, rows=limit, config=config)], fused_params=fused)
    return shard(case, collection_of(case))


def see(model: Any, ids: list[int]) -> None:
    batch = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
    model(batch).values().sum().backward()


def load_under_less(folder: str) -> dict[str, Any]:
    model = model_of(MANY, MANY)
    for step in range(60):  # the later, the more recent
        see(model, [step, step, 1000 + step])
    save(model, f"{folder}/saved")
    model = load(model_of(FEW, FEW), f"{folder}/saved")
    save(model, f"{folder}/again")
    see(model, [59, 59])
    kept = dyn.read_ids(model.module.collection, "t").sort()[0].tolist()
    waiting = dyn.read_counts(model.module.collection, "t", torch.arange(1000, 1060)).tolist()
    see(model, [5000, 5000])
    return {"kept": kept, "waiting": waiting, "then": model.module.collection.table("t").num_rows}


def test_a_table_above_its_limits_comes_back_to_them(tmp_path: Path) -> None:
    (told,) = workers.run(load_under_less, str(tmp_path), world_size=1)
    saved, again = contents(tmp_path / "saved"), contents(tmp_path / "again")
    assert len(saved[KEY + "ids"]) == len(saved[KEY + "waiting"]) == 60
    for name in ("ids", "weight", "last_seen", "count", "waiting"):
        assert torch.equal(saved[KEY + name], again[KEY + name]), name
    assert told["then"] <= FEW
    assert told["kept"][-1] == 59 and len(told["kept"]) in (FEW, 60)
    assert told["kept"] == list(range(60 - len(told["kept"]), 60))
    assert sum(told["waiting"]) in (FEW, 60)
