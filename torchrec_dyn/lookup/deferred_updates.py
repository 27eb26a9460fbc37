"""DeferredUpdates: the gradients of a step, kept from backward to the optimizer's `step()`.

torch has a moment between backward and `step()`, in which gradients are added up over micro-batches, clipped
by their norm, or divided by a loss scale. Row updates in backward leave none. A group with deferred updates
keeps the gradient of each lookup's output with its ids. `step()` writes all of them in one update, in which
the ids of a feature stand in the order of one large batch: so each row's sum has the bits of that batch
(docs/decisions/0036).

The forwards stay open until then, so the rows of removed ids are not reused. All forwards between two calls
of `step()` belong to one step of the tables, and no eviction takes a row of which it counted an occurrence.
Rows without one, of ids that do not count or were assigned, may be evicted: their gradients are counted in
`late_grads`.

`zero_grad()` ends a step, too: at once if all forwards of the step had their backward, else unless a backward
comes before the next forward. The order of calls is the same on all ranks; which graphs Python has collected
is not.

Legend: T tables, F features, N ids, k batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrec_dyn.lookup.bag_layout import BagLayout, Bags
from torchrec_dyn.lookup.gradient_reduction import Reduction
from torchrec_dyn.lookup.table_lists import TrainedTables
from torchrec_dyn.storage import OpenForward, keep_in_use
from torchrec_dyn.table import TableShard


@dataclass
class Update:
    """The arguments of one update of rows.

    If updates are deferred, it lives until `step()`: `grad` and `weights` are copies then, the other tensors
    those of its `Forward`.

    Attributes:
        grad: the gradient of the output, float32, contiguous.
        rows: [N] int64, -1 for an id without an update.
        bags: description of the batch.
        weights: [N] float32 weights of the ids in their bags, or None.
        trained: the tables that were not frozen at the forward.
        streams: of `ops.update_rows_`.
        noted: as of `Forward`.
        generations: [T], generation of each table at the forward.
        ids: [N] int64, which the rounding of rows below float32 needs; else they may be None, or any.
        begins: [F + 1] int64, the begin of each feature's ids; None unless updates are deferred.
        open_forward: the forward, open as long as this object is kept.
        step: `DeferredUpdates.step` of the forward; None unless updates are deferred.
    """

    grad: Tensor
    rows: Tensor
    bags: Bags
    weights: Tensor | None
    trained: TrainedTables
    streams: Tensor
    reduction: Reduction
    noted: list[object] | None
    generations: list[int]
    ids: Tensor | None = None
    begins: Tensor | None = None
    open_forward: OpenForward | None = None
    step: object | None = None

    @property
    def ids_or_rows(self) -> Tensor:
        """The ids for `ops.update_rows_`, [N] int64; rows where nothing is rounded, and ids are not read."""
        return self.rows if self.ids is None else self.ids


class DeferredUpdates:
    """The updates of the present step, as long as nobody has written them.

    Attributes:
        updates: one for each backward.
        sizes: [T] int64, ids of each table in the forwards of the step so far; None before the first.
        begun: numbers of the tables that a forward of the step so far has trained.
        scale: the factor of all gradients, from clipping.
        step: stands for the step; the object is kept from the first forward of the step to its end.
        waiting: number of forwards of the step that had no backward yet.
        ends: True from a `zero_grad()` that found waiting forwards to the next backward: a forward that comes
            first begins another step.
    """

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.sizes: Tensor | None = None
        self.begun: frozenset[int] = frozenset()
        self.scale = 1.0
        self.step = object()
        self.waiting = 0
        self.ends = False

    def dropped(self) -> DeferredUpdates:
        """Returns the step without its updates, or the next one if no forward of the step waits.

        With waiting forwards, the step ends unless a backward comes before the next forward.
        """
        rest = DeferredUpdates()
        if self.waiting:
            rest.sizes, rest.begun, rest.ends = self.sizes, self.begun, True
            rest.step, rest.waiting = self.step, self.waiting
        return rest

    def begin(self, table_offsets: Tensor, trained: Iterable[int]) -> None:
        """Counts a training forward of tables with the numbers `trained`.

        table_offsets [T + 1] int64, where the ids of each table begin.
        """
        sizes = table_offsets.diff()
        self.begun = self.begun.union(trained)
        self.sizes = sizes if self.sizes is None else self.sizes + sizes

    def late(self, trained: Mapping[int, TableShard]) -> dict[int, TableShard]:
        """Returns the tables among `trained`, by number, that were frozen in the step so far."""
        if self.sizes is None:
            return {}
        return {number: trained[number] for number in trained.keys() - self.begun}

    def add(self, update: Update) -> None:
        """Keeps an update, whose gradient is a copy already."""
        self.ends = False
        if update.step is self.step:
            self.waiting -= 1
        if self.scale != 1.0:  # gradients after a clipping are not clipped by it
            self.multiply(self.scale)
            self.scale = 1.0
        keep_in_use(update.grad, update.rows)
        if update.weights is not None:
            update.weights = update.weights.clone()
        self.updates.append(update)

    def multiply(self, factor: float) -> None:
        """Multiplies all gradients so far before they are summed: scaled sums may be infinite."""
        for update in self.updates:
            update.grad = update.grad * factor

    def are_finite(self) -> bool:
        """Returns True if all gradients of outputs are finite."""
        return all(bool(update.grad.isfinite().all()) for update in self.updates)

    def close(self) -> None:
        """Closes the forwards of all updates, which are written or dropped."""
        for update in self.updates:
            if update.open_forward is not None:
                update.open_forward.close()

    def joined(self, layout: BagLayout, limit: float | None) -> Update:
        """Returns all updates as one; there is at least one. `limit`: `max_gradient` of the group."""
        updates = self.updates
        if limit is not None:
            updates = [replace(one, grad=one.grad.clamp(-limit, limit)) for one in updates]
        last = updates[-1]
        scales = [scale * self.scale for scale in last.reduction.scales]
        for update in updates:
            keep_in_use(update.grad, update.ids, update.rows, update.weights)
        if len(updates) == 1:
            reduction = Reduction(scales, last.reduction.senders)
            return replace(last, reduction=reduction)
        return _join(updates, layout, scales)


def _join(updates: Sequence[Update], layout: BagLayout, scales: list[float]) -> Update:
    """Returns two or more updates as one; scales [T] of all gradients."""
    last = updates[-1]
    begins = [update.begins for update in updates if update.begins is not None]
    bags, places = layout.joined([update.bags for update in updates], begins)
    places = places.to(last.rows.device, non_blocking=True)

    def ordered(numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else numbers[places]

    grads = torch.cat([update.grad.flatten() for update in updates])
    if bags.offsets is None:
        grads = grads.view(-1, last.bags.shape[1])[places]
    weights = _joined([update.weights for update in updates], updates, 1.0, torch.float32)
    senders = [update.reduction.senders for update in updates]
    ids = None if last.ids is None else torch.cat([one.ids_or_rows for one in updates])
    return replace(
        last,
        grad=grads,
        ids=ordered(ids),
        rows=torch.cat([update.rows for update in updates])[places],
        bags=bags,
        weights=ordered(weights),
        reduction=Reduction(scales, ordered(_joined(senders, updates, -1, torch.int32))),
        noted=last.noted if all(one.noted == last.noted for one in updates) else None,
    )


def _joined(
    of_updates: Sequence[Tensor | None],
    updates: Sequence[Update],
    missing: float,
    dtype: torch.dtype,
) -> Tensor | None:
    """Returns numbers of the ids of all updates, `missing` for an update without; None if none has them."""
    if all(one is None for one in of_updates):
        return None
    return torch.cat(
        [
            torch.full_like(update.rows, missing, dtype=dtype) if one is None else one
            for one, update in zip(of_updates, updates, strict=True)
        ]
    )
