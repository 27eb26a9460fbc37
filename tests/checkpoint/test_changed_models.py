"""Entries and deltas of a model whose tables, dtypes or policies were changed since."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_cases
import pytest
import torch
import torch.distributed as dist
import workers
from checkpoint_cases import held, quietly
from checkpoint_jobs import TWO, Job, failing
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_dyn as dyn
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import (
    Checkpoints,
    apply_delta,
    export_delta,
    export_table,
    mark,
)
from torchrec_dyn.state_dict import StagedTable, staged_table

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LRU, TIMED = dyn.LeastRecentlyUsed(), dyn.ExpireAfter(time=1000)
NONE, BY_USE = dyn.DynamicTableConfig(), dyn.DynamicTableConfig(eviction=LRU)
BY_TIME = dyn.DynamicTableConfig(eviction=TIMED)
WAITING = dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2), eviction=LRU)
ADMITTING = dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2))


class Net(nn.Module):
    """Tables of one feature each, and a dense part."""

    def __init__(
        self,
        dynamic: dyn.DynamicTableConfig = NONE,
        dtype: DataType = DataType.FP32,
        names: tuple[str, ...] = ("user",),
        optimizer: str = "ADAM",
        width: int = 1,
    ) -> None:
        super().__init__()
        self.names = names
        tables = [
            EmbeddingBagConfig(99, 4, name, feature_names=[name], data_type=dtype) for name in names
        ]
        fused = {"optimizer": optimizer, "learning_rate": 0.1}
        self.sparse = dyn.DynamicEmbeddingBagCollection(tables, dynamic=dynamic, fused_params=fused)
        torch.manual_seed(0)
        self.over = nn.Linear(4, width) if width else nn.Identity()
        parts = [("sparse", self.sparse.fused_optimizer)]
        if width:
            own = dict(self.over.named_parameters(prefix="over"))
            parts += [("", KeyedOptimizerWrapper(own, lambda some: torch.optim.Adam(some)))]
        self.optimizer = CombinedOptimizer(parts)

    def train_step(self, step: int) -> None:
        """Trains ids of their own, and of the step before, of which the first is new again each time."""
        self.sparse.set_time(10 * step)
        ids = torch.tensor(
            [step, step + 1, 50 + step % 3, 7, 7, 7][: 5 + step % 2] * len(self.names)
        )
        lengths = torch.ones_like(ids)
        self.optimizer.zero_grad()
        bags = self.sparse(KeyedJaggedTensor([*self.names], ids, lengths=lengths)).to_dict()
        sum(self.over(one.float()) for one in bags.values()).square().mean().backward()
        self.optimizer.step()

    def contents(self) -> dict[str, Any]:
        """All that is saved of the tables."""
        states = self.optimizer.state_dict()["state"]
        states = {f"{key}.{name}": one for key in states for name, one in states[key].items()}
        return {**self.state_dict(), **states}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.equal(other[name]), name


def saved(folder: Path, model: Net, steps: int = 3) -> None:
    """Trains; saves in full and deltas in one directory, and the end in full in another."""
    checkpoints = Checkpoints(folder / "line", full_every=100)
    for step in range(1, steps + 1):
        model.train_step(step)
        if step == 3:
            model.sparse.table("user").erase(torch.tensor([2]))
        checkpoints.save(model, model.optimizer, step=step)
    checkpoints.close()
    checkpoints = Checkpoints(folder / "full")
    checkpoints.save(model, model.optimizer, step=steps)
    checkpoints.close()


def check_loads_alike(folder: Path, **changed: Any) -> None:
    """A full save and its deltas load into another model as a full save of the end does."""
    loaded = []
    for name in ("line", "full"):
        model = Net(**changed)
        model.train_step(9)  # contents that the restore must replace
        restored = Checkpoints(folder / name).restore(model, model.optimizer)
        assert restored is not None and restored.step == 3 and restored.skipped == []
        loaded.append(model.contents())
    same(*loaded)


CHANGES = [
    (NONE, BY_USE),
    (BY_USE, NONE),
    (BY_TIME, BY_USE),
    *(
        pytest.param(*both, marks=pytest.mark.deep)
        for both in (
            (NONE, BY_TIME),
            (NONE, ADMITTING),
            (BY_USE, BY_TIME),
            (ADMITTING, NONE),
            (ADMITTING, BY_USE),
        )
    ),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_line_loads_into_other_policies(before: Any, after: Any, tmp_path: Path) -> None:
    saved(tmp_path, Net(before))
    check_loads_alike(tmp_path, dynamic=after)


def test_a_line_loads_into_another_initializer(tmp_path: Path) -> None:
    """It is taken from the entry, also by the deltas."""
    before, after = (dyn.DynamicTableConfig(initializer=dyn.Constant(c)) for c in (0.0, 0.5))
    saved(tmp_path, Net(before))
    check_loads_alike(tmp_path, dynamic=after)


@pytest.mark.parametrize("other", [WAITING, BY_TIME])
def test_policies_that_change_and_change_back(other: Any, tmp_path: Path) -> None:
    """The deltas of a table without waiting ids or times do not follow those of one with them."""
    for step, dynamic in enumerate([other, other, BY_USE, BY_USE, other]):
        model = Net(dynamic)
        checkpoints, restored = restore(tmp_path / "kept", model)
        assert restored is None if step == 0 else (restored.step, restored.skipped) == (step, [])
        model.train_step(step + 1)
        checkpoints.save(model, model.optimizer, step=step + 1)
        checkpoints.close()
    kinds = [one.kind for one in checkpoints.entries()]
    assert kinds == ["full", "delta", "full", "delta", "delta"]


def test_a_line_loads_into_another_dtype(tmp_path: Path) -> None:
    saved(tmp_path, Net())
    for dtype in (DataType.BF16, DataType.FP16):
        check_loads_alike(tmp_path, dtype=dtype)


def restore(path: Path, model: Net, **options: Any) -> tuple[Checkpoints, Any]:
    checkpoints = Checkpoints(path, full_every=100)
    return checkpoints, checkpoints.restore(model, model.optimizer, **options)


def test_another_form_begins_with_a_full_save(tmp_path: Path) -> None:
    """Deltas in one dtype after a full save in another could be neither followed nor exported."""
    model = Net(dtype=DataType.BF16)
    checkpoints, _ = restore(tmp_path / "kept", model)
    model.train_step(1)
    checkpoints.save(model, model.optimizer, step=1)
    checkpoints.close()
    served = tmp_path / "served"
    follower = serving.Follower(tmp_path / "kept", served)
    assert follower.poll() is not None
    model = Net()
    checkpoints, _ = restore(tmp_path / "kept", model)
    for step in (2, 3):
        model.train_step(step)
        checkpoints.save(model, model.optimizer, step=step)
    rows = model.sparse.table("user").num_rows
    assert [one.kind for one in checkpoints.entries()] == ["full", "full", "delta"]
    checkpoints.close()
    followed = follower.poll()
    assert followed is not None and followed.entry.step == 3
    assert export_table(tmp_path / "kept", "user", tmp_path / "user.parquet") == rows
    checkpoints, _ = restore(tmp_path / "kept", Net(BY_USE))
    assert checkpoints._marker is None
    checkpoints, _ = restore(tmp_path / "kept", Net())
    assert checkpoints._marker is not None


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full save of one table, then a full save and a delta of two."""
    path = tmp_path_factory.mktemp("line")
    for names, steps in ((("user",), (1,)), (("user", "item"), (2, 3))):
        model = Net(names=names)
        checkpoints = Checkpoints(path, full_every=100)
        checkpoints.restore(model, model.optimizer, allow_partial_load=True)
        for step in steps:
            model.train_step(step)
            checkpoints.save(model, model.optimizer, step=step)
        checkpoints.close()
    return path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"names": ("user",)}, r"of the model, got \['sparse.*item'.*give restore\(allow"),
        ({"names": ("user", "item", "new")}, r"the tables \[.*new'.*give restore\(allow"),
        ({"optimizer": "EXACT_SGD"}, "expected optimizer state of exact_sgd as the model has"),
        ({"dynamic": dyn.DynamicTableConfig(seed=1)}, "expected a checkpoint with seed 1"),
        (
            {"width": 2},
            r"expected model.over.weight of size \[2, 4\] as the model has, got \[1, 4\]",
        ),
        ({"width": 0}, r"optimizer.state.over.bias.*\(allow_partial_load"),
    ],
)
def test_another_model_is_an_error_and_no_older_entry_is_taken(
    changed: dict[str, Any], message: str, line: Path
) -> None:
    model = Net(**{"names": ("user", "item"), **changed})
    with pytest.raises(ValueError, match=rf"/(full|delta)-.*{message}"):
        restore(line, model)
    model.train_step(4)  # no rows wait for a load


def test_what_is_in_both_can_be_loaded(line: Path) -> None:
    loaded = []
    for names in (("user", "item"), ("user",), ("new", "user")):
        model = Net(names=names)
        if len(names) == 2:
            model.train_step(8)
        new = model.sparse.table("new").ids() if "new" in names else None
        checkpoints, restored = restore(line, model, allow_partial_load=names != ("user", "item"))
        assert restored.step == 3 and restored.skipped == []
        assert (checkpoints._marker is None) == (names != ("user", "item"))
        if new is not None:
            assert model.sparse.table("new").ids().equal(new)
        loaded.append(
            {k: v for k, v in model.contents().items() if "item" not in k and "new" not in k}
        )
    same(loaded[0], loaded[1])
    same(loaded[0], loaded[2])
    alone = Net(names=("user", "item"), width=0)
    assert restore(line, alone, allow_partial_load=True)[0]._marker is None


def on_two_ranks(path: str) -> list[str]:
    """Saves a full save, a delta and a full save of the same; loads them into other tables."""
    rank, told, kept = dist.get_rank(), [], f"{path}/kept"
    job = Job(kept, TWO, full_every=9)
    job.save()
    job.save()
    job.checkpoints.close()
    full = Checkpoints(f"{path}/full")
    quietly(full.save, job.model, job.optimizer, step=job.step)
    full.close()
    normal = {"initializer": dyn.Normal(0.0, 0.5), "seed": -7}
    changed = (
        ("plain", "BF16", BY_USE),
        ("sixteen", "FP32", dyn.DynamicTableConfig(eviction=LRU, **normal)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_cases, "TABLES", changed)
        line, whole = Job(kept, TWO), Job(f"{path}/full", TWO)
        assert line.restore().step == whole.restore().step == 2
    same(held(line.model), held(whole.model))
    for setup in (replace(TWO, optimizer="EXACT_SGD"), replace(TWO, tables=1)):
        with pytest.raises(
            ValueError, match=r"of exact_sgd as the|expected an entry with"
        ) as caught:
            Job(kept, setup).restore()
        told.append(str(caught.value))
    assert Job(kept, replace(TWO, tables=1)).restore(allow_partial_load=True).step == 2
    for place, name in ((staged_table, "append_rows"), (StagedTable, "replacing")):
        at, error = 1 if rank else 99, MemoryError("too little")
        with (
            failing(place, name, at, error),
            pytest.raises(RuntimeError, match="too little") as no_memory,
        ):
            job.restore()
        told.append(str(no_memory.value))
    return told


def test_ranks_decide_alike(tmp_path: Path) -> None:
    told = workers.run(on_two_ranks, str(tmp_path), world_size=2)
    assert told[0] == told[1]


@pytest.mark.parametrize(("of_model", "of_copy"), [(NONE, BY_USE), (BY_USE, NONE)])
def test_a_delta_onto_a_copy_with_other_policies(
    of_model: Any, of_copy: Any, tmp_path: Path
) -> None:
    model, copied = Net(of_model), Net(of_copy)
    for one in (model, copied):
        one.train_step(1)
    marker = mark(model)
    model.train_step(2)
    export_delta(model, tmp_path / "delta", marker)
    apply_delta(copied, tmp_path / "delta")
    ours, theirs = copied.contents(), model.contents()
    for name in ("ids", "weight", "last_seen", "count"):
        key = f"sparse.embedding_bags.user.{name}"
        if key in ours:
            seen = torch.full_like(theirs["sparse.embedding_bags.user.ids"], 2)
            expected = {**theirs, "last_seen": seen, "count": torch.zeros_like(seen)}
            assert ours[key].equal(expected.get(name, theirs.get(key))), name
    copied.train_step(3)


def test_scores_of_0_are_scores(tmp_path: Path) -> None:
    """Rows that were assigned before the first step; their sum is 0, as that of missing scores."""
    model, copied = Net(BY_USE), Net(BY_USE)
    for one in (model, copied):
        one.sparse.table("user").assign(torch.tensor([1, 2]), torch.ones(2, 4))
    marker = mark(model)
    for number, ids in enumerate(([], [3])):
        model.sparse.table("user").assign(torch.tensor(ids).long(), torch.ones(len(ids), 4))
        nothing = torch.tensor([]).long()
        model.sparse(KeyedJaggedTensor(["user"], nothing, lengths=torch.tensor([0])))
        marker = export_delta(model, tmp_path / str(number), marker)
        apply_delta(copied, tmp_path / str(number))
        same(copied.contents(), model.contents())
