"""Own policies in checkpoints: their names are saved, never a class; training tells which one is missing."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from policy_cases import ByTime, Dense, Often
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer

import torchrec_dyn as dyn
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import (
    Checkpoints,
    LoadPlanner,
    apply_delta,
    export_delta,
    mark,
    open_checkpoint,
)
from torchrec_dyn.tools.inspection import inspect_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ADAGRAD = {"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1}
OWN = dyn.DynamicTableConfig(admission=Often(3, counters=30), eviction=ByTime())
NAMES = {
    "admission": "policy_cases.Often, version 1",
    "eviction": "policy_cases.ByTime, version 1",
}


class Model(nn.Module):
    def __init__(self, dynamic: dyn.DynamicTableConfig = OWN) -> None:
        super().__init__()
        table = EmbeddingBagConfig(40, 4, "user", feature_names=["user"])
        self.sparse = dyn.DynamicEmbeddingBagCollection(
            [table], dynamic=dynamic, fused_params=ADAGRAD
        )
        self.optimizer = CombinedOptimizer([("sparse", self.sparse.fused_optimizer)])

    def train_steps(self, *steps: int) -> Model:
        for step in steps:
            self.sparse.set_time(3 * step)
            ids = torch.arange(5 * step, 5 * step + 20).repeat(2)
            lengths = torch.ones_like(ids)
            bags = self.sparse(KeyedJaggedTensor(["user"], ids, lengths=lengths))
            bags.values().square().sum().backward()
        return self

    def contents(self) -> dict[str, torch.Tensor]:
        return self.state_dict()


def assert_same(one: Model, other: Model) -> None:
    mine, its = one.contents(), other.contents()
    assert mine.keys() == its.keys()
    assert [name for name in mine if not mine[name].equal(its[name])] == []


def save(model: Model, path: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": model.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=str(path))


def load(model: Model, path: Path) -> None:
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(path), planner=LoadPlanner())
    model.load_state_dict(state["model"])
    optimizer = {"optimizer": model.optimizer.state_dict()}
    dcp.load(optimizer, checkpoint_id=str(path), planner=LoadPlanner())
    model.optimizer.load_state_dict(optimizer["optimizer"])


def told_by(model: Model, path: Path, by_line: bool) -> list[str]:
    """Returns the warnings of a load."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if by_line:
            assert Checkpoints(path / "line").restore(model, model.optimizer) is not None
        else:
            load(model, path / "dcp")
    return [str(one.message) for one in caught if "policy" in str(one.message)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line of a full save and a delta, and the same contents by DCP."""
    path, model = tmp_path_factory.mktemp("saved"), Model().train_steps(*range(8))
    checkpoints = Checkpoints(path / "line", full_every=9)
    for step in (8, 9):
        checkpoints.save(model.train_steps(step), model.optimizer, step=step)
    checkpoints.close()
    save(model, path / "dcp")
    return path


@pytest.mark.parametrize("by_line", [True, False])
def test_a_model_with_the_policies_goes_on_as_if_it_had_never_stopped(
    saved: Path, by_line: bool
) -> None:
    model, whole = Model().train_steps(70), Model().train_steps(*range(10))
    assert whole.sparse.table("user").stats()["evicted_full"] > 5
    assert whole.sparse.table("user").stats()["waiting"] > 5
    assert told_by(model, saved, by_line) == []
    for step in range(10, 20):
        assert_same(model, whole)
        model.train_steps(step)
        whole.train_steps(step)
    model.train_steps(20)
    assert [name for name, one in model.contents().items() if not one.equal(whole.contents()[name])]


class Version2(Often):
    name, version = NAMES["admission"].partition(",")[0], 2


@pytest.mark.parametrize("by_line", [True, False])
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            dyn.DynamicTableConfig(admission=Version2(3), eviction=Dense()),
            {"admission": "policy_cases.Often, version 2", "eviction": "policy_cases.Dense, version 1"},
        ),
        (dyn.DynamicTableConfig(admission=Often(5), eviction=dyn.LeastRecentlyUsed()),
         {"eviction": "none of your own"}),
        (dyn.DynamicTableConfig(), {"admission": "none of your own", "eviction": "none of your own"}),
    ],
)  # fmt: skip
def test_training_tells_which_policy_is_missing(
    saved: Path, config: dyn.DynamicTableConfig, told: dict[str, str], by_line: bool
) -> None:
    model = Model(config)
    messages = sorted(told_by(model, saved, by_line))
    assert len(messages) == len(told)
    for message, (kind, present) in zip(messages, told.items(), strict=True):
        assert f"expected the {kind} policy of the checkpoint, {NAMES[kind]}, got {present}." in (
            message
        )
        assert "user" in message
    if config.eviction is not None:
        model.train_steps(10)


def test_a_table_without_own_policies_is_saved_as_before(tmp_path: Path) -> None:
    model = Model(dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2)))
    save(model.train_steps(1, 2), tmp_path / "plain")
    (table,) = open_checkpoint(tmp_path / "plain").tables.values()
    assert "policies" not in table.config
    assert told_by_plain(tmp_path) == []


def told_by_plain(path: Path) -> list[str]:
    model = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(model, path / "plain")
    return [str(one.message) for one in caught if "policy" in str(one.message)]


def test_tools_and_serving_need_no_class(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (table,) = open_checkpoint(saved / "dcp").tables.values()
    assert table.config["policies"] == NAMES
    inspect_checkpoint(saved / "dcp", verify=True)
    lines = capsys.readouterr().out
    for kind, name in NAMES.items():
        assert f"own {kind}".ljust(22) + name in lines
    serving.build(saved / "dcp", tmp_path / "served")
    config = EmbeddingBagConfig(40, 4, "user", feature_names=["user"])
    served = serving.ServingEmbeddingBagCollection(tmp_path / "served", [config])
    ids = table.read("ids")
    features = KeyedJaggedTensor(["user"], ids, lengths=torch.ones_like(ids))
    assert torch.equal(served(features).values(), table.read("weight"))


def test_a_delta_carries_counters_and_scores(tmp_path: Path) -> None:
    one, other = Model().train_steps(*range(6)), Model()
    save(one, tmp_path / "full")
    marker = mark(one)
    load(other, tmp_path / "full")
    export_delta(one.train_steps(6, 7, 8), tmp_path / "delta", marker)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*policy")
        apply_delta(other, tmp_path / "delta")
    for step in range(9, 15):
        assert_same(one, other)
        one.train_steps(step)
        other.train_steps(step)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (dyn.DynamicTableConfig(admission=Version2(3), eviction=ByTime()), ["admission"]),
        (dyn.DynamicTableConfig(admission=dyn.AdmitAfter(3), eviction=ByTime()), ["admission"]),
        (replace(OWN, pooling="max"), ["pooling"]),
    ],
)
def test_a_delta_goes_into_a_copy_with_other_options(
    tmp_path: Path, config: dyn.DynamicTableConfig, told: list[str]
) -> None:
    model, copy = Model().train_steps(*range(3)), Model(config)
    save(model, tmp_path / "full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(copy, tmp_path / "full")
    since = mark(model.sparse)
    export_delta(model.train_steps(3, 4).sparse, tmp_path / "delta", since)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply_delta(copy.sparse, tmp_path / "delta")
    messages = [str(one.message) for one in caught if "of the checkpoint" in str(one.message)]
    assert len(messages) == len(told)
    for message, what in zip(messages, told, strict=True):
        assert f"expected {what}" in message or f"expected the {what} policy" in message
    ids = torch.arange(40)
    ours, theirs = model.sparse.table("user"), copy.sparse.table("user")
    assert all(map(torch.equal, ours.lookup(ids), theirs.lookup(ids))) and ours.num_rows
