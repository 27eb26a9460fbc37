"""A training loop like TorchRec's dlrm_main: warm-up and decay, a train pipeline, evaluation after each part.

    torchrun --standalone --nproc-per-node 2 examples/ports/click_loop.py

A port of facebookresearch/dlrm's torchrec_dlrm/dlrm_main.py: DLRM on raw 64-bit ids, whose number grows.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import torchrec_dyn as dyn

FEATURES = ["hour", "user", "item"]
DIM = 8
CPU = torch.device("cpu")


def batches(first: int, steps: int, seed: int, size: int = 256) -> Iterator[Batch]:
    """Yields clicks: a user likes even or odd items, more so in the evening. Ids grow in number."""
    draw = torch.Generator().manual_seed(seed)
    for step in range(first, first + steps):
        hour = torch.randint(24, (size,), generator=draw)
        user, item = torch.randint(200 + step, (2, size), generator=draw)
        chance = 0.1 + 0.6 * (user % 2 == item % 2) + 0.2 * (hour > 17)
        raw = dyn.mixed_ids(torch.cat([user, item + 2**40]))  # spread over 64 bits
        yield Batch(
            torch.rand(size, 2, generator=draw),
            KeyedJaggedTensor(
                FEATURES, torch.cat([hour, raw]), lengths=torch.ones(3 * size, dtype=torch.int32)
            ),
            (torch.rand(size, generator=draw) < chance).float(),
        )


def make_model() -> DLRMTrain:
    """Returns DLRM as in the original, then with dynamic tables."""
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=10_000_000, feature_names=[name]
        )
        for name in FEATURES
    ]
    sparse = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, sparse.parameters(), {"lr": 0.1})
    dlrm = DLRM(
        sparse,
        dense_in_features=2,
        dense_arch_layer_sizes=[16, DIM],
        over_arch_layer_sizes=[32, 1],
    )
    return dyn.make_dynamic(DLRMTrain(dlrm))


def make_optimizer(model: DistributedModelParallel, steps: int) -> CombinedOptimizer:
    """Returns one optimizer of rows and dense layers: a tenth of the steps up, then linearly down."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    )
    up = WarmupStage(WarmupPolicy.LINEAR, max_iters=steps // 10, value=0.1)
    down = WarmupStage(WarmupPolicy.POLY, max_iters=steps, value=1.0, decay_iters=2 * steps)
    # One around both would not be saved: a restored job would begin the schedule again.
    return CombinedOptimizer(
        [
            WarmupOptimizer(part, [up, down], lr=0.1, param_name=f"__warmup_{name}")
            for name, part in (("rows", model.fused_optimizer), ("dense", dense))
        ]
    )


def train(pipeline: TrainPipelineSparseDist, data: Iterator[Batch]) -> None:
    """Trains on all batches."""
    pipeline._model.train()
    with suppress(StopIteration):  # the pipeline raises it after the last batch
        while True:
            pipeline.progress(data)


@torch.no_grad()
def evaluate(pipeline: TrainPipelineSparseDist, data: Iterator[Batch]) -> float:
    """Returns the area under the ROC curve over the batches of all ranks. Collective; inserts no ids."""
    pipeline._model.eval()
    outputs = []
    with suppress(StopIteration):
        while True:
            _, logits, labels = pipeline.progress(data)
            outputs.append(torch.stack([logits, labels]))
    gathered: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(gathered, torch.cat(outputs, 1))
    logits, labels = torch.cat(gathered, 1)
    return float(binary_auroc(logits, labels.int()))


def main() -> None:
    """Runs the example on one rank of torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="in all, in three parts")
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same dense layers on every rank
    model = DistributedModelParallel(make_model(), device=CPU, sharders=dyn.default_sharders())
    optimizer = make_optimizer(model, steps)
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    sparse = model.module.get_submodule("model.sparse_arch.embedding_bag_collection")
    for part in range(3):
        train(pipeline, batches(part * steps // 3, steps // 3, seed=10 * part + rank))
        users = dyn.read_num_rows(sparse, "user")
        auc = evaluate(pipeline, batches(part * steps // 3, 4, seed=1000 + rank))
        assert dyn.read_num_rows(sparse, "user") == users  # evaluation gives no rows
        rate = next(iter(model.fused_optimizer.param_groups))["lr"]
        if rank == 0:
            print(f"part {part}: learning rate {rate:.3f}, users {users}, AUC {auc:.3f}")
    del model, optimizer, pipeline, sparse
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
