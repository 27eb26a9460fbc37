"""Dynamic tables against FBGEMM's static CPU TBE: the same rows, the static side's ids already mapped.

    python benchmarks/bench_lookup.py [--rounds 9] [--threads 1 2] [--only pooled-uniform]

Forward, and whole step (forward, backward, row-wise Adagrad), in nanoseconds an id. Ours includes the hash
probe. Also printed: a bare gather of the same rows by torch's index_select, as a plain yardstick.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from axes import ONE_HOT, POOLED, Workload, offsets, ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from interleaved import measure, ratio, summary, write_results
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.ops import unmix64
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.table import DynamicTable

LEARNING_RATE, EPS = 0.02, 1e-8


def static_tables(workload: Workload) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Makes FBGEMM's CPU tables and touches every row."""
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (workload.rows, workload.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for _ in range(workload.tables)
        ],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        pooling_mode=PoolingMode.SUM,
        device=torch.device("cpu"),
    )
    for weights in tables.split_embedding_weights():
        weights.uniform_(-0.001, 0.001)
    return tables


def dynamic_tables(workload: Workload) -> TableGroup:
    """Makes our tables and inserts every id (raw ids: scattered 64-bit numbers)."""
    optimizer = RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, LEARNING_RATE, EPS)
    tables = []
    for t in range(workload.tables):
        table = DynamicTable(
            name=f"table{t}",
            num_embeddings=4 * workload.rows,
            embedding_dim=workload.dim,
            optimizer=optimizer,
            config=DynamicTableConfig(),
        )
        table.find_or_insert(unmix64(torch.arange(workload.rows)))
        tables.append(table)
    return TableGroup(tables, [1] * workload.tables, "sum")


def contestants(
    workload: Workload, batches: int
) -> tuple[dict[str, Callable[[int], None]], dict[str, Callable[[int], None]]]:
    """Returns the forward and the whole step of both sides."""
    mapped = ranks(workload, batches, seed=0)
    raw = [unmix64(batch) for batch in mapped]
    bag_offsets = offsets(workload)
    static, dynamic = static_tables(workload), dynamic_tables(workload)
    grad = torch.randn(workload.batch, workload.tables * workload.dim) * 1e-3
    flat = torch.randn(workload.rows, workload.dim)

    def run(lookup: Callable[[int], Tensor], learn: bool) -> Callable[[int], None]:
        def step(turn: int) -> None:
            if learn:
                lookup(turn % batches).backward(grad)
            else:
                with torch.no_grad():
                    lookup(turn % batches)

        return step

    def ours(i: int) -> Tensor:
        return dynamic(raw[i], bag_offsets, training=True)

    def theirs(i: int) -> Tensor:
        return static(mapped[i], bag_offsets)

    forward = {
        "dynamic": run(ours, False),
        "static": run(theirs, False),
        "index_select": lambda turn: (flat.index_select(0, mapped[turn % batches]), None)[1],
    }
    return forward, {"dynamic": run(ours, True), "static": run(theirs, True)}


def main() -> None:
    """Runs the workloads and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--only", nargs="+", help="names of workloads")
    arguments = parser.parse_args()
    rows = []
    print(
        f"{'workload':18} {'threads':>7} {'what':8} {'ours ns/id':>10} {'static':>8} {'gather':>8}"
        "  ratio [quartiles]"
    )
    for workload in (*POOLED, *ONE_HOT):
        if arguments.only and workload.name not in arguments.only:
            continue
        forward, step = contestants(workload, batches=8)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for what, sides in (("forward", forward), ("step", step)):
                seconds = measure(sides, arguments.rounds)
                numbers = summary(seconds, workload.ids_per_step)
                median, low, high = ratio(seconds, "static", "dynamic")
                gather = numbers.get("index_select", {}).get("median_ns", float("nan"))
                print(
                    f"{workload.name:18} {threads:7} {what:8} {numbers['dynamic']['median_ns']:10.1f} "
                    f"{numbers['static']['median_ns']:8.1f} {gather:8.1f}"
                    f"  {median:.2f}x [{low:.2f}, {high:.2f}]"
                )
                rows.append(
                    {"workload": workload.name, "threads": threads, "what": what,
                     "ratio": median, "ratio_quartiles": [low, high], "ns_per_id": numbers}
                )  # fmt: skip
        del forward, step
    print(f"written: {write_results('lookup', rows)}")


if __name__ == "__main__":
    main()
