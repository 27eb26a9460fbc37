"""Policies: admission gives rows to unseen ids, eviction takes rows from ids.

A policy is a value. Its decisions depend on the stream of ids alone, never on the plan or the machine.
A step is one training forward of the table, empty batches included; evaluation is no step.
"""

from __future__ import annotations

from dataclasses import dataclass

# A score has 32 bits for the count of a row and 32 for its last step; a free row has the step 2^32 - 1.
MOST_COUNT = 2**32 - 1
_MOST_STEPS = 2**32 - 2
_MOST_TIME = 2**63 - 1


def _check_integer(where: str, value: object, most: int, remedy: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{where}: expected an integer from 1 to {most}, got {value!r}.{remedy}")


@dataclass(frozen=True)
class AdmitAfter:
    """Admits an id once it has occurred `count` times in training.

    The decision is made once in a forward, after all occurrences in it are counted, duplicates and
    those of all ranks included: at `count` or above the id gets a row and every occurrence reads it.
    Until then the id waits: it reads as `DynamicTableConfig.unseen` says, and learns nothing.

    Each waiting id has a counter. Counters are exact as long as at most `counters` ids wait. Above
    that number the surplus, or a 64th of `counters` if that is more, is dropped: ids seen longest
    ago first, ties by the mixed id, unsigned. `stats()["counters_dropped"]` counts them. An id
    whose counter was dropped is counted from 0 again.

    Attributes:
        count: occurrences that admit an id; 1 admits at first sight.
        counters: the most ids that may wait; None: as many as the table's row limit. Ranks that
            share a table's rows share this number as they share the limit.
    """

    count: int
    counters: int | None = None

    def __post_init__(self) -> None:
        _check_integer("AdmitAfter.count", self.count, MOST_COUNT)
        if self.counters is not None:
            _check_integer(
                "AdmitAfter.counters",
                self.counters,
                _MOST_TIME,
                " Leave it out for as many as the table's row limit.",
            )


@dataclass(frozen=True)
class AdmitWithProbability:
    """Admits an unseen id with probability `p` at each of its occurrences in training.

    An id with k occurrences in a forward gets a row with probability 1 - (1 - p)^k, drawn once from a
    function of (seed, table name, id, step), so column shards and reruns decide alike. A refused id
    reads as `DynamicTableConfig.unseen` says, and learns nothing; the table keeps nothing of it.

    Attributes:
        p: a number above 0, at most 1.
    """

    p: float

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or isinstance(self.p, bool) or not 0 < self.p <= 1:
            raise ValueError(
                f"AdmitWithProbability.p: expected a number above 0 and at most 1, got {self.p!r}."
            )


@dataclass(frozen=True)
class Never:
    """Admits no id in training: a vocabulary that does not grow.

    Rows are added by `assign` and by loading, and kept by sharding and conversion; they train and are
    scored as usual. An id without a row reads as `DynamicTableConfig.unseen` says, and learns nothing;
    only `stats()["refused"]` counts its occurrences. Training does not restore an evicted or erased row.
    """


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evicts the ids seen longest ago when a table is full.

    Order: the step of an id's last occurrence in training, then its mixed id, unsigned; exact over
    all rows of this rank. A full table frees the rows that the batch needs or a 64th of its limit,
    whichever is more; ids of the batch stay.
    """


@dataclass(frozen=True)
class LeastFrequentlyUsed:
    """Evicts the ids seen least often when a table is full.

    Order: the occurrences of an id in training since it got its row, each one counted, then its mixed
    id, unsigned; exact over all rows of this rank. A full table frees the rows that the batch needs
    or a 64th of its limit, whichever is more; ids of the batch stay.
    """


@dataclass(frozen=True, kw_only=True)
class ExpireAfter:
    """Evicts an id that training has not seen for longer than an age; set exactly one of the two.

    Rows are evicted at the start of a training forward, so an id seen again after a longer gap gets
    a fresh row. A row of exactly this age stays.

    Attributes:
        steps: the age in training steps.
        time: the age in the unit of the clock that `collection.set_time(t)` advances; the time of an
            occurrence is the time that was set when it was trained on.
    """

    steps: int | None = None
    time: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.time is None):
            raise ValueError(
                "ExpireAfter: expected exactly one of steps and time, "
                f"got steps={self.steps!r} and time={self.time!r}. "
                "Count in training steps with steps=, or by your own clock with time=."
            )
        if self.steps is not None:
            _check_integer("ExpireAfter.steps", self.steps, _MOST_STEPS)
        else:
            _check_integer("ExpireAfter.time", self.time, _MOST_TIME)


Admission = AdmitAfter | AdmitWithProbability | Never
Replacement = LeastRecentlyUsed | LeastFrequentlyUsed
Eviction = Replacement | ExpireAfter | tuple[ExpireAfter, Replacement]


def check_admission(admission: object, where: str) -> None:
    """Raises ValueError unless `admission` is an admission policy or None."""
    if admission is not None and not isinstance(admission, Admission):
        raise ValueError(
            f"{where}: expected AdmitAfter, AdmitWithProbability, Never or None, got {admission!r}."
        )


def check_eviction(eviction: object, where: str) -> None:
    """Raises ValueError unless `eviction` is an eviction policy, a pair of them, or None."""
    if eviction is None or isinstance(eviction, Replacement | ExpireAfter):
        return
    match eviction:
        case (ExpireAfter(), LeastRecentlyUsed() | LeastFrequentlyUsed()) if isinstance(
            eviction, tuple
        ):
            return
    raise ValueError(
        f"{where}: expected LeastRecentlyUsed, LeastFrequentlyUsed, ExpireAfter, "
        "a pair (ExpireAfter, LeastRecentlyUsed or LeastFrequentlyUsed) or None, "
        f"got {eviction!r}. Write a pair as a tuple in this order."
    )


def age_limit_of(eviction: Eviction | None) -> ExpireAfter | None:
    """Returns the part of an eviction that goes by age, or None."""
    first = eviction[0] if isinstance(eviction, tuple) else eviction
    return first if isinstance(first, ExpireAfter) else None


def replacement_of(eviction: Eviction | None) -> Replacement | None:
    """Returns the part of an eviction that makes room in a full table, or None."""
    last = eviction[-1] if isinstance(eviction, tuple) else eviction
    return last if isinstance(last, Replacement) else None


def most_counters(admission: Admission | None, row_limit: int) -> int:
    """Returns the most ids that may wait for admission in a table with this row limit."""
    return (admission.counters or row_limit) if isinstance(admission, AdmitAfter) else 0
