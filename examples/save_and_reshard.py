"""Saves a model from two processes and continues training under other plans: 2, 3 and 1 ranks, and unsharded.

    python examples/save_and_reshard.py                       # under a minute on two cores
    python examples/save_and_reshard.py --optimizer rowwise_adagrad --folder /tmp/moves

The first run trains to the end in two processes and saves a checkpoint on the way. Each other run loads this
checkpoint, saves it again immediately, and continues training on the same clicks. The report compares the
losses of all runs with the first run, and each saved checkpoint with the loaded checkpoint, number by number.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parts.options import hide_notes_to_developers, start_processes
from parts.reshard_report import as_text
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner

OPTIMIZERS = {
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
TABLES = ["user", "item"]
DIM = 16
BATCH = 384  # clicks of all ranks together; divisible by 1, 2 and 3 ranks
SAVED_AT, STEPS = 40, 80
SPARSE = "sparse_arch.embedding_bag_collection"  # path of the tables in DLRM
FUSED = "fused"


class Run(NamedTuple):
    """The processes and the plan of one run.

    Attributes:
        ranks: number of processes; 0 for the laptop: one process, nothing is sharded.
        plan: sharding type of each table.
    """

    ranks: int
    plan: dict[str, str]


STAYS = "2 ranks"
RUNS = {
    STAYS: Run(2, {"user": "row_wise", "item": "column_wise"}),
    "2 ranks, other plan": Run(2, {"user": "column_wise", "item": "table_wise"}),
    "3 ranks": Run(3, {"user": "table_wise", "item": "row_wise"}),
    "1 rank": Run(1, {"user": "table_wise", "item": "table_wise"}),
    "laptop": Run(0, {}),
}


def clicks(step: int, part: int, parts: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Returns one part of the clicks of a step. The clicks do not depend on the run.

    Returns:
        dense: [B, 4] float32.
        features: a user and three items a click, raw 64-bit ids.
        labels: [B] float32.
    """
    draw = torch.Generator().manual_seed(step)
    popular = torch.rand(BATCH, 4, generator=draw) ** 3  # few ids are frequent, many are rare
    ids = (popular * 20_000).long() * -0x61C8864680B583EB  # 2^64 / phi: over all of int64
    worth = (ids >> 40) % 64 / 32.0 - 1.0
    dense = torch.rand(BATCH, 4, generator=draw)
    chance = torch.sigmoid(3.0 * worth[:, 0] + worth[:, 1:].sum(1) + dense[:, 0])
    labels = (torch.rand(BATCH, generator=draw) < chance).float()
    mine = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
    users, items = ids[mine, 0], ids[mine, 1:].flatten()
    lengths = torch.tensor([1, 3]).repeat_interleave(users.numel())
    features = KeyedJaggedTensor(TABLES, torch.cat([users, items]), lengths=lengths)
    return dense[mine], features, labels[mine]


def make_model(optimizer: str) -> DLRM:
    """Returns a small DLRM with two dynamic tables."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=1_000_000, feature_names=[name]
        )
        for name in TABLES
    ]
    started = dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.05, 0.05))
    return DLRM(
        dyn.DynamicEmbeddingBagCollection(
            tables, dynamic=started, fused_params=learning(optimizer)
        ),
        dense_in_features=4,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
    )


def learning(optimizer: str) -> dict[str, Any]:
    """Returns the optimizer of the rows, as `fused_params`."""
    return {"optimizer": OPTIMIZERS[optimizer], "learning_rate": 0.05}


def shard(model: DLRM, run: Run, optimizer: str) -> DistributedModelParallel:
    """Returns the model, sharded over the processes by the run's plan."""
    sharder = dyn.DynamicEmbeddingBagCollectionSharder(fused_params=learning(optimizer))
    kinds: dict[str, ParameterShardingGenerator] = {
        "row_wise": row_wise(compute_kernel=FUSED),
        "column_wise": column_wise(ranks=list(range(run.ranks)), compute_kernel=FUSED),
        "table_wise": table_wise(rank=run.ranks - 1, compute_kernel=FUSED),
    }
    plan = construct_module_sharding_plan(
        model.get_submodule(SPARSE),
        {table: kinds[kind] for table, kind in run.plan.items()},
        sharder=sharder,
        local_size=run.ranks,
        world_size=run.ranks,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        plan=ShardingPlan({SPARSE: plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )


def make_optimizer(model: nn.Module) -> CombinedOptimizer:
    """Returns the optimizer of the rows combined with Adam for the dense part, with the model's names."""
    named = in_backward_optimizer_filter(model.named_parameters())
    parameters = {name: one for name, one in named if not name.startswith(SPARSE)}
    dense = KeyedOptimizerWrapper(parameters, lambda some: torch.optim.Adam(some, lr=0.005))
    dense.init_state()  # Adam creates its state at the first step, but loading needs it before
    if isinstance(model, DistributedModelParallel):
        return CombinedOptimizer([model.fused_optimizer, dense])
    rows = model.get_submodule(SPARSE).fused_optimizer
    return CombinedOptimizer([(SPARSE, rows), ("", dense)])


def save(model: nn.Module, optimizer: CombinedOptimizer, folder: Path) -> None:
    """Saves the model and the optimizer into a new folder. Collective."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())


def read(model: nn.Module, optimizer: CombinedOptimizer, folder: Path) -> dict[str, Any]:
    """Returns this process's part of a checkpoint of `save`; the model does not change. Collective."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner(), no_dist=not dist.is_initialized())
    return state


def load(model: nn.Module, optimizer: CombinedOptimizer, folder: Path) -> None:
    """Loads a checkpoint of `save`, made under any plan and number of ranks. Collective."""
    state = read(model, optimizer, folder)
    model.load_state_dict(state["model"])  # first: the optimizer state belongs to these rows
    optimizer.load_state_dict(state["optimizer"])


def train(
    model: nn.Module, optimizer: CombinedOptimizer, steps: range, rank: int, ranks: int
) -> list[float]:
    """Trains on the clicks of these steps. Returns the loss of each step, the mean over all ranks."""
    losses = []
    for step in steps:
        dense, features, labels = clicks(step, rank, ranks)
        optimizer.zero_grad()
        logits = model(dense, features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    curve = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(curve)
    return (curve / ranks).tolist()


def work(name: str, folder: Path, optimizer_name: str) -> nn.Module:
    """Does the work of one process of a run: train and save, or load, save again and continue training."""
    run = RUNS[name]
    rank = dist.get_rank() if run.ranks else 0
    model: nn.Module = make_model(optimizer_name)
    if run.ranks:
        model = shard(model, run, optimizer_name)
    optimizer = make_optimizer(model)
    before: list[float] = []
    if name == STAYS:
        before = train(model, optimizer, range(SAVED_AT), rank, run.ranks)
        save(model, optimizer, folder / STAYS)
    else:
        load(model, optimizer, folder / STAYS)
        save(model, optimizer, folder / name)
    losses = train(model, optimizer, range(SAVED_AT, STEPS), rank, max(run.ranks, 1))
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps([*before, *losses]))
    return model


def differences(folder: Path, name: str, optimizer_name: str) -> list[str]:
    """Returns the names of the tensors whose saved numbers differ from the loaded numbers.

    Checksums are left out: they have a row for each rank that saved.
    """
    found = []
    for checkpoint in (STAYS, name):
        model = make_model(optimizer_name)
        state = read(model, make_optimizer(model), folder / checkpoint)
        flat = dict(state["model"])
        for of, its in state["optimizer"]["state"].items():
            flat |= {f"{of} {key}": value for key, value in its.items()}
        found.append(flat)
    tensors = {key: value for key, value in found[0].items() if not key.endswith("checksum")}
    return [key for key, value in tensors.items() if not value.equal(found[1][key])]


def laptop(folder: Path, optimizer_name: str) -> bool:
    """Continues training without process groups. Returns True if torch.save and torch.load keep the model."""
    model = work("laptop", folder, optimizer_name).eval()
    torch.save(model.state_dict(), folder / "laptop.pt")
    again = make_model(optimizer_name).eval()
    again.load_state_dict(torch.load(folder / "laptop.pt"))
    dense, features, _ = clicks(STEPS, 0, 1)
    return bool(model(dense, features).equal(again(dense, features)))


def move(folder: Path, optimizer_name: str, arguments: list[str]) -> int:
    """Starts the runs one after another and compares them. Returns the exit status."""
    for name, run in RUNS.items():
        told = ["--stage", name, "--folder", str(folder), *arguments]
        if run.ranks and start_processes(__file__, told, run.ranks):
            return 1
    is_kept = laptop(folder, optimizer_name)
    curves = {name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS}
    changed = {name: differences(folder, name, optimizer_name) for name in list(RUNS)[1:]}
    plans = {
        name: ", ".join(f"{t} {kind}" for t, kind in run.plan.items()) for name, run in RUNS.items()
    }
    print(as_text(curves, plans, changed, is_kept, SAVED_AT))
    return 0


def main() -> int:
    """Starts the runs, or does the work of one process of a run. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad", help="of the rows")
    parser.add_argument("--folder", type=Path, help="for the checkpoints (default: not kept)")
    parser.add_argument("--stage", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    hide_notes_to_developers()
    if options.stage:
        dist.init_process_group("gloo")
        work(options.stage, options.folder, options.optimizer)
        gc.collect()  # the model holds the process groups; gloo joins its threads only after it is freed
        dist.destroy_process_group()
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return move(folder, options.optimizer, ["--optimizer", options.optimizer])


if __name__ == "__main__":
    sys.exit(main())
