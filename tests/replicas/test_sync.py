"""Replicas over real groups of ranks: beside static tables, under policies, with markers, and faults."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from replicated_models import (
    FUSED,
    batch_of,
    case_of,
    replica_of,
    sharded,
    sharding_groups,
    shards_of,
)
from sharded_cases import Case
from sharded_training import Holder, collection_of, configs_of
from table_cases import ids_of, same_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.remote_device import _remote_device
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding

import torchrec_dyn as dyn
from torchrec_dyn.replicas.exchange import DIGEST_BYTES

NAMES = ("rows", "columns", "whole")
START = 0.25  # of every weight


@cache
def replica_groups() -> list[dist.ProcessGroup]:
    """Returns the groups of the ranks that hold the same ids. Collective."""
    places = dist.get_world_size() // 2
    return [dist.new_group([2 * place, 2 * place + 1]) for place in range(places)]  # type: ignore[misc]


def static_twin_of(case: Case) -> Any:
    """Returns static tables of the same configs and plan, whose weights are START."""
    configs = configs_of(case)
    for config in configs:
        config.init_fn = partial(torch.nn.init.constant_, val=START)
    return sharded(
        EmbeddingBagCollection(configs, device=torch.device("meta")),
        {one.name: _in_group(one.plan) for one in case.tables},
        EmbeddingBagCollectionSharder(fused_params=FUSED),
    )


def _in_group(plan: ParameterSharding) -> ParameterSharding:
    """Returns a plan whose placements are ranks of the job, as static tables want them."""
    ranks = dist.get_process_group_ranks(sharding_groups()[dist.get_rank() % 2])
    placed = copy.deepcopy(plan)
    assert placed.sharding_spec is not None and placed.ranks is not None
    for shard, rank in zip(placed.sharding_spec.shards, placed.ranks, strict=True):  # type: ignore[attr-defined]
        shard.placement = _remote_device(f"rank:{ranks[rank]}/cpu")
    return placed


def average_static(model: torch.nn.Module) -> int:
    """Averages weights and Adagrad's sums over the replicas, as DMPCollection does. Returns their bytes."""
    group, count = replica_groups()[dist.get_rank() // 2], 0
    lookups = [one for module in model.modules() for one in getattr(module, "_lookups", ())]
    for module in [module for lookup in lookups for module in lookup.modules()]:
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            sums = [state["sum"] for state in module.get_optimizer_state()]
            for tensor in [*module.split_embedding_weights(), *sums]:
                dist.all_reduce(tensor.data, group=group)
                tensor.data.div_(2)
                count += tensor.nbytes
    assert count, "the kernels of the static tables were not found"
    return count


def train(model: torch.nn.Module, batch: KeyedJaggedTensor) -> torch.Tensor:
    """Runs one step; returns the output."""
    output = model(batch).values()
    (output * output.detach() + output).sum().backward()
    return output.detach()


def assert_replicas_are_equal(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Asserts that this rank has what the other replica has, bit for bit, and returns it. Collective."""
    mine, both = shards_of(model), [None, None]
    dist.all_gather_object(both, mine, group=replica_groups()[dist.get_rank() // 2])
    for theirs in both:
        assert theirs is not None and theirs.keys() == mine.keys()
        for name, state in mine.items():
            assert same_state(state, theirs[name]), name
    return mine


def with_constant(**options: Any) -> dyn.DynamicTableConfig:
    """Returns a config whose rows start with START."""
    return dyn.DynamicTableConfig(initializer=dyn.Constant(START), unseen="initial", **options)


def beside_static(steps: int) -> dict[str, int]:
    """Trains static tables of the same plan beside: they are averaged by position."""
    case = case_of(dict.fromkeys(NAMES, with_constant()))
    model, twin = replica_of(case), static_twin_of(case)
    replicas = dyn.Replicas(model)
    sent = []
    for step in range(steps):
        for turn in range(2):
            batch = batch_of(case, 2 * step + turn, ids=20)
            torch.testing.assert_close(
                train(model, batch), train(twin, batch), rtol=1e-5, atol=1e-6
            )
        sent.append(replicas.sync())
        average_static(twin)
        assert_replicas_are_equal(model)
    for module in (model, twin):
        module.eval()
    every = batch_of(case, 99)
    torch.testing.assert_close(model(every).values(), twin(every).values(), rtol=1e-5, atol=1e-6)
    again = replicas.sync()
    assert again == (0, 0, DIGEST_BYTES)
    rows = sum(one.rows for one in sent)
    return {"rows": rows, "sent": sum(one.sent_bytes for one in sent)}


def test_replicas_train_as_static_tables_that_are_averaged():
    for told in workers.run(beside_static, 2, world_size=4):
        # A row of 8 weights and 8 sums goes to or comes from the other replica; its id goes both ways.
        assert 0 < told["sent"] < told["rows"] * (8 * 8 + 2 * 8 + 2) + 500


@pytest.mark.deep
def test_replicas_train_as_static_tables_for_long():
    assert all(told["rows"] > 100 for told in workers.run(beside_static, 30, world_size=4))


LIVES = {
    "rows": with_constant(
        eviction=dyn.LeastFrequentlyUsed(half_life_steps=5), admission=dyn.AdmitAfter(2)
    ),
    "columns": dyn.DynamicTableConfig(eviction=(dyn.ExpireAfter(time=3), dyn.LeastRecentlyUsed())),
    "whole": dyn.DynamicTableConfig(
        eviction=(dyn.ExpireAfter(steps=4), dyn.LeastFrequentlyUsed()), admission=dyn.AdmitAfter(3)
    ),
}


def with_lives(folder: str, steps: int) -> None:
    """Trains under policies; erases, assigns, and exports a delta of what all syncs have written."""
    rank = dist.get_rank()
    case = case_of(LIVES, rows=32)
    model = replica_of(case)
    collection = model.module.collection
    replicas, marker = dyn.Replicas(model), dyn.checkpoint.mark(model)
    for step in range(steps):
        for turn in range(2):
            collection.set_time(10 + step + (rank % 2) * turn)  # replicas see other times
            train(model, batch_of(case, 2 * step + turn, ids=16 + 8 * step))
        erased = ids_of(*range(step, step + 3)) if rank % 2 else ids_of()
        for name in NAMES:  # the odd replica alone
            if rank % 2:
                dyn.erase_rows(collection, name, erased)
            dyn.assign_rows(collection, name, ids_of(500 + rank), torch.full((1, 8), 1.0 * rank))
        synced = replicas.sync()
        assert synced.ids >= synced.rows
        state = assert_replicas_are_equal(model)
        for name in NAMES:
            ids = dyn.read_ids(collection, name).tolist()
            assert not {*range(step, step + 3)} & {*ids}
            assert {500, 501, 502, 503} <= {*ids} or len(ids) >= 32
        assert all(len(one["ids"]) <= 40 for one in state.values())
    path = f"{folder}/{rank % 2}"
    dyn.checkpoint.export_delta(model, path, marker)
    copied = Holder(collection_of(case, fused_params=case.fused_params))
    dyn.checkpoint.apply_delta(copied, path)
    for name in NAMES:
        ids = dyn.read_ids(collection, name)
        assert copied.collection.table(name).ids().tolist() == ids.tolist()
        rows, _ = dyn.lookup_rows(collection, name, ids)
        assert torch.equal(copied.collection.table(name).lookup(ids)[0], rows)
        # The ranks of a replica are not numbered from 0. The table is too full for as many new ids.
        dyn.checkpoint.export_rows(collection, name, f"{path}/{name}")
        assert dyn.checkpoint.import_rows(collection, name, f"{path}/{name}") == len(ids)


def test_policies_erasures_and_deltas(tmp_path):
    workers.run(with_lives, str(tmp_path), 2, world_size=4)


@pytest.mark.deep
def test_policies_erasures_and_deltas_for_long(tmp_path):
    workers.run(with_lives, str(tmp_path), 12, world_size=4, timeout=300.0)


def from_a_checkpoint(folder: str) -> None:
    """One replica saves; a new model of all replicas goes on as the old one does."""
    case = case_of(LIVES, rows=32)
    group = sharding_groups()[dist.get_rank() % 2]
    model, again = replica_of(case), replica_of(case)
    for one in (model, again):
        one.module.collection.set_time(1)
    replicas = dyn.Replicas(model)
    for step in range(2):
        train(model, batch_of(case, step))
        replicas.sync()
    saved, loaded = (
        {"model": one.state_dict(), "optimizer": one.fused_optimizer.state_dict()}
        for one in (model, again)
    )
    if dist.get_rank() % 2:
        dcp.save(saved, checkpoint_id=folder, process_group=group)
    dist.barrier()
    planner = dyn.checkpoint.LoadPlanner(path=folder)
    dcp.load(loaded, checkpoint_id=folder, planner=planner, process_group=group)
    again.load_state_dict(loaded["model"])
    again.fused_optimizer.load_state_dict(loaded["optimizer"])
    for one, of_model in ((model, replicas), (again, dyn.Replicas(again))):
        train(one, batch_of(case, 9))
        of_model.sync()
        assert_replicas_are_equal(one)
    both = shards_of(model), shards_of(again)
    assert all(same_state(state, both[1][name]) for name, state in both[0].items())


def test_a_checkpoint_of_one_replica_is_one_of_all(tmp_path):
    workers.run(from_a_checkpoint, str(tmp_path / "saved"), world_size=4)


def fault_of(work, group=None) -> str:
    """Returns the error of a call, which every rank of a group must get, with the same text."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        work()
    texts = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, str(caught.value), group=group)
    assert len({*texts}) == 1, texts
    return str(caught.value)


def refuse() -> list[str]:
    rank, texts = dist.get_rank(), []
    case = case_of(dict.fromkeys(NAMES, with_constant()), rows=5)
    model = replica_of(case)
    collection = model.module.collection
    two = replica_groups()[rank // 2]
    texts.append(fault_of(lambda: dyn.Replicas(model, group=two), two))
    replicas = dyn.Replicas(model)
    few = batch_of(case, 1, ids=2)
    # A forward that is open on one rank.
    output = model(few).values()
    texts.append(fault_of(replicas.sync))
    output.sum().backward()
    replicas.sync()
    # A replica that is a step ahead.
    if rank % 2:
        train(model, few)
    texts.append(fault_of(replicas.sync))
    if not rank % 2:
        train(model, few)
    # A union over the limit of the table-wise table; nothing changes, the other table neither.
    ids = ids_of(*range(10 * (rank % 2 + 1), 10 * (rank % 2 + 1) + 3)) if rank < 2 else ids_of()
    for name, some in (("whole", ids), ("rows", ids[:1])):
        dyn.assign_rows(collection, name, some, torch.ones(len(some), 8))
    before = copy.deepcopy(shards_of(model))
    texts.append(fault_of(replicas.sync))
    now = shards_of(model)
    assert all(same_state(now[name], state) for name, state in before.items())
    # It can be repaired.
    dyn.erase_rows(collection, "whole", ids[:2])
    replicas.sync()
    assert_replicas_are_equal(model)
    # A table with other contents than training and edits.
    for table in collection._shards.tables():
        for shard in table.shards if table.name == "rows" and rank == 3 else ():
            shard.load_state(shard.export_state())
    texts.append(fault_of(replicas.sync))
    # Replicas that begin with other contents, and another table.
    if rank % 2:
        dyn.assign_rows(collection, "rows", ids_of(7), torch.ones(1, 8) * rank)
    texts.append(fault_of(lambda: dyn.Replicas(model)))
    other = case_of({"rows" if rank % 2 else "others": with_constant()})
    texts.append(fault_of(lambda: dyn.Replicas(replica_of(other))))
    seeded = case_of({"rows": with_constant(seed=rank % 2)})
    texts.append(fault_of(lambda: dyn.Replicas(replica_of(seeded))))
    static = case_of({"rows": with_constant()})
    both = torch.nn.ModuleList([replica_of(static), static_twin_of(static)])
    texts.append(fault_of(lambda: dyn.Replicas(both)))
    nodes = case_of({"rows": with_constant()})
    nodes.tables[0].plan.sharding_type = "table_row_wise"
    texts.append(fault_of(lambda: replica_of(nodes)))
    return texts


EXPECTED = (
    "expected a group with all ranks of the job, got",
    "expected no open forward, got 1. Call sync after the backward",
    "expected replicas after the same number of training steps, got",
    "expected at most 5 rows here (num_embeddings=5) in the union of the replicas, got",
    "expected a table that was only trained and edited since the last sync, got one that was loaded",
    "Replicas(table='rows'): expected the same contents in all replicas, got others on rank",
    "expected the same tables in the same order in all replicas, got",
    "Replicas(table='rows'): expected the same plan, options and optimizer in all replicas, got",
    "expected no sharded static tables, which no sync would merge, got ['rows'] of",
    "expected all 4 ranks of the job under table_row_wise",
)


def test_faults_of_one_rank_are_faults_of_all_and_change_nothing():
    for texts in workers.run(refuse, world_size=4, group_timeout=40.0):
        for text, expected in zip(texts, EXPECTED, strict=True):
            assert expected in text


def unsharded() -> float:
    """Two replicas, each an unsharded collection on one rank."""
    case = case_of({"whole": with_constant()})
    model = Holder(collection_of(case, fused_params=case.fused_params))
    replicas, table = dyn.Replicas(model), model.collection.table("whole")
    rank = dist.get_rank()
    table.assign(ids_of(1, 2 + rank), torch.full((2, 8), 1.0 + 2 * rank))
    replicas.sync()
    rows, found = table.lookup(ids_of(1, 2, 3))
    assert found.all()
    assert rows[:, 0].tolist() == [2.0, (1.0 + 0.25) / 2, (3.0 + 0.25) / 2]
    return replicas.sync().ids


def test_unsharded_replicas_of_one_rank_each():
    assert workers.run(unsharded, world_size=2) == [0, 0]


def test_no_process_group_is_refused():
    with pytest.raises(ValueError, match="Replicas: expected a process group, got none"):
        dyn.Replicas(torch.nn.Linear(1, 1))


def join_by_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(
        ValueError,
        match=r"Replicas: expected group to be a ProcessGroup or None, got DeviceMesh\. .*get_group\(\)",
    ):
        dyn.Replicas(torch.nn.Linear(1, 1), group=mesh)


def test_a_mesh_is_refused():
    workers.run(join_by_a_mesh, world_size=2)
