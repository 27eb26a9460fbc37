"""Sequence collections that send each distinct id once, against collections that send every occurrence.

    python benchmarks/bench_dedup.py [--rounds 9] [--world 2] [--only zipf-1.05]

Measures one training step of a row-wise collection: lookup, exchange, backward, update. Both models exist at
the same time and take turns. Time: the slowest rank. Bytes: all data that the collectives of a step send to
other ranks, summed over ranks, counted at the process group.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axes import raw_ids
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from interleaved import finish, measure, options, ratio, result, spread, summary
from torch import Tensor, multiprocessing
from torchrec import EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn

FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}
BATCHES = 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Stream:
    """Ids of one feature: per rank `batch` sequences of `length` of the `known` ids; zipf 0: uniform."""

    name: str
    zipf: float
    has_policy: bool = False
    known: int = 1_000_000
    batch: int = 1024
    length: int = 50
    dim: int = 64


STREAMS = [
    Stream("zipf-1.05", 1.05),
    Stream("zipf-1.05-lfu", 1.05, has_policy=True),
    Stream("zipf-0.8", 0.8),
    Stream("uniform", 0.0),
    Stream("uniform-lfu", 0.0, has_policy=True),
]


def draw(stream: Stream, seed: int) -> Tensor:
    """Draws the ids of a batch, [batch * length] int64."""
    generator = torch.Generator().manual_seed(seed)
    count = stream.batch * stream.length
    if stream.zipf == 0.0:
        return raw_ids(torch.randint(stream.known, (count,), generator=generator))
    weights = torch.arange(1, stream.known + 1, dtype=torch.float64).pow(-stream.zipf).cumsum(0)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64) * weights[-1]
    return raw_ids(torch.searchsorted(weights, drawn).clamp(max=stream.known - 1))


def features(stream: Stream, ids: Tensor) -> KeyedJaggedTensor:
    """Returns a batch of one feature."""
    return KeyedJaggedTensor(["f"], ids, lengths=torch.full((stream.batch,), stream.length))


def sharded(stream: Stream, dedup: bool) -> DistributedModelParallel:
    """Returns the sharded row-wise collection of a side, without rows."""
    world = dist.get_world_size()
    tables = [EmbeddingConfig(2 * stream.known, stream.dim, name="t", feature_names=["f"])]
    policy = dyn.LeastFrequentlyUsed() if stream.has_policy else None
    collection = dyn.DynamicEmbeddingCollection(
        tables, dynamic={"t": dyn.DynamicTableConfig(eviction=policy)}
    )
    sharder = dyn.DynamicEmbeddingCollectionSharder(FUSED, use_index_dedup=dedup)
    plan = construct_module_sharding_plan(
        collection, {"t": row_wise(compute_kernel="fused")}, sharder=sharder,
        local_size=world, world_size=world, device_type="cpu",
    )  # fmt: skip
    return DistributedModelParallel(
        torch.nn.ModuleDict({"ids": collection}), device=CPU,
        plan=ShardingPlan({"ids": plan}), sharders=[sharder],
    )  # fmt: skip


class Sent:
    """Counts the bytes that this rank sends to other ranks by all-to-all."""

    def __init__(self) -> None:
        self.bytes = 0
        self._send = dist.all_to_all_single

    def __enter__(self) -> Sent:
        dist.all_to_all_single = self._count
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_to_all_single = self._send

    def _count(
        self, output: Tensor, input: Tensor,
        output_split_sizes: Any = None, input_split_sizes: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        splits = input_split_sizes or [len(input) // dist.get_world_size()] * dist.get_world_size()
        others = sum(splits) - splits[dist.get_rank()]
        self.bytes += others * input[:1].numel() * input.element_size() if len(input) else 0
        return self._send(output, input, output_split_sizes, input_split_sizes, **more)


def step_of(stream: Stream, dedup: bool) -> Callable[[int], None]:
    """Returns a side's training step; all its ids have rows."""
    model, rank = sharded(stream, dedup), dist.get_rank()
    drawn = [features(stream, draw(stream, 1000 * rank + turn)) for turn in range(BATCHES)]
    grad = torch.rand(stream.batch * stream.length, stream.dim)

    def step(turn: int) -> None:
        output = model.module["ids"](drawn[turn % BATCHES])["f"].values()
        output.backward(grad)
        dist.barrier()

    for turn in range(BATCHES):
        step(turn)
    return step


def compare(stream: Stream, rounds: int) -> dict[str, Any]:
    """Measures both sides of a stream."""
    sides = {"each": step_of(stream, False), "once": step_of(stream, True)}
    megabytes = {}
    for name, step in sides.items():
        with Sent() as sent:
            step(0)
        of_ranks = torch.tensor(sent.bytes)
        dist.all_reduce(of_ranks)
        megabytes[name] = int(of_ranks) / 1e6
    seconds = measure(sides, rounds)
    distinct = draw(stream, 1000 * dist.get_rank()).unique().numel()
    threads, seen = torch.get_num_threads(), ratio(seconds, "each", "once")
    more = {
        "ranks": dist.get_world_size(),
        "mb_sent": megabytes,
        "distinct": distinct / (stream.batch * stream.length),
        "ns_per_step": summary(seconds, 1),
    }
    return result(stream.name, threads, "step", "each", seen, **more)


def as_text(line: dict[str, Any]) -> str:
    """Formats one line of the table."""
    numbers, sent = line["ns_per_step"], line["mb_sent"]
    return (
        f"{line['workload']:14} {line['ranks']:5} {line['distinct']:8.0%} "
        f"{sent['each']:8.1f} {sent['once']:8.1f} "
        f"{numbers['each']['median_ns'] / 1e6:8.1f} {numbers['once']['median_ns'] / 1e6:8.1f}  "
        f"{spread((line['ratio'], *line['ratio_quartiles']))}"
    )


def work(rank: int, world: int, arguments: argparse.Namespace, folder: str) -> None:
    """Runs one rank: measures all streams; rank 0 prints the results and writes them to the folder."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(world))
    for chatty in ("torchrec", "torch.fx"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(arguments.threads[0] if arguments.threads else 1)
    store = f"file://{folder}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    lines = []
    for stream in STREAMS:
        if stream.name not in arguments.only:
            continue
        if arguments.quick:
            stream = replace(stream, known=500, batch=16, length=5, dim=8)
        lines.append(compare(stream, arguments.rounds))
        if rank == 0:
            print(as_text(lines[-1]), flush=True)
    if rank == 0:
        torch.save(lines, Path(folder, f"lines{world}"))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the ranks, prints one table and writes it."""
    parser = options(__doc__, threads=[])  # by default 1 per rank
    names = [stream.name for stream in STREAMS]
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="numbers of ranks")
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    arguments = parser.parse_args(argv)
    print("stream         ranks distinct  MB each  MB once  each ms  once ms  each / once")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in arguments.world:
            multiprocessing.spawn(work, (world, arguments, folder), nprocs=world)
            lines += torch.load(Path(folder, f"lines{world}"))
    finish("dedup", lines, arguments)


if __name__ == "__main__":
    main()
