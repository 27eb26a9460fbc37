"""Adagrad as a rule in Python, and as a kernel with deferred updates, against the kernel in backward.

    python benchmarks/bench_rules.py [--rounds 15] [--threads 1] [--bags 1 4 20] [--clock thread]

Measures one training step of an unsharded collection of 8 tables: forward, backward, `step()`. All ids have
rows. Ids repeat: they are 200,000 u^3 for a uniform u. Also measured: the memory that deferred updates hold
before `step()`, by micro-batches, and the peak of `step()`. A ratio above 1: more time than the kernel.
"""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from interleaved import finish, measure, options, ratio, result, spread, summary
from peak_memory import MB, resident
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn

TABLES, BATCHES = 8, 4
MICRO_BATCHES = (1, 4)
KERNEL = {"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1, "initial_accumulator_value": 0.1}


class Adagrad(dyn.RowRule):
    """EXACT_ADAGRAD, as docs/guide/train/optimizers.md writes it."""

    name = "adagrad"
    states: ClassVar = {"sum_of_squares": dyn.RuleState(initial=0.1)}

    def update(
        self, rows: Tensor, grads: Tensor, states: Any, learning_rate: float, step: int
    ) -> None:
        """Updates rows in place."""
        squares = states["sum_of_squares"].addcmul_(grads, grads)
        rows.addcdiv_(grads, squares.sqrt().add_(1e-8), value=-learning_rate)


SIDES: dict[str, dict[str, Any]] = {
    "kernel": KERNEL,
    "rule": {"optimizer": Adagrad(), "learning_rate": 0.1},
    "deferred": {**KERNEL, "defer_updates": True},
    "deferred rule": {"optimizer": Adagrad(), "learning_rate": 0.1, "defer_updates": True},
}


class Workload:
    """Batches of `size` samples with bags of `bag` ids, and a gradient of the outputs."""

    def __init__(self, bag: int, size: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = TABLES * size * bag
        self.dim = dim
        keys = [f"f{table}" for table in range(TABLES)]
        lengths = torch.full((TABLES * size,), bag)
        self.batches = [
            KeyedJaggedTensor(
                keys,
                (torch.rand(self.ids, generator=generator, dtype=torch.float64) ** 3 * 200_000)
                .long()
                .mul_(7919),
                lengths=lengths,
            )
            for _ in range(BATCHES)
        ]
        self.grad = torch.randn(size, TABLES * dim, generator=generator)

    def collection(self, fused_params: dict[str, Any]) -> dyn.DynamicEmbeddingBagCollection:
        """Returns a collection with the rows of all batches."""
        tables = [
            EmbeddingBagConfig(
                name=f"t{table}",
                embedding_dim=self.dim,
                num_embeddings=1_000_000,
                feature_names=[f"f{table}"],
            )
            for table in range(TABLES)
        ]
        collection = dyn.DynamicEmbeddingBagCollection(tables, fused_params=fused_params)
        with torch.no_grad():
            for batch in self.batches:
                collection(batch)
        return collection

    def backward(self, collection: dyn.DynamicEmbeddingBagCollection, turn: int) -> None:
        """Runs a forward and its backward."""
        collection(self.batches[turn % BATCHES]).values().backward(self.grad)

    def step(self, collection: dyn.DynamicEmbeddingBagCollection, turn: int) -> None:
        """Runs a whole step."""
        self.backward(collection, turn)
        collection.fused_optimizer.step()


def times(workload: Workload, bag: int, threads: int, rounds: int, clock: str) -> list[Any]:
    """Measures all sides; returns a line for each but the kernel."""
    torch.set_num_threads(threads)
    steps: dict[str, Callable[[int], object]] = {
        name: partial(workload.step, workload.collection(fused_params))
        for name, fused_params in SIDES.items()
    }
    seconds = measure(steps, rounds, warm_up=BATCHES, clock=clock)
    per_id = summary(seconds, workload.ids)
    lines = []
    for name in SIDES:
        if name == "kernel":
            continue
        seen = ratio(seconds, name, "kernel")
        numbers = {side: per_id[side]["median_ns"] for side in (name, "kernel")}
        print(
            f"{bag:3} ids a bag {threads} threads  {name:13} / kernel {spread(seen)}  "
            f"{numbers[name]:7.1f} / {numbers['kernel']:6.1f} ns an id",
            flush=True,
        )
        lines.append(
            result(f"{bag} ids a bag", threads, f"step, {name}", "kernel", seen, ns_per_id=per_id)
        )
    return lines


def memory(workload: Workload, bag: int, batches: int) -> dict[str, Any]:
    """Measures the memory that deferred updates hold after some micro-batches, and the peak of `step()`."""
    collection = workload.collection(SIDES["deferred"])
    grads = [workload.grad.clone() for _ in range(batches)]
    outputs, ids = batches * workload.grad.numel() * 4, batches * workload.ids

    def run() -> tuple[int, int, int]:
        before = _resident_now()
        for turn in range(batches):
            output = collection(workload.batches[turn % BATCHES]).values()
            (output * 1.0).backward(grads[turn])  # a gradient of its own
            del output
        held = _resident_now()
        Path("/proc/self/clear_refs").write_text("5")
        collection.fused_optimizer.step()
        return before, held, resident("VmHWM")

    run()
    before, held, peak = run()
    line = {"held_mb": (held - before) / MB, "peak_mb": (peak - before) / MB}
    an_id = (held - before - outputs) / ids
    print(
        f"{bag:3} ids a bag {batches} micro-batches: {line['held_mb']:6.1f} MB held, outputs "
        f"{outputs / MB:6.1f} MB and {an_id:5.1f} bytes an id; peak of step() {line['peak_mb']:6.1f} MB",
        flush=True,
    )
    return {
        "workload": f"{bag} ids a bag", "what": "memory of deferred updates", "batches": batches,
        "outputs_mb": outputs / MB, "ids": ids, "bytes_an_id": an_id, **line,
    }  # fmt: skip


def _resident_now() -> int:
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # what is free goes back to the system
        libc.malloc_trim(0)
    return resident("VmRSS")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each length of bags; prints a table and writes it."""
    parser = options(__doc__, threads=[1])
    parser.add_argument("--bags", type=int, nargs="+", default=[1, 4, 20], help="ids of a bag")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore", FutureWarning)
    lines: list[dict[str, Any]] = []
    for bag in arguments.bags:
        workload = Workload(bag, *((16, 8) if arguments.quick else (4096, 64)))
        for batches in MICRO_BATCHES:
            lines.append(memory(workload, bag, batches))
        for threads in arguments.threads:
            lines += times(workload, bag, threads, arguments.rounds, arguments.clock)
    finish("rules", lines, arguments)


if __name__ == "__main__":
    main()
