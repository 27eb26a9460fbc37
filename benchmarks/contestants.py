"""The two sides of the comparisons: FBGEMM's static CPU tables and dynamic tables, with all rows written."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from axes import Workload, raw_ids
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from layouts import TableGroup, TableShard
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

LEARNING_RATE, EPS = 0.02, 1e-8
OPTIMIZER = RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, LEARNING_RATE, EPS)


def huge_memory(size: int) -> Tensor:
    """Returns memory [size] uint8 on 2 MiB pages, as the kernel has them; `size` is greater than 0."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def static_tables(
    workload: Workload,
    huge_pages: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Returns FBGEMM's tables; every row and every optimizer state is written.

    Args:
        workload: sizes of the tables.
        huge_pages: True to move them to 2 MiB pages; dynamic tables request such pages, FBGEMM does not.
        dtype: float32 or float16, of the rows; outputs are float32.
        device: "cpu" or "cuda".
    """
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    if device == "cuda":
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(workload.rows, workload.dim, *place) for _ in range(workload.tables)],
        weights_precision=SparseType.from_dtype(dtype),
        output_dtype=SparseType.FP32,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        pooling_mode=PoolingMode.SUM if workload.pooled else PoolingMode.NONE,
        device=torch.device(device),
    )
    if huge_pages:
        for held in (tables.weights_host, tables.momentum1_host):
            held.data = huge_memory(held.nbytes).view(held.dtype)
    for weights in tables.split_embedding_weights():
        weights.uniform_(-0.001, 0.001)
    for states in tables.split_optimizer_states():
        for state in states:
            state.fill_(0.0)
    return tables


def empty_table(name: str, rows: int, dim: int, dtype: torch.dtype = torch.float32) -> TableShard:
    """Returns a dynamic table without rows; its limit is 4 times `rows`."""
    return TableShard(
        name=name,
        num_embeddings=4 * rows,
        embedding_dim=dim,
        optimizer=OPTIMIZER,
        config=DynamicTableConfig(),
        dtype=dtype,
    )


def dynamic_tables(workload: Workload, dtype: torch.dtype = torch.float32) -> TableGroup:
    """Returns dynamic tables with every id inserted at once; the maps are then near their highest load."""
    tables = []
    for t in range(workload.tables):
        table = empty_table(f"table{t}", workload.rows, workload.dim, dtype)
        table.find_or_insert(raw_ids(torch.arange(workload.rows)))
        tables.append(table)
    return TableGroup(tables, [1] * workload.tables, "sum" if workload.pooled else "none")


def output_grad(workload: Workload) -> Tensor:
    """Returns a gradient of the output: [batch, tables * dim], or [N, dim] for a sequence."""
    if workload.pooled:
        return torch.randn(workload.batch, workload.tables * workload.dim) * 1e-3
    return torch.randn(workload.ids_per_step, workload.dim) * 1e-3


def forward_of(lookup: Callable[[int], Tensor], batches: int) -> Callable[[int], None]:
    """Returns a contestant: the forward of a lookup alone."""

    def forward(turn: int) -> None:
        with torch.no_grad():
            lookup(turn % batches)

    return forward


def step_of(lookup: Callable[[int], Tensor], batches: int, grad: Tensor) -> Callable[[int], None]:
    """Returns a contestant: forward, backward and update of a lookup.

    Args:
        lookup: number of a batch -> output.
        batches: number of batches.
        grad: gradient of the output.
    """

    def step(turn: int) -> None:
        lookup(turn % batches).backward(grad)

    return step
