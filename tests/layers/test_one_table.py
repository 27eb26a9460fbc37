"""Modules of one table in models: every plan, uneven inputs, pipelines, the stock planner, checkpoints."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import EXTREME_IDS, FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import Holder, check_rows, check_same, with_dense_sgd
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingPlan
from torchrec.streamable import Pipelineable

import torchrec_dyn as dyn

DIM = 8
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
SHARDERS = (dyn.DynamicEmbeddingBagCollectionSharder, dyn.DynamicEmbeddingCollectionSharder)


@dataclass
class OneTable:
    """A module, its plan, and its calls.

    Attributes:
        mode: "rows" for DynamicEmbedding, else the mode of DynamicEmbeddingBag.
        plan: sharding type.
        exact: True if results must be bit-equal under the plan.
        weighted: True if ids have weights; they are trained if the module supports it.
        calls: forwards before each backward.
        empty: True if no rank has any id.
        dedup: True if each rank sends an id once.
        options: further options of the module.
    """

    mode: str
    plan: str
    world: int = 2
    local: int = 2
    exact: bool = True
    weighted: bool = False
    calls: int = 1
    empty: bool = False
    dedup: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, fused_params: dict[str, Any]) -> Any:
        """Returns the unsharded module."""
        options = {**self.options, "name": "words", "fused_params": fused_params}
        if self.mode == "rows":
            return dyn.DynamicEmbedding(DIM, 1000, **options)
        tile = 3 if self.mode == "tile" else None
        return dyn.DynamicEmbeddingBag(
            DIM, 1000, self.mode, tile_length=tile, is_weighted=self.weighted, **options
        )

    def table(self) -> Table:
        """Returns the table and its plan."""
        return Table("words", ["words"], usual_plan(self.plan, DIM, self.world, self.local), DIM)

    def learns_weights(self) -> bool:
        """Returns True if gradients reach the weights under any plan."""
        return self.weighted and (self.mode == "tile" or "weight_gradients" in self.options)


def sharded(module: nn.Module, plan: dict[str, Any], dedup: bool = False) -> Any:
    """Returns a model under DistributedModelParallel; plans by the path of the collection."""
    return DistributedModelParallel(
        module,
        plan=ShardingPlan(plan),
        sharders=[SHARDERS[0](), SHARDERS[1](use_index_dedup=dedup)],
    )


@dataclass
class Given:
    """One rank's input of one call: ids in some form, and the same ids bag by bag.

    Attributes:
        source: input of the module.
        ids: all ids.
        lengths: lengths of the bags.
        weights: one weight per id.
    """

    source: Any
    ids: Tensor
    lengths: Tensor
    weights: Tensor

    @classmethod
    def draw(cls, form: str, seed: int) -> Given:
        """Draws ids: ids that other calls have too, extreme ids, and new ids."""
        generator = torch.Generator().manual_seed(seed)
        pool = [*EXTREME_IDS, *range(100, 130), *range(1000 * seed, 1000 * seed + 20)]
        shapes = {"dense": (6, 4), "deep": (2, 2, 3), "empty_bags": (2, 0), "no_bags": (0, 4)}
        shapes["strided"] = (6, 1)
        if form in shapes:
            *bags, length = shapes[form]
            lengths = torch.full(bags, length).flatten()
        else:
            lengths = torch.randint(6, (7,), generator=generator)
        places = torch.randint(len(pool), (int(lengths.sum()),), generator=generator)
        ids = torch.tensor(pool)[places]
        weights = torch.rand(len(ids), generator=generator) + 0.1
        return cls(cls._formed(form, shapes, ids, lengths), ids, lengths, weights)

    @staticmethod
    def _formed(form: str, shapes: dict[str, Any], ids: Tensor, lengths: Tensor) -> Any:
        if form == "jagged":
            return JaggedTensor(ids, lengths=lengths)
        if form == "nested":
            offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
            return torch.nested.nested_tensor_from_jagged(ids, offsets)
        if form == "strided":  # a column of a matrix
            return torch.stack([ids, ids + 1], dim=1)[:, :1]
        return ids.view(shapes[form])

    def formed(self, weights: Tensor) -> Tensor:
        """Returns weights in the form of the ids."""
        if isinstance(self.source, JaggedTensor):
            return weights
        if self.source.is_nested:
            return torch.nested.nested_tensor_from_jagged(weights, self.source.offsets())
        return weights.view(self.source.shape)

    def outputs(self, of: OneTable) -> int:
        """Returns the number of rows of the module's output."""
        return len(self.ids if of.mode == "rows" else self.lengths)


def _form(of: OneTable, rank: int, number: int) -> str:
    forms = ["dense", "jagged", "no_bags", "nested", "deep", "strided"]
    forms = ["empty_bags", "no_bags"] if of.empty else forms
    return forms[(rank + number) % len(forms)]


def _flat(output: Any) -> Tensor:
    if isinstance(output, JaggedTensor) or output.is_nested:
        return output.values()
    return output.reshape(-1, output.shape[-1])


def check_trains_as_unsharded(of: OneTable) -> int:
    """Trains a sharded module beside an unsharded module on all ranks' ids; returns the rows on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # With several calls per step the order of updates matters, unless the update rule is linear.
    whole = of.make(SGD if of.calls > 1 else FUSED_PARAMS)
    plan = {"collection.collection": {"words": of.table().plan}}
    module = sharded(Holder(copy.deepcopy(whole)), plan, of.dedup).module.collection
    case = Case([of.table()], pooled=of.mode != "rows", exact=of.exact and of.calls == 1)
    for step in range(4):
        loss, expected_loss = torch.zeros(()), torch.zeros(())
        learnt = []
        for number in range(step * of.calls, (step + 1) * of.calls):
            inputs = [Given.draw(_form(of, r, number), 10 * number + r + 1) for r in range(world)]
            mine = inputs[rank]
            together = JaggedTensor(
                torch.cat([one.ids for one in inputs]),
                lengths=torch.cat([one.lengths for one in inputs]),
            )
            if of.weighted:
                weights = mine.weights.clone().requires_grad_(of.learns_weights())
                theirs = [one.weights.clone().requires_grad_() for one in inputs]
                learnt.append((weights, theirs[rank]))
                got = _flat(module(mine.source, mine.formed(weights)))
                expected = whole(together, torch.cat(theirs))
            else:
                got, expected = _flat(module(mine.source)), _flat(whole(together))
            parts = expected.split([one.outputs(of) for one in inputs])
            check_same(case, got, parts[rank], f"call {number}")
            loss, expected_loss = loss + got.sin().sum(), expected_loss + expected.sin().sum()
        loss.backward()
        (expected_loss / world).backward()
        for weights, theirs in learnt if of.learns_weights() else []:
            torch.testing.assert_close(weights.grad, theirs.grad * world, rtol=1e-4, atol=1e-5)
    check_rows(case, module.collection, whole.collection)
    return module.table.num_rows


# A model of three modules, in plain loops and in TorchRec's pipelines

KINDS = {"user": "table_wise", "words": "row_wise", "recent": "column_wise"}


@dataclass
class Texts(Pipelineable):
    """A batch: user [B], words of B bags, recent [B, 4], labels [B]."""

    user: Tensor
    words: JaggedTensor
    recent: Tensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Texts:
        """Returns the batch on the device."""
        return Texts(
            self.user.to(device),
            self.words.to(device),
            self.recent.to(device),
            self.labels.to(device),
        )

    def record_stream(self, stream: Any) -> None:
        """Does nothing: there are no streams on the CPU."""

    @classmethod
    def draw(cls, step: int, rank: int) -> Texts:
        """Draws a batch; its size differs by rank, and one rank has an empty batch at the second step."""
        generator = torch.Generator().manual_seed(10 * step + rank)
        size = 0 if (step, rank) == (1, 1) else 4 + rank
        pool = torch.tensor([*EXTREME_IDS, *range(100 * step, 100 * step + 30)])
        lengths = torch.randint(5, (size,), generator=generator)

        def ids(*shape: int) -> Tensor:
            return pool[torch.randint(len(pool), shape, generator=generator)]

        total = int(lengths.sum())
        words = JaggedTensor(
            ids(total), lengths=lengths, weights=torch.rand(total, generator=generator)
        )
        labels = torch.rand(size, generator=generator)
        return cls(ids(size), words, ids(size, 4), labels)


class Head(nn.Module):
    """The dense part; a leaf to the pipelines' tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * DIM, 1, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 4 * DIM))

    def forward(self, user: Tensor, words: Tensor, recent: Tensor, labels: Tensor) -> Any:
        """Returns the loss, and the loss and the scores as the output of a pipeline."""
        scores = self.linear(torch.cat([user, words, recent], dim=1)).squeeze(1)
        loss = (scores - labels).square().sum()
        return loss, (loss.detach(), scores.detach())


class Model(nn.Module):
    """One module of each kind; with `twice` the first module is called twice."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.twice = twice
        common: dict[str, Any] = {"fused_params": FUSED_PARAMS}
        self.user = dyn.DynamicEmbedding(DIM, 1000, name="user", **common)
        self.words = dyn.DynamicEmbeddingBag(
            DIM, 1000, "mean", is_weighted=True, name="words", **common
        )
        self.recent = dyn.DynamicEmbeddingBag(
            DIM, 1000, "tile", tile_length=2, name="recent", padding_idx=0, **common
        )
        self.head = Head()

    def forward(self, batch: Texts) -> Any:
        """Returns the loss and the outputs."""
        user = self.user(batch.user)
        if self.twice:
            user = user + self.user(batch.recent[:, 0])
        return self.head(user, self.words(batch.words), self.recent(batch.recent), batch.labels)


def sharded_model(turn: int = 0, twice: bool = False) -> Any:
    """Returns the model under DistributedModelParallel; the plan depends on `turn`."""
    world, kinds = dist.get_world_size(), list(KINDS.values())
    return sharded(
        Model(twice),
        {
            f"{name}.collection": {
                name: usual_plan(kinds[(number + turn) % 3], DIM, world, world, number)
            }
            for number, name in enumerate(KINDS)
        },
    )


def train(pipeline: str, options: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Trains through a pipeline; returns the losses and the paths of the pipelined modules."""
    steps, model = 5, sharded_model(twice=options.pop("twice", False))
    optimizer = with_dense_sgd(model, 0.01)
    runner = getattr(train_pipelines, pipeline)(model, optimizer, torch.device("cpu"), **options)
    stream = iter([Texts.draw(step, dist.get_rank()) for step in range(steps)])
    losses = [float(runner.progress(stream)[0]) for _ in range(steps)]
    pipelined = [module.forward.name for module in getattr(runner, "_pipelined_modules", [])]
    if pipelined:
        bare = runner.detach()
        bare(Texts.draw(steps, dist.get_rank()))  # the modules work without the pipeline again
    return losses, pipelined


def plan_and_name() -> tuple[list[str], str, str]:
    """Plans with the stock planner; returns the sharding types, an error message and a module's repr."""
    world = dist.get_world_size()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    constraints = {
        name: ParameterConstraints(sharding_types=[kind]) for name, kind in KINDS.items()
    }
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    model, sharders = Model(), [sharder() for sharder in SHARDERS]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)  # type: ignore[arg-type]
    device = torch.device("cpu")
    model = DistributedModelParallel(model, plan=plan, sharders=sharders, device=device)
    model(Texts.draw(0, dist.get_rank()))
    kinds = [plan.plan[f"{name}.collection"][name].sharding_type for name in KINDS]
    ids, weights = torch.tensor([[1, 2]]), torch.ones(1, 2, requires_grad=True)
    refused = ""
    try:
        model.module.words(ids, weights)
    except ValueError as fault:
        refused = str(fault)
    with torch.no_grad():
        model.module.words(ids, weights)  # no error: no gradients are needed here
    return kinds, refused, repr(model.module.words)


SEQUENCE = ["table_wise", "row_wise", "column_wise"]
WHOLE_ROWS = ["table_wise", "column_wise", "table_column_wise"]
POOLED = [*WHOLE_ROWS, "row_wise", "table_row_wise", "grid_shard"]


def trained_rows(of: OneTable) -> int:
    sizes = {"world_size": of.world, "local_size": of.local}
    return sum(workers.run(check_trains_as_unsharded, of, **sizes, timeout=120))


@pytest.mark.parametrize("padding", [None, 100])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_rows(plan: str, padding: int | None) -> None:
    assert trained_rows(OneTable("rows", plan, options={"padding_idx": padding})) > 50


@pytest.mark.everyday(9)
@pytest.mark.parametrize("plan", POOLED)
@pytest.mark.parametrize(("mode", "weighted"), [("sum", True), ("mean", False), ("mean", True)])
def test_bags(mode: str, plan: str, weighted: bool) -> None:
    exact = plan in WHOLE_ROWS
    of = OneTable(mode, plan, 4, 2, exact, weighted, options={"padding_idx": 100})
    assert trained_rows(of) > 50


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_bags_whose_weights_learn(mode: str, plan: str) -> None:
    of = OneTable(mode, plan, weighted=True, options={"weight_gradients": True})
    assert trained_rows(of) > 50


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_tiles(plan: str, weighted: bool) -> None:
    assert trained_rows(OneTable("tile", plan, weighted=weighted)) > 30


@pytest.mark.everyday(4)
@pytest.mark.parametrize("padding", [None, 100])
@pytest.mark.parametrize("plan", POOLED)
def test_largest_rows(plan: str, padding: int | None) -> None:
    assert trained_rows(OneTable("max", plan, 4, 2, options={"padding_idx": padding})) > 50


@pytest.mark.everyday(5)
@pytest.mark.parametrize("mode", ["rows", "mean", "max", "tile"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_several_calls_a_step(mode: str, plan: str) -> None:
    assert trained_rows(OneTable(mode, plan, calls=3)) > 30


@pytest.mark.parametrize("mode", ["rows", "mean", "max", "tile"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_no_ids_on_any_rank(mode: str, plan: str) -> None:
    assert trained_rows(OneTable(mode, plan, empty=True)) == 0


@pytest.mark.parametrize("mode", ["rows", "tile"])
def test_each_id_is_sent_once(mode: str) -> None:
    assert trained_rows(OneTable(mode, "row_wise", exact=False, dedup=True)) > 30


# In models: pipelines, the stock planner, checkpoints, and errors


@cache
def trained(pipeline: str, **options: Any) -> Any:
    return workers.run(train, pipeline, options, world_size=2)


@pytest.mark.parametrize(
    ("pipeline", "ahead"),
    [
        ("TrainPipelineSparseDist", False),
        ("TrainPipelineSparseDist", True),
        ("TrainPipelineSparseDistLite", False),
        ("TrainPipelineSparseDistLite", True),
    ],
)
def test_pipelines_train_as_the_plain_loop(pipeline: str, ahead: bool) -> None:
    plain = trained("TrainPipelineBase")
    options = {"pipeline_postproc": True} if ahead else {}
    for (got, pipelined), (expected, _) in zip(trained(pipeline, **options), plain, strict=True):
        assert got == expected
        # A module reads the input: TorchRec pipelines it only in pipelines that run such modules ahead.
        assert pipelined == ([f"{name}.collection" for name in KINDS] if ahead else [])


def test_called_twice_in_a_pipeline() -> None:
    # Without running ahead: correct numbers. With it: an error of TorchRec, not the first call's rows twice.
    assert trained("TrainPipelineSparseDist", twice=True) == trained(
        "TrainPipelineBase", twice=True
    )
    refused = workers.run(call_twice_ahead, world_size=2)
    assert all("invoked more than once" in fault for fault in refused)


def call_twice_ahead() -> str:
    with pytest.raises(AssertionError) as caught:
        train("TrainPipelineSparseDist", {"twice": True, "pipeline_postproc": True})
    return str(caught.value)


def test_planner_and_what_is_refused() -> None:
    for kinds, refused, told in workers.run(plan_and_name, world_size=2):
        assert kinds == list(KINDS.values())
        assert refused.startswith(
            "DynamicEmbeddingBag(table='words'): expected weights without requires_grad"
        )
        assert refused.endswith("Make the module with weight_gradients=True, or detach them.")
        assert "8, 1000, mode='mean', name='words', is_weighted=True" in told
