"""Set-up of one rank of up to a thousand, simulated: CPU seconds, memory and bytes of each phase.

    python benchmarks/bench_scale.py [--world 8 64 1024] [--tables 10 100 1000]
    python benchmarks/bench_scale.py --planner            # planning, beside TorchRec's own planner

Each case is one process: rank 0 of W ranks on nodes of 8, in torch's fake process group, with words of the
peers that are made from the plan (simulated_ranks.py). A tenth of the tables is row-wise, one tenth each is
table-row-wise, column-wise on two ranks and grid-sharded on two nodes; the others are table-wise. Every
table has admission, eviction and row-wise Adagrad. Phases: model, given plan, sharding, dists, the state
dicts of model and optimizer, this rank's save plan, the whole save plan with DCP's metadata (on rank 0
only), unpickled metadata and this rank's load plan, and an entry of `Checkpoints`. What we add to a shard:
bytes that a rank tells the others, and bytes of metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from interleaved import finish, measure, options, ratio, result, spread
from peak_memory import resident
from simulated_ranks import NODE, Peers, simulated_rank
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner
from torchrec_dyn.checkpoint_format import (
    MODEL_CHECKSUM,
    OPTIMIZER_CHECKSUM,
    SUMMED,
    Entry,
)
from torchrec_dyn.planner import make_planner
from torchrec_dyn.ranks import TableLayout
from torchrec_dyn.whole_model import tables_of

COLUMNS = 256  # so many are cut in two by TorchRec, in a grid
ROWS = 16  # of each shard
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
DYNAMIC = dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2), eviction=dyn.LeastRecentlyUsed())
BY_ROW = ("weight", "ids", "last_seen", "count", "waiting", "momentum1")
MB = 1e6


def configs(tables: int, columns: int = COLUMNS) -> list[EmbeddingBagConfig]:
    """Returns the configs of the tables."""
    return [
        EmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=columns,
            num_embeddings=10_000_000,
            feature_names=[f"f{number}"],
        )
        for number in range(tables)
    ]


def sharding_of(number: int, ranks: int) -> Callable[..., Any]:
    """Returns the sharding of one table of the mixed plan."""
    nodes = max(1, ranks // NODE)
    match number % 10:
        case 0:
            return row_wise()
        case 1:
            return table_row_wise(host_index=number // 10 % nodes)
        case 2:
            first = number // 10 % ranks
            return column_wise(ranks=[first, (first + 1) % ranks])
        case 3 if nodes > 1:
            first = number // 10 % nodes
            return grid_shard(host_indexes=[first, (first + 1) % nodes])
    return table_wise(rank=number % ranks)


class Phases:
    """The measured phases of a rank.

    Attributes:
        rows: CPU seconds and growth of the resident memory, by phase.
    """

    def __init__(self, peers: Peers) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        self._peers = peers

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Measures one phase, without the words of the peers that it makes."""
        gc.collect()
        held, made, begin = resident("VmRSS"), self._peers.seconds, time.process_time()
        yield
        spent = time.process_time() - begin - (self._peers.seconds - made)
        gc.collect()
        self.rows[name] = {"cpu_s": spent, "mb": (resident("VmRSS") - held) / MB}
        print(name, self.rows[name], file=sys.stderr, flush=True)  # a long case shows its progress


def fill(collection: Any, rows: int) -> None:
    """Inserts rows and as many waiting ids into each shard of this rank, with ids of its own."""
    ids = torch.arange(1, 1 + 8 * rows * dist.get_world_size())
    owned: dict[Any, torch.Tensor] = {}
    for table in collection._shards.tables():
        if not table.shards:
            continue
        key = table.layout.row_ranks, table.part
        if key not in owned:
            owned[key] = ids[table.owns(ids)][: 2 * rows]
        with_row, waiting = owned[key].split(rows)
        for shard in table.shards:
            shard.assign(with_row, torch.zeros(rows, shard.columns))
            shard.life.waiting.write(waiting, torch.zeros_like(waiting), torch.ones_like(waiting))


def chunks_of_ranks(
    name: str, layout: TableLayout, size: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yields rank, offset and size of each saved chunk of a tensor by row, if all parts have as many rows."""
    rows = size[0] // layout.row_ranks
    for number, piece in enumerate(layout.pieces):
        if number and name not in ("weight", "momentum1"):
            return
        columns = size[1:]
        first: tuple[int, ...] = (0,) * len(columns)
        if name == "weight":
            first, columns = (piece.first_column,), (piece.columns,)
        elif name == "momentum1":
            first, columns = (number,), (1,)
        for part, rank in enumerate(piece.ranks):
            yield rank, (part * rows, *first), (rows, *columns)


def plans_of_ranks(
    mine: SavePlan, state: dict[str, Any], layouts: dict[str, TableLayout], ranks: int
) -> list[SavePlan]:
    """Returns the save plans of all ranks: that of rank 0, and those that the layouts give the others."""
    items: list[list[WriteItem]] = [list(mine.items), *([] for _ in range(1, ranks))]
    for key, tensor in flatten_state_dict(state)[0].items():
        *_, table, name = key.split(".")
        if not tensor.numel():
            continue
        if name in (MODEL_CHECKSUM, OPTIMIZER_CHECKSUM):
            holders = sorted({rank for piece in layouts[table].pieces for rank in piece.ranks})
            chunks = [(rank, (row, 0), (1, tensor.shape[1])) for row, rank in enumerate(holders)]
        elif name in BY_ROW:
            chunks = list(chunks_of_ranks(name, layouts[table], tensor.shape))
        else:
            continue
        properties = TensorProperties(dtype=tensor.dtype)
        for rank, offset, size in chunks:
            if rank:
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
                data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.size())
                index = MetadataIndex(key, chunk.offsets)
                items[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return [SavePlan(one, planner_data=mine.planner_data) for one in items]


def stored(
    metadata: Metadata, plans: Sequence[SavePlan], written: Sequence[WriteResult], folder: Path
) -> Metadata:
    """Returns metadata with the place of each chunk: of rank 0 as written, of others in files of holes."""
    places: dict[MetadataIndex, Any] = {one.index: one.storage_data for one in written}
    for rank, plan in enumerate(plans[1:], 1):
        for number, item in enumerate(plan.items):
            places[item.index] = _StorageInfo(f"__{rank}_0.distcp", 2000 * number, 2000, None)
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(2000 * len(plan.items))
    return dataclasses.replace(metadata, storage_data=places)


def bytes_of(metadata: Metadata, names: Sequence[str]) -> int:
    """Returns the bytes of metadata of the tensors with these names."""
    kept = {
        key: one
        for key, one in metadata.state_dict_metadata.items()
        if key.rpartition(".")[2] in names
    }
    places = {key: one for key, one in metadata.storage_data.items() if key.fqn in kept}
    return len(pickle.dumps(Metadata(kept, storage_data=places)))


def built(
    ranks: int, tables: int, phase: Callable[[str], contextlib.AbstractContextManager[Any]]
) -> tuple[Any, int]:
    """Returns the sharded model of this rank, and the number of shards of the plan, phase by phase."""
    with phase("model"):
        collection = dyn.DynamicEmbeddingBagCollection(
            configs(tables), dynamic=DYNAMIC, fused_params=FUSED
        )
        model = nn.ModuleDict({"sparse": collection})
    sharder = dyn.DynamicEmbeddingBagCollectionSharder()
    with phase("plan"):
        of_tables = {f"t{number}": sharding_of(number, ranks) for number in range(tables)}
        plan = construct_module_sharding_plan(
            collection, of_tables, sharder, min(NODE, ranks), ranks, "cpu"
        )
        for one in plan.values():
            one.compute_kernel = "fused"
    with phase("sharding"):
        sharded = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
            plan=ShardingPlan({"sparse": plan}),
            sharders=[sharder],
            device=torch.device("cpu"),
            init_data_parallel=False,
        )
    with phase("dists"):
        sharded.module.sparse._create_input_dist([f"f{number}" for number in range(tables)])
    return sharded, sum(len(one.sharding_spec.shards) for one in plan.values())


def save_really(tables: int, path: str) -> None:
    """Saves the same tables from real ranks, those of the default group. Collective."""
    sharded, _ = built(dist.get_world_size(), tables, lambda name: contextlib.nullcontext())
    fill(sharded.module.sparse, ROWS)
    state = {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path)


def set_up(ranks: int, tables: int, folder: Path) -> dict[str, Any]:
    """Sets up rank 0 of `ranks`, and returns the results of its phases."""
    start = resident("VmRSS")
    with simulated_rank(0, ranks) as peers:
        phases = Phases(peers)
        sharded, shards = built(ranks, tables, phases.of)
        held: Any = sharded.module.sparse
        fill(held, ROWS)
        layouts = held._shards.layouts
        peers.layouts = list(layouts.values())
        peers.agreements = peers.sent = peers.received = 0
        with phases.of("state dict"):
            state = {"model": sharded.state_dict()}
        with phases.of("optimizer's state dict"):
            state["optimizer"] = sharded.fused_optimizer.state_dict()
        told = {name: getattr(peers, name) for name in ("agreements", "sent", "received")}
        with phases.of("entry"):
            names = (table.name for table in tables_of(sharded, "bench_scale"))
            sums = dict.fromkeys(names, " ".join([f"{0:016x}"] * len(SUMMED)))
            files = {f"dense/__{rank}_0.distcp": "0" * 32 for rank in range(ranks)}
            entry = Entry(
                folder, "full", 1, "0" * 32, None, "0" * 32, 1, 1.0, ranks, sums, {}, "0", {}, files
            )
            text = entry.as_json()
        planner = DefaultSavePlanner()
        with phases.of("save plan"):
            planner.set_up_planner(state, None, True)
            mine = planner.create_local_plan()
        plans = plans_of_ranks(mine, state, layouts, ranks)
        with phases.of("save plan of all"):
            plans, metadata = planner.create_global_plan(plans)
        writer = FileSystemWriter(folder)
        writer.set_up_storage_writer(True)
        with phases.of("written"):
            planner.finish_plan(plans[0])
            prepared = writer.prepare_global_plan(plans)
            written = writer.write_data(prepared[0], planner).wait()
        whole = stored(metadata, plans, written, folder)
        of_sums = bytes_of(whole, (MODEL_CHECKSUM, OPTIMIZER_CHECKSUM))
        of_ids = bytes_of(whole, ("ids", "last_seen", "count", "waiting"))
        saved = pickle.dumps(whole)
        (folder / ".metadata").write_bytes(saved)
        del whole, metadata, plans, prepared, mine, planner, written
        with phases.of("metadata read"):
            metadata = pickle.loads(saved)
        with phases.of("load plan"):
            loader = LoadPlanner()
            loader.set_up_planner(state, metadata, True)
            reads = len(loader.create_local_plan().items)
        peak = resident("VmHWM")
    total = sum(one["cpu_s"] for one in phases.rows.values())
    return {
        "ranks": ranks, "tables": tables, "shards": shards, "cpu_s": total,
        "peak_mb": (peak - start) / MB, "phases": phases.rows, **told,
        "metadata_bytes": len(saved), "checksum_bytes": of_sums, "id_bytes": of_ids, "reads": reads,
        "entry_bytes": len(text),
    }  # fmt: skip


def set_up_alone(ranks: int, tables: int) -> dict[str, Any]:
    """Runs `set_up` in a process of its own, whose memory is its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", str(ranks), str(tables)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def shown(row: dict[str, Any]) -> str:
    """Returns the text of one case."""
    phases = ", ".join(
        f"{name} {one['cpu_s']:.2f} s {one['mb']:,.0f} MB" for name, one in row["phases"].items()
    )
    return (
        f"{row['ranks']:>5} ranks {row['tables']:>5} tables {row['shards']:>7} shards: "
        f"{row['cpu_s']:.1f} s CPU, peak {row['peak_mb']:,.0f} MB\n    {phases}\n"
        f"    {row['agreements']} agreements, {row['sent']:,} bytes sent, {row['received']:,} received, "
        f"metadata {row['metadata_bytes']:,} bytes (checksums {row['checksum_bytes']:,}, ids and scores "
        f"{row['id_bytes']:,}), {row['reads']} reads, entry {row['entry_bytes']:,} bytes"
    )


def plan_seconds(tables: int, ranks: int, is_stock: bool) -> float:
    """Returns the CPU seconds of planning static tables with TorchRec, or dynamic ones with our planner."""
    topology = Topology(ranks, "cpu", local_world_size=min(NODE, ranks), ddr_cap=64 << 30)
    mixed = [
        dataclasses.replace(
            one,
            embedding_dim=64 * (1 + number % 4),
            num_embeddings=10_000 * (1 + number * 7 % 50),
            init_fn=None,
        )
        for number, one in enumerate(configs(tables))
    ]
    model: nn.Module
    sharder: Any
    if is_stock:
        model = EmbeddingBagCollection(mixed, device=torch.device("meta"))
        planner = EmbeddingShardingPlanner(topology=topology)
        sharder = EmbeddingBagCollectionSharder(fused_params=FUSED)
    else:
        model = dyn.DynamicEmbeddingBagCollection(mixed, fused_params=FUSED)
        planner, sharder = make_planner(topology), dyn.DynamicEmbeddingBagCollectionSharder()
    begin = time.process_time()
    planner.plan(nn.ModuleDict({"sparse": model}), [sharder])
    return time.process_time() - begin


def planning(tables: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Measures planning in turn; returns a line of results."""
    sides = {
        "ours": lambda _: plan_seconds(tables, ranks, False),
        "stock": lambda _: plan_seconds(tables, ranks, True),
    }
    seconds = measure(sides, rounds, 0, "cpu")
    seen = ratio(seconds, "ours", "stock")
    told = {name: statistics.median(one) for name, one in seconds.items()}
    print(f"planning {tables} tables, {ranks} ranks: {told}, {spread(seen)}")
    return result("planning", 1, "plan", "stock", seen, tables=tables, ranks=ranks, seconds=told)


def main(arguments: list[str] | None = None) -> None:
    """Runs the cases and writes their results."""
    parser = options(__doc__, [1])
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--tables", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--planner", action="store_true", help="planning only")
    parser.add_argument("--case", type=int, nargs=2, help="ranks and tables, in this process")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if parsed.case:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(set_up(*parsed.case, Path(folder))))
        return
    if parsed.quick:
        parsed.world, parsed.tables = [16], [10]
    rows = []
    if not parsed.planner:
        for ranks, tables in itertools.product(parsed.world, parsed.tables):
            rows.append(set_up_alone(ranks, tables))
            print(shown(rows[-1]), flush=True)
    of_planning = (4, 8, 1) if parsed.quick else (100, 64, 2)
    rows.append(planning(*of_planning))
    finish("scale", rows, parsed)


if __name__ == "__main__":
    main()
