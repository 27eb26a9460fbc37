"""Formulas of memory, traffic and files of a large job, and the tables of docs/dev/scale.md that they print.

    python benchmarks/scale_formulas.py

Each formula is for one row-wise table.
Bytes on the wire are those that a rank sends to other ranks through collectives, as TorchRec calls them; what
the network adds, and how it routes a collective, is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_dyn import knobs
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.planner import TableSize, table_size
from torchrec_dyn.ranks import row_limit

ID_BYTES, STATE_BYTES, SCORE_BYTES = 8, 4, 16
ARCHIVE = 1_300  # bytes of a chunk in a file of DCP, beside its numbers


@dataclass(frozen=True)
class Job:
    """One row-wise table of a job, with rows of float32.

    Attributes:
        rows: rows over all ranks.
        ranks: number of ranks.
        columns: columns of a row.
        optimizer: optimizer of the rows.
        bags: bags of a rank and step.
        bag: ids of a bag.
    """

    rows: int
    ranks: int
    columns: int
    optimizer: RowOptimizer
    bags: int = 4096
    bag: int = 10

    @property
    def state_columns(self) -> int:
        """Numbers of optimizer state a row."""
        return sum(self.optimizer.state_columns(self.columns))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a checkpoint or in a move: id, row and optimizer state."""
        return ID_BYTES + 4 * self.columns + STATE_BYTES * self.state_columns

    @property
    def tensors(self) -> int:
        """Number of tensors by row in a checkpoint: ids, weight, optimizer states."""
        return 2 + len(self.optimizer.state_names)


def memory(job: Job, deltas: bool = True) -> TableSize:
    """Returns the most bytes of the fullest rank's shard, part by part."""
    here = row_limit(job.rows, job.ranks)
    return table_size(here, job.columns, torch.float32, job.optimizer, deltas=deltas)


def wire_pooled(job: Job, length_bytes: int = 8) -> dict[str, float]:
    """Returns the bytes that a rank sends in a step of a pooled collection.

    Every rank returns a sum for each bag of all ranks, and gets a gradient for each.
    """
    others = job.ranks - 1
    ids = ID_BYTES * job.bags * job.bag * others / job.ranks
    pooled = 4.0 * job.columns * job.bags * others
    return {
        "ids and lengths": ids + length_bytes * job.bags * others,
        "pooled rows": pooled,
        "gradients": pooled,
    }


def wire_sequence(job: Job, sent: float, length_bytes: int = 8) -> dict[str, float]:
    """Returns the bytes that a rank sends in a step of a sequence collection.

    Args:
        job: the job.
        sent: ids that a rank sends to owners, itself included: with `use_index_dedup` the distinct ids of
            its batch.
        length_bytes: bytes of a length of the batch.
    """
    others = job.ranks - 1
    rows = 4 * job.columns * sent * others / job.ranks
    return {
        "ids and lengths": ID_BYTES * sent * others / job.ranks + length_bytes * job.bags * others,
        "rows": rows,
        "gradients": rows,
    }


def chunks(job: Job, rows: int | None = None) -> int:
    """Returns the number of chunks of the rows of all ranks in a checkpoint."""
    here = math.ceil((job.rows if rows is None else rows) / job.ranks)
    widths = [ID_BYTES, 4 * job.columns]
    widths += [STATE_BYTES * width for width in job.optimizer.state_columns(job.columns)]
    return job.ranks * sum(
        math.ceil(here / max(1, knobs.SAVED_CHUNK_BYTES // width)) for width in widths
    )


def checkpoint_bytes(job: Job) -> int:
    """Returns the bytes of a full save on the disk."""
    return job.rows * job.row_bytes + chunks(job) * ARCHIVE


def delta_bytes(job: Job, changed: int, removed: int = 0) -> int:
    """Returns the bytes of a delta on the disk."""
    return changed * job.row_bytes + removed * ID_BYTES + chunks(job, changed) * ARCHIVE


def distinct(ids: float, exponent: float, draws: float) -> float:
    """Returns the expected number of distinct ids in a number of draws.

    The k-th of the ids has a probability proportional to k^-exponent (Zipf). Sums over k are integrals from
    the thousandth id on, over bins of equal ratio.
    """
    head = min(1000.0, ids)
    points = [float(k) for k in range(1, int(head) + 1)]
    sizes = [1.0] * len(points)
    bins = 2000 if ids > head else 0
    ratio = (ids / head) ** (1 / bins) if bins else 1.0
    for number in range(bins):
        low = (head + 0.5) * ratio**number if number else head + 0.5
        high = min((head + 0.5) * ratio ** (number + 1), ids + 0.5)
        points.append(math.sqrt(low * high))
        sizes.append(high - low)
    weights = [point**-exponent for point in points]
    total = sum(weight * size for weight, size in zip(weights, sizes, strict=True))
    return sum(
        -size * math.expm1(draws * math.log1p(-min(weight / total, 1 - 1e-15)))
        for weight, size in zip(weights, sizes, strict=True)
    )


def moved(before: Sequence[int], after: Sequence[int]) -> float:
    """Returns the part of a table's rows that changes its rank, from some ranks in order to others."""
    stays = 0.0
    for part, rank in enumerate(before):
        if rank in after:
            other = after.index(rank)
            low = max(part / len(before), other / len(after))
            stays += max(0.0, min((part + 1) / len(before), (other + 1) / len(after)) - low)
    return 1 - stays


def replan_bytes(job: Job, before: Sequence[int], after: Sequence[int]) -> float:
    """Returns the bytes that all ranks together send to others when a table moves."""
    return moved(before, after) * job.rows * job.row_bytes


def restore_bytes(job: Job, ranks: int, changed: Sequence[int] = ()) -> tuple[float, float]:
    """Returns the bytes that a rank reads from a full save and deltas: its rows, and the most beside them.

    DCP reads whole chunks, so a rank reads up to a chunk too much at either end of each tensor.

    Args:
        job: the job that saved.
        ranks: ranks that restore.
        changed: number of rows of each delta.
    """
    own = (job.rows + sum(changed)) * job.row_bytes / ranks
    return own, 2.0 * knobs.SAVED_CHUNK_BYTES * job.tensors * (1 + len(changed))


def seconds(nbytes: float, ranks: int, disk: float, host: float) -> float:
    """Returns the seconds in which all ranks together write or read bytes.

    Args:
        nbytes: bytes over all ranks.
        ranks: number of ranks.
        disk: bytes a second of the file system, over all ranks.
        host: bytes a second of one rank.
    """
    return nbytes / min(disk, ranks * host)


ADAGRAD = RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD)
ADAM = RowOptimizer(OptimizerKind.ADAM)
JOBS = {
    "64 columns, row-wise Adagrad": Job(10**10, 1024, 64, ADAGRAD),
    "128 columns, Adam": Job(10**10, 1024, 128, ADAM),
}
# What a reader has to replace: measured in docs/guide/save/operations.md, or an example.
DISK, LINK = 200e9, 25e9  # bytes a second: a file system, a rank's link
SAVE, LOAD = 0.58e9, 0.56e9  # bytes a second of a rank with one thread, page 'Checkpoint costs'
STEPS_AN_HOUR, EXPONENT = 7200, 1.05


def _line(name: str, values: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(values)} |"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3g} GB" if nbytes < 1e12 else f"{nbytes / 1e12:,.3g} TB"


def tables() -> list[str]:
    """Returns the lines of the tables of docs/scale.md."""
    lines = ["| | " + " | ".join(JOBS) + " |", "|---|" + "---|" * len(JOBS)]
    of_jobs: dict[str, list[str]] = {}

    def add(name: str, value: str) -> None:
        of_jobs.setdefault(name, []).append(value)

    for job in JOBS.values():
        size, ranks = memory(job), job.ranks
        add("memory of the fullest rank", _gb(size.total))
        add("of it rows and optimizer state", _gb(size.weights + size.optimizer_state))
        add("of it id map; record of changes", f"{_gb(size.id_map)}; {_gb(size.marks)}")
        pooled = sum(wire_pooled(job).values())
        add("pooled: sent by a rank in a step", _gb(pooled))
        add("pooled: seconds of the link", f"{pooled / LINK:.2g} s")
        lookups = job.bags * job.bag
        sent = distinct(job.rows, EXPONENT, lookups)
        sequence = sum(wire_sequence(job, lookups).values())
        once = sum(wire_sequence(job, sent).values())
        add("sequence: sent by a rank in a step", _gb(sequence))
        add("sequence, each id once", _gb(once))
        whole = checkpoint_bytes(job)
        add("full save", _gb(whole))
        add("its chunks", f"{chunks(job):,}")
        add("seconds of the full save", f"{seconds(whole, ranks, DISK, SAVE):.3g} s")
        changed = int(distinct(job.rows, EXPONENT, lookups * ranks * STEPS_AN_HOUR))
        delta = delta_bytes(job, changed)
        add("rows changed in an hour", f"{changed:.2e}")
        add("delta of an hour", _gb(delta))
        add("delta of five minutes", _gb(delta_bytes(job, _changed(job, 1 / 12))))
        node = list(range(8))
        replan = replan_bytes(job, range(ranks), node)
        add("move to the 8 ranks of one node, all ranks together", _gb(replan))
        left = ranks - 8
        own, beside = restore_bytes(job, left)
        add(f"restore on {left:,} ranks: read by a rank", f"{_gb(own)}, at most {_gb(beside)} more")
        took = seconds(own * left, left, DISK, LOAD)
        add("seconds of the restore", f"{took:.3g} s")
    return [*lines, *(_line(name, values) for name, values in of_jobs.items())]


def _changed(job: Job, hours: float) -> int:
    draws = job.bags * job.bag * job.ranks * STEPS_AN_HOUR * hours
    return int(distinct(job.rows, EXPONENT, draws))


if __name__ == "__main__":
    print("\n".join(tables()))
