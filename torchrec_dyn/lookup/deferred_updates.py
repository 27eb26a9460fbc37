"""DeferredUpdates: the gradients of a step, kept from backward to the optimizer's `step()`.

torch has a moment between backward and `step()`, in which gradients are added up over micro-batches, clipped
by their norm, or divided by a loss scale. Row updates in backward leave none. A group with deferred updates
keeps the gradient of each lookup's output with its ids. `step()` writes all of them in one update, in which
the ids of a feature stand in the order of one large batch: so each row's sum has the bits of that batch
(docs/dev/decisions/0036).

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
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.lookup.bag_layout import BagLayout
from torchrec_dyn.lookup.gradient_reduction import Reduction
from torchrec_dyn.lookup.lookup_function import Forward
from torchrec_dyn.storage import keep_in_use
from torchrec_dyn.table import TableShard


class Update(NamedTuple):
    """One update of rows. If updates are deferred, it lives until `step()`, and has copies.

    Attributes:
        forward: the forward that has read the rows.
        grad: the gradient of its output, float32, contiguous.
        weights: [N] float32 weights of the ids in their bags, or None.
    """

    forward: Forward
    grad: Tensor
    weights: Tensor | None


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
        if update.forward.step is self.step:
            self.waiting -= 1
        if self.scale != 1.0:  # gradients after a clipping are not clipped by it
            self.multiply(self.scale)
            self.scale = 1.0
        keep_in_use(update.grad, update.forward.rows)
        weights = None if update.weights is None else update.weights.clone()
        self.updates.append(update._replace(weights=weights))

    def multiply(self, factor: float) -> None:
        """Multiplies all gradients so far before they are summed: scaled sums may be infinite."""
        self.updates = [update._replace(grad=update.grad * factor) for update in self.updates]

    def are_finite(self) -> bool:
        """Returns True if all gradients of outputs are finite."""
        return all(bool(update.grad.isfinite().all()) for update in self.updates)

    def close(self) -> None:
        """Closes the forwards of all updates, which are written or dropped."""
        for update in self.updates:
            update.forward.open_forward.close()

    def joined(self, layout: BagLayout, limit: float | None) -> Update:
        """Returns all updates as one; there is at least one. `limit`: `max_gradient` of the group."""
        updates = self.updates
        if limit is not None:
            updates = [one._replace(grad=one.grad.clamp(-limit, limit)) for one in updates]
        last = updates[-1].forward
        scales = [scale * self.scale for scale in last.reduction.scales]
        for forward, grad, weights in updates:
            keep_in_use(grad, forward.ids, forward.rows, weights)
        if len(updates) == 1:
            reduction = Reduction(scales, last.reduction.senders)
            return updates[0]._replace(forward=replace(last, reduction=reduction))
        return _join(updates, layout, scales)


def _join(updates: Sequence[Update], layout: BagLayout, scales: list[float]) -> Update:
    """Returns two or more updates as one; scales [T] of all gradients."""
    forwards = [update.forward for update in updates]
    last = forwards[-1]
    begins = [forward.begins for forward in forwards]
    bags, offsets, places = layout.joined(
        [forward.bags for forward in forwards], [forward.offsets for forward in forwards], begins
    )
    places = places.to(last.rows.device, non_blocking=True)

    def ordered(numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else numbers[places]

    grads = _joined_grads(updates, places if offsets is None else None)
    weights = _joined([update.weights for update in updates], forwards, 1.0, torch.float32)
    senders = [forward.reduction.senders for forward in forwards]
    ids = _joined([forward.ids for forward in forwards], forwards, -1, torch.int64)
    joined = replace(
        last,
        ids=ordered(ids),
        rows=torch.cat([forward.rows for forward in forwards])[places],
        bags=bags,
        offsets=offsets,
        numbers=torch.stack(begins).sum(0),
        reduction=Reduction(scales, ordered(_joined(senders, forwards, -1, torch.int32))),
        noted=_noted(forwards),
    )
    return Update(joined, grads, ordered(weights))


def _noted(forwards: Sequence[Forward]) -> list[object] | None:
    """Returns what was noted in the logs at all forwards; None if they differ."""
    noted = forwards[-1].noted
    return noted if all(one.noted == noted for one in forwards) else None


def _joined_grads(updates: Sequence[Update], places: Tensor | None) -> Tensor:
    """Returns the gradients of the outputs of all updates; those of ids in the order of `places`."""
    grads = torch.cat([update.grad.flatten() for update in updates])
    if places is None:
        return grads
    return grads.view(-1, updates[-1].forward.bags.shape[1])[places]


def _joined(
    numbers: Sequence[Tensor | None],
    forwards: Sequence[Forward],
    missing: float,
    dtype: torch.dtype,
) -> Tensor | None:
    """Returns numbers of the ids of all forwards, `missing` for one without; None if none has them."""
    if all(one is None for one in numbers):
        return None
    return torch.cat(
        [
            torch.full_like(forward.rows, missing, dtype=dtype) if one is None else one
            for one, forward in zip(numbers, forwards, strict=True)
        ]
    )
