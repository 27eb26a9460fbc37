"""Steps of unsharded collections on a GPU, beside FBGEMM's TBE on rows whose numbers are known.

Sides in turn: ours, with the probe of the id map; TBE (SplitTableBatchedEmbeddingBagsCodegen, row-wise
Adagrad); TBE under torch's deterministic algorithms, which sums in a fixed order as ours does; for the
forward also torch's embedding_bag over the same rows in one tensor, and a read of a random line of 64 bytes
for each id. Where FBGEMM has no TBE for the device, its sides are left out.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial

import torch
from axes import GPU_HALF, GPU_HOST, GPU_STEPS, Workload, tiny
from gpu_cases import Case, compared
from gpu_sides import BATCHES, Batches, Sides, deterministic, needed_bytes, why_without_tbe

CALLS = 100  # forwards in one turn of the time of the host


def has_tbe(device: str) -> bool:
    """Returns True if FBGEMM's TBE trains on the device; prints the reason if not."""
    reason = why_without_tbe(device)
    if reason:
        print(f"TBE is left out: {reason}")
    return not reason


def lacks_memory(workload: Workload, dtype: torch.dtype, device: str) -> bool:
    """Returns True if the GPU has too little free memory for all sides; then says so."""
    if device == "cpu":
        return False
    gc.collect()  # the tables before
    torch.cuda.empty_cache()
    needed, free = needed_bytes(workload, dtype), torch.cuda.mem_get_info()[0]
    if needed > free:
        print(f"{workload.name} is left out: it needs {needed / 1e9:.0f} of {free / 1e9:.0f} GB")
    return needed > free


def lookups(
    sides: Sides, workload: Workload, arguments: argparse.Namespace, dtype: str
) -> Iterator[Case]:
    """Measures forward, update and step of one workload."""
    batches, grad = Batches(workload, arguments.device), sides.grad
    forwards = sides.forwards(batches)
    outputs: dict[str, torch.Tensor] = {}

    def forward(name: str, turn: int) -> None:
        with torch.no_grad():
            forwards[name](turn % BATCHES)

    def look_up(turn: int) -> None:
        outputs.update({name: run(turn % BATCHES) for name, run in forwards.items()})

    def update(name: str, turn: int) -> None:
        outputs.pop(name).backward(grad)

    def step(name: str, turn: int) -> None:
        forwards[name](turn % BATCHES).backward(grad)

    def measured(what: str, run: Callable[[str, int], None]) -> Iterator[Case]:
        contestants = {name: partial(run, name) for name in forwards}
        if what == "forward":
            floors = sides.floors(batches)
            contestants |= {name: partial(_of_batch, floor) for name, floor in floors.items()}
        elif "TBE" in contestants:
            contestants["TBE, deterministic"] = deterministic(contestants["TBE"])
        yield from compared(
            what, contestants, workload.ids_per_step, arguments,
            look_up if what == "update" else None, workload=workload.name, dtype=dtype,
        )  # fmt: skip

    for what, run in (("forward", forward), ("update", update), ("step", step)):
        yield from measured(what, run)
        outputs.clear()


def _of_batch(run: Callable[[int], object], turn: int) -> None:
    run(turn % BATCHES)


def steps(arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures the workloads of axes.GPU_STEPS and axes.GPU_HALF, each pair on one set of tables."""
    device, with_tbe = arguments.device, has_tbe(arguments.device)
    families = [(family, torch.float32) for family in GPU_STEPS]
    families += [(family, torch.float16) for family in GPU_HALF]
    for family, dtype in families:
        workloads = [tiny(one) for one in family] if arguments.quick else family
        if lacks_memory(workloads[0], dtype, device):
            continue
        sides, kind = Sides(workloads[0], dtype, device, with_tbe), str(dtype).split(".")[1]
        name = workloads[0].name
        print(f"{name}, {kind}: {sides.bytes_a_row:.1f} bytes a row beside its numbers")
        yield {"workload": name, "dtype": kind, "what": "bytes a row", "bytes": sides.bytes_a_row}
        for workload in workloads:
            yield from lookups(sides, workload, arguments, kind)
        del sides


def host_times(arguments: argparse.Namespace) -> Iterator[Case]:
    """Measures the host's time of a forward of ten tables: Python, dispatch, launches and waits."""
    workload, device = tiny(GPU_HOST) if arguments.quick else GPU_HOST, arguments.device
    calls = 2 if arguments.quick else CALLS
    sides = Sides(workload, torch.float32, device, has_tbe(device))
    forwards = sides.forwards(Batches(workload, device))

    def turns(run: Callable[[int], object], turn: int) -> None:
        with torch.no_grad():
            for call in range(calls):
                run(call % BATCHES)

    contestants = {name: partial(turns, run) for name, run in forwards.items()}
    for case in compared(
        "host", contestants, calls * workload.ids_per_step, arguments,
        clock="wall", workload=workload.name,
    ):  # fmt: skip
        yield {**case, "microseconds": case["milliseconds"] / calls * 1e3}
