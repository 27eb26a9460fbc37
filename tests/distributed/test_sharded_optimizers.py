"""Who chooses the optimizer of sharded rows, and how its learning rate is driven."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_training import Holder, collection_of, shard
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
ONE = [Table("t", ["a"], shard_by_hand("table_wise", [([0], 0, 8)]))]
IDS = torch.tensor([5, -1])


def sharded(collection: Any, case: Case, fused_params: dict[str, Any] | None = None) -> Any:
    sharder: Any = (
        dyn.DynamicEmbeddingBagCollectionSharder
        if case.pooled
        else dyn.DynamicEmbeddingCollectionSharder
    )(fused_params=fused_params)
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})  # type: ignore[misc]
    return DistributedModelParallel(Holder(collection), plan=plan, sharders=[sharder])


def one_step(model: Any) -> torch.Tensor:
    """Trains both ids with gradient 1, and returns by how much their rows changed."""
    table = model.module.collection.table("t")
    features = KeyedJaggedTensor(keys=["a"], values=IDS, lengths=torch.tensor([1, 1]))
    with torch.no_grad():
        model(features).values()  # the rows are there from now on
    before = table.lookup(IDS)[0]
    model(features).values().sum().backward()
    return table.lookup(IDS)[0] - before


def check_precedence() -> None:
    case = Case(ONE)
    collection = collection_of(case, fused_params={**SGD, "learning_rate": 0.125})
    torch.testing.assert_close(
        one_step(sharded(collection, case)), torch.full((2, 8), -0.125), msg="the module's"
    )
    torch.testing.assert_close(
        one_step(sharded(collection, case, SGD)), torch.full((2, 8), -0.5), msg="the sharder's"
    )
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.25})
    torch.testing.assert_close(
        one_step(sharded(collection, case, SGD)), torch.full((2, 8), -0.25), msg="the parameter's"
    )
    # A sharder that names an optimizer does not inherit the hyper-parameters of another one.
    adam = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1, "weight_decay": 0.9}
    other = collection_of(case, fused_params=adam)
    torch.testing.assert_close(
        one_step(sharded(other, case, {"optimizer": EmbOptimType.EXACT_SGD})),
        torch.full((2, 8), -0.01),
    )
    # One that names none completes the module's.
    completed = sharded(other, case, {"weight_decay": 0.0, "learning_rate": 0.5})
    same = collection_of(case, fused_params={**adam, "weight_decay": 0.0, "learning_rate": 0.5})
    torch.testing.assert_close(one_step(completed), one_step(sharded(same, case)))


def test_optimizer_of_parameter_sharder_module() -> None:
    workers.run(check_precedence, world_size=1)


def check_default_optimizer() -> None:
    case = Case(ONE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sharded(collection_of(case), case)
    told = [str(one.message) for one in caught if "no optimizer was chosen" in str(one.message)]
    assert len(told) == 1 and "('collection')" in told[0] and "['t']" in told[0]
    torch.testing.assert_close(one_step(model), torch.full((2, 8), -0.01))


def test_default_optimizer_is_named_in_one_warning() -> None:
    workers.run(check_default_optimizer, world_size=1)


def rates_of(model: Any) -> list[float]:
    return [group["lr"] for group in model.fused_optimizer.param_groups]


def check_schedules() -> None:
    case = Case([ONE[0], Table("u", ["a"], shard_by_hand("row_wise", [([0], 0, 8)]))])
    model = sharded(collection_of(case), case, SGD)
    assert isinstance(model.fused_optimizer, CombinedOptimizer)
    assert rates_of(model) == [0.5]  # of two table groups: their tables were given one optimizer
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.25  # read at the next backward, without step() or zero_grad()
    torch.testing.assert_close(one_step(model), torch.full((2, 8), -0.25))

    scheduler = torch.optim.lr_scheduler.StepLR(model.fused_optimizer, step_size=1, gamma=0.5)
    model.fused_optimizer.step()
    scheduler.step()
    assert rates_of(model) == [0.125]
    torch.testing.assert_close(one_step(model), torch.full((2, 8), -0.125))

    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.5)]
    warm = WarmupOptimizer(model.fused_optimizer, stages, lr=1.0)
    torch.testing.assert_close(one_step(model), torch.full((2, 8), -0.5))
    warm.zero_grad()
    warm.step()
    assert rates_of(model) == [0.625]
    torch.testing.assert_close(one_step(model), torch.full((2, 8), -0.625))


def test_learning_rate_follows_the_parameter_groups() -> None:
    workers.run(check_schedules, world_size=1)


def check_copies_refused() -> None:
    model = sharded(collection_of(Case(ONE)), Case(ONE), SGD)
    warm = WarmupOptimizer(model.fused_optimizer, [WarmupStage()])
    for optimizer in (model.module.collection.fused_optimizer, model.fused_optimizer, warm):
        for way in (copy.deepcopy, pickle.dumps):
            with pytest.raises(
                ValueError,
                match=r"^ShardedOptimizer: expected .* of an unsharded collection in a copy or a pickle, got "
                r"one of a sharded collection: .* Save state dicts with torch\.distributed\.checkpoint",
            ):
                way(optimizer)


def test_an_optimizer_of_sharded_tables_is_not_copied() -> None:
    workers.run(check_copies_refused, world_size=1)


def check_rates_filled_in_place() -> None:
    model = sharded(collection_of(Case(ONE)), Case(ONE), SGD)
    (group,) = model.fused_optimizer.param_groups
    group["lr"] = rate = torch.tensor(0.5)
    for value, call in ((0.25, "zero_grad"), (0.125, "step")):
        rate.fill_(value)
        getattr(model.fused_optimizer, call)()
        torch.testing.assert_close(one_step(model), torch.full((2, 8), -value), msg=call)


def test_a_learning_rate_filled_in_place_holds_from_the_next_call_on() -> None:
    workers.run(check_rates_filled_in_place, world_size=1)


def optimizer_keys() -> list[str]:
    tables = [
        Table("t", ["a"], usual_plan("column_wise", 8, 2, 2)),
        Table("u", ["a"], usual_plan("row_wise", 8, 2, 2)),
        Table("v", ["a"], usual_plan("table_wise", 8, 2, 2)),
    ]
    case = Case(tables)
    model = sharded(collection_of(case), case, SGD)
    if dist.get_rank() == 1:
        # Reading the state is no collective: the other rank does not take part.
        assert len(model.fused_optimizer.state) == len(model.fused_optimizer.params)
    assert dict(model.named_parameters()) == {}
    return sorted(model.fused_optimizer.params)


def test_optimizer_names_all_tables_on_every_rank() -> None:
    """Also those that lie elsewhere: saving and loading are collective."""
    names = [f"collection.embedding_bags.{name}.weight" for name in "tuv"]
    assert workers.run(optimizer_keys, world_size=2) == [names, names]


def check_optimizer_in_backward(pooled: bool) -> None:
    case = Case(ONE, pooled=pooled)
    collection = collection_of(case)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.5, "eps": 1e-30})
    model = sharded(collection, case)
    if not pooled:
        features = KeyedJaggedTensor(keys=["a"], values=IDS, lengths=torch.tensor([1, 1]))
        with torch.no_grad():
            model(features)["a"].values()
        before = model.module.collection.table("t").lookup(IDS)[0]
        model(features)["a"].values().backward(torch.ones(2, 8))
        changed = model.module.collection.table("t").lookup(IDS)[0] - before
    else:
        changed = one_step(model)
    # Adagrad's first step with equal gradients is the learning rate.
    torch.testing.assert_close(changed, torch.full((2, 8), -0.5))


@pytest.mark.parametrize("pooled", [True, False])
def test_optimizer_applied_in_backward(pooled: bool) -> None:
    workers.run(check_optimizer_in_backward, pooled, world_size=1)


def check_frozen_table() -> None:
    case = Case([ONE[0], Table("u", ["a"], ONE[0].plan)])
    collection = collection_of(case)
    collection.embedding_bags["t"].weight.requires_grad_(False)
    collection.table("t").assign(IDS[:1], torch.ones(1, 8))
    model = sharded(collection, case, SGD)
    table = model.module.collection.table("t")
    features = KeyedJaggedTensor(keys=["a"], values=IDS, lengths=torch.tensor([1, 1]))
    out = model(features).to_dict()
    assert torch.equal(out["a@t"], torch.stack([torch.ones(8), torch.zeros(8)]))
    (out["a@t"].sum() + out["a@u"].sum()).backward()
    assert table.num_rows == 1
    assert torch.equal(table.lookup(IDS[:1])[0], torch.ones(1, 8))
    assert model.module.collection.table("u").num_rows == 2


def test_frozen_table_is_read_only() -> None:
    workers.run(check_frozen_table, world_size=1)


def clamped_means() -> dict[str, float]:
    """Returns by how much a row of a bag of four ids moves, whose output has the gradient 2."""
    limit = {"learning_rate": 1.0, "gradient_clipping": True, "max_gradient": 0.25}
    batch = KeyedJaggedTensor(keys=["a"], values=torch.arange(4), lengths=torch.tensor([4]))
    moved = {}
    for kind in ("table_wise", "row_wise", "table_row_wise", "grid_shard"):
        pieces = [([0], 0, 4), ([0], 4, 4)] if kind == "grid_shard" else [([0], 0, 8)]
        case = Case([Table("t", ["a"], shard_by_hand(kind, pieces), pooling="MEAN")])
        model = sharded(collection_of(case), case, {**SGD, **limit})
        model(batch).values()  # the rows are there from now on
        before = model.module.collection.table("t").lookup(torch.tensor([3]))[0]
        (2.0 * model(batch).values()).sum().backward()
        after = model.module.collection.table("t").lookup(torch.tensor([3]))[0]
        moved[kind] = round((before - after).mean().item(), 4)
    return moved


def test_the_gradient_of_a_mean_is_clamped_where_its_sums_are_divided() -> None:
    """Spread rows are divided by the length behind the dist, so before the clamp in backward."""
    (moved,) = workers.run(clamped_means, world_size=1)
    spread = dict.fromkeys(("row_wise", "table_row_wise", "grid_shard"), 0.25)
    assert moved == {"table_wise": 0.0625, **spread}


def clamped_repeats() -> dict[bool, float]:
    """Returns by how much the row of an id with four occurrences moves, each with the gradient 2."""
    limit = {"learning_rate": 1.0, "gradient_clipping": True, "max_gradient": 0.25}
    batch = KeyedJaggedTensor(keys=["a"], values=IDS[:1].repeat(4), lengths=torch.tensor([4]))
    moved = {}
    for dedup in (False, True):
        table = Table("t", ["a"], shard_by_hand("row_wise", [([0], 0, 8)]))
        case = Case([table], pooled=False, dedup=dedup, fused_params={**SGD, **limit})
        model = shard(case, collection_of(case))
        model(batch)["a"].values()  # the row is there from now on
        before = model.module.collection.table("t").lookup(IDS[:1])[0]
        (2.0 * model(batch)["a"].values()).sum().backward()
        after = model.module.collection.table("t").lookup(IDS[:1])[0]
        moved[dedup] = round((before - after).mean().item(), 4)
    return moved


def test_repeats_that_are_sent_once_are_clamped_as_a_sum() -> None:
    (moved,) = workers.run(clamped_repeats, world_size=1)
    assert moved == {False: 1.0, True: 0.25}
