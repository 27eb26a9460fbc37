"""The workloads, written once: every benchmark takes its sizes from here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Workload:
    """A pooled batch over equal tables.

    Attributes:
        tables: number of tables, one feature each.
        rows: ids that each table knows.
        dim: columns of a row.
        batch: bags of a feature.
        bag: ids of a bag.
        zipf: exponent of the ids' distribution; 0 is uniform.
    """

    name: str
    tables: int = 8
    rows: int = 1_000_000
    dim: int = 64
    batch: int = 4096
    bag: int = 10
    zipf: float = 0.0

    @property
    def ids_per_step(self) -> int:
        """Ids of one batch."""
        return self.tables * self.batch * self.bag


# The workload of DESIGN section 4, uniform and skewed.
POOLED = (
    Workload("pooled-uniform"),
    Workload("pooled-zipf1.05", zipf=1.05),
)
ONE_HOT = tuple(
    Workload(f"onehot-dim{dim}", tables=26, rows=100_000, dim=dim, batch=2048, bag=1, zipf=1.05)
    for dim in (16, 64, 128)
)


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


# End to end (bench_train.py): `batch` is of one rank.
TRAIN = (
    Workload("train-onehot", tables=26, rows=100_000, batch=2048, bag=1, zipf=1.05),
    Workload("train-10hot", batch=2048),
)
