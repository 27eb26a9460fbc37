"""Sharded collections refuse wrong devices and TorchRec's 2D parallelism, before anything is built."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from processed_training import position_weights, processed
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand
from sharded_training import Holder, collection_of, sharder_of
from sharded_twins import group_for_cuda
from torch.distributed import distributed_c10d
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torchrec_dyn as dyn


def case_of(pooled):
    table = Table("t", ["a"], shard_by_hand("table_wise", [([0], 0, 8)]))
    return Case([table], pooled=pooled, fused_params=FUSED_PARAMS)


def refuse_device(form, device):
    case = replace(case_of(form != "sequences"), weighted=form == "processed")
    plan = ShardingPlan({"collection": {"t": case.tables[0].plan}})
    collection, sharders = collection_of(case), [sharder_of(case)]
    if form == "processed":
        collection = processed(case, collection, "collection")
        sharders = [dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(FUSED_PARAMS)]
    weights = [weight.tolist() for weight in position_weights(collection).values()]
    without = mock.patch("torchrec_dyn.ops.has_cuda_kernels", lambda: False)
    with without, pytest.raises(ValueError) as caught:
        DistributedModelParallel(
            Holder(collection), device=torch.device(device), plan=plan, sharders=sharders
        )
    assert [weight.tolist() for weight in position_weights(collection).values()] == weights
    return str(caught.value)


@pytest.mark.parametrize("form", ["pooled", "sequences", "processed"])
def test_a_gpu_is_refused_without_kernels(form):
    (text,) = workers.run(refuse_device, form, "cuda:0", world_size=1)
    assert "('collection'): expected rows on the CPU, since torchrec_dyn was built without" in text
    assert text.endswith("or shard with device=torch.device('cpu').")


@pytest.mark.parametrize("form", ["pooled", "processed"])
def test_other_devices_are_refused(form):
    (text,) = workers.run(refuse_device, form, "meta", world_size=1)
    assert "('collection'): expected rows of a sharded collection on cpu or cuda, got meta." in text


def refuse_groups():
    """Groups for GPUs only: one of some ranks, one of all ranks in another order."""
    case, texts = case_of(True), []
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    group_for_cuda()
    for group in (
        dist.new_group([0], backend="only_cuda"),
        distributed_c10d._new_group_with_tag([1, 0], backend="only_cuda", sort_ranks=False),
    ):
        env.process_group = group if isinstance(group, dist.ProcessGroup) else None
        with pytest.raises(ValueError) as caught:
            sharder_of(case).shard(collection_of(case), {"t": case.tables[0].plan}, env)
        texts.append(str(caught.value))
    return texts


def test_groups_beside_which_no_group_for_the_host_can_be_made_are_refused():
    (some, turned), (_, also_turned) = workers.run(refuse_groups, world_size=2)
    expected = "expected all 2 ranks in order, got backend"
    assert some.startswith(f"process group of ranks [0]: {expected}")
    assert turned == also_turned and turned.startswith(f"process group of ranks [1, 0]: {expected}")
    assert turned.endswith("Create the group with backend='cpu:gloo,cuda:nccl'.")


def refuse_move_to_gpu():
    case = case_of(True)
    plan, sharder = {"t": case.tables[0].plan}, sharder_of(case)
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    collection = sharder.shard(collection_of(case), plan, env)  # device: None, the CPU
    place = torch.device("cuda" if dist.get_rank() else "cpu")
    with pytest.raises(ValueError) as caught:
        sharder.reshard(collection, plan, env, place)
    assert collection.table("t").num_rows == 0
    sharder.reshard(collection, plan, env, torch.device("cpu"))
    return str(caught.value)


def test_resharding_to_another_device_on_one_rank_is_refused_on_all():
    for text in workers.run(refuse_move_to_gpu, world_size=2):
        assert ".reshard(rank=1): expected the device of the collection, cpu, got cuda." in text


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
        assert text.endswith(
            "Use torchrec_dyn.Replicas, or DistributedModelParallel over all ranks."
        )
