"""Sharded collections on a device: edits, policies, resharding and feature processors have the CPU's bits."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from mock_device import CUDA, MockDevice
from processed_training import processed
from sharded_cases import FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import batches, collection_of, sharder_of
from sharded_twins import ShardedTwins, group_for_cuda
from shards import deep_but
from torchrec.distributed.types import ShardingEnv

import torchrec_dyn as dyn
from torchrec_dyn import ops
from torchrec_dyn.ranks import gather_results, host_group
from torchrec_dyn.table import TableShard

KINDS = ["table_wise", "row_wise", "column_wise"]


def case_of(kinds=KINDS, pooled=True, config=None, **options):
    plans = {kind: usual_plan(kind, 8, 2, 2) for kind in kinds}
    tables = [Table(kind, [kind], plans[kind], config=config) for kind in kinds]
    return Case(tables, pooled=pooled, fused_params=FUSED_PARAMS, **options)


def on_cpu(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def edit(twins):
    """Makes the same edits of both models, and compares the results."""
    rank = dist.get_rank()
    for table in twins.case.tables:
        results = []
        for collection, place in zip(twins.collections, (torch.device("cpu"), CUDA), strict=True):
            handle = collection.table(table.name)
            ids = torch.arange(6, device=place) * 3 + 100 * rank
            handle.assign(ids, torch.ones(6, 8, device=place) * (rank + 1))
            erased = handle.erase(ids[:2])
            found = handle.lookup_rows(ids)
            assert {one.device for one in (*found, handle.ids(), handle.read_ids())} == {place}
            assert {one.device for one in handle.lookup(ids)} == {place}
            results.append([erased, *found, *handle.lookup(ids), handle.ids(), handle.read_ids()])
            results[-1] += [handle.read_num_rows(), handle.stats()["rows"], handle.columns]
            results[-1].append(dyn.owner_ranks(collection, table.name, ids))
            if table.config is not None:
                results[-1] += [handle.read_last_seen(ids), handle.count(ids)]
                collection.set_time(5)
        for ours, theirs in zip(*results, strict=True):
            ours, theirs = on_cpu(ours), on_cpu(theirs)
            is_same = (
                ours == theirs if not isinstance(ours, torch.Tensor) else torch.equal(ours, theirs)
            )
            assert is_same, f"{table.name}: {ours}, on the device {theirs}"


def move(twins):
    """Moves all tables to other ranks."""
    for model, collection in zip(twins.models, twins.collections, strict=True):
        plan = {
            table.name: usual_plan(kind, 8, 2, 2, 1)
            for table, kind in zip(twins.case.tables, [*KINDS[1:], KINDS[0]], strict=True)
        }
        model.sharders[0].reshard(collection, plan, model._env, model.device)


def freeze(twins):
    for collection in twins.collections:
        collection.table(twins.case.tables[0].name).freeze()


def evaluate(twins):
    for model in twins.models:
        model.eval()
    twins.forward(batches(twins.case, 9)[0][dist.get_rank()])
    for model in twins.models:
        model.train()


def prefetch(twins):
    """Gives rows to the ids of the next batch, as a pipeline that keeps no steps does."""
    batch = batches(twins.case, 1)[0][dist.get_rank()]
    for collection, place in zip(twins.collections, (torch.device("cpu"), CUDA), strict=True):
        context = collection.create_context()
        arrived = collection.input_dist(context, batch.to(place)).wait().wait()
        collection.prefetch(arrived)
        context.sent.close()


ACTIONS = {
    "edits": edit,
    "moves": move,
    "freezes": freeze,
    "evaluates": evaluate,
    "prefetches": prefetch,
}
LIVES = {
    "recent": dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed()),
    "on the host": dyn.DynamicTableConfig(
        eviction=dyn.LeastRecentlyUsed(), storage=dyn.HostMemory(10)
    ),
    "expires": dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(steps=1), admission=dyn.AdmitAfter(2)),
}  # fmt: skip


def train_and_act(case, action, trains_first=False):
    def trained(collection):
        if trains_first:
            collection(batches(case, 7)[1])
        return collection

    with MockDevice() as device:
        twins = ShardedTwins(device, case, wrap=trained)
        twins.train(0)
        if action is not None:
            ACTIONS[action](twins)
        twins.train(1)
        twins.check_notes()
        return twins.compare()


@pytest.mark.everyday(2)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("pooled", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_an_action_between_steps_has_the_result_of_the_cpu(action, pooled):
    assert sum(workers.run(train_and_act, case_of(pooled=pooled), action, world_size=2)) > 0


@pytest.mark.parametrize(
    "life, action",
    deep_but(
        [("recent", "edits"), ("expires", "moves"), *itertools.product(["on the host"], ACTIONS)],
        itertools.product(LIVES, (None, "edits", "moves")),
    ),
)
def test_tables_with_policies_train_on_a_device(life, action):
    case = case_of(pooled=life == "expires", config=LIVES[life], dedup=life != "expires")
    assert sum(workers.run(train_and_act, case, action, world_size=2)) > 0


def rows_loaded_by_prefetching():
    config = dyn.DynamicTableConfig(storage=dyn.HostMemory(16))
    with MockDevice() as device:
        twins = ShardedTwins(device, case_of(["row_wise"], config=config))
        for step in range(3):
            twins.train(step)
        table = twins.collections[1].table("row_wise")
        before = table.stats()["rows_loaded"]
        prefetch(twins)
        loaded = table.stats()["rows_loaded"] - before
        twins.train(1)
        return loaded


def test_prefetching_loads_the_rows_of_the_next_batch():
    assert max(workers.run(rows_loaded_by_prefetching, world_size=2)) > 0


@pytest.mark.simt
def test_rows_trained_on_the_cpu_are_copied_to_a_device():
    assert sum(workers.run(train_and_act, case_of(), None, True, world_size=2)) > 0


def fail():
    raise ValueError("expected it, got none")


def agree_beside_cuda():
    """Returns the answers of an agreement over a group that sends no tensors of the CPU."""
    group = group_for_cuda()
    host = host_group(group)
    assert host is not group and host is host_group(group)
    assert host_group(host) is host and host_group(dist.group.WORLD) is dist.group.WORLD
    assert dist.get_process_group_ranks(host) == dist.get_process_group_ranks(group)
    with pytest.raises(ValueError, match=r"^here\(rank=1\): expected it, got none"):
        gather_results(group, "here", fail if dist.get_rank() else lambda: None)
    return gather_results(group, "here", dist.get_rank)


def test_ranks_agree_over_a_group_for_gpus():
    assert workers.run(agree_beside_cuda, world_size=2) == [[0, 1]] * 2


def agree_beside_a_group_of_one():
    dist.new_group([0])
    return gather_results(group_for_cuda.__wrapped__(), "here", dist.get_rank)


def test_ranks_in_different_numbers_of_groups_agree():
    answers = workers.run(agree_beside_a_group_of_one, world_size=2, group_timeout=60)
    assert answers == [[0, 1]] * 2


def shard_for_gpus(case):
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    env.process_group = group_for_cuda.__wrapped__()
    plan = {table.name: table.plan for table in case.tables}
    return sharder_of(case).shard(collection_of(case), plan, env, torch.device("cpu"))


def read_here():
    collection = shard_for_gpus(case_of(["row_wise"]))
    return dist.get_rank() or collection.table("row_wise").ids().tolist()


def test_one_rank_alone_reads_a_table_over_a_group_for_gpus():
    assert workers.run(read_here, world_size=2, group_timeout=60) == [[], 1]


def check_fail_to_list_ids():
    table = shard_for_gpus(case_of(["row_wise"])).table("row_wise")
    broken = mock.Mock(side_effect=ValueError("expected ids of this rank, got none"))
    listed = broken if dist.get_rank() else TableShard.ids
    text = r"ids\(rank=1\): expected ids of this rank, got none"
    with mock.patch.object(TableShard, "ids", listed), pytest.raises(ValueError, match=text):
        table.read_ids()


def test_an_error_while_ids_are_listed_is_raised_on_all_ranks():
    workers.run(check_fail_to_list_ids, world_size=2, group_timeout=60)


def train_processed():
    """Trains position weights, too; DDP does not average their gradients here."""
    case = case_of(["table_wise", "row_wise"], weighted=True)
    # Parameters that move become new ones: a tensor of the CPU does not get the memory of the device.
    overwrites = mock.patch.object(
        torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True
    )
    with MockDevice() as device, overwrites:
        twins = ShardedTwins(
            device,
            case,
            wrap=lambda collection: processed(case, collection, "collection"),
            sharder=lambda: dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(FUSED_PARAMS),
        )
        for step in range(2):
            twins.train(step)
        grads = [
            {name: on_cpu(weight.grad) for name, weight in model.named_parameters()}
            for model in twins.models
        ]
        assert grads[0].keys() == grads[1].keys() and grads[0]
        for name, grad in grads[0].items():
            assert torch.equal(grad, grads[1][name]), name
        twins.check_notes()
        return twins.compare()


def test_feature_processors_train_on_a_device():
    assert sum(workers.run(train_processed, world_size=2)) > 0


def waits_of_step(case):
    """Returns the lines at which the host waits in a step whose ids are known."""
    with MockDevice() as device:
        twins = ShardedTwins(device, case)
        twins.train(0)
        twins.train(0)
        device.forget()
        twins.train(0)
        return [
            note.place for note in device.reads if note.op not in ("sort_by_owner", "update_rows_")
        ]


@pytest.mark.mock_only
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_the_host_waits_for_the_lengths_for_torchrec_and_for_new_ids(kind):
    for places in workers.run(waits_of_step, case_of([kind]), world_size=2):
        ours = [place.split(":")[0] for place in places if not place.startswith("torchrec/")]
        expected = ["torchrec_dyn/modules/feature_ids.py", "torchrec_dyn/lookup/table_group.py"]
        assert ours in (expected, expected[:1]), places  # a rank without the table does not look up
        assert len(places) - len(ours) <= 3 + (kind == "row_wise"), places


def save_after_an_error():
    with MockDevice() as device:
        twins = ShardedTwins(device, case_of())
        twins.train(0)
        if dist.get_rank():  # an op that finds no slot for an id, and does not wait to say so
            full = device.of(torch.ones(8, 2, dtype=torch.int64))
            ops.grown_slots([full], [4], [0])
        with pytest.raises((RuntimeError, ValueError), match=r"rank=1\).*grown_slots"):
            twins.models[1].state_dict()
        return len(twins.models[1].state_dict())


def test_a_save_raises_the_errors_of_earlier_ops_on_all_ranks():
    assert min(workers.run(save_after_an_error, world_size=2)) > 0
