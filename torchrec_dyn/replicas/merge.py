"""The rules of a merge of replicas by id: who keeps an id, its score, and the mean of rows.

Pure functions of the states of ids on the sides, in the order of the replicas (docs/dev/decisions/0044).

Legend: R sides, one for each replica, K ids, M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.policies import MOST_COUNT

# The state of an id on a side: bits.
HAS_ROW = 1
WAITS = 2
ERASED = 4  # the user erased it on this side since the last sync
LOST = 8  # it had a row at the last sync, has none now, and nobody erased it

# Verdicts on an id: afterwards it has on every side ...
NOTHING, COUNTER, ROW = 0, 1, 2

# Returns counts [R, K] of scores with last_seen [R, K] as they are at steps [K]; steps are not earlier.
CountsAsOf = Callable[[Tensor, Tensor, Tensor], Tensor]


def packed(last_seen: Tensor, counts: Tensor) -> Tensor:
    """Returns scores, last_seen [...] and counts [...] below 2^32, as words [...] int64."""
    return last_seen << 32 | counts


def unpacked(words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns last_seen and counts, [...] int64, of words [...] int64."""
    return words >> 32 & MOST_COUNT, words & MOST_COUNT


class IdStates(NamedTuple):
    """The states of K ids on the sides."""

    flags: Tensor  # [R, K] uint8
    words: Tensor  # [R, K] int64, the score of its row or of its counter; 0 without one
    earlier: Tensor  # [R, K] int64, this score at the last sync; 0 if there was none


class Verdict(NamedTuple):
    """The decision on K ids."""

    kinds: Tensor  # [K] uint8
    words: Tensor  # [K] int64, the merged scores
    gives: Tensor  # [R, K] bool, True if the row of the side is in the mean
    takes_part: (
        Tensor  # [R, K] bool, True if the side counts in the mean, also as one without the id
    )


def decide(id_states: IdStates, as_of: CountsAsOf, adds_waiting: bool) -> Verdict:
    """Returns the verdict on ids; with `adds_waiting` occurrences of waiting ids count for their rows."""
    flags = id_states.flags
    has_erased = (flags & ERASED) != 0
    is_erased = has_erased.any(0)
    # What a side still has of an id that was erased elsewhere does not count any more.
    is_void = is_erased & ~has_erased
    has_row = ((flags & HAS_ROW) != 0) & ~is_void
    waits = ((flags & WAITS) != 0) & ~is_void
    gets_row = has_row.any(0)
    gets_counter = waits.any(0) & ~gets_row
    kinds = torch.where(gets_row, ROW, torch.where(gets_counter, COUNTER, NOTHING))
    is_counted = has_row | waits if adds_waiting else torch.where(gets_row, has_row, waits)
    earlier = torch.where(is_counted & ~is_erased, id_states.earlier, 0)
    words = _merged_scores(torch.where(is_counted, id_states.words, 0), earlier, is_counted, as_of)
    is_lost = ((flags & LOST) != 0) & ~is_void
    return Verdict(kinds.to(torch.uint8), words, has_row, has_row | ~is_lost)


def _merged_scores(words: Tensor, earlier: Tensor, is_counted: Tensor, as_of: CountsAsOf) -> Tensor:
    """Returns the merged scores [K] of words and earlier [R, K], 0 unless is_counted [R, K]."""
    last_seen, counts = unpacked(words)
    latest = torch.where(is_counted, last_seen, 0).amax(0)
    before = as_of(latest, *unpacked(earlier))
    added = (as_of(latest, last_seen, counts) - before).clamp_(min=0)
    total = before.amax(0) + torch.where(is_counted, added, 0).sum(0)
    return packed(latest, total.clamp_(max=MOST_COUNT))


def mean_of(rows: Sequence[Tensor], initial: Tensor, gives: Tensor, takes_part: Tensor) -> Tensor:
    """Returns the mean of the rows of the sides, [M, C] in their dtype, rounded once.

    rows: [M, C] of each side, any numbers where it gives no row; initial [M, C], the row of a side that has
    not seen the id; gives and takes_part [R, M] bool, at least one side takes part in each row.
    """
    # -0.0 is what can be added to any number without a change of its bits.
    total = torch.full(initial.shape, -0.0, dtype=torch.float64, device=initial.device)
    for side_rows, given, takes in zip(rows, gives, takes_part, strict=True):
        summand = torch.where(given.unsqueeze(1), side_rows, initial).double()
        total += torch.where(takes.unsqueeze(1), summand, -0.0)
    return total.div_(takes_part.sum(0).unsqueeze(1)).to(initial.dtype)
