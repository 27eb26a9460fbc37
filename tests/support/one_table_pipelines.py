"""A model of three modules of one table, sharded, in plain loops and in TorchRec's pipelines."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly
from one_table_runs import DIM, SHARDERS, sharded
from sharded_cases import EXTREME_IDS, FUSED_PARAMS, usual_plan
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import torchrec_dyn as dyn
from torchrec_dyn.state_dict.load_planner import LoadPlanner

KINDS = {"user": "table_wise", "words": "row_wise", "recent": "column_wise"}


@dataclass
class Texts(Pipelineable):
    """A batch: user [B], words of B bags, recent [B, 4], labels [B]."""

    user: Tensor
    words: JaggedTensor
    recent: Tensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Texts:
        """Moves the batch."""
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
        """Draws a batch, of another size on each rank; one rank has none at the second step."""
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
        """Returns the loss, and what a pipeline hands out."""
        scores = self.linear(torch.cat([user, words, recent], dim=1)).squeeze(1)
        loss = (scores - labels).square().sum()
        return loss, (loss.detach(), scores.detach())


class Model(nn.Module):
    """One module of each kind, the first of them perhaps called twice."""

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
    """The model under DistributedModelParallel; another plan by turn."""
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


def train(
    pipeline: str, steps: int = 5, twice: bool = False, **options: Any
) -> tuple[list[float], list[str]]:
    """Trains through a pipeline; returns losses, and the paths of what was pipelined."""
    model = sharded_model(twice=twice)
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda some: torch.optim.SGD(some, lr=0.01))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    runner = getattr(train_pipelines, pipeline)(model, optimizer, torch.device("cpu"), **options)
    stream = iter([Texts.draw(step, dist.get_rank()) for step in range(steps)])
    losses = [float(runner.progress(stream)[0]) for _ in range(steps)]
    pipelined = [module.forward.name for module in getattr(runner, "_pipelined_modules", [])]
    if pipelined:
        bare = runner.detach()
        bare(Texts.draw(steps, dist.get_rank()))  # the modules are themselves again
    return losses, pipelined


def plan_and_name() -> tuple[list[str], str, str, str]:
    """Plans with the stock planner, and does what is refused."""
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
        model.module.words(ids, weights)  # nobody asks for gradients here
    twins = nn.ModuleList([dyn.DynamicEmbedding(DIM, 10, fused_params=FUSED_PARAMS) for _ in "ab"])
    same = ""
    try:
        DistributedModelParallel(twins, sharders=sharders, device=device)
    except ValueError as fault:
        same = str(fault)
    return kinds, refused, same, repr(model.module.words)


def save_and_move() -> list[str]:
    """Saves a trained model, loads it under other plans; returns the names of what was saved."""
    rank = dist.get_rank()
    model = sharded_model()
    for step in range(3):
        model(Texts.draw(step, rank))[0].backward()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = f"{folder[0]}/step"
    saved = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    quietly(dcp.save, saved, checkpoint_id=path)
    moved = sharded_model(turn=1)
    state = {"model": moved.state_dict(), "optimizer": moved.fused_optimizer.state_dict()}
    quietly(dcp.load, state, checkpoint_id=path, planner=LoadPlanner())
    moved.load_state_dict(state["model"])
    moved.fused_optimizer.load_state_dict(state["optimizer"])
    for step in (3, 4):
        losses = [one(Texts.draw(step, rank))[0] for one in (model, moved)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for loss in losses:
            loss.backward()
    return [name for name in saved["model"] if "collection" in name]
