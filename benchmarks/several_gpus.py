"""Sharded collections on several GPUs over nccl have the results of the CPU over gloo.

    python benchmarks/several_gpus.py [--world 2] [--only "row_wise" "reshard"] [--device cpu]

One process a GPU, then one a rank on the CPU, train the same cases (tests/support/checkpoint_cases.py, whose
gradients have exact sums): every plan, policies, ids sent once, edits, `reshard`, checkpoints. Trained rows,
optimizer state and scores are equal to the bit, and so are outputs, but where ranks add parts of them
(docs/design.md, Determinism). Prints a line for each case, and ends with 1 if one differs.

`--device cpu` tests that it runs: both sides are on the CPU. From 4 ranks on, two ranks are a node.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests/support"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from checkpoint_cases import (  # noqa: E402
    LOCAL_SIZES,
    Setup,
    batch,
    held,
    optimizer_of,
    quietly,
    same_bits,
    tables_of,
    train,
)
from life_cases import COUNTS  # noqa: E402
from parts.devices import backend_for, missing_for_cuda  # noqa: E402
from sharded_cases import POOLED, SEQUENCE, SPREAD_ROWS, Case  # noqa: E402
from sharded_training import collection_of, shard  # noqa: E402
from torch import multiprocessing  # noqa: E402

import torchrec_dyn as dyn  # noqa: E402
from torchrec_dyn.checkpoint import Checkpoints  # noqa: E402

ROUNDING = 1e-5
RECENT = dyn.LeastRecentlyUsed()
# Each evicts in tables of FEW rows.
LIVES = (
    dyn.DynamicTableConfig(eviction=RECENT),
    dyn.DynamicTableConfig(eviction=dyn.LeastFrequentlyUsed(half_life_steps=2)),
    dyn.DynamicTableConfig(eviction=RECENT, admission=dyn.AdmitAfter(2)),
    dyn.DynamicTableConfig(eviction=(dyn.ExpireAfter(steps=1), RECENT)),
    dyn.DynamicTableConfig(
        eviction=dyn.LeastFrequentlyUsed(), admission=dyn.AdmitWithProbability(0.7)
    ),
)
FEW = 26
Results = dict[str, torch.Tensor]
Run = Callable[["TrialSetup", torch.device, Path], Results]


@dataclass(frozen=True)
class TrialSetup(Setup):
    """As Setup, with tables of these options instead, ids sent once, and a number of steps."""

    lives: tuple[dyn.DynamicTableConfig, ...] = ()
    dedup: bool = False
    steps: int = 5

    @property
    def adds_outputs(self) -> bool:
        """True if outputs are sums of parts of several ranks."""
        return self.pooled and not {*self.kinds}.isdisjoint(SPREAD_ROWS)

    def case(self) -> Case:
        """Returns the collection and its plan."""
        case = replace(super().case(), dedup=self.dedup)
        for table, config in zip(case.tables, self.lives, strict=False):
            table.config = config
        return case


def new(setup: TrialSetup, device: torch.device) -> Any:
    """Returns the sharded model of a setup. Collective."""
    case = setup.case()
    return shard(case, collection_of(case), device=device, init_data_parallel=False)


def trained(model: Any, setup: Setup, steps: Iterable[int], device: torch.device) -> Results:
    """Trains a model; returns this rank's outputs."""
    outputs, steps = train(model, setup, steps, str(device)), list(steps)
    names = sorted(setup.case().features()) * len(steps)
    return {
        f"output {n} of {name}": one.cpu()
        for n, (name, one) in enumerate(zip(names, outputs, strict=True))
    }


def rows_of(model: Any, when: str) -> Results:
    """Returns all that this rank's tables hold, and their counts."""
    found = {f"{name} {when}": value.cpu() for name, value in held(model).items()}
    for one in tables_of(model):
        counts = torch.tensor([one.stats()[name] for name in COUNTS])
        found[f"counts of {one.name} from {one.first_column} {when}"] = counts
    return found


def turned(setup: TrialSetup) -> TrialSetup:
    """Returns the setup with the plan of each table given to the next one."""
    return replace(setup, kinds=(*setup.kinds[1:], setup.kinds[0]))


def run_plan(setup: TrialSetup, device: torch.device, folder: Path) -> Results:
    """Trains under a plan."""
    model = new(setup, device)
    return trained(model, setup, range(setup.steps), device) | rows_of(model, "at the end")


def run_reshard(setup: TrialSetup, device: torch.device, folder: Path) -> Results:
    """Moves all tables between steps."""
    model = new(setup, device)
    results = trained(model, setup, range(3), device)
    plan = {table.name: table.plan for table in turned(setup).case().tables}
    model.sharders[0].reshard(model.module.collection, plan, model._env, model.device)
    results |= rows_of(model, "after a move")
    trained(model, setup, range(3, setup.steps), device)
    return results | rows_of(model, "at the end")


def run_checkpoint(setup: TrialSetup, device: torch.device, folder: Path) -> Results:
    """Saves a full checkpoint and a delta, and restores them under another plan."""
    model = new(setup, device)
    with closing(Checkpoints(folder, full_every=2)) as checkpoints:
        for step in range(2):
            trained(model, setup, [2 * step, 2 * step + 1], device)
            quietly(checkpoints.save, model, optimizer_of(model), step=step)
    other = turned(setup)
    model = new(other, device)
    with closing(Checkpoints(folder)) as checkpoints:
        quietly(checkpoints.restore, model, optimizer_of(model))
    results = rows_of(model, "restored")
    trained(model, other, [4], device)
    return results | rows_of(model, "at the end")


def run_edits(setup: TrialSetup, device: torch.device, folder: Path) -> Results:
    """Reads and edits rows by id, on all ranks together."""
    model, results = new(setup, device), {}
    trained(model, setup, range(3), device)
    for table in setup.case().tables:
        handle = model.module.collection.table(table.name)
        ids = batch(setup.case(), 2, dist.get_rank(), setup.world)[table.features[0]].values()
        ids = ids.unique().to(device)
        handle.erase(ids[::3].contiguous())
        handle.assign(ids[1::4].contiguous(), torch.ones(len(ids[1::4]), table.dim, device=device))
        for name, one in zip(("rows", "found"), handle.lookup_rows(ids), strict=True):
            results[f"{name} of {table.name} by id"] = one.cpu()
        results[f"ids of {table.name}"] = handle.read_ids().cpu()
    return results | rows_of(model, "after edits")


def trials(world: int) -> dict[str, tuple[TrialSetup, Run]]:
    """Returns all cases for a number of ranks: setups, and what is done with them."""
    LOCAL_SIZES[world] = local_size(world)

    def setup(*kinds: str, **options: Any) -> TrialSetup:
        return TrialSetup(world, kinds, **options)

    plans = {f"pooled {kind}": setup(kind) for kind in POOLED}
    plans |= {f"sequences {kind}": setup(kind, pooled=False) for kind in SEQUENCE}
    for optimizer in ("EXACT_ROWWISE_ADAGRAD", "ADAM"):
        plans[f"pooled, all plans, {optimizer}"] = setup(*POOLED[::-1], optimizer=optimizer)
    plans["sequences, ids sent once"] = setup(*SEQUENCE, pooled=False, dedup=True)
    for kind in SEQUENCE:
        plans[f"policies {kind}"] = setup(kind, rows=FEW, lives=LIVES, steps=15)
    found: dict[str, tuple[TrialSetup, Run]] = {
        name: (one, run_plan) for name, one in plans.items()
    }
    for name, run in (
        ("reshard", run_reshard),
        ("checkpoint", run_checkpoint),
        ("edits", run_edits),
    ):
        found[name] = setup(*SEQUENCE), run
        found[f"{name}, policies"] = setup(*SEQUENCE, rows=FEW, lives=LIVES), run
        found[f"{name}, sequences"] = setup(*SEQUENCE, pooled=False), run
    return found


def local_size(world: int) -> int:
    """Returns the ranks of a node: pairs, so that there are nodes."""
    return 2 if world % 2 == 0 else world


def run_side(names: Mapping[int, str], world: int, device: torch.device, folder: Path) -> None:
    """Runs cases on this rank, and writes their results into a folder of this side. Collective."""
    every = trials(world)
    for place, name in names.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            setup, run = every[name]
            results = run(setup, device, folder / f"checkpoints of {place}")
        torch.save(results, folder / f"{place}.{dist.get_rank()}")


def process(rank: int, world: int, kind: str, names: Mapping[int, str], folder: Path) -> None:
    """Joins the process group of a side, and runs its cases."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(local_size(world)))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    for chatty in ("torchrec", "torch.fx"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend_for(device),
        init_method=f"file://{folder}/store {min(names)}",
        timeout=timedelta(seconds=60),
        rank=rank,
        world_size=world,
    )
    run_side(names, world, device, folder)
    dist.destroy_process_group()


def run_processes(names: Sequence[str], world: int, kind: str, folder: Path) -> None:
    """Runs cases of a side; after one that fails, whose error is printed, new processes run the others."""
    folder.mkdir()
    left = dict(enumerate(names))
    while left:
        try:
            multiprocessing.spawn(process, (world, kind, left, folder), nprocs=world)
            return
        except Exception:
            traceback.print_exc()
        for place in list(left):
            del left[place]
            if not all(Path(folder, f"{place}.{rank}").exists() for rank in range(world)):
                break


def difference(setup: TrialSetup, got: Results, expected: Results) -> tuple[str, float]:
    """Returns the first name of a tensor that differs too much, "" if none does; and the largest rounding."""
    largest = 0.0
    for name in sorted(got.keys() | expected.keys()):
        if name not in got or name not in expected or got[name].shape != expected[name].shape:
            return name, largest
        if same_bits(got[name], expected[name]):
            continue
        is_sum = setup.adds_outputs and name.startswith("output")
        apart = (got[name].double() - expected[name].double()).abs()
        if not is_sum or bool((apart > ROUNDING * (1 + expected[name].double().abs())).any()):
            return name, largest
        largest = max(largest, float(apart.max()))
    return "", largest


def compare(names: Sequence[str], world: int, got: Path, expected: Path) -> int:
    """Prints a line for each case; returns the number of those that differ or have no result."""
    every, wrong = trials(world), 0
    for place, name in enumerate(names):
        said, rounding = "", 0.0
        for rank in range(world):
            files = [folder / f"{place}.{rank}" for folder in (got, expected)]
            if not all(file.exists() for file in files):
                said = said or f"no result of rank {rank}"
                continue
            differs, apart = difference(every[name][0], *(torch.load(file) for file in files))
            said = said or (differs and f"rank {rank} differs in {differs}")
            rounding = max(rounding, apart)
        wrong += bool(said)
        print(
            f"{name:40} {said or (f'equal up to {rounding:.0e}' if rounding else 'equal bits')}",
            flush=True,
        )
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both sides and compares them; returns 1 if they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--world", type=int, help="ranks; default: the GPUs, 2 on the CPU, at most 8"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cases")
    arguments = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    world = arguments.world or (2 if arguments.device == "cpu" else min(gpus, 8))
    if arguments.device == "cuda" and gpus < 2:
        print(
            f"several_gpus: skipped: expected 2 GPUs or more, got {gpus}. --device cpu tests that it runs."
        )
        return 0
    missing = missing_for_cuda(world) if arguments.device == "cuda" else ""
    names = [name for name in trials(world) if any(part in name for part in arguments.only)]
    if missing or not names or world < 2:
        said = missing or (
            f"--world of at least 2, got {world}" if world < 2 else "names of cases, got none"
        )
        raise SystemExit(f"several_gpus: expected {said}.")
    with tempfile.TemporaryDirectory() as place:
        sides = [Path(place, side) for side in ("got", "expected")]
        for folder, kind in zip(sides, (arguments.device, "cpu"), strict=True):
            run_processes(names, world, kind, folder)
        return int(compare(names, world, *sides) > 0)


if __name__ == "__main__":
    sys.exit(main())
