"""The optimizer of the rows is copied and pickled with its tables, as torch's optimizers with parameters."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import Adagrad, Adam
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_dyn as dyn

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
IDS = torch.tensor([1, 7, -5])


class Model(nn.Module):
    """Two tables, a dense layer, and an optimizer of both as an attribute."""

    def __init__(self, has_two_rules: bool = False, **options: object) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(100, 4, name, feature_names=["f"]) for name in "tu"]
        self.ebc = dyn.DynamicEmbeddingBagCollection(configs, fused_params={**ADAM, **options})
        if has_two_rules:
            weights = self.ebc.embedding_bags["u"].parameters()
            apply_optimizer_in_backward(Adagrad, weights, {"lr": 0.3})
        self.head = nn.Linear(8, 1)
        self.rows_optimizer = self.ebc.fused_optimizer
        dense = KeyedOptimizerWrapper(
            dict(self.head.named_parameters()), lambda some: torch.optim.SGD(some, lr=0.1)
        )
        self.optimizer = CombinedOptimizer([("rows", self.rows_optimizer), ("head", dense)])

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        features = KeyedJaggedTensor(["f"], IDS, lengths=torch.tensor([3]))
        self.head(self.ebc(features).values()).sum().backward()
        self.optimizer.step()

    def rows(self) -> torch.Tensor:
        return torch.cat([self.ebc.table(name).lookup(IDS)[0] for name in "tu"])


def saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, saved]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_two_rules", [False, True])
@pytest.mark.parametrize("defers", [False, True])
def test_a_copied_optimizer_is_that_of_the_copied_tables(
    way: Callable[[Model], Model], has_two_rules: bool, defers: bool
) -> None:
    model = Model(has_two_rules, defer_updates=defers)
    model.train_step()
    copied, before = way(model), model.rows()
    assert torch.equal(copied.rows(), before)
    for group in copied.rows_optimizer.param_groups:
        group["lr"] = 0.0
    copied.train_step()
    assert torch.equal(copied.rows(), before)
    model.train_step()
    assert not torch.equal(model.rows(), before)
    model.train_step()
    # The state is that of the copy, which saves and loads it.
    states = [one.optimizer.state_dict()["state"] for one in (model, copied, copied)]
    key = "rows.embedding_bags.t.weight"
    copied.ebc.load_state_dict(model.ebc.state_dict())
    copied.optimizer.load_state_dict({"state": states[0]})
    states[2] = copied.optimizer.state_dict()["state"]
    moments = [state[key]["t.momentum1"] for state in states]
    assert not torch.equal(moments[0], moments[1]) and torch.equal(moments[0], moments[2])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_two_rules", [False, True])
def test_a_copied_scheduler_sets_the_rates_of_the_copy(
    way: Callable[[Model], Model], has_two_rules: bool
) -> None:
    model = Model(has_two_rules)
    schedule = torch.optim.lr_scheduler.ExponentialLR
    model.schedule = schedule(model.rows_optimizer, gamma=0.5)
    model.train_step()
    model.schedule.step()
    rates = [group["lr"] for group in model.rows_optimizer.param_groups]
    copied = way(model)
    copied.schedule.step()
    assert [group["lr"] for group in model.rows_optimizer.param_groups] == rates
    groups = copied.ebc.fused_optimizer.param_groups
    assert [group["lr"] for group in groups] == [rate / 2 for rate in rates]
    initial = [group["initial_lr"] for group in groups]
    assert initial == [4 * group["lr"] for group in groups]
    tables = copied.ebc.unsharded_lookup.table_groups()
    assert {one.learning_rate for one in tables} == {group["lr"] for group in groups}


def test_an_optimizer_alone_brings_its_tables() -> None:
    model = Model()
    model.train_step()
    ebc, optimizer = copy.deepcopy((model.ebc, model.rows_optimizer))
    assert optimizer is ebc.fused_optimizer and optimizer is not model.rows_optimizer
    alone = copy.deepcopy(model.rows_optimizer)
    kept: dict[str, Any] = alone.state_dict()["state"]["embedding_bags.t.weight"]
    assert kept["t.momentum1"].shape == (3, 4)


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_an_optimizer_of_earlier_tables_is_not_copied(way: Callable[[object], object]) -> None:
    model = Model()
    for table in model.ebc.embedding_bags.values():
        table.mark_optimizer([Adam], [{"lr": 0.2, "eps": 0.5}])
    with pytest.raises(
        ValueError,
        match=r"^DynamicOptimizer: expected the present optimizer of an unsharded .* got one of before .* "
        "Read `fused_optimizer` of the collection again",
    ):
        way(model)
    model.rows_optimizer = model.ebc.fused_optimizer
    del model.optimizer
    way(model)
