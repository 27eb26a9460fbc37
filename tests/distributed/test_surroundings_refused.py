"""Sharded collections refuse wrong devices and TorchRec's 2D parallelism, before anything is built."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand
from sharded_training import Holder, collection_of, shard, sharder_of
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardingPlan


def case_of(pooled):
    table = Table("t", ["a"], shard_by_hand("table_wise", [([0], 0, 8)]))
    return Case([table], pooled=pooled, fused_params=FUSED_PARAMS)


def refuse_device(pooled, device):
    case = case_of(pooled)
    plan = ShardingPlan({"collection": {"t": case.tables[0].plan}})
    model = Holder(collection_of(case))
    without = mock.patch("torchrec_dyn.ops.has_cuda_kernels", lambda: False)
    with without, pytest.raises(ValueError) as caught:
        DistributedModelParallel(
            model, device=torch.device(device), plan=plan, sharders=[sharder_of(case)]
        )
    return str(caught.value)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_gpu_is_refused_without_kernels(pooled):
    (text,) = workers.run(refuse_device, pooled, "cuda:0", world_size=1)
    assert "('collection'): expected rows on the CPU, since torchrec_dyn was built without" in text
    assert text.endswith("or shard with device=torch.device('cpu').")


def test_other_devices_are_refused():
    (text,) = workers.run(refuse_device, True, "meta", world_size=1)
    assert "('collection'): expected rows of a sharded collection on cpu or cuda, got meta." in text


def refuse_move_to_gpu():
    case = case_of(True)
    model = shard(case, collection_of(case))
    collection, rows = model.module.collection, model.module.collection.table("t").num_rows
    with pytest.raises(ValueError) as caught:
        sharder_of(case).reshard(
            collection, {"t": case.tables[0].plan}, model._env, torch.device("cuda")
        )
    assert collection.table("t").num_rows == rows
    return str(caught.value)


def test_resharding_to_another_device_is_refused():
    (text,) = workers.run(refuse_move_to_gpu, world_size=1)
    assert ".reshard: expected the device of the collection, cpu, got cuda." in text


def refuse_replicas(pooled):
    """Two replicas, each sharded over one rank. DMPCollection accepts GPUs only, and selects one."""
    assert dist.group.WORLD is not None
    case = case_of(pooled)
    with mock.patch("torch.cuda.set_device"), pytest.raises(ValueError) as caught:
        DMPCollection(
            Holder(collection_of(case)),
            torch.device("cuda"),
            ShardingPlan({"collection": {"t": case.tables[0].plan}}),
            world_size=2,
            sharding_group_size=1,
            global_pg=dist.group.WORLD,
            sharders=[sharder_of(case)],
        )
    return str(caught.value)


@pytest.mark.parametrize("pooled", [True, False])
def test_2d_parallelism_is_refused(pooled):
    for text in workers.run(refuse_replicas, pooled, world_size=2):
        assert (
            "('collection'): expected DistributedModelParallel, got TorchRec's DMPCollection"
            in text
        )
        assert "Its sync averages rows by their position" in text
        assert text.endswith("Use DistributedModelParallel over all ranks.")
