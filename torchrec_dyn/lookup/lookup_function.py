"""LookupFunction: the autograd function of a lookup, and the data of the forward that its backward needs.

Legend: N ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.lookup.bag_layout import Bags
from torchrec_dyn.lookup.gradient_reduction import Reduction
from torchrec_dyn.lookup.table_lists import TrainedTables
from torchrec_dyn.storage import OpenForward, TableLock


class Group(Protocol):
    """The parts of a table group that a lookup uses."""

    is_mean: bool
    output_dtype: torch.dtype

    @property
    def deferred(self) -> object:
        """The updates that wait; None if each backward writes its own."""

    @property
    def lock(self) -> TableLock:
        """The lock of the tables."""

    @property
    def max_gradient(self) -> float | None:
        """The limit of the gradient of the outputs; None if it has none."""

    def _check_backward(self, forward: Forward) -> None: ...

    def _weights_grad(self, forward: Forward, grad: Tensor) -> Tensor: ...

    def _take_gradient(self, forward: Forward, grad: Tensor, weights: Tensor | None) -> None: ...


@dataclass
class Forward:
    """The data of one forward that its backward needs.

    The caller may overwrite its batch as soon as the forward has returned, so no tensor here is the caller's.
    Until the backward, or until the graph is dropped, live: `rows`, `shown`, the offsets and segments of
    `bags`, the senders of `reduction` and `begins`, made by this forward; `streams`, of the tables; and the
    copies `ids` and `initial_ids`. The weights of bags are the caller's: autograd saves them, and raises its
    error if they were written in place.

    Attributes:
        group: the tables.
        rows: [N] int64, rows to update, -1 for an id without an update; [0] in evaluation.
        shown: [N] int64, rows to read, -1 for an id without a row.
        initial_ids: [N] int64, a copy of the ids, if the gradient of the weights needs initial rows of ids
            without a row; else None.
        trained: the tables that are not frozen; none in evaluation.
        streams: of `ops.update_rows_`; [0] in evaluation.
        generations: of each table, at the forward.
        noted: `tokens_of` the logs when the rows to update were recorded as changed; None without a record.
        ids: [N] int64, a copy, for the rounding of rows below float32; else None.
        begins: [F + 1] int64, the begin of each feature's ids; None unless updates are deferred.
        step: `DeferredUpdates.step` at the forward; None unless updates are deferred.
        open_forward: open until the backward has run; None without a backward.
        is_done: True as soon as the backward has updated rows.
    """

    group: Group
    rows: Tensor
    shown: Tensor
    bags: Bags
    initial_ids: Tensor | None
    trained: TrainedTables | None
    streams: Tensor
    generations: list[int]
    noted: list[object] | None
    reduction: Reduction
    open_forward: OpenForward | None = None
    is_done: bool = False
    ids: Tensor | None = None
    begins: Tensor | None = None
    step: object | None = None

    @property
    def ids_or_rows(self) -> Tensor:
        """The ids for `ops.update_rows_`, [N] int64; rows where nothing is rounded, and ids are not read."""
        return self.rows if self.ids is None else self.ids

    def close(self) -> None:
        """Closes the forward: the rows of ids that were removed since are free."""
        if self.open_forward is not None:
            self.open_forward.close()


def as_float(weights: Tensor | None) -> Tensor | None:
    """Returns weights: [N] of any floating dtype, as the ops take them."""
    return None if weights is None else weights.detach().to(torch.float32).contiguous()


def raise_after_backward(error: Exception) -> None:
    """Raises an error at the end of the present backward, behind what others do there.

    Other lookups and DistributedDataParallel exchange gradients until then: the other ranks do not wait for
    this one.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def raise_error() -> None:
        raise error

    queue(lambda: queue(raise_error))


class LookupFunction(torch.autograd.Function):
    """The autograd function: forward gathers and pools, backward updates.

    The only purpose of `anchor` is that autograd calls backward.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, weights: Tensor | None, forward: Forward, out: list[Tensor]
    ) -> Tensor:
        """Returns the output, which is `out`: in a list, or autograd would take it for an argument."""
        ctx.lookup = forward
        ctx.save_for_backward(weights)
        return out.pop()

    @staticmethod
    @not_compiled
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        """Updates the rows, and returns the gradient of the weights."""
        (weights,) = ctx.saved_tensors  # before the lock is held: hooks of saved tensors run here
        lock = ctx.lookup.group.lock
        if lock.is_changing or lock.torn:
            lock.check_at_rest()
        with lock:
            if grad.is_cpu:
                return LookupFunction._update(ctx, grad, weights)
            with lock.streams.turn(grad.device):
                return LookupFunction._update(ctx, grad, weights)

    @staticmethod
    def _update(
        ctx: Any, grad: Tensor, weights: Tensor | None
    ) -> tuple[None, Tensor | None, None, None]:
        forward: Forward = ctx.lookup
        group, wants_grad = forward.group, ctx.needs_input_grad[1]
        group._check_backward(forward)
        # A deferred gradient outlives this call: the caller may use one buffer for all micro-batches.
        grad = grad.to(torch.float32, copy=group.deferred is not None).contiguous()
        limit = group.max_gradient
        # Deferred gradients may have a loss scale. Those of rows are clamped when it is taken off; those of
        # weights are not clamped.
        if limit is not None and group.deferred is None:
            grad = grad.clamp(-limit, limit)
        weights_grad = None
        if wants_grad:
            assert weights is not None
            # Computed from the present rows: in a pipeline another batch may have updated them.
            weights_grad = group._weights_grad(forward, grad).to(weights.dtype)
        if forward.trained:
            try:
                group.lock.is_changing = True
                group._take_gradient(forward, grad, as_float(weights))
            finally:
                group.lock.is_changing = False
        else:
            forward.close()
        forward.is_done = True
        return None, weights_grad, None, None
