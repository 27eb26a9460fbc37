"""`Checkpoints` beside the tables: dense parameters and the state of their optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import workers
from checkpoint_cases import differences, quietly
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import usual_plan
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints
from torchrec_dyn.checkpoint.dense_part import split_state
from torchrec_dyn.checkpoint_format import checkpoint_reader

TABLES = {
    name: EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=100, feature_names=[name])
    for name in ("user", "fixed", "other")
}


class Net(nn.Module):
    """A tower that has the name of the table, and a head that is trained from a step on."""

    def __init__(self, head_from: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_from = head_from
        self.sparse = dyn.DynamicEmbeddingBagCollection(
            [TABLES["user"]], fused_params={"optimizer": "ADAM", "learning_rate": 0.02}
        )
        self.user = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))


class Job:
    """A model that trains one batch for each save."""

    def __init__(self, path: Path, head_from: int = 0) -> None:
        self.model = Net(head_from)
        named = self.model.named_parameters()
        dense = KeyedOptimizerWrapper(
            {name: one for name, one in named if not name.startswith("sparse.")},
            lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        )
        rows = self.model.sparse.fused_optimizer
        self.optimizer = CombinedOptimizer([("sparse", rows), dense])
        self.checkpoints = Checkpoints(path, keep=9, full_every=3)

    def train(self, step: int) -> None:
        ids = torch.arange(4) + step
        batch = KeyedJaggedTensor(["user"], ids, lengths=torch.ones_like(ids))
        outputs = self.model.user(self.model.sparse(batch).values()) * self.model.weight
        if step >= self.model.head_from:
            outputs = self.model.head(outputs)
        self.optimizer.zero_grad(set_to_none=True)
        outputs.square().sum().backward()
        self.optimizer.step()

    def save(self, step: int) -> Any:
        return quietly(self.checkpoints.save, self.model, self.optimizer, step=step)

    def restore(self, **options: Any) -> Any:
        return quietly(self.checkpoints.restore, self.model, self.optimizer, **options)

    def held(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state_dict()["state"].items()
        of_optimizer = {f"{key} {name}": one for key, of in state for name, one in of.items()}
        of_model = self.model.state_dict()
        return {name: one.clone() for name, one in (of_model | of_optimizer).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """Saves full, delta, delta, full; the head is trained from step 2 on."""
    path = tmp_path_factory.mktemp("saved") / "kept"
    job, moments = Job(path, head_from=2), []
    for step in range(4):
        job.train(step)
        job.save(step)
        moments.append(job.held())
    job.checkpoints.close()
    assert len(moments[0]) + 6 == len(moments[2])
    return path, moments


@pytest.mark.parametrize("step", range(4))
def test_state_is_as_it_was(saved: Any, step: int) -> None:
    """Also of a parameter without state then: of a new job, and of one that has trained it since."""
    path, moments = saved
    job = Job(path)
    for _ in range(2):
        assert job.restore(step=step).step == step
        assert not differences(job.held(), moments[step])
        job.train(9)


def test_state_of_another_optimizer(saved: Any) -> None:
    job = Job(saved[0])
    job.optimizer = CombinedOptimizer([("sparse", job.model.sparse.fused_optimizer)])
    with pytest.raises(
        ValueError, match=r"expected an optimizer with state for optimizer\.state\.h"
    ):
        job.restore(step=3)


def test_state_that_cannot_be_dropped(tmp_path: Path) -> None:
    """As of a static table, which its kernel holds: the entry is of another optimizer."""
    job = Job(tmp_path / "kept")
    rows, weight = ("sparse", job.model.sparse.fused_optimizer), job.model.weight
    job.optimizer = CombinedOptimizer([rows])
    job.save(0)
    fused = KeyedOptimizer({"weight": weight}, {weight: {"sum": torch.ones(4)}}, [])
    job.optimizer = CombinedOptimizer([rows, fused])
    with pytest.raises(ValueError, match=r"expected an entry with optimizer\.state\.weight\.sum"):
        job.restore()
    assert fused.state[weight]["sum"].sum() == 4
    job.checkpoints.close()


def test_learning_rates_of_numpy_and_tensors(tmp_path: Path) -> None:
    """A rate that a schedule computes with numpy, and one that a compiled optimizer has as a tensor."""
    job, again = Job(tmp_path / "kept"), Job(tmp_path / "kept")
    for rate in (np.float64(0.5), np.float32(0.25), torch.tensor(0.125)):
        for group in job.optimizer.param_groups:
            group["lr"], group["betas"] = rate, (np.float64(0.75), 0.5)
        held = again.optimizer.param_groups[-1]["lr"] = torch.zeros(())
        job.save(0)
        assert again.restore().skipped == []
        rows, dense = again.optimizer.param_groups
        assert dense["lr"] is held and rows["lr"] == dense["lr"] == rate
        assert type(rows["lr"]) is float and dense["betas"] == (0.75, 0.5)
    job.checkpoints.close()


def test_a_rate_in_a_tensor_is_that_of_the_rows_after_a_restore(tmp_path: Path) -> None:
    job, again = Job(tmp_path / "kept"), Job(tmp_path / "kept")
    job.optimizer.param_groups[0]["lr"] = 0.5
    rows = again.optimizer.param_groups[0]
    held = rows["lr"] = torch.tensor(0.125)
    job.save(0)
    again.restore()
    assert rows["lr"] is held and held == 0.5
    assert {group.learning_rate for group in rows.groups} == {0.5}
    job.checkpoints.close()


def warming(optimizer: Any, name: str = "__warmup") -> WarmupOptimizer:
    stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=20, value=0.1)
    return WarmupOptimizer(optimizer, [stage], lr=0.05, param_name=name)


def test_a_warm_up_of_each_part_goes_on(tmp_path: Path) -> None:
    """In a full save, and in a delta."""
    job, again = Job(tmp_path / "kept"), Job(tmp_path / "kept")
    for one in (job, again):
        parts = [(key, warming(part, f"__{key}")) for key, part in one.optimizer.optimizers]
        one.optimizer = CombinedOptimizer(parts)
    for step in range(2):
        job.train(step)
        job.save(step)
        assert again.restore().skipped == []
        job.train(7), again.train(7)
        assert not differences(again.held(), job.held())
        rates = [group["lr"] for group in again.optimizer.param_groups]
        assert rates == [group["lr"] for group in job.optimizer.param_groups]
        assert rates[0] == pytest.approx(0.05 * (0.1 + 0.9 * (2 * step + 2) / 20))
    job.checkpoints.close()


@pytest.mark.parametrize("inside", [False, True])
def test_a_warm_up_around_all_parts_is_refused(inside: bool, tmp_path: Path) -> None:
    """TorchRec's state dict would lack its step; inside another combination the state of Adam."""
    job = Job(tmp_path / "kept")
    job.save(0)  # the next save is a delta
    job.optimizer = warming(job.optimizer)
    if inside:
        job.optimizer = CombinedOptimizer([job.optimizer])
    job.train(1)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"without that of (__warmup|head.bias, .*):.* around each"
        ):
            job.save(1)
        job.checkpoints = Checkpoints(tmp_path / "full")
    assert not Checkpoints(tmp_path / "full").entries()


def test_a_restore_leaves_no_gradients(saved: Any) -> None:
    """It takes a step of zeros, so that torch's optimizer has state to load into."""
    job = Job(saved[0])
    job.restore(step=0)
    assert [name for name, one in job.model.named_parameters() if one.grad is not None] == []


def test_values_of_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:77")
        quietly(
            job.checkpoints.save, job.model, job.optimizer, step=0, extra={"mean": torch.ones(2)}
        )
    job.checkpoints.close()
    assert torch.equal(job.restore().extra["mean"], torch.ones(2))


@contextmanager
def at_most(lines: int) -> Iterator[None]:
    """Ends with an error the code below that runs more lines of Python."""
    left = lines

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        left -= event == "line"
        assert left >= 0, f"more than {lines} lines"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def test_many_tables_are_found_in_one_pass() -> None:
    """Not in one for each table."""
    names = [f"t{number}" for number in range(500)]
    tables: Any = [SimpleNamespace(name=name, key=f"sparse.bags.{name}") for name in names]
    states = {f"{table.key}.weight": {f"{table.name}.optimizer_config": 0} for table in tables}
    state = {"model": {}, "optimizer": {"state": {**states, "sparse.bags": {}}}}
    saved = {f"optimizer.state.{table.key}.weight.{table.name}": 0 for table in tables}
    keys = {f"model.{table.key}": 0 for table in tables}
    with at_most(100 * len(tables)):
        assert split_state(state, tables)[1]["optimizer"]["state"] == {"sparse.bags": {}}
        owners, ownerless = checkpoint_reader._owners(saved, keys)
    assert len(owners) == len(tables) and not ownerless


class Mixed(nn.Module):
    """A dynamic table and two static ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = dyn.DynamicEmbeddingBagCollection([TABLES["user"]])
        self.static = EmbeddingBagCollection([TABLES["fixed"], TABLES["other"]])
        self.over = nn.Linear(12, 1)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        rows = torch.cat([self.sparse(batch).values(), self.static(batch).values()], 1)
        return self.over(rows).square().sum()


def mixed(rule: EmbOptimType) -> tuple[Any, Any]:
    """Each static table lies on another rank."""
    plans = {name: usual_plan("table_wise", 4, 2, 2, turn, 100) for turn, name in enumerate(TABLES)}
    static = {name: plans.pop(name) for name in ("fixed", "other")}
    sharders: Any = [
        dyn.DynamicEmbeddingBagCollectionSharder(),
        EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1, "optimizer": rule}),
    ]
    plan = ShardingPlan({"sparse": plans, "static": static})
    model = DistributedModelParallel(Mixed(), plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def restore_static_tables(path: str) -> list[bool]:
    ids, told = torch.arange(12) % 7, []
    batch = KeyedJaggedTensor([*TABLES], ids, lengths=torch.ones_like(ids))
    for rule in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD):  # without state, and with
        (model, optimizer), checkpoints = mixed(rule), Checkpoints(f"{path}/{rule}", full_every=3)
        for group in optimizer.param_groups:
            group["lr"] /= 2
        for step in range(2):
            model(batch).backward()
            optimizer.step()
            quietly(checkpoints.save, model, optimizer, step=step)
            optimizer.zero_grad()
        checkpoints.close()
        again, its_optimizer = mixed(rule)
        restored = quietly(checkpoints.restore, again, its_optimizer)
        assert (restored.step, restored.skipped) == (1, [])
        told += [torch.equal(one(batch), model(batch)) for one in (again, mixed(rule)[0])]
        for one in (model, again):  # by the saved learning rate, without a zero_grad before
            one(batch).backward()
        for one in (optimizer, its_optimizer):
            one.step()
        told.append(torch.equal(again(batch), model(batch)))
    return told


def test_static_tables_of_other_ranks(tmp_path: Path) -> None:
    """The optimizer of a rank has no state of a table that lies on another rank."""
    told = workers.run(restore_static_tables, str(tmp_path), world_size=2)
    assert told == [[True, False, True] * 2] * 2
