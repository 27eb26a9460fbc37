"""Host time of a step with many tables: tiny batches, so almost all of it is Python and dispatch.

    python benchmarks/bench_host.py [--rounds 60] [--tables 2 20 200 1000] [--plans table_wise row_wise]

One rank under DistributedModelParallel: forward and backward of one pooled collection. Sides: stock tables
with row numbers, dynamic tables, and dynamic tables with AdmitAfter(2) and LeastRecentlyUsed, or with
ExpireAfter. All ids have rows. The clock is the CPU time of the thread, which runs the backward too. Also
measured: making and sharding. A ratio above 1: more time than the side after the slash.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from axes import HOST_BAGS, HOST_PLANS, HOST_TABLES
from interleaved import finish, measure, options, ratio, result, spread, summary
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from train_sides import CPU, FUSED, raw_ids

import torchrec_dyn as dyn

ROWS, DIM = 1000, 4
DYNAMIC = {
    "dynamic": dyn.DynamicTableConfig(),
    "policies": dyn.DynamicTableConfig(
        admission=dyn.AdmitAfter(2), eviction=dyn.LeastRecentlyUsed()
    ),
    "ages": dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(steps=1000)),
}


@dataclass(frozen=True)
class Host:
    """Tables of one collection, and the plan of all of them.

    Attributes:
        tables: number of tables, one feature each.
        plan: "table_wise" or "row_wise".
    """

    tables: int
    plan: str


def made(side: str, case: Host) -> DistributedModelParallel:
    """Makes and shards the model of a side: "static" or a name of DYNAMIC."""
    configs = [
        EmbeddingBagConfig(
            name=f"t{t}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f{t}"]
        )
        for t in range(case.tables)
    ]
    collection: Any
    sharder: Any
    if side == "static":
        collection = EmbeddingBagCollection(configs, device=torch.device("meta"))
        sharder = EmbeddingBagCollectionSharder(fused_params=dict(FUSED))
    else:
        collection = dyn.DynamicEmbeddingBagCollection(configs, dynamic=DYNAMIC[side])
        sharder = dyn.DynamicEmbeddingBagCollectionSharder(fused_params=dict(FUSED))
    is_whole = case.plan == "table_wise"
    kind = partial(table_wise, rank=0) if is_whole else row_wise
    plan = construct_module_sharding_plan(
        collection,
        {config.name: kind(compute_kernel="fused") for config in configs},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        torch.nn.Sequential(collection),
        device=CPU,
        plan=ShardingPlan({"0": plan}),
        sharders=[sharder],
    )


def batches(case: Host, raw: bool) -> list[KeyedJaggedTensor]:
    """Returns batches of HOST_BAGS bags, or of one bag a table if there are more tables; 1 or 2 ids a bag."""
    generator = torch.Generator().manual_seed(0)
    keys = [f"f{t}" for t in range(case.tables)]
    bags = case.tables * max(1, HOST_BAGS // case.tables)
    drawn = []
    for _ in range(4):
        lengths = torch.randint(1, 3, (bags,), generator=generator)
        rows = torch.randint(ROWS // 2, (int(lengths.sum()),), generator=generator)
        drawn.append(KeyedJaggedTensor(keys, raw_ids(rows) if raw else rows, lengths=lengths))
    return drawn


def copied(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a batch as a data loader makes it: without cached offsets and counts."""
    return KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths())


def steps_of(side: str, case: Host, steps: int) -> Callable[[int], None]:
    """Returns a function that runs the steps of one round of a side. All its ids have rows then."""
    model, drawn = made(side, case), batches(case, raw=side != "static")
    grad: list[Tensor] = []

    def turn(first: int) -> None:
        for step in range(first, first + steps):
            output = model(copied(drawn[step % len(drawn)])).values()
            if not grad:
                grad.append(torch.ones_like(output))
            output.backward(grad[0])

    # Every id twice: then AdmitAfter(2) has given all of them rows.
    for start in range(2 * len(drawn)):
        turn(start)
    return turn


def _clear(_: int) -> None:
    gc.collect()


def compared(name: str, case: Host, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Measures all sides of one case: a step, and making and sharding. Returns lines of results."""
    more = {"plan": case.plan, "ranks": 1}
    sides = {side: steps_of(side, case, steps) for side in ("static", *DYNAMIC)}
    seconds = measure(sides, rounds, clock="thread")
    more |= {"ns_per_step": summary(seconds, steps)}
    lines = [
        result(name, 1, "step", "static", ratio(seconds, "dynamic", "static"), **more),
        result(name, 1, "policies", "dynamic", ratio(seconds, "policies", "dynamic"), **more),
        result(name, 1, "ages", "dynamic", ratio(seconds, "ages", "dynamic"), **more),
    ]
    sides.clear()
    making = {
        side: lambda _, side=side: made(side, case) and None for side in ("static", "dynamic")
    }
    most = min(rounds, 3)
    seconds = measure(making, most, 0, clock="thread", before=_clear, collects=True)
    more |= {"ns_per_step": summary(seconds, 1)}
    seen = ratio(seconds, "dynamic", "static")
    return [*lines, result(name, 1, "make and shard", "static", seen, **more)]


def as_text(line: dict[str, Any]) -> str:
    """Formats one line of the table."""
    numbers = line["ns_per_step"].values()
    times = " ".join(f"{number['median_ns'] / 1e6:9.3f}" for number in numbers)
    seen = spread((line["ratio"], *line["ratio_quartiles"]))
    what = f"{line['what']} / {line['against']}"
    return f"{line['workload']:17} {line['plan']:11} {what:24} {seen:22} {times}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one table and writes it."""
    parser = options(__doc__, threads=[1])
    parser.set_defaults(rounds=60, clock="thread")
    parser.add_argument("--tables", type=int, nargs="+", default=list(HOST_TABLES))
    parser.add_argument("--plans", nargs="+", default=HOST_PLANS, choices=HOST_PLANS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    lines: list[dict[str, Any]] = []
    print(f"{'tables':17} {'plan':11} {'ratio of thread CPU time':47} ms of each side")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            for tables in arguments.tables:
                for plan in arguments.plans:
                    case = Host(min(tables, 3) if arguments.quick else tables, plan)
                    steps = 1 if arguments.quick else max(1, 40 // tables)
                    for line in compared(f"host-{tables}-tables", case, arguments.rounds, steps):
                        lines.append(line)
                        print(as_text(line), flush=True)
                    gc.collect()
        finally:
            dist.destroy_process_group()
    finish("host", lines, arguments)


if __name__ == "__main__":
    main()
