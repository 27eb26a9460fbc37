"""Rows, optimizer state, scores, counts and outputs after fifty steps are as recorded, bit for bit.

They change only with a decision that says why; `make goldens` then records them anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from checkpoint_cases import load, save
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from oracle import EXTREME_IDS, GOLDEN, WORD, canonical_order, mix64, signed
from sharded_cases import Case, Table, usual_plan
from sharded_training import new, optimizer_of, outputs_by_name
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn

FILE = Path(__file__).parents[1] / "golden" / "goldens.json"
STEPS, SAMPLES, DIM, LIMIT = 50, 8, 8, 90
STATES = ("momentum1", "momentum2", "row_counter", "momentum", "step")
COUNTS = (
    "rows", "step", "ids_seen", "hits", "unseen", "refused", "inserted", "evicted_expired", "evicted_full",
    "erased", "waiting", "counters_dropped", "counters_expired",
)  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "rowwise_adagrad": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.125,
        "weight_decay_mode": WeightDecayMode.L2,
    },
    "adam": {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.125},
    "partial_rowwise_adam": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM},
    "adamw": {"optimizer": "ADAMW"},
    "ftrl": {"optimizer": "FTRL", "l1": 0.0625, "l2": 0.125},
    "lamb": {"optimizer": EmbOptimType.LAMB},
    "partial_rowwise_lamb": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB},
    "adam_by_row": {"optimizer": EmbOptimType.ADAM, "use_rowwise_bias_correction": True},
    "lion": {"optimizer": dyn.Lion(beta1=0.5, beta2=0.5)},  # by halves: fused or not, the same bits
}  # fmt: skip
LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
# Table -> dtype of its rows, pooling, config.
TABLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("FP32", "SUM", {}),
    "halves": ("FP16", "MEAN", {"seed": 3, "on_nonfinite": "skip"}),
    "recent": ("BF16", "SUM", {"eviction": LRU, "gradient": "mean_over_senders"}),
    "frequent": ("FP32", "SUM", {"eviction": (dyn.ExpireAfter(steps=9), LFU)}),
    "fading": ("FP32", "MEAN", {"admission": dyn.AdmitWithProbability(0.625), "unseen": "initial",
                                "eviction": dyn.LeastFrequentlyUsed(half_life_steps=4)}),
    "timed": ("FP16", "SUM", {"admission": dyn.AdmitAfter(2), "eviction": (dyn.ExpireAfter(time=9), LRU)}),
    "counted": ("FP32", "SUM", {"admission": dyn.AdmitAfter(3, counters=70), "unseen": "initial",
                                "eviction": dyn.ExpireAfter(steps=5)}),
    "scored": ("FP32", "SUM", {"admission": dyn.AdmitAfter(2, counters=30), "gradient": "sum",
                               "eviction": dyn.LowestScore(half_life_time=5)}),
    "negatives": ("FP32", "SUM", {"eviction": LRU, "features": (
        dyn.FeatureUse("a", trains=False), dyn.FeatureUse("b", inserts=False, counts=False))}),
    "never": ("FP32", "SUM", {"admission": dyn.Never(), "eviction": LFU}),
}  # fmt: skip
POOLED = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
SEQUENCES = ("table_wise", "row_wise", "column_wise")


@dataclass(frozen=True)
class Run:
    """A collection of `count` tables from table number `first` on; on ranks they take all plans in turn."""

    optimizer: str
    first: int = 0
    count: int = len(TABLES)
    world: int = 0  # 0: unsharded
    pooled: bool = True
    weighted: bool = False

    def case(self) -> Case:
        kinds = POOLED if self.pooled else SEQUENCES
        names, world, tables = [*TABLES], max(1, self.world), []
        for turn in range(self.count):
            name = names[(self.first + turn) % len(names)]
            dtype, pooling, config = TABLES[name]
            limit = 1000 if name in {"plain", "halves", "counted"} else LIMIT
            kind = kinds[turn % len(kinds)]
            tables.append(
                Table(
                    name,
                    ["a", "b"],
                    usual_plan(kind, DIM, world, world, self.first + turn, limit),
                    DIM,
                    pooling,
                    dtype,
                    limit,
                    dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.125, 0.125), **config),
                )
            )
        fused = {"learning_rate": 0.125, **OPTIMIZERS[self.optimizer]}
        return Case(tables, pooled=self.pooled, weighted=self.weighted, fused_params=fused)


RUNS = {
    **{
        f"unsharded, {optimizer}": Run(optimizer, 3 * turn, 4)
        for turn, optimizer in enumerate(OPTIMIZERS)
    },
    "unsharded, sequences": Run("adam", pooled=False),
    "unsharded, weighted": Run("adagrad", weighted=True),
    "plans, adagrad": Run("adagrad", 0, 6, world=2),
    "plans, rowwise_adagrad": Run("rowwise_adagrad", 3, 6, world=2, weighted=True),
    "plans, adam": Run("adam", 5, 7, world=2),
    "plans, adam_by_row": Run("adam_by_row", 8, 6, world=2),
    "sequences, partial_rowwise_adam": Run("partial_rowwise_adam", 2, 5, world=2, pooled=False),
    "sequences, sgd": Run("sgd", 7, 5, world=2, pooled=False),
}


def word(*numbers: int) -> int:
    """Returns 64 bits that depend on some whole numbers."""
    bits = 0
    for number in numbers:
        bits = mix64(bits + GOLDEN + number)
    return bits


def bag_of(step: int, feature: int, sample: int) -> list[int]:
    """Returns the ids of a bag: first new, then popular, then rare; some are extreme, some far apart."""
    if step % 17 == 16:
        return []
    length, ids = word(step, feature, sample) % (2 if step % 5 == 4 else 7), []
    for place in range(length):
        bits = word(step, feature, sample, place)
        age = (bits & 1023) ** 2 * 60 >> 20
        number = 40 + 8 * step - age
        number = signed(mix64(number)) if number % 2 else number
        ids.append(EXTREME_IDS[bits >> 20 & 7] if (bits >> 10 & 1023) < 90 else number)
    return ids


def batch_of(step: int, rank: int, world: int) -> KeyedJaggedTensor:
    """Returns a rank's samples of a step; weights are eighths, for scores too."""
    first, count = rank * SAMPLES // world, SAMPLES // world
    bags = [bag_of(step, feature, first + i) for feature in range(2) for i in range(count)]
    ids = torch.tensor([number for bag in bags for number in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in bags])
    weights = torch.tensor([number % 11 / 8 for bag in bags for number in bag], dtype=torch.float32)
    return KeyedJaggedTensor(["a", "b"], ids, weights, lengths=lengths)


def gradient_of(
    case: Case, batch: KeyedJaggedTensor, feature: str, step: int, scale: int
) -> torch.Tensor:
    """Returns a gradient of sixteenths, a function of the ids of each bag, or of each id of a sequence."""
    bags = [
        part.tolist()
        for part in torch.split(batch[feature].values(), batch[feature].lengths().tolist())
    ]
    numbers = (
        [sum(bag) for bag in bags] if case.pooled else [number for bag in bags for number in bag]
    )
    rows = [
        [(word(number % WORD, column, step) % 31 - 15) / 16 * scale for column in range(DIM)]
        for number in numbers
    ]
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, DIM)


def digest(*tensors: torch.Tensor) -> str:
    """Returns 12 hex digits of the dtypes, shapes and bytes of tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().contiguous()
        total.update(f"{plain.dtype}{[*plain.shape]}".encode())
        total.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:12]


def train(model: Any, case: Case, steps: range) -> list[torch.Tensor]:
    """Trains a model on its part of the samples; returns its outputs by step and name."""
    collection, outputs = collection_in(model), []
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        if step % 3 == 0:
            collection.set_time(2 * step)
        batch = batch_of(step, rank, world)
        by_name = outputs_by_name(case, model(batch))
        grads = {
            f: gradient_of(case, batch, f, step, world) for f in ("a", "b")
        }  # TorchRec divides by the ranks
        names = sorted(by_name)
        torch.autograd.backward(
            [by_name[n] for n in names], [grads[n.partition("@")[0]] for n in names]
        )
        outputs += [by_name[name] for name in names]
        if step in (20, 35):
            edit(collection, case, step, rank)
    return outputs


def edit(collection: Any, case: Case, step: int, rank: int) -> None:
    """Assigns rows to known and new ids and erases some, all of them named by rank 0."""
    known = sorted(ids_until(step), key=mix64)[:: 5 if step == 20 else 7]
    ids = torch.tensor(
        [*known, *range(5000 + step, 5010 + step)][: 1000 * (rank == 0)], dtype=torch.int64
    )
    rows = (ids[:, None] % 13 + torch.arange(DIM)).float() / 32
    for table in case.tables:
        dyn.assign_rows(collection, table.name, ids, rows)
        dyn.erase_rows(collection, table.name, ids[::3])


def ids_until(step: int) -> set[int]:
    """Returns all ids of the batches before a step."""
    return {
        number
        for s in range(step)
        for f in range(2)
        for i in range(SAMPLES)
        for number in bag_of(s, f, i)
    }


def collection_in(model: Any) -> Any:
    return getattr(model, "module", model).collection


def read_tables(collection: Any, case: Case, known: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Returns digests of each table; `known` [M] are all ids that it may have seen. Collective."""
    tables = {}
    for name in (table.name for table in case.tables):
        ids = dyn.read_ids(collection, name)
        rows, found = dyn.lookup_rows(collection, name, ids)
        assert bool(found.all()) and ids.tolist() == canonical_order(ids.tolist())
        stats = dyn.read_stats(collection, name)
        tables[name] = {
            "counts": " ".join(str(int(stats[count])) for count in COUNTS if count in stats),
            "ids": digest(ids),
            "rows": digest(rows),
            "found": digest(dyn.lookup_rows(collection, name, known)[1]),
        }
        if name not in {"plain", "halves"}:
            scores = (
                dyn.read_last_seen(collection, name, known),
                dyn.read_counts(collection, name, known),
            )
            tables[name]["scores"] = digest(*scores)
    return tables


def states_of(model: Any, tables: Iterable[str]) -> dict[str, str]:
    """Returns digests of the optimizer state of tables of an unsharded model, by FBGEMM's names."""
    tensors: dict[str, dict[str, Any]] = {table: {} for table in tables}
    for key, state in optimizer_of(model).state_dict()["state"].items():
        table = next(part for part in key.split(".") if part in tensors)
        tensors[table] |= {name.rpartition(".")[2]: value for name, value in state.items()}
    return {
        table: digest(*(torch.as_tensor(state[name]).float() for name in STATES if name in state))
        for table, state in tensors.items()
    }


def content_sum(table: str, tensor: str, ids: torch.Tensor, rows: torch.Tensor) -> int:
    """Returns the content sum of rows, by the formula of docs/checkpoint_format.md."""
    text, purpose = f"0\0{table}".encode(), f"sum {tensor}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=purpose).digest(), "little")
    # An int64 is two columns, its low half first.
    halves = rows.reshape(len(ids), -1).contiguous()
    halves = halves.view(torch.int32 if halves.element_size() > 2 else torch.int16)
    mask = 2**32 - 1 if halves.dtype == torch.int32 else 2**16 - 1
    factors = [mix64(key + column + 1) >> 32 | 1 for column in range(halves.shape[1])]
    total = 0
    for number, row in zip(ids.tolist(), halves.tolist(), strict=True):
        inner = sum((bits & mask) * factor for bits, factor in zip(row, factors, strict=True))
        total += (mix64(number % WORD ^ key) | 1) * inner
    return total % WORD


def run_here(run: Run, path: str) -> dict[str, Any]:
    """Trains, reads and saves a model on this rank; returns what rank 0 has read, and its outputs."""
    case = run.case()
    model = new(case, bool(run.world))
    outputs = train(model, case, range(STEPS))
    tables = read_tables(
        collection_in(model), case, torch.tensor(canonical_order([*ids_until(STEPS)]))
    )
    save(model, path)
    return {"outputs": digest(*outputs), "tables": tables}


def results(run: Run, folder: Path) -> dict[str, Any]:
    """Returns what the goldens keep of a run: of what is trained, saved, loaded, and trained on."""
    path = str(folder / "saved")
    if run.world:
        by_rank = workers.run(run_here, run, path, world_size=run.world)
    else:
        by_rank = [run_here(run, path)]
    tables = by_rank[0]["tables"]
    assert all(
        of_rank["tables"] == tables for of_rank in by_rank
    )  # each rank reads the whole table

    case = run.case()
    model = load(new(case, False), path)
    known = torch.tensor(canonical_order([*ids_until(STEPS)]))
    loaded, states = read_tables(model.collection, case, known), states_of(model, tables)
    for name, table in tables.items():
        assert {**loaded[name], "counts": ""} == {**table, "counts": ""}, (
            f"{name}, as it was loaded"
        )
        ids = dyn.read_ids(model.collection, name)
        rows = dyn.lookup_rows(model.collection, name, ids)[0]
        sums = (
            content_sum(name, "ids", ids, ids),
            content_sum(name, "weight", ids, stored(rows, TABLES[name][0])),
        )
        table |= {"states": states[name], "sums": " ".join(f"{one:016x}" for one in sums)}
    later = train(model, case, range(STEPS, STEPS + 3))
    for name, table in read_tables(model.collection, case, known).items():
        tables[name]["later"] = table["rows"]
    return {
        "outputs": " ".join(of_rank["outputs"] for of_rank in by_rank),
        "later outputs": digest(*later),
        **tables,
    }


def stored(rows: torch.Tensor, data_type: str) -> torch.Tensor:
    """Returns rows as they are saved."""
    return rows.to(
        {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}[data_type]
    )


def differences(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Returns what differs, as "table, quantity: got instead of expected"."""

    def flat(result: dict[str, Any]) -> dict[str, str]:
        tables = {k: v for k, v in result.items() if isinstance(v, dict)}
        lines = {
            f"{table}, {name}": value for table in tables for name, value in tables[table].items()
        }
        return lines | {name: value for name, value in result.items() if name not in tables}

    ours, theirs = flat(got), flat(expected)
    return [
        f"{name}: {ours.get(name)} instead of {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def record() -> None:
    """Writes the results of all runs; prints those that have changed."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    lines = []
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            result = results(run, Path(folder))
        for line in differences(result, before.get(name, {})) if before else ():
            print(f"{name}: {line}")
        inside = ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()
        )
        lines.append(f"{json.dumps(name)}: {{\n{inside}\n}}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.parametrize("name", RUNS)
def test_fifty_steps_are_as_recorded(name: str, tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text())[name]
    assert not differences(results(RUNS[name], tmp_path), expected)
