"""Feature processors with wrong batches and plans, user-written processors, tables with policies."""

import copy

import pytest
import torch
import torch.distributed as dist
import workers
from processed_training import (
    LONGEST,
    Model,
    backward,
    bags,
    one_table,
    position_weights,
    processed,
    shard_processed,
)
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand, usual_plan
from sharded_training import collection_of
from torch import Tensor
from torchrec import EmbeddingBagCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn


def see_long_bag(kind: str) -> str:
    case = one_table(kind)
    model = shard_processed(case, processed(case, collection_of(case), "dict"))
    _, collection = model.module.collection.split()
    model(bags(LONGEST, 0))
    before = collection.table("t").stats()
    with pytest.raises(ValueError) as caught:
        model(bags(2, LONGEST + 1))
    assert collection.table("t").stats() == before
    model(bags(LONGEST, 1))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_a_bag_longer_than_the_position_weights_is_refused(kind: str) -> None:
    for text in workers.run(see_long_bag, kind, world_size=2):
        assert "collection" in text and "at most 6 ids of feature 'a'" in text and "of 7" in text


def see_bad_batches() -> list[str]:
    case = one_table("row_wise")
    model = shard_processed(case, processed(case, collection_of(case), "collection"))
    bad = bags(1, 2)
    bad._lengths = torch.tensor([1, 400])  # positions are computed after the check
    texts = []
    for batch in (bad, KeyedJaggedTensor(["b"], torch.arange(1), lengths=torch.tensor([1]))):
        with pytest.raises(ValueError) as caught:
            model(batch)
        texts.append(str(caught.value))
    return texts


def test_a_bad_batch_is_refused_before_positions_are_computed() -> None:
    for lengths, names in workers.run(see_bad_batches, world_size=2):
        assert "add up to the 3 ids" in lengths and "expected feature 'a'" in names


def check_long_bag_of_half_weights() -> None:
    case = one_table("row_wise")
    module = processed(case, collection_of(case, fused_params=FUSED_PARAMS), "collection")
    module._feature_processors = PositionWeightedModuleCollection({"a": 3000})
    model = shard_processed(case, module)
    batch = KeyedJaggedTensor(
        ["a"], torch.full((2500,), 7), torch.ones(2500).half(), lengths=torch.tensor([2500])
    )
    backward(model(batch))
    grad = position_weights(model)["a"].grad
    assert bool((grad[:2500] == grad[0]).all()) and not bool(grad[2500:].any())


def test_positions_beyond_what_half_weights_can_count() -> None:
    workers.run(check_long_bag_of_half_weights, world_size=2)


def check_keep_what_was_cached() -> None:
    seen: list[Tensor] = []

    class Curious(PositionWeightedModuleCollection):
        def pre_process_input(self, features: KeyedJaggedTensor) -> None:
            """Writes by another way than TorchRec's own."""
            self._pre_processed = True
            features.to_dict()["a"].weights().copy_(torch.tensor([0.0, 1.0]))
            seen.append(features.weights().clone())

    case = one_table("row_wise")
    module = processed(case, collection_of(case, fused_params=FUSED_PARAMS), "collection")
    module._feature_processors = Curious({"a": 3})
    batch = bags(2)
    batch._weights = torch.tensor([5.0, 5.0])
    batch.to_dict()
    shard_processed(case, module)(batch)
    assert batch.weights().tolist() == [5, 5] and seen[0].tolist() == [0, 1]


def test_what_a_batch_has_cached_is_not_written_to() -> None:
    workers.run(check_keep_what_was_cached, world_size=2)


def check_empty_batches() -> None:
    case = one_table("row_wise")
    model = shard_processed(case, processed(case, collection_of(case), "collection"))
    mine = bags(0, 0) if dist.get_rank() else bags(3, 1)
    backward(model(mine))
    grads = position_weights(model)["a"].grad
    assert bool((grads[:3] != 0).all()) and not bool(grads[3:].any())
    backward(model(bags(0, 0)))


def test_ranks_without_ids() -> None:
    workers.run(check_empty_batches, world_size=2)


def scored(case: Case) -> dyn.DynamicEmbeddingBagCollection:
    return dyn.DynamicEmbeddingBagCollection(
        collection_of(case).embedding_bag_configs(),
        is_weighted=True,
        dynamic=dyn.DynamicTableConfig(eviction=dyn.LowestScore()),
    )


def see_refused(what: str) -> str:
    case = one_table("row_wise")
    collection = collection_of(case, fused_params=case.fused_params)
    module = processed(case, collection, "dict")
    if what == "score":
        module._embedding_bag_collection = scored(case)
    elif what == "processor":
        module._feature_processors["a"] = Loudness()
    else:
        case.tables[0].plan = shard_by_hand("data_parallel", [([0], 0, 8)])
    with pytest.raises(ValueError) as caught:
        shard_processed(case, module)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, told",
    [
        ("score", "replace the weights of a batch, got LowestScore of tables ['t']"),
        ("processor", "got Loudness. Add the method"),
        ("data_parallel", "data_parallel"),
    ],
)
def test_refused_before_anything_is_built(what: str, told: str) -> None:
    assert all(told in text for text in workers.run(see_refused, what, world_size=2))


def test_scores_by_weights_that_processors_replace_are_refused() -> None:
    told = r"replace the weights of a batch, got LowestScore of tables \['t'\]\. Use Least"
    collection = scored(one_table())
    static = EmbeddingBagCollection(collection.embedding_bag_configs(), is_weighted=True)
    module = FeatureProcessedEmbeddingBagCollection(static, {"a": PositionWeightedModule(4)})
    with pytest.raises(ValueError, match=rf"make_dynamic\('_embedding_bag_collection'\): .*{told}"):
        dyn.make_dynamic(module, dynamic=collection.dynamic_configs())
    assert module._embedding_bag_collection is static


def check_move_where_positions_cannot_follow() -> None:
    case = one_table("table_wise")
    module = processed(case, collection_of(case, fused_params=case.fused_params), "dict")
    module._feature_processors["a"] = Loudness()
    model = shard_processed(case, module)
    before = model(bags(1, 2))
    spread = {"t": one_table("row_wise").tables[0].plan}
    sharded = model.module.collection
    with pytest.raises(ValueError, match=r"got Loudness\. Add the method"):
        model.sharders[0].reshard(sharded, spread, model._env, model.device)
    del before
    assert sharded.module_sharding_plan["t"].sharding_type == "table_wise"
    model(bags(1, 2))


def test_a_move_that_positions_cannot_follow_is_refused() -> None:
    workers.run(check_move_where_positions_cannot_follow, world_size=2)


def see_lost_gradient() -> str:
    case = one_table("table_wise")
    module = Model(processed(case, collection_of(case), "collection"))
    path = "collection._embedding_bag_collection"
    model = DistributedModelParallel(
        module,
        plan=ShardingPlan({path: {"t": case.tables[0].plan}}),
        sharders=[dyn.DynamicEmbeddingBagCollectionSharder(dict(FUSED_PARAMS))],
    )
    with torch.no_grad():
        model(bags(1, 2))
    with pytest.raises(ValueError) as caught:
        model(bags(1, 2))
    return str(caught.value)


def test_the_collection_sharded_alone_would_lose_the_gradient() -> None:
    for text in workers.run(see_lost_gradient, world_size=2):
        assert "require no gradient" in text and "DynamicFeatureProcessed" in text


class Loudness(FeatureProcessor):
    """Weighs an id by its value: odd ones 1, even ones 2. Has no parameters."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Weighs."""
        weights = 2.0 - (features.values() % 2).float()
        return JaggedTensor(features.values(), lengths=features.lengths(), weights=weights)


class TravellingLoudness(Loudness):
    """The same where rows are spread: positions do not count."""

    def pre_process_input(self, features: JaggedTensor) -> None:
        """Does nothing."""


def check_weigh_by_id(kind: str) -> None:
    case = Case([Table("t", ["a"], usual_plan(kind, 8, 2, 2))], weighted=True, steps=1)
    collection = collection_of(case, fused_params=case.fused_params)
    whole = FeatureProcessedEmbeddingBagCollection(collection, {"a": TravellingLoudness()})
    sharded = shard_processed(case, copy.deepcopy(whole))
    ids = torch.tensor([3, 2**40, -7, -(2**63), 2**63 - 1, 8])
    batch = KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([4, 2]))
    got, expected = sharded(batch)["a"], whole(batch)["a"]
    torch.testing.assert_close(got, expected)
    got.sum().backward()


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_processors_see_ids_as_the_user_wrote_them(kind: str) -> None:
    workers.run(check_weigh_by_id, kind, world_size=2)
