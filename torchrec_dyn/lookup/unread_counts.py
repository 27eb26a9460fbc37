"""UnreadCounts: the counts of a batch on a GPU, before the host knows them.

The host waits for the GPU when it reads a number. So it reads the counts together with the first numbers of a
lookup: one wait for both. They are checked before the lookup changes anything.

Legend: F features, W words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from torchrec_dyn.storage import HostRead, read


class UnreadCounts:
    """The number of ids of each feature, which the host reads when it first needs it.

    Args:
        words: [W] int64 on the GPU: where the ids of each feature begin, [F], the end of the last feature,
            and further numbers for `check`.
        features: F.
        check: raises ValueError if the batch is not valid. It gets the counts [F] and the further numbers.
    """

    def __init__(
        self,
        words: Tensor,
        features: int,
        check: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self.words = words
        self._features = features
        self._check = check
        self._counts: list[int] | None = None

    @property
    def are_read(self) -> bool:
        """True if the host knows the counts, and they are checked."""
        return self._counts is not None

    @property
    def begins(self) -> Tensor:
        """Where the ids of each feature begin, and the end of the last feature, [F + 1] int64."""
        return self.words[: self._features + 1]

    def get(self) -> list[int]:
        """Returns the counts, [F]; reads them unless the host knows them.

        Raises:
            ValueError: the batch is not valid.
        """
        return self._counts if self._counts is not None else read(self.host_read())

    def host_read(self) -> HostRead[list[int]]:
        """`get` as a host read, for counts that the host does not know."""
        numbers = yield [self.words]
        begins = numbers[: self._features + 1]
        counts = [end - begin for begin, end in pairwise(begins)]
        self._check(counts, numbers[self._features + 1 :])
        self._counts = counts
        return counts
