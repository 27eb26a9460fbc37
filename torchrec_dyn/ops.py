"""A typed Python function for each op of the core; its body is the fake kernel.

The schemas and the meaning of every argument are in csrc/library.cpp. This is the only file that spells
`torch.ops`. An op changes state in place only if its name or docstring says so.
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
    """Returns the op that has the name, the arguments and the docstring of a function.

    The body is the fake kernel: it returns tensors of the right shapes, for torch.compile.
    """
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
    """Returns 0 and the cumulative sums of lengths, by an op of FBGEMM.

    Args:
        lengths: [M] integer.

    Returns:
        [M + 1] int64.
    """
    sums: Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.long().contiguous())
    return sums


def has_cuda_kernels() -> bool:
    """Returns True if this build of the extension has kernels for CUDA."""
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key("torchrec_dyn::lookup", "CUDA")
    return has


@_op
def mix64(ids: Tensor) -> Tensor:
    """Returns the mixed ids: a bijection of 64-bit words.

    Args:
        ids: [N] int64.

    Returns:
        [N] int64, the bits of an unsigned word.
    """
    return torch.empty_like(ids)


@_op
def raise_errors(like: Tensor) -> None:
    """Raises the first error that ops have found on a GPU since the last such call; waits for the GPU.

    Ops on a GPU do not wait to see whether the contents of their arguments are valid
    (csrc/device_errors.h). On the CPU each op raises its own errors, and this does nothing.
    like: any tensor on the GPU; not read.
    """


@_op
def lookup(
    ids: Tensor, table_offsets: Tensor, slots: Sequence[Tensor], moved: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds the rows of ids in the maps of T tables.

    Args:
        ids: [N] int64 in table order.
        table_offsets: [T + 1] int64; the ids of table t are ids[table_offsets[t] : table_offsets[t + 1]].
            With ids on a GPU they may be there, too. Then they are not checked; a caller who finds wrong ones
            drops the results.
        slots: [C, 2] int64 each: the slots of T maps, then the outgoing slots of each map that grows.
        moved: [T, 2] int64, number of moved outgoing slots, -1 for a map that does not grow; and the key of
            the map's hash (csrc/slot_hash.h). [T]: all keys are 0.

    Returns:
        rows: [N] int64, -1 for an absent id.
        absent: [T] int64, number of absent ids of each table, repeats included; on the device of `ids`. On a
            GPU the sign bit of absent[0] is set if `raise_errors` has an error to raise.
    """
    return torch.empty_like(ids), ids.new_empty(moved.shape[0])


@_op
def collect_new(
    ids: Tensor, rows: Tensor, table_offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lists the distinct absent ids of each table in the order in which they first occur.

    Args:
        ids: [N] int64 in table order.
        rows: [N] int64, the result of `lookup`.
        table_offsets: [T + 1] int64, as in `lookup`.

    Returns:
        new_ids: [M] int64, table after table.
        new_counts: [M] int64, occurrences of each new id.
        new_offsets: [T + 1] int64 on the CPU; the new ids of table t are
            new_ids[new_offsets[t] : new_offsets[t + 1]].
        new_index: [N] int64, position of an absent id in new_ids; -1 for an id with a row.
    """
    fresh = torch.library.get_ctx().new_dynamic_size()
    new_ids, new_counts = ids.new_empty(fresh), ids.new_empty(fresh)
    return new_ids, new_counts, torch.empty_like(table_offsets), torch.empty_like(rows)


@_op
def insert(
    new_ids: Tensor, new_rows: Tensor, new_offsets: Tensor, slots: Sequence[Tensor], moved: Tensor
) -> None:
    """Writes distinct absent ids into the maps, in place.

    Args:
        new_ids: [M] int64.
        new_rows: [M] int64, at least 0.
        new_offsets: [T + 1] int64, as in `collect_new`.
        slots: as in `lookup`, with an empty slot for every new id; written.
        moved: as in `lookup`.
    """


@_op
def fill_new_(rows: Tensor, new_index: Tensor, new_rows: Tensor) -> None:
    """Writes `new_rows[new_index]` into `rows` where new_index is not -1.

    Args:
        rows: [N] int64, written in place.
        new_index: [N] int64, a result of `collect_new`.
        new_rows: [M] int64.
    """


@_op
def erase(ids: Tensor, slots: Sequence[Tensor], moved: Tensor) -> Tensor:
    """Removes ids from one map, in place.

    Args:
        ids: [M] int64.
        slots: slots of one map, as in `lookup`; written.
        moved: [1, 2] int64, as in `lookup`.

    Returns:
        [M] int64, the rows of the ids; -1 for an absent id and for a repeat of an erased id.
    """
    return torch.empty_like(ids)


@_op
def new_slots(slots: Tensor, capacity: int) -> Tensor:
    """Returns empty slots. Their memory is committed when ids are written.

    Args:
        slots: [C, 2] int64, any slots on the device of the result; not read.
        capacity: number of slots of the result.

    Returns:
        [capacity, 2] int64.
    """
    return slots.new_empty(capacity, 2)


@_op
def move_slots(outgoing: Tensor, slots: Tensor, moved: int, until: int, key: int = 0) -> Tensor:
    """Moves a range of outgoing slots into a larger array of slots, both in place.

    Args:
        outgoing: [C, 2] int64; moved slots become empty, and their memory is released.
        slots: [C', 2] int64, C' at least C, with room for every id; written.
        moved: number of outgoing slots that earlier calls moved, 0 at first.
        until: end of the range: the outgoing slots before this number are moved.
        key: of the map's hash, as in `lookup`.

    Returns:
        [1] int64 on the CPU, the new value of `moved`: `until` or a few slots more; C if all slots are
            moved. A GPU always moves all slots.
    """
    return torch.empty(1, dtype=torch.int64)


@_op
def probe_lengths(slots: Tensor, every: int, key: int = 0) -> Tensor:
    """Sums the probe lengths of ids. A probe length is the number of slots read to find an id.

    Args:
        slots: [C, 2] int64.
        every: sampling interval: one in `every` runs of 4,096 slots is read, starting with the first run.
        key: of the map's hash, as in `lookup`.

    Returns:
        [3] int64: number of ids, sum of their probe lengths (1 for an id in its home slot), and the longest
            probe length.
    """
    return slots.new_empty(3)


@_op
def used_slots(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Lists the ids of some slots, in the order of the slots.

    Args:
        slots: [C, 2] int64, an array of slots or a slice of it; C is a multiple of 4.

    Returns:
        ids: [K] int64.
        rows: [K] int64.
    """
    return _two_lists(slots)


@_op
def ids_of_rows(
    slots: Sequence[Tensor], moved: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Returns the ids of one map by row, for a range of R rows.

    Args:
        slots: slots of one map, as in `lookup`.
        moved: [1, 2] int64, as in `lookup`.
        first: the first row.
        last: the row after the last row.

    Returns:
        ids: [R] int64; 0 for a row without an id.
        has_id: [R] bool.
    """
    ids = slots[0].new_empty(last - first)
    return ids, ids.bool()


@_op
def count_cells(slots: Sequence[Tensor], moved: Tensor, bits: int) -> Tensor:
    """Counts the ids of one map per cell. The cell of an id is the top bits of its mixed id.

    Args:
        slots: slots of one map, as in `lookup`.
        moved: [1, 2] int64, as in `lookup`.
        bits: number of top bits, 0 to 16.

    Returns:
        [2^bits] int64, number of ids in each cell.
    """
    return moved.new_empty(1 << bits)


@_op
def ids_between(
    slots: Sequence[Tensor], moved: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Lists the ids of one map whose mixed id is in a range, in canonical order.

    Args:
        slots: slots of one map, as in `lookup`.
        moved: [1, 2] int64, as in `lookup`.
        first: the smallest mixed id, the bits of an unsigned word as int64.
        last: the largest mixed id, included, in the same form; no id is listed if `last` is below `first`.

    Returns:
        ids: [K] int64, ascending by mixed id, unsigned.
        rows: [K] int64.
    """
    return _two_lists(moved)


@_op
def content_sum(ids: Tensor, values: Tensor, first_column: int, key: int) -> Tensor:
    """Computes the content sum of rows, one word (csrc/storage/content_sum.h).

    For any cut of a table into rows and columns, the sums of the parts add up, modulo 2^64, to the sum of
    the whole table.

    Args:
        ids: [M] int64.
        values: [M, D] float32, float16, bfloat16 or int64, read as bits: 0.0 and -0.0 differ, NaNs with
            the same bits are equal.
        first_column: number of the first column in the whole table.
        key: 64-bit key (as int64) of the table and of the kind of values.

    Returns:
        [] int64, the bits of an unsigned word.

    Source: multilinear hashing, Lemire and Kaser, "Strongly universal string hashing is fast", 2014.
    """
    return ids.new_empty(())


@_op
def touch_scores_(
    rows: Tensor,
    table_offsets: Tensor,
    scores: Sequence[Tensor],
    layout: Tensor,
    steps: Tensor,
    times: Tensor | None = None,
) -> None:
    """Counts every occurrence of a row and writes the step of its last occurrence, in place.

    Args:
        rows: [N] int64 in table order; -1 is skipped, each repeat of a row counts.
        table_offsets: [T + 1] int64, as in `lookup`.
        scores: blocks [2^shift, 1] int64 of all tables, table after table (csrc/life/scores.h); written.
        layout: [T, 4] int64, as in `gather_pool`; a table with 0 blocks keeps no scores.
        steps: [T] int64, the step of each table, in [0, 2^32 - 1).
        times: [N] int64, in [1, 2^32), number of occurrences per entry of `rows`; None: 1.
    """


@_op
def write_scores_(
    rows: Tensor, last_seen: Tensor, counts: Tensor, scores: Sequence[Tensor], shift: int
) -> None:
    """Writes scores of one table, in place. For a repeated row the last score is kept.

    Args:
        rows: [M] int64 inside the blocks.
        last_seen: [M] int64, steps in [0, 2^32 - 1), or -1 to make a row free; its count is then ignored.
        counts: [M] int64 in [0, 2^32).
        scores: blocks of one table, 2^shift rows each; written.
        shift: binary logarithm of the rows of a block.
    """


@_op
def read_scores(rows: Tensor, scores: Sequence[Tensor], shift: int) -> tuple[Tensor, Tensor]:
    """Reads scores of one table.

    Args:
        rows: [M] int64; -1 reads as a free row.
        scores: blocks of one table, 2^shift rows each.
        shift: binary logarithm of the rows of a block.

    Returns:
        last_seen: [M] int64, -1 for a free row.
        counts: [M] int64, 0 for a free row.
    """
    return torch.empty_like(rows), torch.empty_like(rows)


@_op
def lowest_scores(
    slots: Sequence[Tensor],
    moved: Tensor,
    scores: Sequence[Tensor],
    shift: int,
    rows: int,
    by_count: bool,
    before: int,
    most: int,
) -> tuple[Tensor, Tensor]:
    """Finds the ids of one map with the lowest scores: by count or last_seen, then by mixed id, unsigned.

    Args:
        slots: slots of one map, as in `lookup`.
        moved: [1, 2] int64, as in `lookup`.
        scores: blocks of one table, 2^shift rows each; every row without an id is free.
        shift: binary logarithm of the rows of a block.
        rows: number of rows: rows [0, rows) are considered.
        by_count: True to compare counts, False to compare last_seen.
        before: a step. Rows of this step and later are never chosen, except rows assigned at this step and
            not seen yet (count 0).
        most: maximum number of ids to return.

    Returns:
        ids: [K] int64. On the CPU in the order of the slots, so that erasing them accesses memory in
            ascending order; on a GPU by mixed id, unsigned.
        rows: [K] int64.
    """
    return _two_lists(slots[0])


@_op
def oldest_first(ids: Tensor, last_seen: Tensor) -> Tensor:
    """Returns the order of ids by last_seen, ties by mixed id, unsigned.

    Args:
        ids: [M] int64; repeats with the same last_seen become neighbours.
        last_seen: [M] int64 in [0, 2^32).

    Returns:
        [M] int64, the permutation that sorts the ids.
    """
    return torch.empty_like(ids)


@_op
def mark_rows_(
    rows: Tensor,
    table_offsets: Tensor,
    marks: Sequence[Tensor],
    layout: Tensor,
    versions: Tensor,
) -> None:
    """Marks rows with the version of their table, in place.

    Args:
        rows: [N] int64 in table order; negative rows are skipped.
        table_offsets: [T + 1] int64, as in `lookup`.
        marks: blocks [2^shift, 1] int32 of all tables (csrc/storage/row_marks.h); written.
        layout: [T, 4] int64, as in `gather_pool`; a table with 0 blocks keeps no marks.
        versions: [T] int64, in [0, 2^31).
    """


@_op
def mark_new_(
    rows: Tensor, table_offsets: Tensor, marks: Sequence[Tensor], layout: Tensor
) -> tuple[Tensor, Tensor]:
    """Sets the bits of rows, in place, and finds the rows whose bit was clear. On the CPU only.

    Args:
        rows: [N] int64 in table order; negative rows are skipped.
        table_offsets: [T + 1] int64, as in `lookup`.
        marks: blocks [2^shift] uint8 of all tables, one bit for each row (csrc/storage/row_marks.h); written.
        layout: [T, 4] int64, as in `gather_pool`, of shift 6 or more; a table with 0 blocks keeps no marks.

    Returns:
        places: [K] int64, ascending: the first places in `rows` of the rows whose bit was clear. Behind
            these, from begins[T] on, -1.
        begins: [T + 1] int64, where the places of each table begin.
    """
    places = rows.new_empty(torch.library.get_ctx().new_dynamic_size())
    return places, torch.empty_like(table_offsets)


@_op
def advise_huge_pages(block: Tensor) -> None:
    """Requests 2 MiB pages for a block from the operating system. Call it before the first write.

    Args:
        block: a contiguous tensor of any shape and dtype. Its values do not change.
    """


@_op
def grow_block(block: Tensor, rows: int, limit: int) -> Tensor:
    """Returns a block with more rows; its first rows are those of `block`, other rows are not initialised.

    A block that this op returned keeps its address, and shares memory with the result. Any other block is
    copied. Memory is committed for `rows` rows; nothing has changed if there is none (MemoryError).

    Args:
        block: [R, D] of any dtype, contiguous; R may be 0.
        rows: number of rows of the result, at least R and at least 1.
        limit: the most rows that the block will ever have; the first call reserves their addresses.

    Returns:
        [rows, D].
    """
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
    """Writes the initial rows of ids into the blocks of one table, in place.

    Args:
        ids: [M] int64.
        rows: [M] int64 inside the blocks, each once.
        blocks: blocks of one table, 2^shift rows each; written.
        shift: binary logarithm of the rows of a block.
        columns: columns of a row in these blocks.
        first_column: number of the first column in the whole table.
        kind: 0 constant, 1 uniform, 2 normal (csrc/storage/initial_rows.h).
        parameters: low, high, mean, deviation, low probability, high probability; for kind 2 the
            probabilities ascend in [0, 1].
        key: 64-bit key (as int64) of the seed and the table's name.
    """


@_op
def ask_for_rows(rows: Tensor, blocks: Sequence[Tensor], shift: int, columns: int) -> None:
    """Asks the operating system to read the pages of rows that are mapped from files, and does not wait.

    Args:
        rows: [M] int64; -1 is no row.
        blocks: blocks of one table, 2^shift rows each. Their values do not change.
        shift: binary logarithm of the rows of a block.
        columns: columns of a row.
    """


@_op
def gather_rows(
    rows: Tensor, blocks: Sequence[Tensor], shift: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Returns copies of rows of one table.

    Args:
        rows: [M] int64; -1 reads as zeros.
        blocks: blocks of one table, 2^shift rows each.
        shift: binary logarithm of the rows of a block.
        columns: columns of a row.
        dtype: dtype of the blocks and of the result.

    Returns:
        [M, columns] of dtype.
    """
    return rows.new_empty(rows.shape[0], columns, dtype=dtype)


@_op
def scatter_rows_(
    rows: Tensor, values: Tensor, blocks: Sequence[Tensor], shift: int, columns: int
) -> None:
    """Copies values into rows of one table, in place. For a repeated row the last values are kept.

    Args:
        rows: [M] int64 inside the blocks.
        values: [M, columns] of the blocks' dtype.
        blocks: blocks of one table, 2^shift rows each; written.
        shift: binary logarithm of the rows of a block.
        columns: columns of a row.
    """


@_op
def sort_by_owner(
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    ranks: int,
    positions: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts a batch by the owners of its ids, for a table whose rows `ranks` ranks share.

    Args:
        ids: [N] int64.
        lengths: [B] int64 or int32, number of ids of each bag.
        weights: [N] floating point, weights of the ids, or None.
        ranks: number of ranks, at most 2^20.
        positions: True to return the position of each id in the result.

    Returns:
        ids: [N] int64, by owner, then in the order of the batch.
        lengths: [ranks * B] as `lengths`: number of ids of each owner and bag.
        weights: [N], the weights of the returned ids; [0] without weights.
        where: [N] int64, position of each id of the batch among the returned ids; [0] without positions.
    """
    owner_lengths = lengths.new_empty(ranks * lengths.shape[0])
    sent = ids.new_empty(0, dtype=torch.float32) if weights is None else torch.empty_like(weights)
    return (
        torch.empty_like(ids),
        owner_lengths,
        sent,
        ids.new_empty(ids.shape[0] if positions else 0),
    )


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
    """Gathers rows of T tables and pools them by bag.

    Args:
        rows: [N] int64; -1 reads as zeros.
        offsets: [B + 1] int64, the begin of each bag and the end of the last bag; None for sequences, where
            bag i is id i.
        bag_weights: [N] float32, or None.
        weights: blocks of all tables, table after table.
        layout: [T, 4] int64: first block, number of blocks, shift, columns (csrc/storage/blocks.h).
        segments: [S, 5] int64: table, first bag, number of bags, output offset, output stride
            (csrc/lookup/bags.h).
        mean: True to divide each bag by its length.
        elements: size of the result; the segments hold every bag and fill every element, once.
        dtype: float32, float16 or bfloat16.

    Returns:
        [elements] of dtype.
    """
    return rows.new_empty(elements, dtype=dtype)


@_op
def pool_into_(
    out: Tensor, new_index: Tensor | None, rows: Tensor, offsets: Tensor | None,
    bag_weights: Tensor | None, weights: Sequence[Tensor], layout: Tensor, segments: Tensor, mean: bool,
) -> None:  # fmt: skip
    """Gathers and pools as `gather_pool`, into a given output: all bags, or the bags of new ids.

    A GPU does not report wrong offsets: a caller who finds them drops the output, which is written anyway.

    Args:
        out: [elements] float32, float16 or bfloat16, written in place.
        new_index: [N] int64, a result of `collect_new`: bags in which every id has -1 keep their output.
            None: all bags are pooled.
        rows: as in `gather_pool`.
        offsets: as in `gather_pool`.
        bag_weights: as in `gather_pool`.
        weights: as in `gather_pool`.
        layout: as in `gather_pool`.
        segments: as in `gather_pool`.
        mean: as in `gather_pool`.
    """


@_op
def bag_weights_grad(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    weights: Sequence[Tensor],
    layout: Tensor,
    segments: Tensor,
    mean: bool,
) -> Tensor:
    """Computes the gradient of the bag weights.

    Args:
        grad: [elements] float32, the gradient of the result of `gather_pool`.
        rows: [N] int64, as in `gather_pool`.
        offsets: as in `gather_pool`.
        weights: as in `gather_pool`.
        layout: as in `gather_pool`.
        segments: as in `gather_pool`.
        mean: as in `gather_pool`.

    Returns:
        [N] float32.
    """
    return grad.new_empty(rows.shape[0])


@_op
def update_rows_(
    grad: Tensor,
    ids: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    bag_weights: Tensor | None,
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    layout: Tensor,
    segments: Tensor,
    streams: Tensor,
    mean: bool,
    optimizer: int,
    hyper: Sequence[float],
    grad_scales: Sequence[float],
    senders: Tensor | None,
    marks: Sequence[Tensor],
    mark_layout: Tensor | None,
    on_nonfinite: Sequence[int],
    nonfinite: Sequence[Tensor],
) -> None:
    """Sums the gradients of each row and applies the optimizer, in place. Marks the updated rows.

    Args:
        grad: [elements] float32, the gradient of the result of `gather_pool`.
        ids: [N] int64, the ids of the forward.
        rows: [N] int64, the rows of the forward; -1 is skipped.
        offsets: as in `gather_pool`.
        bag_weights: as in `gather_pool`.
        weights: as in `gather_pool`; written.
        states: blocks of optimizer states, float32: for each state of the rule, in its order, one for each
            block of `weights`; written.
        layout: as in `gather_pool`.
        segments: as in `gather_pool`.
        streams: [T, 3] int64: rounding key, first column, step (from 1).
        mean: as in `gather_pool`.
        optimizer: number of the update rule (csrc/lookup/row_update.h).
        hyper: learning rate, then the hyper-parameters of the rule (`Rule.hyper` in optimizers.py).
        grad_scales: [T], factor of the summed gradients of each table.
        senders: [N] int32, the rank that sent each id. The summed gradient of a row is divided by the number
            of its distinct senders. -1 for all ids of a table without this division; None: no table has it.
        marks: blocks [2^shift] uint8 of all tables, one bit for each row (csrc/storage/row_marks.h); written.
        mark_layout: [T, 4] int64: first block, number of blocks, shift, 1; a table with 0 blocks keeps no
            marks. None: no table keeps marks.
        on_nonfinite: [T], what becomes of a row with a weight or a state that the update would make NaN or
            infinite: 0 it is written, 1 it stays as it was, 2 no row of the call changes, and RuntimeError is
            raised. Empty: 0 for every table.
        nonfinite: [T] tensors [1] int64, which count the rows that were not written; empty as `on_nonfinite`.
    """
