"""The bytes of a shard of a dynamic table, part by part, and their estimator for TorchRec's planner.

TorchRec's own estimator prices a table as one plain weight tensor: without id map, scores and counters, and
without optimizer state unless `apply_optimizer_in_backward` set the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    Shard,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import PipelineType
from torchrec.modules.embedding_configs import dtype_to_data_type

from torchrec_dyn.config import MappedFiles
from torchrec_dyn.life import SCORE_BYTES, most_counters
from torchrec_dyn.modules import (
    UnshardedCollection,
    chosen_optimizer,
    merged_fused_params,
)
from torchrec_dyn.optimizers import STATE_DTYPE, RowOptimizer, output_dtype_of
from torchrec_dyn.planner.caches import gpu_rows_of
from torchrec_dyn.planner.measured import (
    ExpectedRows,
    checked_constraints,
    checked_count,
    checked_rows,
    without_processors,
)
from torchrec_dyn.planner.travelling_rows import price_as_sequences
from torchrec_dyn.ranks import IN_DEVICE_MEMORY, config_of_share, row_limit
from torchrec_dyn.storage import (
    SLOT_BYTES,
    block_shift,
    most_log_bytes,
    most_slots,
    most_store_bytes,
)
from torchrec_dyn.table import ROW_DTYPES

_PLACE_BYTES = 4  # of a row of HostMemory: the frame that it is in (storage/row_cache.py)
_FRAME_BYTES = (
    8,
    4,
    4,
)  # of a frame: its row, when it was used, and its place in the list of free ones
# Not in every version of TorchRec that is supported.
_COUNTS_DISKS = "ssd" in {field.name for field in fields(Storage)}


class DynamicStorageEstimator(ShardEstimator):
    """A storage estimator: dynamic tables by their allocations, other tables as in TorchRec.

    A shard of a dynamic table is priced as full: id map, weights in the table's dtype and optimizer state at
    this rank's row limit, with a policy also the scores of the rows, and with AdmitAfter or OwnAdmission the
    maximum number of counters for these rows. Rows and optimizer state in mapped files are not host memory:
    they count as `ssd` if TorchRec's Storage has it, and their pages in memory are not counted. Of a table on
    a GPU with HostMemory, or with a compute kernel that means it, rows and optimizer state are host memory
    (`ddr`), and their cache is the GPU's (`hbm`). Each column shard has its own id map, rows, cache, scores
    and counters. For the memory of a batch (input and output of a step) TorchRec's estimate is used.

    Args:
        topology: the devices.
        constraints: the planner's constraints by table name. Constraints of `constraints_from` have expected
            rows and counters, bounded by the limits of the table.
        pipeline_type: as in TorchRec's EmbeddingStorageEstimator.
        run_embedding_at_peak_memory: as in TorchRec's EmbeddingStorageEstimator.
        expected_rows: expected number of rows by table name, over all ranks. Use it for tables with far fewer
            rows than `num_embeddings`: the limit reserves no memory, so it need not be priced. It replaces
            the expected rows in the constraints, but not the expected counters. The default of
            AdmitAfter.counters, or OwnAdmission's, is computed from these rows.
        deltas: True to price the record of changed rows, for models whose deltas are exported.

    Raises:
        ValueError: if `constraints` or `expected_rows` is not such a dict, or a number of expected rows is
            not an integer or below 1; in `estimate`, if it is above the table's limit.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
        run_embedding_at_peak_memory: bool = False,
        expected_rows: Mapping[str, int] | None = None,
        deltas: bool = False,
    ) -> None:
        self._deltas = deltas
        self._device_type: str = topology.compute_device
        given = checked_constraints(constraints, "DynamicStorageEstimator.constraints")
        self.expected = ExpectedRows(given, checked_rows(expected_rows))
        # The second estimator excludes the memory of a batch. So the difference of both is that memory.
        self._whole, self._table_only = (
            EmbeddingStorageEstimator(
                topology,
                constraints,
                pipeline_type=pipeline_type,
                run_embedding_at_peak_memory=run_embedding_at_peak_memory,
                is_inference=is_inference,
            )
            for is_inference in (False, True)
        )

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """Writes the storage of each shard of each option."""
        price_as_sequences(sharding_options)
        self._whole.estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            if isinstance(_collection(option), UnshardedCollection):
                self._estimate_dynamic(option, sharder_data_map)

    def _estimate_dynamic(self, option: ShardingOption, sharder_data_map: SharderDataMap) -> None:
        sharder_params = sharder_data_map[option.module_type_key].fused_params
        fused_params = merged_fused_params(sharder_params, _collection(option).fused_params)
        optimizer = chosen_optimizer(option.tensor, fused_params, f"table '{option.name}'")
        config = _collection(option).dynamic_configs()[option.name]
        limit = option.tensor.shape[0]
        rows, waiting = self.expected.rows(option.name, limit), self.expected.waiting(option.name)
        gpu_rows = gpu_rows_of(option, sharder_params)
        # TorchRec splits num_embeddings evenly among the ranks that share rows. The limit of a rank is
        # higher, because ids never split evenly.
        first_column = option.shards[0].offset[1]
        sharers = sum(shard.offset[1] == first_column for shard in option.shards)
        limit, rows = row_limit(limit, sharers), row_limit(rows, sharers)
        counters = most_counters(config_of_share(config, sharers).admission, limit, rows)
        if waiting is not None:
            counters = min(counters, row_limit(waiting, sharers) if waiting else 0)
        batch = self._storage_of_a_batch(option, fused_params, sharder_data_map)
        for shard, batch_storage in zip(option.shards, batch, strict=True):
            held = table_size(
                rows,
                shard.size[1],
                option.tensor.dtype,
                optimizer,
                self._device_type,
                limit,
                config.has_life,
                counters,
                self._deltas,
                None if gpu_rows is None else -(-gpu_rows // sharers),
            )
            in_files = isinstance(config.storage, MappedFiles)
            on_disk = held.weights + held.optimizer_state if in_files else 0
            memory = "ddr" if self._device_type == "cpu" else "hbm"
            table = Storage(**{"hbm": 0, "ddr": held.host, memory: held.on_device - on_disk})
            if _COUNTS_DISKS:
                table.ssd = on_disk
            shard.storage = table + batch_storage

    def _storage_of_a_batch(
        self,
        option: ShardingOption,
        fused_params: Mapping[str, Any],
        sharder_data_map: SharderDataMap,
    ) -> list[Storage]:
        """Returns TorchRec's estimate for the input and output of a step, for each shard."""
        stand_in = copy.copy(option)
        stand_in.compute_kernel = IN_DEVICE_MEMORY  # wherever the rows are, the batch is in it
        # A tensor without optimizer, so that both estimates count the same table.
        stand_in._tensor = torch.empty(
            option.tensor.shape, dtype=option.tensor.dtype, device="meta"
        )
        # One row, because TorchRec assumes no batch for a shard without rows, but this shard gets ids.
        stand_in.shards = [
            Shard(size=[1, shard.size[1]], offset=shard.offset) for shard in option.shards
        ]
        if stand_in.output_dtype is None:
            dtype = output_dtype_of(fused_params, f"table '{option.name}'")
            stand_in.output_dtype = dtype_to_data_type(dtype)
        self._whole.estimate([stand_in], sharder_data_map)
        whole = [shard.storage for shard in stand_in.shards]
        self._table_only.estimate([stand_in], sharder_data_map)
        return [both - shard.storage for both, shard in zip(whole, stand_in.shards, strict=True)]


def _collection(option: ShardingOption) -> Any:
    """Returns the collection of a table, without its feature processors if it has any."""
    return without_processors(option.module[1])


@dataclass(frozen=True)
class TableSize:
    """An upper bound of the bytes of one shard.

    Attributes:
        weights: bytes of the rows.
        optimizer_state: bytes of the optimizer state of the rows.
        id_map: bytes of the id map.
        scores: bytes of the scores of the rows; 0 without a policy.
        counters: bytes of the counters of waiting ids, with their map.
        marks: bytes of the record of changed rows; 0 without deltas.
        cache: bytes of the GPU's memory for the frames of a table with HostMemory: weights, optimizer state
            and the map of rows to frames; else 0.
        host: bytes of the host's memory that a table on a GPU has: `weights` and `optimizer_state` with
            HostMemory; else 0.
    """

    weights: int
    optimizer_state: int
    id_map: int
    scores: int
    counters: int
    marks: int = 0
    cache: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes of the shard."""
        rows = self.weights + self.optimizer_state + self.scores + self.marks
        return rows + self.id_map + self.counters + self.cache

    @property
    def on_device(self) -> int:
        """Bytes of the shard in the memory of its device."""
        return self.total - self.host


def table_size(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    optimizer: RowOptimizer,
    device_type: str | torch.device = "cpu",
    limit: int | None = None,
    has_life: bool = False,
    counters: int = 0,
    deltas: bool = False,
    gpu_rows: int | None = None,
) -> TableSize:
    """Returns an upper bound of the bytes of a table's shard with `rows` rows, part by part.

    On the CPU the weights and the optimizer state are exact, because memory is committed when a row is
    first written. A GPU commits pages of 2 MiB, and an eighth more than a store needs (at most 256 MiB more).
    The id map is counted at its largest size on the way to this number of ids, including growth: 2 / MAX_LOAD
    slots per row while it is small, 1.25 / MAX_LOAD later. A GPU has old and new slots in memory while the
    map grows: 3 / MAX_LOAD, later 2.25 / MAX_LOAD. The map of counters is counted in the same way. Not
    included: withheld rows, counters above their limit before the surplus of a batch is dropped, the lists of
    rows to evict next, and the removed ids that deltas need.

    Args:
        rows: number of ids with a row.
        columns: columns of a row in this shard.
        dtype: dtype of the rows.
        optimizer: optimizer of the rows.
        device_type: "cpu" or "cuda", or a device of this type.
        limit: the table's row limit, at least `rows`, which sets the size of its blocks; None: `rows`.
        has_life: True if the table has a policy, so that each row has a score.
        counters: maximum number of waiting ids in this shard.
        deltas: True if deltas will be exported (`checkpoint.mark`), so that changed rows are recorded.
        gpu_rows: of a table with HostMemory, the rows of this shard with a place in the GPU's memory; None:
            all rows are in the memory of the device. Without effect on the CPU.

    Raises:
        ValueError: if an argument is not valid.
    """
    if dtype not in ROW_DTYPES:
        raise ValueError(
            f"table_size.dtype: expected torch.float32, torch.float16 or torch.bfloat16, got {dtype!r}."
        )
    if not isinstance(optimizer, RowOptimizer):
        raise ValueError(
            f"table_size.optimizer: expected a RowOptimizer, got {optimizer!r}. Write "
            "RowOptimizer.from_fused_params(fused_params, 'my table')."
        )
    kind = device_type.type if isinstance(device_type, torch.device) else device_type
    if kind not in ("cpu", "cuda"):
        raise ValueError(
            f"table_size.device_type: expected 'cpu' or 'cuda', got {device_type!r}. Pass the type of the "
            "device that has the rows."
        )
    rows = checked_count(rows, "table_size.rows", 0, "Pass the ids with a row in this shard.")
    columns = checked_count(columns, "table_size.columns", 1, "Pass the columns of this shard.")
    remedy = f"Pass the table's row limit, at least its rows={rows}, or None for as many as these."
    limit = rows if limit is None else checked_count(limit, "table_size.limit", rows, remedy)
    remedy = "Pass the most ids that wait in this shard; 0 without AdmitAfter."
    counters = checked_count(counters, "table_size.counters", 0, remedy)
    if gpu_rows is not None:
        remedy = "Pass the rows with a place on the GPU, or None if all rows are there."
        gpu_rows = checked_count(gpu_rows, "table_size.gpu_rows", 1, remedy)
    widths = [columns * dtype.itemsize]
    widths += [width * STATE_DTYPE.itemsize for width in optimizer.state_columns(columns)]
    shift = block_shift(limit, widths[0], kind)
    stores, cache, host = _store_bytes(rows, limit, widths, kind, gpu_rows)
    waiting = 0
    if counters:
        # The counters of a table have at most its limit, or the number that the user chose.
        shift_of_counters = block_shift(max(counters, limit), SCORE_BYTES, kind)
        waiting = most_slots(counters, kind) * SLOT_BYTES
        waiting += most_store_bytes(counters, SCORE_BYTES, shift_of_counters, kind)
    return TableSize(
        weights=stores[0],
        optimizer_state=sum(stores[1:]),
        id_map=most_slots(rows, kind) * SLOT_BYTES,
        scores=most_store_bytes(rows, SCORE_BYTES, shift, kind) if has_life else 0,
        counters=waiting,
        marks=most_log_bytes(rows, limit, kind) if deltas else 0,
        cache=cache,
        host=host,
    )


def _store_bytes(
    rows: int, limit: int, widths: list[int], kind: str, gpu_rows: int | None
) -> tuple[list[int], int, int]:
    """Returns the bytes of the stores of rows of these widths, of their cache, and those of the host."""
    if gpu_rows is None or kind == "cpu":
        shift = block_shift(limit, widths[0], kind)
        return [most_store_bytes(rows, width, shift, kind) for width in widths], 0, 0
    shift = block_shift(limit, widths[0])
    stores = [_host_bytes(rows, shift, width) for width in widths]
    return stores, _cache_bytes(rows, limit, gpu_rows, shift, widths), sum(stores)


def _host_bytes(rows: int, shift: int, row_bytes: int) -> int:
    """Returns the bytes of the blocks in the host's memory with `rows` rows: each is allocated as a whole."""
    return (-(-rows >> shift) << shift) * row_bytes


def _cache_bytes(rows: int, limit: int, gpu_rows: int, shift: int, widths: list[int]) -> int:
    """Returns a GPU's bytes for the frames of a table, in blocks as long as the host's, and their map."""
    frames, most_frames = min(gpu_rows, rows), min(gpu_rows, limit)
    of_frames = sum(most_store_bytes(frames, each, shift, "cuda") for each in widths)
    for used, most, width in (
        (rows, limit, _PLACE_BYTES),
        *((frames, most_frames, width) for width in _FRAME_BYTES),
    ):
        of_frames += most_store_bytes(used, width, block_shift(most, width, "cuda"), "cuda")
    return of_frames


def table_bytes(*arguments: Any, **named: Any) -> int:
    """Returns `table_size(...).total`, an upper bound of the bytes of a shard, for the same arguments."""
    return table_size(*arguments, **named).total


def print_size(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    optimizer: RowOptimizer,
    row_ranks: int,
    column_shards: int,
    has_life: bool,
    counters: int,
) -> None:
    """Prints the bytes of one shard and of all shards of a table on the CPU.

    Args:
        rows: number of ids with a row, over all ranks.
        columns: columns of the table.
        dtype: dtype of the rows.
        optimizer: optimizer of the rows.
        row_ranks: number of ranks that share the rows of a column shard.
        column_shards: number of column shards, all of about the same width.
        has_life: True if any policy is set.
        counters: maximum number of waiting ids, over all ranks.

    Raises:
        ValueError: if there are more column shards than columns, or an argument is not valid.
    """
    for name, number, least, remedy in (
        ("rows", rows, 0, "Pass the ids with a row, over all ranks."),
        ("columns", columns, 1, "Pass the table's embedding_dim."),
        ("row_ranks", row_ranks, 1, "Pass 1 if each column shard is on one rank."),
        ("column_shards", column_shards, 1, "Pass 1 if the columns are not split."),
        ("counters", counters, 0, "Pass 0 without AdmitAfter."),
    ):
        checked_count(number, f"print_size.{name}", least, remedy)
    if column_shards > columns:
        raise ValueError(
            f"size: expected at most {columns} column shards, one per column, got {column_shards}."
        )
    width, wider = divmod(columns, column_shards)
    widths = [width + (shard < wider) for shard in range(column_shards)]
    # The limit of a rank is also what it holds at most of the expected rows: ids do not split evenly.
    here, waiting = row_limit(rows, row_ranks), row_limit(counters, row_ranks) if counters else 0

    def size(rows_here: int, width: int, counters_here: int) -> TableSize:
        return table_size(
            rows_here, width, dtype, optimizer, has_life=has_life, counters=counters_here
        )

    largest = size(here, widths[0], waiting)
    # On average a rank holds its even share, so the whole is not the largest shard times the ranks.
    even = [size(-(-rows // row_ranks), width, -(-counters // row_ranks)) for width in widths]
    print(f"{'MiB':<18}{'largest shard':>15}{'all shards':>15}")
    for part in ("weights", "optimizer_state", "id_map", "scores", "counters", "total"):
        whole = row_ranks * sum(getattr(shard, part) for shard in even)
        print(
            f"{part.replace('_', ' '):<18}{getattr(largest, part) / 2**20:>15,.1f}{whole / 2**20:>15,.1f}"
        )
    print(
        f"{row_ranks * column_shards} shards of at most {here:,} rows and {widths[0]} columns, "
        f"for {rows:,} rows and {columns} columns in all"
    )
