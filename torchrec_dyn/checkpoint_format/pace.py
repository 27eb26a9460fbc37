"""A limit on the bytes that a verification reads a second."""

from __future__ import annotations

import math
import time


class Pace:
    """A limit on the bytes that are read a second; None: no limit.

    Raises:
        ValueError: if the limit is not a number above 0.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        if bytes_per_second is not None and not 0 < bytes_per_second < math.inf:
            raise ValueError(
                f"verify.bytes_per_second: expected a number above 0, or None, got {bytes_per_second!r}."
            )
        self._limit = bytes_per_second
        self._free_at = time.monotonic()

    def wait(self, size: int) -> None:
        """Waits until `size` more bytes may be read. Time that the caller did not use is not made up for."""
        if self._limit is None:
            return
        now = time.monotonic()
        if now < self._free_at:
            time.sleep(self._free_at - now)
        self._free_at = max(now, self._free_at) + size / self._limit
