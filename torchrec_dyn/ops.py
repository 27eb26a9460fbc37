"""A typed Python function for each op of the core; its body is the fake kernel.

The schemas, the shapes and the meaning of every argument are in csrc/library.cpp. This is the only file that
spells `torch.ops`. An op changes state in place only if its name or docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from torchrec_dyn.versions import REPORT

try:
    import torchrec_dyn._C  # noqa: F401  (loads the library that registers the ops)
except ImportError as fault:
    raise ImportError(
        f"torchrec_dyn: expected its compiled extension, got {type(fault).__name__}: {fault}. Build it "
        f"with the installed torch (make build), or install a wheel. {REPORT}"
    ) from fault

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _op(fake: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns the op that has the name, the arguments and the docstring of its fake kernel."""
    name = fake.__name__
    torch.library.register_fake(f"torchrec_dyn::{name}")(fake)
    op = getattr(torch.ops.torchrec_dyn, name).default
    op.__doc__ = fake.__doc__
    return cast("Callable[Arguments, Result]", op)


def _two_lists(like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two lists of the same length, which depends on the contents of tensors."""
    length = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty(length), like.new_empty(length)


def complete_cumsum(lengths: Tensor) -> Tensor:
    """Returns 0 and the cumulative sums of lengths [M], by an op of FBGEMM: [M + 1] int64."""
    sums: Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.long().contiguous())
    return sums


def has_cuda_kernels() -> bool:
    """Returns True if this build of the extension has kernels for CUDA."""
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key("torchrec_dyn::lookup", "CUDA")
    return has


@_op
def mix64(ids: Tensor) -> Tensor:
    """Returns the mixed ids: a bijection of 64-bit words."""
    return torch.empty_like(ids)


@_op
def raise_errors(like: Tensor) -> None:
    """Raises the first error that ops have found on a GPU since the last such call; waits for the GPU."""


@_op
def lookup(
    ids: Tensor, table_offsets: Tensor, slots: Sequence[Tensor], moved: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds the rows of ids in the maps of T tables."""
    return torch.empty_like(ids), ids.new_empty(moved.shape[0])


@_op
def collect_new(
    ids: Tensor, rows: Tensor, table_offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lists the distinct absent ids of each table in the order in which they first occur."""
    fresh = torch.library.get_ctx().new_dynamic_size()
    new_ids, new_counts = ids.new_empty(fresh), ids.new_empty(fresh)
    return new_ids, new_counts, torch.empty_like(table_offsets), torch.empty_like(rows)


@_op
def insert(
    new_ids: Tensor, new_rows: Tensor, new_offsets: Tensor, slots: Sequence[Tensor], moved: Tensor
) -> None:
    """Writes distinct absent ids into the maps, in place."""


@_op
def erase(ids: Tensor, slots: Sequence[Tensor], moved: Tensor) -> Tensor:
    """Removes ids from one map, in place."""
    return torch.empty_like(ids)


@_op
def new_slots(slots: Tensor, capacity: int) -> Tensor:
    """Returns empty slots. Their memory is committed when ids are written."""
    return slots.new_empty(capacity, 2)


@_op
def grown_slots(
    slots: Sequence[Tensor], capacities: Sequence[int], keys: Sequence[int]
) -> list[Tensor]:
    """Copies maps to larger arrays of slots."""
    both = zip(slots, capacities, strict=True)
    return [array.new_empty(capacity, 2) for array, capacity in both]


@_op
def move_slots(outgoing: Tensor, slots: Tensor, moved: int, until: int, key: int = 0) -> Tensor:
    """Moves a range of outgoing slots into a larger array of slots, both in place."""
    return torch.empty(1, dtype=torch.int64)


@_op
def probe_lengths(slots: Tensor, every: int, key: int = 0) -> Tensor:
    """Sums the probe lengths of ids. A probe length is the number of slots read to find an id."""
    return slots.new_empty(3)


@_op
def used_slots(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Lists the ids of some slots, in the order of the slots."""
    return _two_lists(slots)


@_op
def ids_of_rows(
    slots: Sequence[Tensor], moved: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Returns the ids of one map by row, for a range of R rows."""
    ids = slots[0].new_empty(last - first)
    return ids, ids.bool()


@_op
def count_cells(slots: Sequence[Tensor], moved: Tensor, bits: int) -> Tensor:
    """Counts the ids of one map per cell. The cell of an id is the top bits of its mixed id."""
    return moved.new_empty(1 << bits)


@_op
def ids_between(
    slots: Sequence[Tensor], moved: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Lists the ids of one map whose mixed id is in a range, in canonical order."""
    return _two_lists(moved)


@_op
def content_sum(ids: Tensor, values: Tensor, first_column: int, key: int) -> Tensor:
    """Computes the content sum of rows, one word (csrc/storage/content_sum.h)."""
    return ids.new_empty(())


@_op
def mark_rows_(
    rows: Tensor,
    table_offsets: Tensor,
    marks: Sequence[Tensor],
    layout: Tensor,
    versions: Tensor,
) -> None:
    """Marks rows with the version of their table, in place."""


@_op
def mark_new_(
    rows: Tensor, table_offsets: Tensor, marks: Sequence[Tensor], layout: Tensor
) -> tuple[Tensor, Tensor]:
    """Sets the bits of rows, in place, and finds the rows whose bit was clear. On the CPU only."""
    places = rows.new_empty(torch.library.get_ctx().new_dynamic_size())
    return places, torch.empty_like(table_offsets)


@_op
def grow_block(block: Tensor, rows: int, limit: int, on_host: bool = False) -> Tensor:
    """Returns a block with more rows; its first rows are those of `block`, other rows are not initialised."""
    return block.new_empty(rows, block.shape[1])


@_op
def init_rows_(
    ids: Tensor,
    rows: Tensor,
    blocks: Sequence[Tensor],
    shift: int,
    columns: int,
    first_column: int,
    kind: int,
    parameters: Sequence[float],
    key: int,
) -> None:
    """Writes the initial rows of ids into the blocks of one table, in place."""


@_op
def ask_for_rows(rows: Tensor, blocks: Sequence[Tensor], shift: int, columns: int) -> None:
    """Asks the operating system to read the pages of rows that are mapped from files, and does not wait."""


@_op
def gather_rows(
    rows: Tensor, blocks: Sequence[Tensor], shift: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Returns copies of rows of one table."""
    return rows.new_empty(rows.shape[0], columns, dtype=dtype)


@_op
def scatter_rows_(
    rows: Tensor, values: Tensor, blocks: Sequence[Tensor], shift: int, columns: int
) -> None:
    """Copies values into rows of one table, in place. For a repeated row the last values are kept."""


@_op
def sort_by_owner(
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    ranks: int,
    positions: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts a batch by the owners of its ids, for a table whose rows `ranks` ranks share."""
    owner_lengths = lengths.new_empty(ranks * lengths.shape[0])
    sent = ids.new_empty(0, dtype=torch.float32) if weights is None else torch.empty_like(weights)
    return (
        torch.empty_like(ids),
        owner_lengths,
        sent,
        ids.new_empty(ids.shape[0] if positions else 0),
    )


@_op
def cache_rows_(
    rows: Tensor,
    table_offsets: Tensor,
    caches: Sequence[Tensor],
    cache_layout: Tensor,
    loads: bool,
    tables: Tensor,
) -> None:
    """Gives frames to rows of tables in host memory, in place. On a GPU only."""


@_op
def row_places(
    rows: Tensor, table_offsets: Tensor, caches: Sequence[Tensor], cache_layout: Tensor
) -> Tensor:
    """Returns where rows are: themselves, or their frames. On a GPU only."""
    return torch.empty_like(rows)


@_op
def gather_pool(
    rows: Tensor,
    offsets: Tensor | None,
    bag_weights: Tensor | None,
    weights: Sequence[Tensor],
    layout: Tensor,
    segments: Tensor,
    mean: bool,
    elements: int,
    dtype: torch.dtype,
) -> Tensor:
    """Gathers rows of T tables and pools them by bag."""
    return rows.new_empty(elements, dtype=dtype)


@_op
def prepare_tables(
    slots: Sequence[Tensor],
    moved: Tensor,
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    layout: Tensor,
    optimizer: int,
    on_nonfinite: Sequence[int],
    nonfinite: Sequence[Tensor],
    initial: Tensor | None,
    parameters: Tensor | None,
    initial_states: Sequence[float],
    scores: Sequence[Tensor],
    score_layout: Tensor | None,
) -> Tensor:
    """Checks the maps, rows, optimizer states and scores of T tables once, for ops that take the result."""
    return torch.empty(1, dtype=torch.int64)


@_op
def touch_scores_(
    rows: Tensor, table_offsets: Tensor, steps: Tensor, times: Tensor | None, tables: Tensor
) -> None:
    """Counts each occurrence of a row and writes the step of its last one, in prepared tables."""


@_op
def find_and_pool(
    ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, bag_weights: Tensor | None,
    first_bags: Tensor, first_features: Tensor, segments: Tensor | None, tables: Tensor, mean: bool,
    pools: int, collects: int, output_rows: int, columns: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Finds the rows of ids in the maps of prepared tables, pools them by bag, and lists the absent ids."""
    shape = (output_rows, columns) if columns else (output_rows,)
    out = ids.new_empty(shape if pools else (0,), dtype=dtype)
    if pools and segments is None:
        width = torch.library.get_ctx().new_dynamic_size()
        out = ids.new_empty((ids.shape[0], width), dtype=dtype)
    numbers = first_bags.new_empty(first_bags.shape[0] + 3 * first_features.shape[0] - 1)
    bags, fresh, index = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
    new = ids.new_empty(fresh), ids.new_empty(fresh), ids.new_empty(index)
    return out, torch.empty_like(ids), ids.new_empty(bags), numbers, *new


@_op
def read_scores(rows: Tensor, table_offsets: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Reads scores of prepared tables."""
    return torch.empty_like(rows), torch.empty_like(rows)


@_op
def write_scores_(
    rows: Tensor, table_offsets: Tensor, last_seen: Tensor, counts: Tensor, tables: Tensor
) -> None:
    """Writes scores of prepared tables, in place."""


@_op
def add_rows_(
    new_rows: Tensor, new_ids: Tensor, new_offsets: Sequence[int], first_rows: Sequence[int],
    reused: Tensor, reused_offsets: Sequence[int], steps: Sequence[int], counts: Tensor | None,
    rows: Tensor | None, new_index: Tensor | None, places: Tensor | None,
    initial_places: Tensor | None, tables: Tensor,
) -> None:  # fmt: skip
    """Gives rows to new ids of prepared tables, in place: their numbers, contents, scores and slots."""


@_op
def remove_rows_(ids: Tensor, rows: Tensor, offsets: Sequence[int], tables: Tensor) -> None:
    """Removes ids of prepared tables and the scores of their rows, in place."""


@_op
def commit_step_(
    removed_ids: Tensor, removed_rows: Tensor, removed_offsets: Sequence[int], seen_rows: Tensor,
    table_offsets: Tensor, steps: Tensor, times: Tensor | None, new_rows: Tensor, new_ids: Tensor,
    new_offsets: Sequence[int], first_rows: Sequence[int], reused: Tensor,
    reused_offsets: Sequence[int], new_steps: Sequence[int], counts: Tensor | None,
    rows: Tensor | None, new_index: Tensor | None, places: Tensor | None,
    initial_places: Tensor | None, tables: Tensor,
    dropped_ids: Tensor, dropped_rows: Tensor, dropped_offsets: Sequence[int], waiting_rows: Tensor,
    waiting_offsets: Tensor, waiting_steps: Tensor, waiting_times: Tensor | None,
    begun_rows: Tensor, begun_ids: Tensor, begun_offsets: Sequence[int],
    begun_first_rows: Sequence[int], begun_reused: Tensor, begun_reused_offsets: Sequence[int],
    begun_steps: Sequence[int], begun_counts: Tensor | None, begun_fills: Tensor | None,
    begun_index: Tensor | None, begun_places: Tensor | None, begun_initial_places: Tensor | None,
    counters: Tensor,
) -> None:  # fmt: skip
    """Commits a training step of prepared tables, in place: scores, removed rows, new rows, counters."""


@_op
def admit(
    new_ids: Tensor, occurrences: Tensor, new_offsets: Tensor, asks: Tensor | None,
    counted: Tensor | None, rules: Tensor, squares: Tensor, counters: Tensor, sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Decides which new ids of several tables get rows, and what becomes of the counters of all."""
    first, second = _two_lists(new_ids)
    places = new_ids.new_empty(torch.library.get_ctx().new_dynamic_size())
    return places, first, second, new_offsets.new_empty(6 * (new_offsets.shape[0] - 1))


@_op
def lowest_rows(
    like: Tensor, questions: Tensor, half_lives: Tensor | None, in_order: bool, tables: Tensor,
    kept: Tensor | None = None, kept_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Finds the lowest rows of prepared tables: by count or last_seen, then by mixed id, unsigned."""
    ids, rows = _two_lists(like)
    last_seen = torch.empty_like(ids) if in_order else torch.empty_like(like[:0])
    return ids, rows, last_seen, questions.new_empty(questions.shape[0] + 1)


@_op
def choose_listed(
    listed: Sequence[Tensor], spans: Tensor, tables: Tensor, kept: Tensor | None = None,
    kept_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Finds the first rows of lists whose last_seen is as listed."""
    ids, rows = _two_lists(listed[0] if listed else tables)
    lists = spans.shape[0]
    return ids, rows, spans.new_empty(lists + 1), spans.new_empty(lists)


@_op
def pool_prepared_(
    out: Tensor, new_index: Tensor | None, rows: Tensor, initial_ids: Tensor | None,
    offsets: Tensor | None, bag_weights: Tensor | None, segments: Tensor, tables: Tensor, mean: bool,
) -> None:  # fmt: skip
    """Gathers rows of prepared tables and pools them, in place of `out`: all bags, or those that changed."""


@_op
def weights_grad_prepared(
    grad: Tensor, rows: Tensor, initial_ids: Tensor | None, offsets: Tensor | None,
    segments: Tensor, tables: Tensor, mean: bool,
) -> Tensor:  # fmt: skip
    """Computes the gradient of the bag weights, of prepared tables."""
    return grad.new_empty(rows.shape[0])


@_op
def update_prepared_(
    grad: Tensor, ids: Tensor, rows: Tensor, offsets: Tensor | None, bag_weights: Tensor | None,
    segments: Tensor, streams: Tensor, mean: bool, hyper: Sequence[float], grad_scales: Sequence[float],
    senders: Tensor | None, marks: Sequence[Tensor], mark_layout: Tensor | None, tables: Tensor,
) -> None:  # fmt: skip
    """As `update_rows_`, of prepared tables."""


@_op
def update_rows_(
    grad: Tensor, ids: Tensor, rows: Tensor, offsets: Tensor | None, bag_weights: Tensor | None,
    segments: Tensor, streams: Tensor, mean: bool, hyper: Sequence[float], grad_scales: Sequence[float],
    senders: Tensor | None, marks: Sequence[Tensor], mark_layout: Tensor | None,
    weights: Sequence[Tensor], states: Sequence[Tensor], layout: Tensor, optimizer: int,
    on_nonfinite: Sequence[int], nonfinite: Sequence[Tensor],
) -> None:  # fmt: skip
    """Sums the gradients of each row and applies the optimizer, in place. Marks the updated rows."""
