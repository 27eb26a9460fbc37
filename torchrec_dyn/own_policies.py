"""OwnAdmission and OwnEviction: custom policies in Python, for `DynamicTableConfig`.

The package asks them in a training step, before anything is written; nothing is stored for them beside what
a table with a policy stores anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from torchrec_dyn.row_rules import ByValue


class OwnPolicy(ByValue, ABC):
    """Name, version and equality of a custom policy."""

    name: ClassVar[str] = ""
    version: ClassVar[int] = 1

    @property
    def label(self) -> str:
        """The name and version in checkpoints and messages."""
        kind = type(self)
        return f"{self.name or f'{kind.__module__}.{kind.__qualname__}'}, version {self.version}"


class OwnAdmission(OwnPolicy):
    """A custom admission policy: a function of the number of occurrences. Subclass it, and pass an object.

    An unseen id waits at its first occurrence. At each later one `admit` decides by what was known when the
    step before ended: if it says yes, the id gets a row, which every occurrence of this forward reads. So the
    id is admitted from its next occurrence on as soon as the answer is yes, as long as an answer that depends
    only on its arguments never turns from yes to no.

    Waiting ids have counters as in `AdmitAfter`, with the same limit, drops and expiry. A checkpoint contains
    the name and version, never the class; loading it into a model with another policy warns. Two objects are
    the same policy if their classes and attributes are equal; attributes are plain numbers.

    Attributes:
        name: name of the policy in checkpoints and messages; "": that of its class.
        version: raise it when the same name decides in another way.
        counters: maximum number of waiting ids, as of `AdmitAfter`; None: the same default.
    """

    counters: int | None = None

    @abstractmethod
    def admit(self, ids: Tensor, counts: Tensor, step: int) -> Tensor:
        """Returns which ids are admitted, [M] bool on the device of the ids.

        It is called without autograd, at most once in a forward for each table, or column shard of a table,
        with the waiting ids of the forward. Each rank runs it for its own ids, so it must not communicate.
        The answer for an id depends only on its id, its count and the step: then it is the same under every
        plan.

        Args:
            ids: [M] int64, distinct waiting ids, in no particular order.
            counts: [M] int64, at least 1, the occurrences of each until the end of `step`.
            step: the last training step of the table.
        """


class OwnEviction(OwnPolicy):
    """A custom eviction policy: a full table evicts the ids with the lowest scores of a function.

    Subclass it, and pass an object, alone or as the second of a pair with `ExpireAfter`.

    Order: the score, then the mixed id, unsigned. The order is exact over all rows of this rank. A full table
    frees the number of rows that the batch needs or a 64th of its limit, whichever is more. Ids of the batch
    are not evicted. Each eviction scores all rows.

    Name, version and equality are those of `OwnAdmission`.

    Attributes:
        name: name of the policy in checkpoints and messages; "": that of its class.
        version: raise it when the same name scores in another way.
        keeps_times: True if `score` needs times. The clock then keeps the times of all living rows, at most
            the last 65,536 that `collection.set_time(t)` has set.
        reads_rows: True if `score` has a fifth argument for the rows. Such a table cannot be sharded by
            columns.
    """

    keeps_times: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = False

    @abstractmethod
    def score(self, last_seen: Tensor, counts: Tensor, times: Tensor, step: int) -> Tensor:
        """Returns the score of each row, [M] int64 on the device of the arguments.

        It is called without autograd, in the forward that evicts, with a part of the rows of the table at a
        time. Each rank runs it for its own rows, so it must not communicate. The score of a row depends only
        on the arguments for this row and the step: then the same ids go under every plan.

        Args:
            last_seen: [M] int64, the step of the last occurrence before this forward.
            counts: [M] int64, the occurrences as `count` of a table returns them; 0 for an assigned row.
            times: [M] int64, the time of the last occurrence, if `keeps_times` or rows expire by time, else
                -1; 0 before the first `set_time`. A row that is older than the times kept has the first of
                them.
            step: the present training step of the table.

        With `reads_rows` there is a fifth argument, `rows` [M, columns] float32, the weights.
        """
