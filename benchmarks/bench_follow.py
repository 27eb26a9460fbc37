"""From a trained row to a served row: a delta, and a follower that applies it.

    OMP_NUM_THREADS=2 python benchmarks/bench_follow.py [--rounds 9] [--threads 2] [--folder /tmp]

One table of a million rows of 64 columns in float32, row-wise Adagrad. Each round trains 10,000 rows, saves a
delta (Checkpoints.save), applies it to the served tables (Follower.poll) and changes a reader to it
(refresh), in one process. The whole begins when the rows are trained and ends when the reader reads them.
Trainer, follower and reader of a real job are processes of their own, and the follower looks every few
seconds: add half of that. Prints seconds: the median and quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from axes import SERVING, raw_ids
from bench_serving import configs
from interleaved import CLOCKS, finish, options, quartiles
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import Checkpoints

ROWS, CHANGED = 1_000_000, 10_000
PARTS = ("save", "poll", "refresh", "row trained to row served")
WORKLOAD = "a hundredth of a million rows"


class Sides:
    """A trainer with its directory of checkpoints, a follower, and a reader of what is served."""

    def __init__(self, rows: int, folder: Path) -> None:
        shape = replace(SERVING[0], tables=1, rows=rows)
        self.model = nn.Module()
        self.model.sparse = dyn.DynamicEmbeddingBagCollection(
            configs(shape), fused_params={"optimizer": "EXACT_ROWWISE_ADAGRAD"}
        )
        self.ids = raw_ids(torch.arange(rows))
        weights = torch.randn(rows, shape.dim) * 0.05
        self.model.sparse.table("t0").assign(self.ids, weights)
        self.checkpoints = Checkpoints(folder / "checkpoints", full_every=1 << 30)
        self.follower = serving.Follower(folder / "checkpoints", folder / "served")
        self.step = 0
        self.save()
        self.follower.poll()
        self.served = serving.ServingEmbeddingBagCollection(folder / "served", configs(shape))

    def save(self) -> None:
        """Saves an entry."""
        self.step += 1
        self.checkpoints.save(self.model, self.model.sparse.fused_optimizer, step=self.step)

    def round(self, changed: int, clock: str) -> dict[str, float]:
        """Trains rows and serves them; returns the seconds of each part."""
        chosen = self.ids[torch.randperm(len(self.ids))[:changed]]
        batch = KeyedJaggedTensor(["f0"], chosen, lengths=torch.ones_like(chosen))
        self.model.sparse(batch).values().sum().backward()
        now = CLOCKS[clock]
        moments = [now()]
        self.save()
        moments.append(now())
        followed = self.follower.poll()
        moments.append(now())
        self.served.refresh()
        read = self.served(batch).values()
        moments.append(now())
        assert followed is not None and followed.changed is not None
        assert len(followed.changed["t0"]) == changed
        with torch.no_grad():
            assert torch.equal(read, self.model.sparse.eval()(batch).values())
        self.model.sparse.train()
        parts = [b - a for a, b in pairwise(moments)]
        return dict(zip(PARTS, [*parts, moments[-1] - moments[0]], strict=True))


def measured(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures all rounds; prints and returns the results."""
    rows, changed = (5000, 50) if arguments.quick else (ROWS, CHANGED)
    sides = Sides(rows, folder)
    lines = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        rounds = [sides.round(changed, arguments.clock) for _ in range(2 + arguments.rounds)][2:]
        for part in PARTS:
            seen = quartiles([one[part] for one in rounds])
            text = " {:.3f} [{:.3f}, {:.3f}]".format(*seen)
            print(f"{WORKLOAD}  {threads}  {part:26}{text}")
            lines.append(
                {"workload": WORKLOAD, "threads": threads, "what": part,
                 "rows": rows, "seconds": seen[0], "seconds_quartiles": seen[1:]}
            )  # fmt: skip
    sides.checkpoints.close()
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints one table."""
    parser = options(__doc__, (2,))
    parser.add_argument("--folder", type=Path, help="where to put checkpoints and served tables")
    arguments = parser.parse_args(argv)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        warnings.simplefilter("ignore")  # of DCP: there is one process
        print("workload, threads, part, seconds")
        rows = measured(arguments, Path(name))
    finish("follow", rows, arguments)


if __name__ == "__main__":
    main()
