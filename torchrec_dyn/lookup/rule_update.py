"""Updates of rows by a rule in Python (row_rules.py), in place of the kernel.

The rows and states of all tables are copied, updated, checked, and then written: an error of a rule
changes no row. Rows below float32 are rounded stochastically, by the kernel and its numbers.

Legend: T tables, M distinct rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torchrec_dyn.lookup.row_sums import RowSums, subtract_gradients
from torchrec_dyn.row_rules import RowRule
from torchrec_dyn.storage import host_numbers
from torchrec_dyn.table import TableShard


def update_by_rule(
    rule: RowRule,
    tables: Sequence[TableShard],
    sums: list[RowSums],
    streams: Tensor,
    learning_rate: float,
) -> list[Callable[[], None]]:
    """Runs a rule on the row sums of T tables; returns the calls that write the rows.

    streams [T, 3] int64, as of `ops.update_rows_`. `sums` is empty afterwards: copies of the next table's
    rows take the memory of a table's sums, which is in the cache.

    Raises:
        RuntimeError: a table with `on_nonfinite="error"` would have numbers that are not finite; no row has
            changed.
        ValueError: the rule has replaced a state by one of another shape or dtype; no row has changed.
    """
    writes: list[Callable[[], None]] = []
    refused: list[tuple[TableShard, Tensor]] = []
    sums.reverse()
    for table, stream in zip(tables, streams, strict=True):
        of_table = sums.pop()
        if of_table.rows.numel():
            weights, states, is_refused = _run(rule, table, of_table, stream, learning_rate)
            writes.append(partial(_write, table, of_table.rows, weights, states))
            if is_refused is not None:
                refused.append((table, is_refused.count_nonzero()))
    for table, count in refused:
        assert table.nonfinite is not None
        table.nonfinite += count
        if table.config.on_nonfinite == "error" and int(count):
            raise RuntimeError(
                f"{table.where}: expected finite rows and states after {rule!r}, got NaN or infinity in "
                f"{int(count)} rows. No row has changed. Look for the loss or the input that is not finite, "
                'or set on_nonfinite="skip".'
            )
    return writes


def _run(
    rule: RowRule, table: TableShard, sums: RowSums, stream: Tensor, learning_rate: float
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Returns the rows and states of one table after a rule, and which are refused, [M] bool; None: none."""
    before = table.weights.read(sums.rows)
    former = [store.read(sums.rows) for store in table.states]
    checks = table.nonfinite is not None
    weights = before.to(torch.float32, copy=checks)
    states = {
        name: one.clone() if checks else one for name, one in zip(rule.states, former, strict=True)
    }
    with torch.no_grad():
        rule.update(weights, sums.grads, states, learning_rate, int(stream[2]))
    after = [states[name] for name in rule.states]
    for name, old, new in zip(rule.states, former, after, strict=True):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(
                f"{table.where}: expected the state {name!r} after {rule!r} as {list(old.shape)} of "
                f"{old.dtype}, got {list(new.shape)} of {new.dtype}. Change it in place. No row has changed."
            )
    if weights.dtype != before.dtype:
        assert sums.ids is not None
        weights = _rounded(before, weights, sums.ids, stream)
    if not checks:
        return weights, after, None
    is_refused = _not_finite([weights, *after])
    kept = zip([before, *former], [weights, *after], strict=True)
    weights, *after = (torch.where(is_refused[:, None], old, new) for old, new in kept)
    return weights, after, is_refused


def _not_finite(numbers: Sequence[Tensor]) -> Tensor:
    """Returns which rows have NaN or infinity in one of the numbers [M, any], [M] bool."""
    return ~torch.stack([one.isfinite().all(1) for one in numbers]).all(0)


def _rounded(before: Tensor, after: Tensor, ids: Tensor, stream: Tensor) -> Tensor:
    """Returns `after` [M, columns] in the dtype of `before`: before - (before - after) by the kernel."""
    count, columns = before.shape
    rounded, shift = before.clone(), max(4, (count - 1).bit_length())
    blocks = [torch.cat([rounded, rounded.new_empty((1 << shift) - count, columns)])]
    subtract_gradients(
        1.0,
        grad=(before.float() - after).flatten(),
        ids=ids,
        rows=torch.arange(count, device=ids.device),
        offsets=None,
        bag_weights=None,
        weights=blocks,
        layout=host_numbers([[0, 1, shift, columns]]),
        segments=host_numbers([[0, 0, count, 0, columns]]),
        streams=stream[None],
        mean=False,
        grad_scales=[1.0],
        senders=None,
    )
    return blocks[0][:count]


def _write(table: TableShard, rows: Tensor, weights: Tensor, states: Sequence[Tensor]) -> None:
    table.weights.write(rows, weights)
    for store, state in zip(table.states, states, strict=True):
        store.write(rows, state)
