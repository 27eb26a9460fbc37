"""Workloads and axes: all benchmarks take their sizes from here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from torchrec_dyn.ops import mix64


@dataclass(frozen=True)
class Workload:
    """A batch over equal tables.

    Attributes:
        name: name in the results.
        tables: number of tables, one feature each.
        rows: known ids of each table.
        dim: columns of a row.
        batch: bags per feature.
        bag: ids per bag.
        zipf: exponent of the ids' distribution; 0 is uniform.
        pooled: True if the rows of a bag are summed; False for a sequence, which keeps them.
        drift: places of the popularity ranking by which its head moves on from batch to batch.
    """

    name: str
    tables: int = 8
    rows: int = 1_000_000
    dim: int = 64
    batch: int = 4096
    bag: int = 10
    zipf: float = 0.0
    pooled: bool = True
    drift: int = 0

    @property
    def ids_per_step(self) -> int:
        """Number of ids in one batch."""
        return self.tables * self.batch * self.bag

    @property
    def copies(self) -> bool:
        """True if the forward returns every row it reads; its floor is then a copy."""
        return not self.pooled or self.bag == 1


# The main workload, uniform and skewed.
POOLED = (
    Workload("pooled-uniform"),
    Workload("pooled-zipf1.05", zipf=1.05),
)
ONE_HOT = tuple(
    Workload(f"onehot-dim{dim}", tables=26, rows=100_000, dim=dim, batch=2048, bag=1, zipf=1.05)
    for dim in (16, 64, 128)
)
SEQUENCE = (Workload("sequence", tables=4, batch=512, bag=50, pooled=False),)
# float16 and bfloat16 rows against dynamic tables in float32.
HALF = tuple(Workload(f"half-dim{dim}", tables=4, dim=dim) for dim in (64, 128))

THREADS = (2, 1)

# bench_sweep.py: one axis changes, the others stay as in POOLED[0]; the ids per step stay about equal.
SWEEP_ROWS = (1_000, 10_000, 100_000, 300_000, 1_000_000, 2_000_000)
SWEEP_ZIPF = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
SWEEP_BAG = (1, 2, 5, 10, 20, 50, 100)

# bench_id_map.py
MAP_IDS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
MAP_LOADS = (0.1, 0.25, 0.5, 0.625, 0.75, 0.9)
MAP_HIT_RATES = (1.0, 0.5, 0.0)
MAP_QUERIES = 65_536

# bench_growth.py
GROWTH_STEP = 40_960
GROWTH_ROWS = 20_000_000
GROWTH_MARKS = (100_000, 1_000_000, 20_000_000)

# bench_eviction.py
EVICTION_ROWS = (1_000_000, 10_000_000)
FULL_ZIPF = (0.0, 1.05)
LOGGED = Workload("logged", tables=2)
LOGGED_EVERY = 100

# bench_delta.py
DELTA_ROWS = (250_000, 1_000_000, 4_000_000)
DELTA_CHANGED = 10_000
DELTA = Workload("delta", tables=1)
DELTA_ZIPF = (0.0, 1.05)


def full_table(limit: int, zipf: float) -> Workload:
    """Returns a workload of one full table: its known ids are half of the rows.

    Args:
        limit: limit of the table.
        zipf: exponent of the known ids' distribution.
    """
    name = f"full {limit} " + (f"zipf{zipf:g}" if zipf else "uniform")
    return Workload(name, tables=1, rows=limit // 2, zipf=zipf)


def tiny(workload: Workload) -> Workload:
    """Returns a tiny version of a workload, for tests of the benchmarks."""
    drift = min(workload.drift, 5)
    return replace(workload, tables=2, rows=500, batch=16, bag=min(workload.bag, 3), drift=drift)


def raw_ids(numbers: Tensor) -> Tensor:
    """Returns 64-bit ids for the numbers 0, 1, 2, ..., scattered like hashed features.

    Not `unmix64(numbers)`: the map mixes ids, so it would see consecutive numbers, and their home slots
    would be spread more evenly than the home slots of real ids (a mean probe of 1.07 slots at a load of
    0.75 instead of 2.5).

    Args:
        numbers: [N] int64.
    """
    return mix64(numbers)


def ranks(workload: Workload, batches: int, seed: int) -> list[Tensor]:
    """Draws batches of numbers of known rows in [0, rows), [ids_per_step] int64 each, table-major.

    Skewed numbers follow a Zipf law: they are drawn by its inverse distribution function over the rows.
    """
    generator = np.random.default_rng(seed)
    if workload.zipf == 0.0:
        draws = generator.integers(0, workload.rows, (batches, workload.ids_per_step))
    else:
        mass = np.arange(1, workload.rows + 1, dtype=np.float64) ** -workload.zipf
        cumulative = np.cumsum(mass) / mass.sum()
        uniform = generator.random((batches, workload.ids_per_step))
        draws = np.minimum(np.searchsorted(cumulative, uniform), workload.rows - 1)
    if workload.drift:
        draws = (draws + np.arange(batches)[:, None] * workload.drift) % workload.rows
    # Popular rows are anywhere in a real table, not at its start: each popularity rank gets a random row.
    shuffle = generator.permutation(workload.rows)
    return [torch.from_numpy(shuffle[batch].astype(np.int64)) for batch in draws]


def offsets(workload: Workload) -> Tensor:
    """Returns the bag offsets of one batch, [tables * batch + 1] int64."""
    return torch.arange(workload.tables * workload.batch + 1) * workload.bag


def counts(workload: Workload) -> list[int]:
    """Returns the number of ids of each feature, [tables], to pass beside the offsets of one batch."""
    return [workload.batch * workload.bag] * workload.tables


# bench_train.py, end to end: `batch` is the batch of one rank. Workloads of equal tables share their models.
TRAIN = tuple(
    replace(one, name=f"{one.name}-{'zipf1.05' if zipf else 'uniform'}", zipf=zipf)
    for one in (
        Workload("train-10hot", batch=2048),
        Workload("train-onehot", tables=26, rows=100_000, batch=2048, bag=1),
        Workload("train-sequence", tables=4, batch=512, bag=50, pooled=False),
    )
    for zipf in (0.0, 1.05)
)

# bench_host.py: a step of about HOST_BAGS bags; with more tables, of one bag a table.
HOST_TABLES = (2, 20, 200, 1000)
HOST_PLANS = ("table_wise", "row_wise")
HOST_BAGS = 64

# bench_serving.py: examples per request, and rows of the table that two processes share.
SERVING = tuple(
    Workload(f"serving-{'zipf1.05' if zipf else 'uniform'}", tables=4, zipf=zipf)
    for zipf in (0.0, 1.05)
)
SERVING_BATCHES = (1, 32, 512)
SHARED_ROWS = 4_000_000

# bench_gpu.py: sizes of maps, and steps of about GPU_IDS_A_STEP ids. One axis changes at a time.
GPU_IDS = (1_000_000, 10_000_000, 100_000_000)
GPU_IDS_A_STEP = 2_621_440  # 8 tables, 32,768 bags of 10 ids
GPU_ZIPF = (0.0, 1.05)


def gpu_step(dim: int = 64, bag: int = 10, rows: int = 1_000_000, zipf: float = 0.0) -> Workload:
    """Returns a workload of bench_gpu.py. With 100M rows it has one table, for two sides must fit."""
    tables = 8 if rows < 100_000_000 else 1
    name = f"{tables} x {rows // 1_000_000}M x {dim}, bag {bag}, "
    name += f"zipf{zipf:g}" if zipf else "uniform"
    return Workload(name, tables, rows, dim, GPU_IDS_A_STEP // (tables * bag), bag, zipf)


# Both distributions use the same tables.
GPU_STEPS = tuple(
    tuple(gpu_step(**axis, zipf=zipf) for zipf in GPU_ZIPF)
    for axis in (
        {}, {"dim": 32}, {"dim": 128}, {"dim": 256}, {"bag": 1}, {"bag": 50},
        {"rows": 10_000_000}, {"rows": 100_000_000},
    )
)  # fmt: skip
GPU_HALF = tuple(tuple(gpu_step(dim=dim, zipf=zipf) for zipf in GPU_ZIPF) for dim in (64, 128))
GPU_HOST = Workload("host-10-tables", tables=10, rows=64, batch=64, bag=1)

# bench_gpu_train.py: as TRAIN, with larger batches.
GPU_TRAIN = tuple(
    replace(one, name=f"{one.name}-{'zipf1.05' if zipf else 'uniform'}", zipf=zipf)
    for one in (
        Workload("gpu-train-10hot", batch=32_768),
        Workload("gpu-train-onehot", tables=26, batch=32_768, bag=1),
        Workload("gpu-train-sequence", tables=4, batch=8192, bag=50, pooled=False),
    )
    for zipf in GPU_ZIPF
)

# bench_host_memory.py: streams over one table, and the parts of its rows that fit into the GPU's memory.
HOST_MEMORY = tuple(
    Workload(name, tables=1, batch=8192, bag=8, zipf=zipf, drift=drift)
    for name, zipf, drift in (("zipf", 1.05, 0), ("drift", 1.05, 1000), ("uniform", 0.0, 0))
)
HOST_MEMORY_PARTS = (1, 4, 10)
HOST_COPY_BYTES = (64, 256, 512)
HOST_COPY_ROWS = (10_000, 100_000, 1_000_000)
