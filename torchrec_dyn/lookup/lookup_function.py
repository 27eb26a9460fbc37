"""LookupFunction: the autograd function of a lookup, and the data of the forward that its backward needs.

Legend: N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.lookup.bag_layout import Bags
from torchrec_dyn.lookup.gradient_reduction import Reduction
from torchrec_dyn.lookup.table_lists import TableLists, TrainedTables
from torchrec_dyn.storage import OpenForward
from torchrec_dyn.table import TableShard


class Group(Protocol):
    """The parts of a table group that a backward uses."""

    tables: Sequence[TableShard]

    def backward(
        self, forward: Forward, grad: Tensor, weights: Tensor | None, wants_grad: bool
    ) -> Tensor | None:
        """Updates the rows of a forward; returns the gradient of its weights if it is wanted."""


@dataclass
class Forward:
    """The data of one forward that its backward needs.

    The caller may overwrite its batch as soon as the forward has returned, so no tensor here is the caller's.
    Until the backward, or until the graph is dropped, live: `rows`, `shown`, `offsets`, `numbers`, the
    segments of `bags` and the senders of `reduction`, made by this forward; `streams`, of the tables; and the
    copy `ids`. The weights of bags are the caller's: autograd saves them, and raises its error if they were
    written in place.

    Attributes:
        group: the tables.
        bags: their places in the output.
        offsets: [bags + 1] int64, where each bag begins; None for sequences.
        numbers: [F + 1 or more] int64 on the CPU, where the ids of each feature begin, and others.
        num_begins: F + 1.
        shown: [N] int64, rows to read, -1 for an id without a row.
        rows: [N] int64, rows to update, -1 for an id without an update; [0] in evaluation.
        trained: the tables that are not frozen; none in evaluation.
        streams: of `ops.update_rows_`; [0] in evaluation.
        lists: the tables of the group, at the forward.
        noted: `tokens_of` the logs when the rows to update were recorded as changed; None without a record.
        reduction: of the gradients.
        open_forward: open until the backward has run.
        ids: [N] int64, a copy, for the rounding of rows below float32, or if the gradient of the weights
            needs initial rows of ids without a row; else None.
        step: `DeferredUpdates.step` at the forward; None unless updates are deferred.
        is_done: True as soon as the backward has updated rows.
    """

    group: Group
    bags: Bags
    offsets: Tensor | None
    numbers: Tensor
    num_begins: int
    shown: Tensor
    rows: Tensor
    trained: TrainedTables | None
    streams: Tensor
    lists: TableLists
    noted: list[object] | None
    reduction: Reduction
    open_forward: OpenForward
    ids: Tensor | None = None
    step: object | None = None
    is_done: bool = False

    @property
    def begins(self) -> Tensor:
        """Where the ids of each feature begin, [F + 1] int64 on the CPU."""
        return self.numbers[: self.num_begins]


def as_float(weights: Tensor) -> Tensor:
    """Returns weights: [N] of any floating dtype, as the ops take them."""
    return weights.detach().to(torch.float32).contiguous()


def raise_after_backward(error: Exception) -> None:
    """Raises an error at the end of the present backward, behind what others do there.

    Other lookups and DistributedDataParallel exchange gradients until then: the other ranks do not wait for
    this one.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def raise_error() -> None:
        raise error

    queue(lambda: queue(raise_error))


with torch.inference_mode(False):  # wherever this is imported
    ANCHOR = torch.zeros((), requires_grad=True, device="cpu")


class LookupFunction(torch.autograd.Function):
    """The autograd function: forward gathers and pools, backward updates.

    The only purpose of `anchor`, which is `ANCHOR` in training, is that autograd calls backward.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, weights: Tensor | None, forward: Forward, out: list[Tensor]
    ) -> Tensor:
        """Returns the output, which is `out`: in a list, or autograd would take it for an argument."""
        ctx.lookup = forward
        if weights is not None:
            ctx.save_for_backward(weights)
        return out.pop()

    @staticmethod
    @not_compiled
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        """Updates the rows, and returns the gradient of the weights."""
        saved = ctx.saved_tensors  # before the lock is held: hooks of saved tensors run here
        weights, forward = saved[0] if saved else None, ctx.lookup
        group, wants_grad = forward.group, ctx.needs_input_grad[1]
        lock = group.tables[0].lock
        if lock.is_changing or lock.torn:
            lock.check_at_rest()
        with lock:
            if grad.is_cpu:
                return None, group.backward(forward, grad, weights, wants_grad), None, None
            with lock.streams.turn(grad.device):
                return None, group.backward(forward, grad, weights, wants_grad), None, None


# Not the `apply` of `Function`: it looks for the transforms of torch.func, which `forward_of_tables` refuses.
apply_lookup = super(torch.autograd.Function, LookupFunction).apply
