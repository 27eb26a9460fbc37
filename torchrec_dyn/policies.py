"""Policies: admission decides which unseen ids get a row, eviction decides which ids lose their row.

A policy is a value. Its decisions depend only on the sequence of ids, never on the plan or the machine.
A step is one training forward of the table, even with an empty batch. An evaluation is not a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NoReturn

from torch import Tensor

from torchrec_dyn.initializers import make_numbers_plain
from torchrec_dyn.own_policies import OwnAdmission, OwnEviction, OwnPolicy

# A score has 32 bits for the count of a row and 32 for its last step; a free row has the step 2^32 - 1.
MOST_COUNT = 2**32 - 1
_MOST_STEPS = 2**32 - 2
_MOST_TIME = 2**63 - 1


def _check_integer(where: str, value: object, most: int, remedy: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{where}: expected an integer from 1 to {most}, got {value!r}.{remedy}")


def _check_half_life(policy: LeastFrequentlyUsed | LowestScore) -> None:
    where, steps, time = type(policy).__name__, policy.half_life_steps, policy.half_life_time
    if steps is not None and time is not None:
        raise ValueError(
            f"{where}: expected at most one half-life, got half_life_steps={steps!r} and "
            f"half_life_time={time!r}. Count in training steps, or by your own clock."
        )
    if steps is not None:
        _check_integer(f"{where}.half_life_steps", steps, _MOST_STEPS)
    if time is not None:
        _check_integer(f"{where}.half_life_time", time, _MOST_TIME)


def _changed_fields(policy: LeastFrequentlyUsed | LowestScore) -> str:
    """Returns the expression of a policy, without the fields that have their default."""
    given = ((field.name, field.default, getattr(policy, field.name)) for field in fields(policy))
    changed = [f"{name}={value!r}" for name, default, value in given if value != default]
    return f"{type(policy).__name__}({', '.join(changed)})"


@dataclass(frozen=True)
class AdmitAfter:
    """Admission policy: an id gets a row after `count` occurrences in training.

    A forward first counts all occurrences of an id, including repeats and the occurrences on all ranks.
    It then decides once: if the total is at least `count`, the id gets a row, which every occurrence reads.
    Until then the id waits: it reads as `DynamicTableConfig.unseen` specifies, and training does not update
    it.

    Each waiting id has a counter. Counters are exact as long as at most `counters` ids wait. If more ids
    wait, the surplus or a 64th of `counters`, whichever is more, is dropped, starting with the ids last seen
    longest ago, with ties in the order of the mixed id, unsigned. `stats()["counters_dropped"]` counts the
    dropped counters. An id whose counter was dropped is counted from 0 again. The same holds for a waiting id
    that the table's `ExpireAfter` would expire if it had a row; `stats()["counters_expired"]` counts these.

    Attributes:
        count: number of occurrences after which an id is admitted; 1: at its first occurrence.
        counters: maximum number of waiting ids, at most 60 bytes each. Ranks that share a table's rows share
            this number in the same way as the row limit. None: 4 times the rows in use before the step, at
            least 65,536 and at most the table's row limit, by each rank's own rows and limit. Set a number if
            a single step may have more ids without a row than the default.
    """

    count: int
    counters: int | None = None

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        _check_integer("AdmitAfter.count", self.count, MOST_COUNT)
        if self.counters is not None:
            _check_integer(
                "AdmitAfter.counters",
                self.counters,
                _MOST_TIME,
                " Omit it for a number that follows the rows in use.",
            )


@dataclass(frozen=True)
class AdmitWithProbability:
    """Admission policy: each occurrence of an unseen id in training admits it with probability `p`.

    An id with k occurrences in a forward gets a row with probability 1 - (1 - p)^k. This takes a single draw,
    a function of (seed, table name, id, step), so column shards and reruns make the same decision. A refused
    id reads as `DynamicTableConfig.unseen` specifies, and training does not update it. The table stores
    nothing about a refused id.

    Attributes:
        p: admission probability of one occurrence, above 0 and at most 1.
    """

    p: float

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        if not isinstance(self.p, (int, float)) or isinstance(self.p, bool) or not 0 < self.p <= 1:
            raise ValueError(
                f"AdmitWithProbability.p: expected a number above 0 and at most 1, got {self.p!r}."
            )


@dataclass(frozen=True)
class Never:
    """Admission policy: training admits no id, so the vocabulary does not grow.

    Only `assign` and loading add rows; sharding and conversion keep them. These rows are trained and scored
    as usual. An id without a row reads as `DynamicTableConfig.unseen` specifies, and training does not update
    it; only `stats()["refused"]` counts its occurrences. Training does not bring back an evicted or erased
    row.
    """


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Eviction policy: a full table evicts the ids that were last seen longest ago.

    Order: the step of an id's last occurrence in training, then its mixed id, unsigned. The order is
    exact over all rows of this rank. A full table frees the number of rows that the batch needs or a
    64th of its limit, whichever is more. Ids of the batch are not evicted.
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class LeastFrequentlyUsed:
    """Eviction policy: a full table evicts the ids with the fewest occurrences.

    Order: the number of all occurrences of an id in training since it got its row, then its mixed id,
    unsigned. The order is exact over all rows of this rank. A full table frees the number of rows that
    the batch needs or a 64th of its limit, whichever is more. Ids of the batch are not evicted.

    With a half-life, the order is by the present number in 256ths, rounded down; all numbers from 2^24 on are
    equal in this order. An id's number is halved at the start of each half-life, at the steps or times that
    are multiples of it. When the id occurs again, the occurrences are added to its present number, rounded to
    the nearest integer, half up. Set at most one half-life.

    Attributes:
        half_life_steps: half-life in training steps; None: no decay by steps.
        half_life_time: half-life in the unit of the clock that `collection.set_time(t)` sets; None: no decay
            by time. Nothing is halved before the first time is set.
    """

    half_life_steps: int | None = None
    half_life_time: int | None = None

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        _check_half_life(self)

    __repr__ = _changed_fields


@dataclass(frozen=True, kw_only=True, repr=False)
class LowestScore:
    """Eviction policy: a full table evicts the ids with the lowest scores, the sums of the user's weights.

    In training, each occurrence of an id adds its weight to the id's score. The weights are those of the
    KeyedJaggedTensor, even if the collection does not pool by them; a weighted collection also pools by them.
    A training batch must have weights, all finite and not negative.

    Scores are integers, so sums are exact and do not depend on an order: a weight adds weight / unit, rounded
    to the nearest integer, half to even, and at least 1. A score does not grow above 2^32 - 1 units. A
    table's `count` returns scores in units. With AdmitAfter, the first score is the sum over the step that
    admits the id.

    Order: the score, then the mixed id, unsigned. The order is exact over all rows of this rank. A full table
    frees the number of rows that the batch needs or a 64th of its limit, whichever is more. Ids of the batch
    are not evicted. A half-life works as in `LeastFrequentlyUsed`.

    Attributes:
        unit: the weight of one unit, above 0.
        half_life_steps: half-life in training steps; None: no decay by steps.
        half_life_time: half-life in the unit of the clock; None: no decay by time.
    """

    unit: float = 1 / 256
    half_life_steps: int | None = None
    half_life_time: int | None = None

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        is_number = isinstance(self.unit, (int, float)) and not isinstance(self.unit, bool)
        if not is_number or not 0 < self.unit < math.inf:
            raise ValueError(
                f"LowestScore.unit: expected a finite number above 0, got {self.unit!r}."
            )
        _check_half_life(self)

    __repr__ = _changed_fields


@dataclass(frozen=True, kw_only=True, init=False)
class ExpireAfter:
    """Eviction policy: an id expires when training has not seen it for longer than an age.

    Set exactly one of `steps` and `time`. Expired rows are evicted at the start of a training forward, so
    an id that occurs again after a longer gap gets a fresh row. A row of exactly this age is kept.

    Attributes:
        steps: age in training steps.
        time: age in the unit of the clock that `collection.set_time(t)` sets. The time of an occurrence
            is the clock's time in its training forward.
    """

    steps: int | None = None
    time: int | None = None

    def __init__(
        self, *unnamed: NoReturn, steps: int | None = None, time: int | None = None
    ) -> None:
        if unnamed:
            raise ValueError(
                f"ExpireAfter: expected an age with its name, got {unnamed[0]!r}. "
                "Count in training steps with steps=, or by your own clock with time=."
            )
        if (steps is None) == (time is None):
            raise ValueError(
                f"ExpireAfter: expected exactly one of steps and time, got steps={steps!r} and "
                f"time={time!r}. "
                "Count in training steps with steps=, or by your own clock with time=."
            )
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "time", time)
        make_numbers_plain(self)
        if steps is not None:
            _check_integer("ExpireAfter.steps", self.steps, _MOST_STEPS)
        else:
            _check_integer("ExpireAfter.time", self.time, _MOST_TIME)


Counting = AdmitAfter | OwnAdmission  # with counters of waiting ids
Admission = Counting | AdmitWithProbability | Never
Replacement = LeastRecentlyUsed | LeastFrequentlyUsed | LowestScore | OwnEviction
Eviction = Replacement | ExpireAfter | tuple[ExpireAfter, Replacement]


def check_admission(admission: object, where: str) -> None:
    """Raises ValueError unless `admission` is an admission policy or None."""
    if isinstance(admission, OwnAdmission):
        _check_own(admission, where)
        if admission.counters is not None:
            _check_integer(f"{where}.counters", admission.counters, _MOST_TIME)
    elif admission is not None and not isinstance(admission, Admission):
        raise ValueError(
            f"{where}: expected AdmitAfter, AdmitWithProbability, OwnAdmission, Never or None, "
            f"got {admission!r}.{_object_of(admission)}"
        )


def check_eviction(eviction: object, where: str) -> None:
    """Raises ValueError unless `eviction` is an eviction policy, a pair of them, or None."""
    match eviction:
        case (ExpireAfter(), last) if isinstance(eviction, tuple):
            is_policy = isinstance(last, Replacement)
        case last:
            is_policy = last is None or isinstance(last, Replacement | ExpireAfter)
    if not is_policy:
        raise ValueError(
            f"{where}: expected LeastRecentlyUsed, LeastFrequentlyUsed, LowestScore, OwnEviction, "
            "ExpireAfter, a pair (ExpireAfter, LeastRecentlyUsed, LeastFrequentlyUsed, LowestScore or "
            f"OwnEviction) or None, got {eviction!r}. Write a pair as a tuple in this order."
            f"{_object_of(last)}"
        )
    if isinstance(last, OwnEviction):
        _check_own(last, where)


def _object_of(given: object) -> str:
    """Returns the remedy if a policy's class was given in place of an object."""
    return f" Write {given.__name__}(...)." if isinstance(given, type) else ""


def _check_own(policy: OwnPolicy, where: str) -> None:
    if not isinstance(policy.name, str):
        raise ValueError(
            f"{where}: expected a string as the name of {policy!r}, got {policy.name!r}."
        )
    _check_integer(f"{where}: version of {policy!r}", policy.version, _MOST_TIME)
    for name, value in vars(policy).items():
        if isinstance(value, Tensor):  # its == is no bool
            raise ValueError(
                f"{where}: expected attributes of {type(policy).__name__} by which policies can be compared, "
                f"got the tensor {name!r}. Keep numbers, and make tensors in its method."
            )
    if type(policy).__hash__ is None:
        raise ValueError(
            f"{where}: expected a policy that can be hashed, got {policy!r}. Write its class without "
            "__eq__; a dataclass with frozen=True."
        )


def age_limit_of(eviction: Eviction | None) -> ExpireAfter | None:
    """Returns the ExpireAfter of an eviction policy, or None."""
    first = eviction[0] if isinstance(eviction, tuple) else eviction
    return first if isinstance(first, ExpireAfter) else None


def replacement_of(eviction: Eviction | None) -> Replacement | None:
    """Returns the part of an eviction policy for a full table, or None."""
    last = eviction[-1] if isinstance(eviction, tuple) else eviction
    return last if isinstance(last, Replacement) else None


def is_timed(eviction: Eviction | None) -> bool:
    """Returns True if the time that the user sets decides: about expiry, decay, or the user's scores."""
    age_limit, replacement = age_limit_of(eviction), replacement_of(eviction)
    if isinstance(replacement, OwnEviction) and replacement.keeps_times:
        return True
    half_life = getattr(replacement, "half_life_time", None)
    return half_life is not None or (age_limit is not None and age_limit.time is not None)


def making_room(eviction: Eviction | None) -> str:
    """Returns the argument of DynamicTableConfig by which a table with this policy also evicts when full."""
    if age_limit_of(eviction) is None:
        return "eviction=LeastRecentlyUsed()"
    return "eviction=(ExpireAfter(...), LeastRecentlyUsed())"
