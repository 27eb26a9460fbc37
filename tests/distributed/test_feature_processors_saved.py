"""Feature processors around tables that are saved, moved and converted."""

import copy

import pytest
import torch
import torch.distributed as dist
import workers
from processed_training import (
    Model,
    backward,
    bags,
    one_table,
    position_weights,
    processed,
    shard_processed,
)
from sharded_cases import FUSED_PARAMS, Case
from sharded_training import batches, collection_of
from test_feature_processors import tables_of
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torchrec import EmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn

MIXED = ["row_wise", "table_wise", "column_wise"]


def trained(case: Case, steps: int = 2) -> DistributedModelParallel:
    model = shard_processed(case, processed(case, collection_of(case), "collection"))
    for step in range(steps):
        backward(model(batches(case, step)[0][dist.get_rank()]))
    return model


def contents(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """All rows and position weights."""
    _, collection = model.module.collection.split()
    found = {name: weight.detach().clone() for name, weight in position_weights(model).items()}
    for table in case.tables:
        ids = dyn.read_ids(collection, table.name)
        found[f"{table.name} ids"] = ids
        found[f"{table.name} rows"] = dyn.lookup_rows(collection, table.name, ids)[0]
    return found


def save(folder: str) -> dict[str, Tensor]:
    case = Case(tables_of(MIXED, 2, 2), weighted=True)
    model = trained(case)
    with torch.no_grad():
        for weight in position_weights(model).values():
            weight += 1
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return contents(model, case)


def load(folder: str, world: int) -> dict[str, Tensor]:
    kinds = ["column_wise", "row_wise", "table_wise"]
    case = Case(tables_of(kinds, world, world), weighted=True)
    model = shard_processed(case, processed(case, collection_of(case), "collection"))
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder, planner=dyn.checkpoint.LoadPlanner())
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    assert dyn.read_stats(model.module.collection.split()[1], "t0")["rows"] > 0
    return contents(model, case)


@pytest.mark.parametrize("world", [1, 4])
def test_checkpoint_into_another_plan(tmp_path, world: int) -> None:
    saved = workers.run(save, str(tmp_path), world_size=2)[0]
    loaded = workers.run(load, str(tmp_path), world, world_size=world)[0]
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name


def test_checkpoint_into_the_unsharded_module(tmp_path) -> None:
    saved = workers.run(save, str(tmp_path), world_size=2)[0]
    case = Case(tables_of(MIXED, 1, 1), weighted=True)
    model = Model(processed(case, collection_of(case), "collection"))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), planner=dyn.checkpoint.LoadPlanner())
    model.load_state_dict(state["model"])
    table = model.collection.split()[1].table("t0")
    assert torch.equal(table.lookup(saved["t0 ids"])[0], saved["t0 rows"])
    assert torch.equal(position_weights(model)["a"], saved["a"])


def export_delta(folder: str) -> None:
    case = Case(tables_of(MIXED, 2, 2), weighted=True)
    model = trained(case, 1)
    marker = dyn.checkpoint.mark(model)
    backward(model(batches(case, 1)[0][dist.get_rank()]))
    assert dyn.checkpoint.export_delta(model, folder, marker)


def test_deltas_find_the_tables(tmp_path) -> None:
    workers.run(export_delta, str(tmp_path / "delta"), world_size=2)


def test_make_dynamic_and_from_static_keep_the_processors() -> None:
    case = one_table()
    static = EmbeddingBagCollection(collection_of(case).embedding_bag_configs(), is_weighted=True)
    model = Model(processed(case, static, "collection"))
    changed = dyn.make_dynamic(copy.deepcopy(model))
    _, collection = changed.collection.split()
    assert type(collection) is dyn.DynamicEmbeddingBagCollection and collection.is_weighted()
    processors, _ = model.collection.split()
    moved = FeatureProcessedEmbeddingBagCollection(
        dyn.from_static(static, fused_params=FUSED_PARAMS), processors
    )
    batch = bags(3, 0, 2)
    torch.testing.assert_close(moved(batch)["a"], model(batch)["a"])
