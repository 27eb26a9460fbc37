"""Trains TorchRec's DLRM on raw ids: hash-backed tables, sharded over processes, in one script.

    python examples/train_dlrm.py                                  # synthetic clicks, 2 processes
    python examples/train_dlrm.py --data day_0.gz --plan row_wise  # the Criteo click log
    torchrun --standalone --nproc-per-node 4 examples/train_dlrm.py
    python examples/train_dlrm.py --device cuda                    # a process a GPU, one GPU too

Only `make_model` and `make_sharders` use dynamic tables, in place of TorchRec's tables. Everything else
is plain TorchRec: its DLRM, planner, DistributedModelParallel, train pipeline and optimizers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parts.click_source import FileSource, StreamSource
from parts.clicks import CATEGORICAL_NAMES, NUM_INTEGERS, Clicks
from parts.criteo import BadLine
from parts.devices import backend_for, device_of_process
from parts.lockstep import AnotherRankFailed, in_step
from parts.options import hide_notes_to_developers, parse_options, start_processes
from parts.plans import make_plan, plan_as_text
from parts.progress import Progress
from parts.results import collect_results, results_as_text
from torchrec import EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_dyn as dyn

EMB_OPTIM_TYPES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
}


def make_model(options: argparse.Namespace, device: torch.device) -> DLRMTrain:
    """Returns DLRM with one dynamic table per categorical. `max_rows` reserves no memory."""
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=options.dim,
            num_embeddings=options.max_rows,
            feature_names=[name],
        )
        for name in CATEGORICAL_NAMES
    ]
    rows = dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.05, 0.05), seed=options.seed)
    model = DLRM(
        dyn.DynamicEmbeddingBagCollection(tables, device=torch.device("meta"), dynamic=rows),
        dense_in_features=NUM_INTEGERS,
        dense_arch_layer_sizes=[64, options.dim],
        over_arch_layer_sizes=[128, 64, 1],
        dense_device=device,
    )
    return DLRMTrain(model)


def make_sharders(options: argparse.Namespace) -> list[ModuleSharder]:
    """Returns the sharders with the optimizer of the rows, which runs in the backward pass."""
    fused_params = {"optimizer": EMB_OPTIM_TYPES[options.optimizer], "learning_rate": options.lr}
    return [dyn.DynamicEmbeddingBagCollectionSharder(fused_params=fused_params)]


def make_optimizer(model: DistributedModelParallel, dense_lr: float) -> CombinedOptimizer:
    """Returns the optimizer of the rows combined with Adam for the dense part."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=dense_lr))
    return CombinedOptimizer([model.fused_optimizer, adam])


def make_source(options: argparse.Namespace, rank: int) -> FileSource | StreamSource:
    """Returns the source of clicks: the file, or the synthetic stream without a file."""
    share = {
        "batch_size": options.batch_size,
        "steps": options.steps,
        "held_out": options.held_out,
        "rank": rank,
        "world_size": options.world_size,
    }
    if options.data is None:
        return StreamSource(seed=options.seed, **share)
    return FileSource(path=options.data, on_bad_line=options.on_bad_line, **share)


def run_batches(
    pipeline: TrainPipelineSparseDist, clicks: Iterator[Clicks], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Runs the model on the clicks, with all ranks in step. Trains it if it is in training mode.

    Yields:
        loss: [], the mean over this rank's batch.
        logits: [B].
        labels: [B].
    """
    batches = (part.to_batch() for part in in_step(clicks))
    if device.type == "cuda":
        batches = (batch.pin_memory() for batch in batches)  # copied beside other work
    with suppress(StopIteration):  # the pipeline raises it after the last batch
        while True:
            yield pipeline.progress(batches)


def work(options: argparse.Namespace, device: torch.device) -> None:
    """Does the work of one process: plan, train, evaluate, report.

    Raises:
        BadLine: if a line is not a click and bad lines are errors, or there are too few lines.
    """
    rank = dist.get_rank()
    torch.manual_seed(options.seed)
    model = make_model(options, device)
    sharders = make_sharders(options)
    plan = make_plan(
        options.plan, model, sharders, CATEGORICAL_NAMES, options.dim, options.batch_size, device
    )
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    pipeline = TrainPipelineSparseDist(model, make_optimizer(model, options.dense_lr), device)
    source = make_source(options, rank)
    if rank == 0:
        print(plan_as_text(plan), flush=True)

    progress = Progress(model, CATEGORICAL_NAMES, options.steps)
    model.train()
    for loss, _, labels in run_batches(pipeline, source.training(), device):
        progress.step(loss, labels)
    progress.close()

    model.eval()
    with torch.no_grad():
        held_out = [
            (labels, logits.sigmoid())
            for _, logits, labels in run_batches(pipeline, source.evaluation(), device)
        ]
    if progress.steps == 0 or not held_out:
        raise BadLine(
            f"{options.data}: expected clicks for each of {options.world_size} ranks, to train on "
            "and to hold out, got too few. Use a longer file."
        )
    labels, probabilities = (
        torch.cat(parts).cpu().numpy() for parts in zip(*held_out, strict=True)
    )
    results = collect_results(model, plan, progress, labels, probabilities)
    if rank == 0:
        print(results_as_text(results), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    """Starts the processes, or does the work of one process. Returns the exit status."""
    options = parse_options(sys.argv[1:])
    if "RANK" not in os.environ:
        return start_processes(__file__, sys.argv[1:], options.world_size)
    hide_notes_to_developers()
    device = device_of_process(options.device)
    dist.init_process_group(backend_for(device))
    try:
        work(options, device)
    except BadLine as error:
        print(f"\ntrain_dlrm.py: {error}", file=sys.stderr)
        return 1
    except AnotherRankFailed:
        return 1
    gc.collect()  # the model holds the process groups; gloo joins its threads only after it is freed
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
