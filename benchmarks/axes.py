"""The workloads and axes, written once: every benchmark takes its sizes from here."""

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
        tables: number of tables, one feature each.
        rows: ids that each table knows.
        dim: columns of a row.
        batch: bags of a feature.
        bag: ids of a bag.
        zipf: exponent of the ids' distribution; 0 is uniform.
        pooled: whether the ids of a bag are summed; a sequence keeps them.
    """

    name: str
    tables: int = 8
    rows: int = 1_000_000
    dim: int = 64
    batch: int = 4096
    bag: int = 10
    zipf: float = 0.0
    pooled: bool = True

    @property
    def ids_per_step(self) -> int:
        """Ids of one batch."""
        return self.tables * self.batch * self.bag

    @property
    def copies(self) -> bool:
        """Whether the forward gives back every row it reads, so that its floor is a copy."""
        return not self.pooled or self.bag == 1


# The workload of DESIGN section 4, uniform and skewed.
POOLED = (
    Workload("pooled-uniform"),
    Workload("pooled-zipf1.05", zipf=1.05),
)
ONE_HOT = tuple(
    Workload(f"onehot-dim{dim}", tables=26, rows=100_000, dim=dim, batch=2048, bag=1, zipf=1.05)
    for dim in (16, 64, 128)
)
SEQUENCE = (Workload("sequence", tables=4, batch=512, bag=50, pooled=False),)
# Rows of half the bytes against ours in float32.
HALF = tuple(Workload(f"half-dim{dim}", tables=4, dim=dim) for dim in (64, 128))

THREADS = (2, 1)

# bench_sweep.py: one axis moves, the others stay as in POOLED[0]; ids a step stay about equal.
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


def full_table(limit: int, zipf: float) -> Workload:
    """Batches over one full table, of whose rows the stream comes back to half.

    Args:
        limit: its rows.
        zipf: exponent of the known ids' distribution.
    """
    name = f"full {limit} " + (f"zipf{zipf:g}" if zipf else "uniform")
    return Workload(name, tables=1, rows=limit // 2, zipf=zipf)


def tiny(workload: Workload) -> Workload:
    """The workload in a size that runs in a moment, for tests of the benchmarks themselves."""
    return replace(workload, tables=2, rows=500, batch=16, bag=min(workload.bag, 3))


def raw_ids(numbers: Tensor) -> Tensor:
    """Makes 64-bit ids of the numbers 0, 1, 2, ..., scattered as hashed features are.

    Not `unmix64(numbers)`: the map mixes ids, numbers in a row would come back, and their home slots are
    spread more evenly than any real ids' (a mean probe of 1.07 slots at a load of 0.75 instead of 2.5).

    Args:
        numbers: [N] int64.
    """
    return mix64(numbers)


def ranks(workload: Workload, batches: int, seed: int) -> list[Tensor]:
    """Draws batches of known-row numbers in [0, rows), [ids_per_step] int64 each, table-major.

    The skewed ones follow a Zipf law by its inverse distribution function over the rows.
    """
    generator = np.random.default_rng(seed)
    if workload.zipf == 0.0:
        draws = generator.integers(0, workload.rows, (batches, workload.ids_per_step))
    else:
        mass = np.arange(1, workload.rows + 1, dtype=np.float64) ** -workload.zipf
        cumulative = np.cumsum(mass) / mass.sum()
        uniform = generator.random((batches, workload.ids_per_step))
        draws = np.minimum(np.searchsorted(cumulative, uniform), workload.rows - 1)
    # Popular rows are anywhere in a real table, not first: shuffle which rank is which row.
    shuffle = generator.permutation(workload.rows)
    return [torch.from_numpy(shuffle[batch].astype(np.int64)) for batch in draws]


def offsets(workload: Workload) -> Tensor:
    """Returns the bag offsets of one batch, [tables * batch + 1] int64."""
    return torch.arange(workload.tables * workload.batch + 1) * workload.bag


def counts(workload: Workload) -> list[int]:
    """Returns the ids of each feature, [tables]: who has checked the offsets passes them on."""
    return [workload.batch * workload.bag] * workload.tables


# End to end (bench_train.py): `batch` is of one rank.
TRAIN = (
    Workload("train-onehot", tables=26, rows=100_000, batch=2048, bag=1, zipf=1.05),
    Workload("train-10hot", batch=2048),
)

# bench_serving.py: requests of so many examples; the processes of one directory share so many rows.
SERVING = tuple(
    Workload(f"serving-{'zipf1.05' if zipf else 'uniform'}", tables=4, zipf=zipf)
    for zipf in (0.0, 1.05)
)
SERVING_BATCHES = (1, 32, 512)
SHARED_ROWS = 4_000_000
