"""Makes a new plan for a running model from the measured rows and lookups of its tables.

    python examples/replan.py                                 # half a minute on two cores

Eight tables have the same limit, so a planner treats them as equal. But after training, the largest table has
a thousand times the rows of the smallest, and the busiest table has a thousand times the lookups of the
least busy. Four processes train under a plan made from the limits, measure, make a new plan, move the
running model to the new plan, and continue training.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parts.options import hide_notes_to_developers, start_processes
from parts.plans import plan_as_text
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.planner import (
    PlanLoad,
    constraints_from,
    load_by_rank,
    make_planner,
    read_model_stats,
)

# Table: (number of ids, ids per sample). Both differ by a factor of 1000, in different orders.
TABLES = {
    **{"country": (20, 0.031), "shop": (54, 1.6), "brand": (144, 0.083), "hour": (386, 11.6)},
    **{"city": (1036, 0.22), "word": (2780, 31.0), "query": (7455, 0.6), "user": (20_000, 4.3)},
}
RANKS, BATCH, STEPS, DIM = 4, 64, 60, 16
LEARNING = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05}
SHARDERS = [dyn.DynamicEmbeddingBagCollectionSharder(fused_params=LEARNING)]


class Model(nn.Module):
    """A model with a linear layer, because DistributedModelParallel.reshard also needs dense parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = dyn.DynamicEmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, embedding_dim=DIM, num_embeddings=1_000_000, feature_names=[name]
                )
                for name in TABLES
            ],
            fused_params=LEARNING,
        )
        self.score = nn.Linear(len(TABLES) * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the loss, []."""
        loss: torch.Tensor = self.score(self.sparse(features).values()).square().mean()
        return loss


def batch(step: int) -> KeyedJaggedTensor:
    """Returns this rank's samples of one step."""
    draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    values, lengths = [], []
    for vocabulary, ids_a_sample in TABLES.values():
        bags = (torch.rand(BATCH, generator=draw) + ids_a_sample).floor().long()
        values.append(torch.randint(vocabulary, (int(bags.sum()),), generator=draw))
        lengths.append(bags)
    return KeyedJaggedTensor(list(TABLES), torch.cat(values), lengths=torch.cat(lengths))


def train(plan: ShardingPlan) -> DistributedModelParallel:
    """Returns a new model, trained under a plan."""
    model = DistributedModelParallel(
        Model(), plan=plan, sharders=SHARDERS, device=torch.device("cpu")
    )
    train_on(model, 0)
    return model


def train_on(model: DistributedModelParallel, first: int) -> None:
    """Trains a model for STEPS steps, from step `first` on."""
    for step in range(first, first + STEPS):
        model(batch(step)).backward()


def replan() -> tuple[str, dict[str, PlanLoad]]:
    """Trains, makes a new plan, moves the tables, and continues training. Collective.

    Returns:
        The report, and its loads: before the move, predicted for the new plan, and measured after the move.
    """
    ranks = dist.get_world_size()
    topology = Topology(
        world_size=ranks, local_world_size=get_local_size(ranks), compute_device="cpu"
    )
    blind = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH)
    model = train(blind.collective_plan(Model(), SHARDERS, dist.group.WORLD))

    stats = read_model_stats(model)
    constraints = constraints_from(stats, batch_size=BATCH, growth=1.5)
    planner = make_planner(topology, BATCH, constraints)
    plan = planner.collective_plan(Model(), SHARDERS, dist.group.WORLD)

    said = [
        "Planned from the limits alone:\n" + plan_as_text(model.plan),
        "Planned by what was measured:\n" + plan_as_text(plan),
    ]
    loads = {
        "before": load_by_rank(model.plan, stats, ranks),
        "foreseen": load_by_rank(plan, stats, ranks),
    }
    model.reshard({"sparse": (0.0, plan.plan["sparse"])}, "sparse")
    train_on(model, STEPS)
    loads["after"] = load_by_rank(model.plan, read_model_stats(model), ranks)
    said.append(as_text(loads))
    return "\n\n".join(said), loads


def as_text(loads: Mapping[str, PlanLoad]) -> str:
    """Returns a table of the loads of all ranks."""
    ranks = range(len(loads["before"].bytes))
    title = "".join(f"{f'rank {rank}':>9}" for rank in ranks)
    lines = [f"{'':24}{title}  most/mean"]
    for name, load in loads.items():
        numbers = "".join(f"{held / 1e6:9.2f}" for held in load.bytes)
        lines.append(f"{name:10}{'MB':14}{numbers}{load.memory_imbalance:11.2f}")
        numbers = "".join(f"{count:9.0f}" for count in load.lookups)
        lines.append(f"{'':10}{'lookups/step':14}{numbers}{load.traffic_imbalance:11.2f}")
    return "\n".join(lines)


def main() -> int:
    """Starts the processes, or does the work of one process. Returns the exit status."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    hide_notes_to_developers()
    if "RANK" not in os.environ:
        return start_processes(__file__, [], RANKS)
    dist.init_process_group("gloo")
    report, _ = replan()
    if dist.get_rank() == 0:
        print(report)
    gc.collect()  # the models hold the process groups; gloo joins its threads only after they are freed
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
