"""What a batch says beside its ids: the times and scores of ids, and what the features of new ids ask for.

Legend: T tables, N ids, M distinct ids without a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life import ADMITTED, Admitted, Asked
from torchrec_dyn.lookup.batch import Batch, no_scores, wrong_scores
from torchrec_dyn.lookup.feature_uses import Uses
from torchrec_dyn.lookup.table_lists import TrainedTables
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.storage import read
from torchrec_dyn.table import NewIds, Numbers


def occurrences_of(trained: TrainedTables, batch: Batch) -> Numbers:
    """Returns the first occurrence of each table's ids, and the end, [T + 1].

    Checks the times, and the scores if some table counts them. A GPU's host waits if there are any.
    """
    ids, times = batch.ids, batch.times
    if trained.living.units:
        _check_scores(trained, batch)
    if times is None or not trained.living.numbers:
        return batch.table_starts
    if times.dtype != torch.int64 or times.shape != ids.shape:
        got = f"{list(times.shape)} of {times.dtype}"
        raise ValueError(
            f"take_step: expected {list(ids.shape)} int64 times, one for each id, got {got}."
        )
    bounds = times.aminmax() if ids.numel() else (times.new_ones(()), times.new_ones(()))
    of_ids = ops.complete_cumsum(times)
    of_tables = of_ids[batch.table_offsets.to(times.device, non_blocking=True)].diff()
    least, most, *numbers = read([*bounds, of_tables])
    if least < 1 or most > MOST_COUNT:
        raise ValueError(f"take_step: expected times in [1, 2^32), got {least} to {most}.")
    # A table without a life counts each sent id once, whatever the other tables of its group are.
    seen = np.diff(batch.table_starts)
    for number in trained.living.numbers:
        seen[number] = numbers[number]
    return np.concatenate([batch.table_starts[:1], seen.cumsum()])


def _check_scores(trained: TrainedTables, batch: Batch) -> None:
    """Raises ValueError unless a batch has a valid score for each id of the tables that count scores."""
    scores, ids = batch.scores, batch.ids
    where = f"table '{trained.tables[min(trained.living.units)].name}'"
    if scores is None:
        if not ids.numel():
            return
        raise no_scores(where)
    if not scores.is_floating_point() or scores.shape != ids.shape:
        raise ValueError(
            f"{where}: expected one weight per id for LowestScore, got {list(scores.shape)} of "
            f"{scores.dtype} for {ids.numel()} ids."
        )
    ends = batch.table_offsets.tolist()
    parts = torch.cat([scores[ends[number] : ends[number + 1]] for number in trained.living.units])
    [wrong] = read([((parts >= 0) & (parts < torch.inf)).logical_not_().sum()])
    if wrong:
        raise wrong_scores(where, wrong)


def added_by(trained: TrainedTables, batch: Batch) -> Tensor | None:
    """Returns what each id adds to the count of its row, [N] int64; None: 1."""
    if not trained.living.units or batch.scores is None:
        return batch.times
    added = torch.ones_like(batch.ids) if batch.times is None else batch.times.clone()
    ends = batch.table_offsets.tolist()
    for number, unit in trained.living.units.items():
        of_table = slice(ends[number], ends[number + 1])
        # In float64, whose division and rounding are the same on every device.
        units = (batch.scores[of_table].detach().double() / unit).round_()
        added[of_table] = units.clamp_(1, MOST_COUNT).long()
    return added


def counts_of_new(trained: TrainedTables, batch: Batch, new: NewIds) -> Tensor:
    """Returns the occurrences of new ids: in tables with a life with their times, else as they were sent."""
    if batch.times is None:
        return new.counts
    timed, counts = summed(new, batch.times), new.counts.clone()
    for number in trained.living.numbers:
        own = slice(new.ends[number], new.ends[number + 1])
        counts[own] = timed[own]
    return counts


def asked_of_new(batch: Batch, new: NewIds) -> Asked | None:
    """Returns what the features ask for the new ids; None if all insert and count."""
    uses, times = batch.uses, batch.times
    if uses is None or (uses.inserts is None and uses.counts is None):
        return None
    asks = torch.ones_like(new.ids, dtype=torch.bool)
    if uses.inserts is not None:
        asks = summed(new, uses.inserts.long()) > 0
    given = _given(uses, torch.ones_like(new.new_index) if times is None else times)
    return Asked(asks, summed(new, given))


def first_counts(
    trained: TrainedTables,
    batch: Batch,
    new: NewIds,
    admitted: Admitted,
    added: Tensor | None,
) -> Tensor:
    """Returns what rows of admitted ids begin to count with, [K] int64: weights in tables that count them.

    `added` is what each id of the batch adds, [N] int64.
    """
    if not trained.living.units or added is None:
        return admitted.counts
    weighed = summed(new, _given(batch.uses, added))
    if admitted.places is not None:
        weighed = weighed.index_select(0, admitted.places)
    sizes = admitted.sizes(ADMITTED)
    both = zip(
        sizes, weighed.split([*sizes.values()]), admitted.counts.split([*sizes.values()]), strict=True
    )  # fmt: skip
    parts = [weighing if t in trained.living.units else counting for t, weighing, counting in both]
    return torch.cat(parts) if parts else admitted.counts


def _given(uses: Uses | None, numbers: Tensor) -> Tensor:
    """Returns numbers [N] int64 with 0 for ids whose features do not insert, or do not count."""
    for flags in () if uses is None else (uses.inserts, uses.counts):
        if flags is not None:
            numbers = numbers * flags
    return numbers


def summed(new: NewIds, numbers: Tensor) -> Tensor:
    """Returns the sum of the numbers [N] int64 of each new id, [M] int64."""
    # Ids with a row add to an extra last number: to select the others, the host would wait.
    last = new.ids.numel()
    places = new.new_index.masked_fill(new.new_index < 0, last)
    return numbers.new_zeros(last + 1).index_add_(0, places, numbers)[:last]
