"""`use_index_dedup=True` under every plan: outputs, rows and counts are as without it."""

from typing import Any

import pytest
import torch
import workers
from dedup_cases import exact_grad, tables_here, tables_of, train_both
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case
from sharded_training import batches, collection_of, outputs_by_name, shard, train_beside
from torchrec.distributed import embedding

import torchrec_dyn as dyn

KINDS = ["table_wise", "row_wise", "column_wise"]


def case_of(kinds: list[str], world: int, **options: Any) -> Case:
    tables = tables_of(kinds, world, world, **options.pop("tables", {}))
    return Case(tables, pooled=False, **{"known_ids": 15, "longest_bag": 6, **options})


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS])
def test_all_is_equal_to_the_bit_where_sums_are_exact(kinds: list[str], world: int) -> None:
    of_ranks = workers.run(train_both, case_of(kinds, world), world_size=world)
    assert sum(one["rows"] for one in of_ranks) > 0
    once, each = (sum(sum(one[name]) for one in of_ranks) for name in ("once", "each"))
    assert 0 < once < 0.8 * each


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_the_unsharded_collection(kind: str, world: int) -> None:
    case = case_of([kind], world, exact=False, dedup=True)
    assert sum(workers.run(train_beside, case, world_size=world)) > 0


BATCHES = {
    "a size per feature": {"variable": True},
    "a size per rank and feature": {"variable": True, "batch_sizes": [5, 2, 8, 1]},
    "ranks without examples": {"batch_sizes": [0, 5, 0, 2]},
    "no rank has an example": {"batch_sizes": [0, 0, 0, 0]},
    "empty bags only": {"longest_bag": 0},
    "weights that nobody reads": {"weighted": True},
    "one id a bag": {"longest_bag": 1},
    "a batch of one id": {"known_ids": 1, "batch_sizes": [40] * 4},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kinds", [["row_wise"], KINDS])
def test_batches_of_all_shapes(kinds: list[str], batch: str) -> None:
    case = case_of(kinds, 4, **BATCHES[batch])
    workers.run(train_both, case, True, world_size=4)


@pytest.mark.parametrize("data_type, output", [("FP16", "FP32"), ("BF16", "BF16")])
def test_half_precision(data_type: str, output: str) -> None:
    from torchrec.modules.embedding_configs import DataType

    rate = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05, "output_dtype": DataType[output]}
    case = case_of(KINDS, 2, tables={"data_type": data_type}, fused_params=rate)
    workers.run(train_both, case, world_size=2)


def test_a_sum_of_many_gradients_of_half_precision_does_not_stand_still() -> None:
    from torchrec.modules.embedding_configs import DataType

    config = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0))
    case = case_of(
        ["table_wise"], 2, dedup=True, tables={"config": config},
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0,
                      "output_dtype": DataType.BF16},
    )  # fmt: skip
    workers.run(repeat_one_id, case, world_size=2)


def repeat_one_id(case: Case) -> None:
    """Both ranks name one id 1000 times in one bag."""
    from torchrec import KeyedJaggedTensor

    model = shard(case, collection_of(case))
    features = KeyedJaggedTensor(
        case.features(), torch.full((4000,), 7), lengths=torch.full((4,), 1000)
    )
    output = outputs_by_name(case, model(features))["a@t0"]
    assert output.dtype == torch.bfloat16
    output.backward(torch.ones_like(output))
    for table in tables_here(model):
        if table.name == "t0":
            assert torch.equal(table.lookup(torch.tensor([7]))[0], torch.full((1, 8), -999.0))


def flag_of_torchrec(case: Case) -> list[bool]:
    embedding.EC_INDEX_DEDUP = True
    try:
        flagged = shard(case, collection_of(case))
    finally:
        embedding.EC_INDEX_DEDUP = False
    plain = shard(case, collection_of(case))
    return [bool(model.module.collection._send_once) for model in (flagged, plain)]


def test_torchrecs_flag_for_all_collections_is_honoured() -> None:
    assert workers.run(flag_of_torchrec, case_of(KINDS, 2), world_size=2) == [[True, False]] * 2


def frozen_from_the_start(case: Case) -> None:
    """A frozen table beside others: sent once too, and not changed."""
    unsharded = collection_of(case)
    unsharded.embeddings["t1"].weight.requires_grad_(False)
    model = shard(case, unsharded)
    features = batches(case, 0)[0][torch.distributed.get_rank()]
    outputs = outputs_by_name(case, model(features))
    torch.autograd.backward(
        [v for v in outputs.values() if v.requires_grad],
        [exact_grad(v, 0) for v in outputs.values() if v.requires_grad],
    )
    for table in tables_here(model):
        assert (table.num_rows > 0) == (table.name != "t1") or table.step == 0


def test_tables_that_were_frozen_before_sharding() -> None:
    config = dyn.DynamicTableConfig(eviction=dyn.LeastFrequentlyUsed())
    for kinds in (["row_wise"], KINDS):
        case = case_of(kinds, 2, dedup=True, tables={"config": config})
        workers.run(frozen_from_the_start, case, world_size=2)
