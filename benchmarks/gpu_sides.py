"""The sides of a step in bench_gpu.py: dynamic tables, FBGEMM's TBE, and floors of plain torch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cached_property

import torch
from axes import GPU_HOST, Workload, offsets, ranks, raw_ids, tiny
from contestants import EPS, LEARNING_RATE, output_grad, static_tables
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.nn.functional import embedding_bag
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import dtype_to_data_type

import torchrec_dyn as dyn

BATCHES = 4
FED = 1 << 22  # ids of a forward that inserts
LINE = 8  # int64 numbers of 64 bytes
SLOTS = 1.6  # slots a row at the highest load
FUSED = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LEARNING_RATE, "eps": EPS,
}  # fmt: skip


class Batches:
    """Batches on the device, with ids in the form of each side.

    Args:
        workload: the workload.
        device: "cuda" or "cpu".
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self.rows = [batch.to(device) for batch in ranks(workload, BATCHES, seed=0)]
        self.offsets = offsets(workload).to(device)
        self.features = [features(workload, raw_ids(batch), workload.bag) for batch in self.rows]
        # A table's rows follow those of the tables before it.
        first = torch.arange(workload.tables, device=device) * workload.rows
        ids_a_table = workload.batch * workload.bag
        self.flat_rows = [batch + first.repeat_interleave(ids_a_table) for batch in self.rows]


def features(workload: Workload, ids: Tensor, bag: int) -> KeyedJaggedTensor:
    """Returns ids [tables * B * bag], table-major, in bags of one length. The host knows all sizes."""
    names = [f"f{t}" for t in range(workload.tables)]
    bags = ids.numel() // bag
    each = ids.numel() // workload.tables
    return KeyedJaggedTensor(
        names,
        ids,
        lengths=torch.full((bags,), bag, device=ids.device),
        offsets=torch.arange(bags + 1, device=ids.device) * bag,
        stride=bags // workload.tables,
        length_per_key=[each] * workload.tables,
        offset_per_key=[each * t for t in range(workload.tables + 1)],
    )


def dynamic_tables(
    workload: Workload, dtype: torch.dtype, device: str
) -> dyn.DynamicEmbeddingBagCollection:
    """Returns an unsharded collection in which every id has a row."""
    collection = dyn.DynamicEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t{t}", feature_names=[f"f{t}"], embedding_dim=workload.dim,
                num_embeddings=workload.rows, data_type=dtype_to_data_type(dtype),
            )
            for t in range(workload.tables)
        ],
        device=device,
        fused_params=FUSED,
    )  # fmt: skip
    with torch.no_grad():
        for numbers in torch.arange(workload.rows, device=device).split(FED // workload.tables):
            collection(features(workload, raw_ids(numbers).repeat(workload.tables), 1))
    return collection


class Sides:
    """The sides of one workload on tables that are filled once.

    Args:
        workload: sizes of the tables.
        dtype: float32 or float16, of the rows.
        device: "cuda" or "cpu".
        has_tbe: False to leave TBE out.

    Attributes:
        bytes_a_row: bytes of the dynamic tables beside weights and optimizer state, for each row.
    """

    def __init__(self, workload: Workload, dtype: torch.dtype, device: str, has_tbe: bool) -> None:
        self.workload, self.dtype, self.device = workload, dtype, device
        before = memory_in_use(device)
        self.dynamic = dynamic_tables(workload, dtype, device)
        held = memory_in_use(device) - before
        if device == "cpu":  # what the tables say of themselves
            held = sum(table.stats()["bytes"] for table in self.dynamic.local_tables().values())
        self.bytes_a_row = held / (workload.tables * workload.rows)
        self.bytes_a_row -= workload.dim * dtype.itemsize + 4
        self.tbe = static_tables(workload, dtype=dtype, device=device) if has_tbe else None
        self.grad = output_grad(workload).to(device)

    @cached_property
    def weights(self) -> Tensor:
        """All rows in one tensor, [tables * rows, dim]: those of TBE if it is there."""
        if self.tbe is not None:
            held = self.tbe.weights_dev if self.device == "cuda" else self.tbe.weights_host
            return held.detach().view(-1, self.workload.dim)
        rows = self.workload.tables * self.workload.rows
        return torch.zeros(rows, self.workload.dim, dtype=self.dtype, device=self.device)

    @cached_property
    def lines(self) -> Tensor:
        """As many lines of 64 bytes as the id maps have, [lines, 8] int64."""
        slots = int(self.workload.tables * self.workload.rows * SLOTS)
        return torch.zeros(slots // 4 + 1, LINE, dtype=torch.int64, device=self.device)

    def forwards(self, batches: Batches) -> dict[str, Callable[[int], Tensor]]:
        """Returns the lookups: number of a batch -> pooled rows."""
        looked_up: dict[str, Callable[[int], Tensor]] = {
            "ours": lambda i: self.dynamic(batches.features[i]).values()
        }
        if self.tbe is not None:
            tbe = self.tbe
            looked_up["TBE"] = lambda i: tbe(batches.rows[i], batches.offsets)
        return looked_up

    def floors(self, batches: Batches) -> dict[str, Callable[[int], Tensor]]:
        """Returns bare loops in place of lookups: number of a batch -> what they read."""
        places = [raw_ids(rows) % len(self.lines) for rows in batches.flat_rows]
        return {
            "bare gather": lambda i: embedding_bag(
                batches.flat_rows[i], self.weights, batches.offsets[:-1], mode="sum"
            ),
            "random lines": lambda i: self.lines.index_select(0, places[i]),
        }


def memory_in_use(device: str) -> int:
    """Returns the bytes of a GPU that are in use, without what torch keeps for later; 0 on the CPU.

    The driver counts all segments of torch; `empty_cache` returns only those without any tensor. What is
    free in the others is subtracted: small tables would be charged for it.
    """
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return total - free - kept


def needed_bytes(workload: Workload, dtype: torch.dtype) -> int:
    """Returns about how many bytes of the device the sides of a workload need, batches included."""
    # Rows and moments of two sides, a map that grows, lines.
    a_row = 2 * (workload.dim * dtype.itemsize + 4) + 58 + SLOTS * 16
    output = workload.batch * workload.tables * workload.dim * 4
    batches = BATCHES * workload.ids_per_step * 5 * 8
    return int(workload.tables * workload.rows * a_row) + 6 * output + batches


def deterministic(run: Callable[[int], object]) -> Callable[[int], None]:
    """Returns a contestant that runs under torch's deterministic algorithms."""
    settings = torch.utils.deterministic

    def turn(number: int) -> None:
        filled = settings.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = False  # an aid for debugging, which takes time
        try:
            run(number)
        finally:
            torch.use_deterministic_algorithms(False)
            settings.fill_uninitialized_memory = filled

    return turn


def why_without_tbe(device: str) -> str:
    """Returns the reason why FBGEMM's TBE does not train on this device; empty if it does."""
    workload = tiny(GPU_HOST)
    batches = Batches(workload, device)
    try:
        output = static_tables(workload, device=device)(batches.rows[0], batches.offsets)
        output.backward(output_grad(workload).to(device))
        output.sum().item()
    except Exception as error:  # what a missing library raises is not known
        return (str(error).splitlines() or [""])[0] or type(error).__name__
    return ""
