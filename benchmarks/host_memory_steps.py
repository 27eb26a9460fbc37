"""Steps of bench_host_memory.py: one table in a GPU's memory or in host memory, trained by several loops."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from axes import HOST_MEMORY, Workload, ranks, tiny
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from gpu_cases import Case
from interleaved import measure, quartiles, ratio, result, spread
from torch import Tensor
from torch.autograd import DeviceType
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from train_sides import PIPELINES, ClickModel, Clicks, Setting, Stream, features, raw_ids, trainer

import torchrec_dyn as dyn

LOOPS = ("plain", *PIPELINES)
IN_GPU = "in GPU"
STEPS, WARM_UP = 4, 2  # steps of a turn; turns before those that are measured
WARM = 160  # steps before those that are measured
AHEAD = 8  # more batches than steps: a pipeline reads ahead
# Bytes an id over the link, both ways, by stream and part, of a simulation: rows of 256 bytes and a state of
# 4, those that were not used for the longest time leave, at least a 64th of the room at once, 1 million ids,
# 65,536 a step.
SIMULATED = {("zipf", 4): 44, ("zipf", 10): 76, ("drift", 4): 49, ("drift", 10): 81}
SIMULATED_SHARE = 65_536 / 1_000_000


def _backward(output: Any, grad: Tensor) -> None:
    values = output.values()
    values.backward(grad.to(values.device))


@dataclass(frozen=True)
class Place:
    """A device, and what is done in another way on a mock one."""

    name: str
    device: torch.device
    send: Callable[[Tensor], Tensor]
    backward: Callable[[Any, Tensor], object] = _backward

    @property
    def is_gpu(self) -> bool:
        """True where there are times to measure."""
        return self.name == "cuda"

    def wait(self) -> None:
        """Waits until the GPU has done all work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def _options(
    workload: Workload, part: int | None, optimizer: EmbOptimType
) -> tuple[list[EmbeddingBagConfig], dict[str, dyn.DynamicTableConfig], dict[str, Any]]:
    """Returns configs, table options and fused_params. `part`: as in `collection_of`."""
    configs = [EmbeddingBagConfig(workload.rows, workload.dim, name="t0", feature_names=["f0"])]
    storage = None if part is None else dyn.HostMemory(workload.rows // part)
    fused = {"optimizer": optimizer, "learning_rate": 0.02}
    return configs, {"t0": dyn.DynamicTableConfig(storage=storage)}, fused


def collection_of(
    workload: Workload,
    part: int | None,
    place: Place,
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
) -> dyn.DynamicEmbeddingBagCollection:
    """Returns a collection of one table with room for rows / part in a GPU's memory; None: no storage."""
    configs, dynamic, fused = _options(workload, part, optimizer)
    return dyn.DynamicEmbeddingBagCollection(
        configs, dynamic=dynamic, device=place.device, fused_params=fused
    )


def lookups(
    model: dyn.DynamicEmbeddingBagCollection, ids: Tensor, workload: Workload, place: Place
) -> Any:
    """Returns the output for ids [batch * bag] on the device."""
    lengths = place.send(torch.full((workload.batch,), workload.bag))
    return model(KeyedJaggedTensor(["f0"], ids, lengths=lengths))


class Plain:
    """Trains an unsharded collection by a gradient of ones."""

    def __init__(
        self, workload: Workload, part: int | None, place: Place, batches: Sequence[Clicks]
    ) -> None:
        self._model = collection_of(workload, part, place)
        self._ids = [place.send(batch.features.values()) for batch in batches]
        self._lengths = place.send(batches[0].features.lengths())
        self._grad = torch.ones(workload.batch, workload.dim)
        if place.name != "mock":
            self._grad = place.send(self._grad)
        self._place, self._trained = place, 0

    def step(self) -> None:
        """Trains the next batch."""
        ids = self._ids[self._trained]
        output = self._model(KeyedJaggedTensor(["f0"], ids, lengths=self._lengths))
        self._place.backward(output, self._grad)
        self._trained += 1

    def stats(self) -> dict[str, Any]:
        """Returns the stats of the table."""
        return self._model.table("t0").stats()


class Piped:
    """Trains a small click model under DistributedModelParallel by a pipeline."""

    def __init__(
        self,
        workload: Workload,
        part: int | None,
        place: Place,
        batches: Sequence[Clicks],
        loop: str,
    ) -> None:
        configs, dynamic, fused = _options(workload, part, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
        torch.manual_seed(0)
        collection = dyn.DynamicEmbeddingBagCollection(
            configs, dynamic=dynamic, device=torch.device("meta")
        )
        sharder = dyn.DynamicEmbeddingBagCollectionSharder(fused_params=fused)
        plan = construct_module_sharding_plan(
            collection, {"t0": table_wise(rank=0, compute_kernel="fused")}, sharder=sharder,
            local_size=1, world_size=1, device_type=place.device.type,
        )  # fmt: skip
        whole = ClickModel(collection, workload)
        whole.head.to(place.device)
        self._model = DistributedModelParallel(
            whole, device=place.device, plan=ShardingPlan({"sparse": plan}), sharders=[sharder]
        )
        stream = Stream()
        stream.batches = list(batches)
        self.step = trainer(self._model, stream, Setting("table_wise", place.device, loop))

    def stats(self) -> dict[str, Any]:
        """Returns the stats of the table."""
        return self._model.module.sparse.table("t0").stats()


@contextmanager
def _group(place: Place) -> Iterator[None]:
    """Makes a process group of one rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    for chatty in ("torchrec", "torch.fx"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    if place.is_gpu:
        torch.cuda.set_device(place.device)
    backend = "cpu:gloo,cuda:nccl" if place.is_gpu else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            gc.collect()  # references to the group keep gloo's threads alive
            dist.destroy_process_group()


def _gpu_milliseconds(turn: Callable[[], None]) -> float:
    """Returns the time of kernels and copies in a turn, added up."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        turn()
    return sum(
        event.self_device_time_total / 1e3
        for event in profile.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )


def steps(place: Place, arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures all loops over all streams."""
    for drawn in HOST_MEMORY:
        if drawn.name not in arguments.streams:
            continue
        workload = replace(drawn, rows=arguments.rows, batch=arguments.ids // drawn.bag)
        workload = replace(workload, drift=drawn.drift * arguments.rows // drawn.rows)
        if arguments.quick:
            workload = replace(tiny(drawn), tables=1)
        warm = 2 if arguments.quick else WARM - WARM_UP * STEPS
        # A turn more for the profiler.
        count = warm + (WARM_UP + arguments.rounds + 1) * STEPS + AHEAD
        batches = [
            Clicks(features(workload, raw_ids(numbers), workload.bag), torch.zeros(workload.batch))
            for numbers in ranks(workload, count, seed=0)
        ]
        if place.is_gpu:
            batches = [batch.pin_memory() for batch in batches]
        for loop in arguments.loops:
            with _group(place) if loop != "plain" else nullcontext():
                yield from _contest(workload, loop, place, batches, warm, arguments)
            gc.collect()  # free these tables before the next ones are made
            if place.is_gpu:
                torch.cuda.empty_cache()


def _contest(
    workload: Workload,
    loop: str,
    place: Place,
    batches: Sequence[Clicks],
    warm: int,
    arguments: argparse.Namespace,
) -> Iterator[Case]:
    """Trains all sides in turn on the same batches; prints and yields a line for each."""
    parts = {IN_GPU: None, **{f"1/{part}": part for part in arguments.parts}}
    sides: dict[str, Plain | Piped] = {
        name: Plain(workload, part, place, batches)
        if loop == "plain"
        else Piped(workload, part, place, batches, loop)
        for name, part in parts.items()
    }

    def train(name: str, count: int = STEPS) -> None:
        for _ in range(count):
            sides[name].step()
        place.wait()

    def copied() -> dict[str, tuple[int, int]]:
        stats = {name: side.stats() for name, side in sides.items()}
        return {name: (one["rows_loaded"], one["rows_written_back"]) for name, one in stats.items()}

    before: dict[str, tuple[int, int]] = {}

    def count_before(turn: int) -> None:
        if turn == WARM_UP and not before:
            before.update(copied())

    for name in sides:
        train(name, warm)
    turns = {name: lambda _, name=name: train(name) for name in sides}
    seconds = measure(turns, arguments.rounds, WARM_UP, before=count_before)
    after = copied()
    milliseconds = {
        name: [value / STEPS * 1e3 for value in quartiles(times)] for name, times in seconds.items()
    }
    gpu = {}
    if place.is_gpu:
        gpu = {name: _gpu_milliseconds(lambda name=name: train(name)) / STEPS for name in sides}
    for name, part in parts.items():
        loaded, written = (
            (end - begin) / (arguments.rounds * STEPS)
            for begin, end in zip(before[name], after[name], strict=True)
        )
        bytes_an_id = (loaded + written) * (4 * workload.dim + 4) / workload.ids_per_step
        case = {
            "workload": workload.name, "what": "step", "loop": loop, "part": name,
            "loaded": loaded, "written_back": written, "bytes_an_id": bytes_an_id,
        }  # fmt: skip
        text = f"{workload.name:8} {loop:11} {name:7}"
        if place.is_gpu:
            median, low, high = milliseconds[name]
            case |= {"milliseconds": median, "milliseconds_quartiles": [low, high]}
            # Without CUPTI the profiler sees nothing, and no goal is met by it.
            gpu_ratio = gpu[name] / gpu[IN_GPU] if gpu[IN_GPU] else math.inf
            case |= {"gpu_milliseconds": gpu[name], "gpu_ratio": gpu_ratio}
            text += f" {median:7.3f} [{low:.3f}, {high:.3f}] ms a step, GPU {gpu[name]:.3f};"
        text += f" {loaded:8,.0f} rows loaded, {written:8,.0f} written back: {bytes_an_id:5.1f} bytes an id"
        share = workload.ids_per_step / workload.rows
        simulated = SIMULATED.get((workload.name, part or 0))
        if simulated and abs(share / SIMULATED_SHARE - 1) < 0.01 and place.name != "cpu":
            case |= {"simulated_bytes_an_id": simulated}
            text += f" (simulated: {simulated}, {bytes_an_id / simulated:.3f} of it)"
        if place.is_gpu and name != IN_GPU:
            seen = ratio(seconds, name, IN_GPU)
            text += f"; {spread(seen)} of in GPU, GPU {gpu_ratio:.2f}x"
            case |= result(workload.name, 1, "step", IN_GPU, seen)
        print(text, flush=True)
        yield case
