"""A deleted model frees its rows and id maps at once, without a garbage collection."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from pipeline_model import ClickModel, Run, batches, sharded_model
from pipeline_runs import optimizer_of, tables_of
from processed_training import one_table, processed, shard_processed
from sharded_cases import usual_plan
from sharded_training import batches as features_of
from sharded_training import collection_of

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner
from torchrec_dyn.table import TableShard

KINDS = ("table_wise", "row_wise", "column_wise")
RUN = Run(KINDS, KINDS, steps=2)


@contextmanager
def no_collection() -> Iterator[None]:
    """Frees by reference counts only."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Watch:
    """Weak references to tables, their id maps and their blocks of rows."""

    def __init__(self, tables: Iterable[TableShard]) -> None:
        parts = [part for of in tables for part in (of, of.id_map, *of.weights.blocks)]
        assert len(parts) >= 3
        self._parts = [weakref.ref(part) for part in parts]

    def alive(self) -> list[str]:
        return [type(of()).__name__ for of in self._parts if of() is not None]


def trained(model: Any) -> None:
    optimizer = optimizer_of(RUN, model)
    for batch in batches(RUN):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()


def evaluated_and_read(model: Any) -> None:
    trained(model)
    model.eval()
    with torch.no_grad():
        model(batches(RUN, first_step=7)[0])
    assert dyn.read_stats(model.module.pooled, "pooled_0")["step"] == RUN.steps
    assert model.module.sequences.table("sequences_0").ids() is not None


def saved_and_loaded(model: Any) -> None:
    trained(model)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for call, options in ((dcp.save, {}), (dcp.load, {"planner": LoadPlanner()})):
        state = {"model": model.state_dict(), "rows": model.fused_optimizer.state_dict()}
        call(state, checkpoint_id=folder[0], **options)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["rows"])


def moved(model: Any) -> None:
    trained(model)
    world = dist.get_world_size()
    plan = {"pooled_0": usual_plan("column_wise", 8, world, world, 0, RUN.rows)}
    model.reshard({"pooled": (0.0, plan)}, "pooled")
    trained(model)


def left_after(use: Callable[[Any], None]) -> list[str]:
    with no_collection():
        model = sharded_model(RUN)
        use(model)
        watch = Watch(tables_of(model).values())
        del model
        return watch.alive()


@pytest.mark.everyday(4)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use", [trained, evaluated_and_read, saved_and_loaded, moved])
def test_sharded_model(world: int, use: Any) -> None:
    assert workers.run(left_after, use, world_size=world) == [[]] * world


def left_of_processed() -> list[str]:
    case = one_table()
    with no_collection():
        model = shard_processed(case, processed(case, collection_of(case), "collection"))
        outputs = model(features_of(case, 0)[0][dist.get_rank()])
        sum(output.sum() for output in outputs.values()).backward()
        lookups = model.module.collection._embedding_bag_collection._lookups
        watch = Watch(lookups[0]._emb_modules[0].group.tables)
        del model, lookups, outputs
        return watch.alive()


def test_feature_processed_model() -> None:
    assert workers.run(left_of_processed, world_size=2) == [[]] * 2


def left_of_unsharded() -> list[str]:
    with no_collection():
        model = ClickModel(RUN, dynamic=True)
        for batch in batches(RUN):
            model(batch)[0].backward()
        model.load_state_dict(model.state_dict())
        collections = (model.pooled, model.sequences)
        for collection in collections:
            collection.fused_optimizer.load_state_dict(collection.fused_optimizer.state_dict())
        watch = Watch(table for of in collections for table in of.local_tables().values())
        del model, collections, collection
        return watch.alive()


def test_unsharded_model() -> None:
    assert workers.run(left_of_unsharded, world_size=1) == [[]]
