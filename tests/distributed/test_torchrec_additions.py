"""Additions of TorchRec around its collections: written rows, evaluation on the CPU, stages, other sends."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import SEQUENCE, Case, three_tables
from sharded_training import Holder, batches, collection_of, outputs_by_name, shard, sharder_of
from torchrec import EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import model_parallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn

FEATURES = ["b", "c", "a@t2", "d"]  # of t1 and t2


def writable(case: Case) -> dyn.DynamicEmbeddingCollection:
    """Returns the collection of a case; DistributedModelParallel may write t1 and t2."""
    return dyn.DynamicEmbeddingCollection(
        [
            EmbeddingConfig(
                table.rows,
                table.dim,
                table.name,
                feature_names=list(table.features),
                enable_embedding_update=table.name != "t0",
            )
            for table in case.tables
        ]
    )


def written(rank: int, names: list[str]) -> KeyedJaggedTensor:
    """Returns the ids of a rank with rows; rank 1 writes into two features only."""
    sizes = [3, 0, 2, 1] if rank else [2, 4, 1, 2]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(9, (sum(sizes),), generator=generator) - 4
    rows = torch.rand(sum(sizes), 8, generator=generator)
    return KeyedJaggedTensor(names, ids, rows, lengths=torch.tensor(sizes))


def write_rows(case: Case) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, twin = shard(case, writable(case)), collection_of(case)
    model.write(written(rank, FEATURES))
    for part in range(world):
        given = written(part, FEATURES)
        sizes = given.length_per_key()
        ids, rows = given.values().split(sizes), given.weights().split(sizes)
        for table, features in (("t1", (0, 1)), ("t2", (2, 3))):
            all_ids = torch.cat([ids[one] for one in features])
            twin.table(table).assign(all_ids, torch.cat([rows[one] for one in features]))
    collection = model.module.collection
    for name in ("t0", "t1", "t2"):
        ids = dyn.read_ids(twin, name)
        assert torch.equal(dyn.read_ids(collection, name), ids)
        assert torch.equal(*(dyn.lookup_rows(one, name, ids)[0] for one in (collection, twin)))
    bad = KeyedJaggedTensor(["b"], torch.tensor([1]), lengths=torch.tensor([1]))
    flat = KeyedJaggedTensor(
        FEATURES, torch.arange(4), torch.rand(4), lengths=torch.ones(4, dtype=torch.int64)
    )
    texts = []
    for given in (bad, flat):
        with pytest.raises(ValueError) as caught:
            model.write(given if rank else written(0, FEATURES))
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("kinds", [SEQUENCE, ["row_wise"]])
def test_rows_that_the_model_writes_are_assigned(kinds: list[str]) -> None:
    case = Case(three_tables(kinds, 2, 2), pooled=False)
    by_rank = workers.run(write_rows, case, world_size=2)
    where = "DynamicEmbeddingCollection('collection').write(rank=1): expected"
    expected = [
        f"{where} the features of its tables with enable_embedding_update, {FEATURES}, got ['b'].",
        f"{where} weights [4, embedding_dim], the row of each id, got [4].",
    ]
    assert by_rank == [expected, expected]


def test_without_the_option_a_model_writes_nothing() -> None:
    case = Case(three_tables(["table_wise"], 1, 1), pooled=False)
    (text,) = workers.run(write_without_option, case, world_size=1)
    assert "Please check `enable_embedding_update` flag" in text  # TorchRec's


def write_without_option(case: Case) -> str:
    with pytest.raises(RuntimeError) as caught:
        shard(case, collection_of(case)).write(written(0, FEATURES))
    return str(caught.value)


def check_evaluate(case: Case) -> None:
    """The rows of a rank are its own: sharing the memory of parameters must not replace them."""
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    trained = shard(case, collection_of(case))
    mine, other = (batches(case, step)[0][dist.get_rank()] for step in (0, 1))
    outputs = outputs_by_name(case, trained(mine)).values()
    torch.autograd.backward([one.sum() for one in outputs])
    hybrid: Any = model_parallel.HybridEvalDMP(
        Holder(collection_of(case)),
        plan=plan,
        sharders=[sharder_of(case)],
        device=torch.device("cpu"),
    ).eval()
    for table in case.tables:
        ids = dyn.read_ids(trained.module.collection, table.name)
        rows, _ = dyn.lookup_rows(trained.module.collection, table.name, ids)
        part = slice(dist.get_rank(), None, dist.get_world_size())
        dyn.assign_rows(hybrid.module.collection, table.name, ids[part], rows[part])
    trained.eval()
    with torch.no_grad():
        for share in (False, True):
            if share:
                hybrid.share_embedding_memory(dist.group.WORLD)
                hybrid.to("cpu")
            for batch in (mine, other):
                expected = outputs_by_name(case, trained(batch))
                found = outputs_by_name(case, hybrid(batch))
                assert found.keys() == expected.keys() and len(found) > 3
                for name in expected:
                    assert torch.equal(found[name], expected[name])


@pytest.mark.skipif(not hasattr(model_parallel, "HybridEvalDMP"), reason="TorchRec has none")
@pytest.mark.parametrize("pooled", [True, False])
def test_hybrid_evaluation_on_the_cpu_reads_the_rows(pooled: bool) -> None:
    workers.run(check_evaluate, Case(three_tables(SEQUENCE, 2, 2), pooled=pooled), world_size=2)


def check_stage_by_stage(case: Case) -> None:
    collection = shard(case, collection_of(case)).module.collection
    batch = batches(case, 0)[0][dist.get_rank()]
    expected = outputs_by_name(case, collection(batch))
    ctx = collection.create_context()
    arrived = collection.input_dist(ctx, batch).wait().wait()
    assert len(collection._shards.batches) == 1
    outputs = collection.compute(ctx, arrived)
    assert len(collection._shards.batches) == 0  # the ids are looked up: a reshard need not wait
    found = outputs_by_name(case, collection.output_dist(ctx, outputs))
    assert found.keys() == expected.keys() and len(found) > 3
    for name in expected:
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("pooled", [True, False])
def test_stages_may_be_called_one_by_one(pooled: bool) -> None:
    tables = three_tables(SEQUENCE, 2, 2)
    for table in tables if pooled else ():
        table.pooling = "MEAN"  # divided after the output dist
    workers.run(check_stage_by_stage, Case(tables, pooled=pooled), world_size=2)


def communicate_by_priority(case: Case, ours: bool) -> str:
    pec_modules = pytest.importorskip("torchrec.modules.pec_embedding_modules")
    pec = pytest.importorskip("torchrec.distributed.pec_embedding")
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    sharder = pec.PECEmbeddingCollectionSharder(ec_sharder=sharder_of(case) if ours else None)
    with pytest.raises(ValueError) as caught:
        model = DistributedModelParallel(
            Holder(pec_modules.PECEmbeddingCollection(collection_of(case))),
            plan=plan,
            sharders=[sharder],
            device=torch.device("cpu"),
        )
        model(batches(case, 0)[0][dist.get_rank()])
    return str(caught.value)


@pytest.mark.parametrize("ours", [False, True])
def test_prioritized_communication_is_refused(ours: bool) -> None:
    pytest.importorskip("torchrec.distributed.pec_embedding")
    case = Case(three_tables(["row_wise"], 2, 2), pooled=False)
    for text in workers.run(communicate_by_priority, case, ours, world_size=2):
        if ours:
            assert text == (
                "DynamicEmbeddingCollection: expected a batch with the context of its create_context(), got "
                "PECEmbeddingCollectionContext, as from TorchRec's PECEmbeddingCollection, which sends rows "
                "in an order of its own. Shard the collection itself, without that module."
            )
        else:
            assert "expected a sharder of torchrec_dyn, got TorchRec's, which makes static" in text
