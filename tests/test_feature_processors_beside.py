"""Feature processors beside all else: wrong batches, their own kinds, checkpoints, pipelines, planner."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import workers
from processed_training import (
    LONGEST,
    Model,
    backward,
    position_weights,
    processed,
    shard_processed,
)
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, collection_of
from test_feature_processors import tables_of
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import torchrec_dyn as dyn
from torchrec_dyn.planner import make_planner

MIXED = ["row_wise", "table_wise", "column_wise"]


def one_table(kind: str = "row_wise", world: int = 2, plan: object = None) -> Case:
    """A case of one table of one feature."""
    return Case([Table("t", ["a"], plan or usual_plan(kind, 8, world, world))], weighted=True)


def bags(*lengths: int) -> KeyedJaggedTensor:
    """A batch of one feature without weights."""
    return KeyedJaggedTensor(["a"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))


def trained(case: Case, steps: int = 2) -> DistributedModelParallel:
    model = shard_processed(case, processed(case, collection_of(case), "collection"))
    for step in range(steps):
        backward(model(batches(case, step)[0][dist.get_rank()]))
    return model


# Wrong batches


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


def long_bag_of_half_weights() -> None:
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
    workers.run(long_bag_of_half_weights, world_size=2)


def empty_batches() -> None:
    case = one_table("row_wise")
    model = shard_processed(case, processed(case, collection_of(case), "collection"))
    mine = bags(0, 0) if dist.get_rank() else bags(3, 1)
    backward(model(mine))
    grads = position_weights(model)["a"].grad
    assert bool((grads[:3] != 0).all()) and not bool(grads[3:].any())
    backward(model(bags(0, 0)))


def test_ranks_without_ids() -> None:
    workers.run(empty_batches, world_size=2)


# Plans that do not do


def see_refused(what: str) -> str:
    case = one_table("row_wise")
    collection = collection_of(case, fused_params=case.fused_params)
    module = processed(case, collection, "dict")
    if what == "static":
        module._embedding_bag_collection = EmbeddingBagCollection(
            collection.embedding_bag_configs(), is_weighted=True
        )
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
        ("static", "got EmbeddingBagCollection. Convert it with make_dynamic"),
        ("processor", "got Loudness. Give it one"),
        ("data_parallel", "data_parallel"),
    ],
)
def test_refused_before_anything_is_built(what: str, told: str) -> None:
    assert all(told in text for text in workers.run(see_refused, what, world_size=2))


def see_lost_gradient() -> str:
    case = one_table("table_wise")
    module = Model(processed(case, collection_of(case), "collection"))
    path = "collection._embedding_bag_collection"
    model = DistributedModelParallel(
        module,
        device=torch.device("cpu"),
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
        assert "ask for no gradient" in text and "DynamicFeatureProcessed" in text


# Processors of one's own


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


def weigh_by_id(kind: str) -> None:
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
    workers.run(weigh_by_id, kind, world_size=2)


# Checkpoints, deltas, questions


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


# Changing a model


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


# The planner


def plan_and_train(constraints: dict[str, ParameterConstraints] | None) -> str:
    case = one_table()
    model = Model(processed(case, collection_of(case), "collection"))
    sharders = [dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(dict(FUSED_PARAMS))]
    planner = make_planner(Topology(2, "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    backward(model(bags(2, 1)))
    (chosen,) = plan.plan["collection"].values()
    return chosen.sharding_type


def test_the_planner_plans_them() -> None:
    kinds = workers.run(plan_and_train, None, world_size=2)
    assert set(kinds) <= {"table_wise", "column_wise", "table_column_wise"}
    asked = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    assert set(workers.run(plan_and_train, asked, world_size=2)) == {"row_wise"}


def test_storage_is_priced_as_of_dynamic_tables() -> None:
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    from torchrec_dyn.planner import DynamicStorageEstimator

    case = one_table()
    topology = Topology(2, "cpu")
    prices = []
    for wrapped in (False, True):
        collection = collection_of(case, fused_params=FUSED_PARAMS)
        module = Model(processed(case, collection, "dict") if wrapped else collection)
        sharders = [
            dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(),
            dyn.DynamicEmbeddingBagCollectionSharder(),
        ]
        enumerator = EmbeddingEnumerator(topology, 4, None, [DynamicStorageEstimator(topology)])
        options = enumerator.enumerate(module, sharders[:1] if wrapped else sharders[1:])
        (one,) = [each for each in options if each.sharding_type == "table_wise"]
        prices.append(one.shards[0].storage.ddr)
    assert prices[0] == prices[1]


# Pipelines


@dataclass
class Batch(Pipelineable):
    """Bags, as a pipeline takes them."""

    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Moves the batch."""
        return Batch(self.features.to(device, non_blocking))

    def record_stream(self, stream: object) -> None:
        """Does nothing: there are no streams on the CPU."""

    def pin_memory(self) -> "Batch":
        """Does nothing."""
        return self


class Loss(nn.Module):
    """A leaf to the pipelines' tracer."""

    def forward(self, pooled) -> Tensor:
        """Sums squares."""
        return (pooled.values() - 1).square().sum()


class LossModel(nn.Module):
    """A collection and its loss."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection
        self.loss = Loss()

    def forward(self, batch: Batch):
        """Returns the loss, twice."""
        loss = self.loss(self.collection(batch.features))
        return loss, loss.detach()


def run_pipeline(kind: str, form: str, name: str) -> list[float]:
    case = Case(tables_of([kind] * 3, 2, 2), weighted=True, steps=4)
    module = processed(case, collection_of(case), form)
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    sharders = [dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(dict(FUSED_PARAMS))]
    model = DistributedModelParallel(
        LossModel(module), device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert len(dense) == len(case.features())
    optimizer = CombinedOptimizer(
        [
            model.fused_optimizer,
            KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.05)),
        ]
    )
    given = [Batch(batches(case, step)[0][dist.get_rank()]) for step in range(case.steps)]
    for step, batch in enumerate(given):
        if step % 2:
            batch.features._weights = None
    losses, left = [], iter(given)
    pipeline = getattr(train_pipelines, name)(model, optimizer, torch.device("cpu"))
    for _ in range(3):
        losses.append(float(pipeline.progress(left)))
    if name != "TrainPipelineBase":
        (pipelined,) = pipeline._pipelined_modules
        assert type(pipelined) is dyn.ShardedDynamicFeatureProcessedEmbeddingBagCollection
        pipeline.detach()  # afterwards positions are still computed, though TorchRec's flag stays
    assert given[1].features.weights_or_none() is None
    with torch.no_grad():
        losses.append(float(model.eval()(given[1])[0]))
    return losses


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "grid_shard"])
def test_pipelines(kind: str) -> None:
    for form in ("collection", "dict"):
        base = workers.run(run_pipeline, kind, form, "TrainPipelineBase", world_size=2)
        ahead = workers.run(run_pipeline, kind, form, "TrainPipelineSparseDist", world_size=2)
        assert base == ahead and len(set(base[0])) == 4


# A life


def train_with_admission(kind: str) -> tuple[list[float], list[float]]:
    life = dyn.DynamicTableConfig(
        admission=dyn.AdmitAfter(2), eviction=dyn.LeastRecentlyUsed(), unseen="initial"
    )
    config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=64, feature_names=["a"])
    outputs: list[list[float]] = []
    for sharded in (False, True):
        collection = dyn.DynamicEmbeddingBagCollection(
            [config], is_weighted=True, dynamic=life, fused_params=FUSED_PARAMS
        )
        processors = PositionWeightedModuleCollection({"a": 4})
        module = FeatureProcessedEmbeddingBagCollection(collection, processors)
        model = Model(module)
        if sharded:
            case = Case(
                [Table("t", ["a"], usual_plan(kind, 8, 1, 1, rows=64), rows=64)], weighted=True
            )
            model = shard_processed(case, module)
        seen = []
        for step in range(6):
            ids = torch.arange(12) + 5 * (step // 2)
            out = model(KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([4, 4, 0, 4])))["a"]
            out.square().sum().backward()
            weight = position_weights(model)["a"]
            seen += [float(out.detach().sum()), float(weight.grad.sum())]
            weight.grad = None
        outputs.append(seen)
    return outputs[0], outputs[1]


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_admission_and_eviction(kind: str) -> None:
    ((unsharded, sharded),) = workers.run(train_with_admission, kind, world_size=1)
    torch.testing.assert_close(torch.tensor(sharded), torch.tensor(unsharded))


def test_single_process_position_weights_learn() -> None:
    collection = collection_of(one_table(), fused_params=FUSED_PARAMS)
    module = FeatureProcessedEmbeddingBagCollection(collection, {"a": PositionWeightedModule(4)})
    out = module(bags(3, 1))["a"]
    rows = collection.table("t").lookup(torch.arange(4))[0]
    out.sum().backward()
    expected = torch.tensor([rows[0].sum() + rows[3].sum(), rows[1].sum(), rows[2].sum(), 0])
    torch.testing.assert_close(position_weights(module)["a"].grad, expected)
