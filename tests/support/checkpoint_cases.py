"""Collections whose contents are the same under every plan: builds, trains, saves, loads and compares them.

Gradients are multiples of 1/16 and do not depend on the ranks, so their sums are exact. A step on the same 12
samples updates a row equally under any plan and on any number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sharded_training
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from oracle import unmixed
from sharded_cases import EXTREME_IDS, Case, Table, shard_by_hand, usual_plan
from sharded_training import optimizer_of as optimizer_of
from sharded_training import outputs_by_name
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ParameterSharding

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint_format import as_words, from_words
from torchrec_dyn.optimizers import OptimizerKind
from torchrec_dyn.state_dict.load_planner import LoadPlanner
from torchrec_dyn.table.shard import TableShard

DIM = 12
SAMPLES = 12  # divisible by 1, 2, 3 and 4 ranks
LOCAL_SIZES = {0: 1, 1: 1, 2: 2, 3: 3, 4: 2}
# The ids with the largest mixed ids: on S ranks, mixed ids from S * ((2^64 - 1) // S) on are after all
# ranges.
LAST_IDS = unmixed(torch.arange(-6, 0)).tolist()
POOLED_KINDS = ("table_wise", "row_wise", "column_wise", "three_columns")
NODE_KINDS = ("table_row_wise", "table_column_wise", "grid_shard")  # of pooled collections
SEQUENCE_KINDS = POOLED_KINDS
ROW_WISE_STATES = {
    "EXACT_ROWWISE_ADAGRAD": "momentum1",
    "PARTIAL_ROWWISE_ADAM": "momentum2",
    "ADAM_BY_ROW": "row_counter",
}
ROW_WISE = tuple(ROW_WISE_STATES)
OPTIMIZERS = (
    *dict.fromkeys(("EXACT_ADAGRAD", "ADAM", "EXACT_SGD", *(kind.name for kind in OptimizerKind))),
    "lion",
)
WITH_NORMS = ("LAMB", "PARTIAL_ROWWISE_LAMB")  # of the columns of a shard
RULES: dict[str, dyn.RowRule] = {"lion": dyn.Lion(), "lars_sgd": dyn.LarsSGD()}

_COUNTED = dyn.DynamicTableConfig(
    admission=dyn.AdmitAfter(3), eviction=dyn.ExpireAfter(time=10), seed=3
)
_DRAWN = dyn.DynamicTableConfig(
    admission=dyn.AdmitWithProbability(0.7), eviction=dyn.LeastRecentlyUsed()
)
_NORMAL = dyn.DynamicTableConfig(initializer=dyn.Normal(0.0, 0.5), seed=-7)
# name, dtype of the rows, config
TABLES: tuple[tuple[str, str, dyn.DynamicTableConfig | None], ...] = (
    ("plain", "FP32", None),
    ("sixteen", "FP16", _NORMAL),
    ("brain", "BF16", None),
    ("counted", "FP32", _COUNTED),
    ("drawn", "FP16", _DRAWN),
)


@dataclass(frozen=True)
class Setup:
    """A collection on some ranks, or unsharded.

    Attributes:
        world: number of ranks; 0: unsharded.
        kinds: sharding types that the tables take in turn.
        pooled: True for a pooled collection, False for a sequence collection.
        optimizer: optimizer of all tables, or the name of a rule in Python.
        tables: number of tables, the first of TABLES.
        names: names of the tables, instead of the first ones.
        rows: limit of each table.
        gpu_rows: of tables in host memory; 0: in the device's.
        feedback: True if gradients depend on the outputs, so that an error of one step grows in the next.
            If ranks add their parts of a pooled output, its last bits depend on the plan.
    """

    world: int
    kinds: tuple[str, ...] = ("table_wise",)
    pooled: bool = True
    optimizer: str = "EXACT_ADAGRAD"
    tables: int = len(TABLES)
    names: tuple[str, ...] = ()
    rows: int = 1000
    gpu_rows: int = 0
    feedback: bool = False

    def case(self) -> Case:
        """Returns the same collection as a case of sharded_training."""
        local = LOCAL_SIZES[self.world]
        tables = []
        chosen = [one for one in TABLES if one[0] in self.names] if self.names else TABLES
        for turn, (name, dtype, config) in enumerate(chosen[: self.tables]):
            kind = self.kinds[turn % len(self.kinds)]
            plan = plan_of(kind, max(1, self.world), local, turn, self.pooled, self.rows)
            if self.gpu_rows:
                storage = dyn.HostMemory(self.gpu_rows)
                config = replace(config or dyn.DynamicTableConfig(), storage=storage)
            tables.append(Table(name, [f"f_{name}"], plan, DIM, "SUM", dtype, self.rows, config))
        kind: Any = getattr(EmbOptimType, self.optimizer, self.optimizer)  # FBGEMM has no ADAMW
        kind = RULES.get(self.optimizer, kind)
        fused = {"optimizer": kind, "learning_rate": 0.1}
        return Case(tables, pooled=self.pooled, fused_params=fused)


def plan_of(
    kind: str, world: int, local: int, turn: int, pooled: bool, rows: int = 1000
) -> ParameterSharding:
    """Returns a plan of one table of DIM columns; "three_columns" repeats a rank."""
    if kind != "three_columns":
        return usual_plan(kind, DIM, world, local, turn, rows)
    cuts = (0, 3, 8, DIM) if pooled else (0, 4, 8, DIM)
    ranks = [turn % world, (turn + 1) % world, turn % world]
    pieces = [([ranks[i]], cuts[i], cuts[i + 1] - cuts[i]) for i in range(3)]
    return shard_by_hand("column_wise", pieces, rows)


def kinds_on(world: int, pooled: bool) -> tuple[str, ...]:
    """Returns the kinds of plans that are possible on `world` ranks."""
    if not pooled:
        return SEQUENCE_KINDS
    return (*POOLED_KINDS, *NODE_KINDS) if world == 4 else POOLED_KINDS


def batch(case: Case, step: int, rank: int, world: int) -> KeyedJaggedTensor:
    """Returns this rank's part of the samples of a step."""
    generator = torch.Generator().manual_seed(500 + step)
    pool = torch.tensor(
        [*EXTREME_IDS, *LAST_IDS, *range(100, 110), *range(1000 * step, 1000 * step + 8)]
    )
    size = SAMPLES // world
    values, lengths = [], []
    for _ in case.features():
        of_samples = torch.randint(5, (SAMPLES,), generator=generator)
        ids = pool[torch.randint(pool.numel(), (int(of_samples.sum()),), generator=generator)]
        values += ids.split(of_samples.tolist())[rank * size : (rank + 1) * size]
        lengths.append(of_samples[rank * size : (rank + 1) * size])
    return KeyedJaggedTensor(case.features(), torch.cat(values), lengths=torch.cat(lengths))


def train(model: Any, setup: Setup, steps: Iterable[int], place: str = "cpu") -> list[torch.Tensor]:
    """Trains a model on a device; returns this rank's outputs of every step."""
    case, outputs = setup.case(), []
    rank, world = (dist.get_rank(), setup.world) if setup.world else (0, 1)
    holder = getattr(model, "module", model)
    for step in steps:
        holder.collection.set_time(3 * step)
        mine = batch(case, step, rank, world)
        out = outputs_by_name(case, model(mine.to(torch.device(place))))
        grads = [_grad(case, mine, name, out[name], step, setup).to(place) for name in out]
        torch.autograd.backward(list(out.values()), grads)
        outputs += [out[name].detach().clone() for name in sorted(out)]
    return outputs


def _grad(
    case: Case, mine: KeyedJaggedTensor, name: str, out: torch.Tensor, step: int, setup: Setup
) -> torch.Tensor:
    """Returns a gradient of multiples of 1/16, from each id of a sequence or from the sum of a bag's ids."""
    jagged = mine[name]
    if case.pooled:
        ends = jagged.lengths().cumsum(0)
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), (jagged.values() % 1000).cumsum(0)])
        numbers = sums[ends] - sums[ends - jagged.lengths()]
    else:
        numbers = jagged.values() % 1000
    columns = torch.arange(out.shape[1])
    grad = ((numbers[:, None] * 7 + columns * 5 + step) % 31 - 15).float() / 16
    if setup.feedback:
        grad = grad + (out.detach().float() * 16).round().clamp(-64, 64) / 16
    return grad * max(1, setup.world)  # TorchRec divides by the number of ranks


def new(setup: Setup) -> Any:
    return sharded_training.new(setup.case(), bool(setup.world))


def state_dict_of(model: Any) -> dict[str, Any]:
    """Returns the state dicts of a model and its optimizer, as they are saved."""
    return {"model": model.state_dict(), "optimizer": optimizer_of(model).state_dict()}


def save(model: Any, path: str | Path) -> None:
    quietly(dcp.save, state_dict_of(model), checkpoint_id=str(path))


def load(model: Any, path: str | Path, planner: Any = None) -> Any:
    state = state_dict_of(model)
    quietly(dcp.load, state, checkpoint_id=str(path), planner=planner or LoadPlanner())
    put(model, state)
    return model


def put(model: Any, state: dict[str, Any], **options: Any) -> Any:
    """Loads state dicts that were read; returns torch's report of the keys."""
    keys = model.load_state_dict(state["model"], **options)
    optimizer_of(model).load_state_dict(state["optimizer"])
    return keys


def quietly(function: Any, *args: Any, **options: Any) -> Any:
    """Calls a function and ignores the warnings of torch's checkpoints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


def contents(path: str | Path) -> dict[str, torch.Tensor]:
    """Reads a whole checkpoint as plain tensors by their keys, without our load planner.

    Empty tensors are left out, as DCP leaves out tensors without a chunk. Of checksums, which have a row for
    each rank, the sums are returned.
    """
    tensors = _flat(quietly(_load_state_dict_from_keys, checkpoint_id=str(path)), "")
    return {
        key: as_words(from_words(tensor)) if key.endswith("checksum") else tensor
        for key, tensor in tensors.items()
        if tensor.numel()
    }


def _flat(nested: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in nested.items():
        found.update(
            _flat(value, f"{prefix}{key}/")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return found


def differences(got: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Returns the keys of tensors that are not bit-equal or are on one side only."""
    both = sorted(got.keys() | expected.keys())
    return [one for one in both if one not in got or one not in expected] + [
        one
        for one in both
        if one in got and one in expected and not same_bits(got[one], expected[one])
    ]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors have the same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def tables_of(model: Any) -> list[TableShard]:
    """Returns the tables of this rank's kernels, or of the unsharded collection."""
    return sharded_training.tables_of(getattr(model, "module", model).collection)


def held(model: Any) -> dict[str, torch.Tensor]:
    """Returns the whole contents of this rank's tables by table, first column and name."""
    return {
        f"{one.name} from {one.first_column}: {name}": value
        for one in tables_of(model)
        for name, value in one.export_state().items()
    }


def run_on(setup: Setup, function: Any, *args: Any, timeout: float = 300) -> list[Any]:
    """Calls a function with a setup on each of its ranks, or in this process if it is unsharded."""
    if not setup.world:
        return [function(setup, *args)]
    sizes = {"world_size": setup.world, "local_size": LOCAL_SIZES[setup.world]}
    return workers.run(function, setup, *args, **sizes, timeout=timeout)
