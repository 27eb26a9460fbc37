"""Policies: which unseen ids get a row, and which ids lose theirs.

Each is a value: what it decides depends on the stream of ids alone, never on the plan or the machine.
A step here is one training forward of the table, empty batches included; evaluation is no step.
"""

from __future__ import annotations

from dataclasses import dataclass

# A score keeps a row's last step and its count in 32 bits each; a free row has the last step 2^32 - 1.
_MOST_COUNT = 2**32 - 1
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

    An id that waits takes a counter. Counters are exact as long as no more than `counters` ids wait;
    above it the surplus, or a 64th of `counters` if that is more, is dropped: those seen longest
    ago first, ties by the mixed id, unsigned. `stats()["counters_dropped"]` counts them. Such an id
    starts counting anew.

    Attributes:
        count: occurrences that admit an id; 1 admits at first sight.
        counters: the most ids that may wait; None: as many as the table's row limit. Where ranks
            share a table's rows they share this number as they share the limit.
    """

    count: int
    counters: int | None = None

    def __post_init__(self) -> None:
        _check_integer("AdmitAfter.count", self.count, _MOST_COUNT)
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
    function of (seed, table name, id, step): all column shards agree, and so does every rerun. An
    id that was not admitted reads as `DynamicTableConfig.unseen` says, and learns nothing; nothing
    is kept of it.

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

    Rows come by `assign`, by loading, and with what is sharded or converted; they train and are scored
    as any. An id without one reads as `DynamicTableConfig.unseen` says, and learns nothing; nothing is
    kept of it but the count of its occurrences in `stats()["refused"]`. A row that is evicted or erased
    does not come back by itself.
    """


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evicts the ids seen longest ago when a table is full.

    Order: the step of an id's last occurrence in training, then its mixed id, unsigned; exact over
    all rows here. A full table frees what the batch needs or a 64th of its limit, whichever is more;
    ids of the batch stay.
    """


@dataclass(frozen=True)
class LeastFrequentlyUsed:
    """Evicts the ids seen least often when a table is full.

    Order: how often an id occurred in training since it was made, each occurrence counted, then its
    mixed id, unsigned; exact over all rows here. A full table frees what the batch needs or a 64th
    of its limit, whichever is more; ids of the batch stay.
    """


@dataclass(frozen=True, kw_only=True)
class ExpireAfter:
    """Evicts an id that training has not seen for longer than an age; exactly one of the two is set.

    Rows leave at the start of a training forward, so an id that comes back after a longer gap
    starts anew. An age of exactly the number given stays.

    Attributes:
        steps: the age in training steps.
        time: the age in the unit of the clock that `collection.set_time(t)` advances; an occurrence
            has the time that was set when it was trained on.
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
    """Checks that this can stand for an admission; None can.

    Raises:
        ValueError: if it cannot.
    """
    if admission is not None and not isinstance(admission, Admission):
        raise ValueError(
            f"{where}: expected AdmitAfter, AdmitWithProbability, Never or None, got {admission!r}."
        )


def check_eviction(eviction: object, where: str) -> None:
    """Checks that this can stand for an eviction; None can.

    Raises:
        ValueError: if it cannot.
    """
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
    """Returns the part of an eviction that goes by age."""
    first = eviction[0] if isinstance(eviction, tuple) else eviction
    return first if isinstance(first, ExpireAfter) else None


def replacement_of(eviction: Eviction | None) -> Replacement | None:
    """Returns the part of an eviction that makes room in a full table."""
    last = eviction[-1] if isinstance(eviction, tuple) else eviction
    return last if isinstance(last, Replacement) else None


def most_counters(admission: Admission | None, row_limit: int) -> int:
    """Returns how many ids may wait for admission in a table of that row limit."""
    return (admission.counters or row_limit) if isinstance(admission, AdmitAfter) else 0
