"""The sources of clicks: a file or the synthetic stream, each split over the ranks.

Training clicks and held-out clicks are disjoint, and no two ranks read the same click.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from parts.click_stream import ClickStream
from parts.clicks import Clicks
from parts.criteo import in_batches, read_clicks


def is_held_out(line_number: int) -> bool:
    """Returns True for a tenth of the lines, spread over the file, the same for any world size.

    Source: Fibonacci hashing, Knuth TAOCP 6.4; the high bits of the product are well mixed.
    """
    return (line_number * 2654435769 % 2**32) * 10 >> 32 == 0


@dataclass(frozen=True)
class FileSource:
    """A click log. The rank of a line is line number % world size.

    Attributes:
        path: path of the log.
        on_bad_line: "error" or "skip".
        batch_size: clicks per rank and step.
        steps: number of training batches; None for the whole file.
        held_out: number of clicks for the evaluation, over all ranks.
        rank: this rank.
        world_size: number of ranks.
    """

    path: Path
    on_bad_line: str
    batch_size: int
    steps: int | None
    held_out: int
    rank: int
    world_size: int

    def training(self) -> Iterator[Clicks]:
        """Yields this rank's batches of lines that are not held out."""
        return islice(self._batches(of_held_out=False), self.steps)

    def evaluation(self) -> Iterator[Clicks]:
        """Yields this rank's batches of held-out lines, from the start of the file."""
        most = -(-self.held_out // (self.batch_size * self.world_size))
        return islice(self._batches(of_held_out=True), most)

    def _batches(self, of_held_out: bool) -> Iterator[Clicks]:
        def mine(line_number: int) -> bool:
            return (
                line_number % self.world_size == self.rank
                and is_held_out(line_number) == of_held_out
            )

        return in_batches(read_clicks(self.path, mine, self.on_bad_line), self.batch_size)


@dataclass(frozen=True)
class StreamSource:
    """The synthetic stream. The held-out clicks follow the training clicks and include new ids.

    Attributes:
        seed: seed of the stream.
        batch_size: clicks per rank and step.
        steps: number of training batches.
        held_out: number of clicks for the evaluation, over all ranks.
        rank: this rank.
        world_size: number of ranks.
    """

    seed: int
    batch_size: int
    steps: int
    held_out: int
    rank: int
    world_size: int

    def training(self) -> Iterator[Clicks]:
        """Yields this rank's batches of the first `steps` global batches."""
        return self._batches(0, self.steps)

    def evaluation(self) -> Iterator[Clicks]:
        """Yields this rank's batches of the clicks after the training clicks."""
        most = -(-self.held_out // (self.batch_size * self.world_size))
        return self._batches(self.steps, self.steps + most)

    def _batches(self, first: int, end: int) -> Iterator[Clicks]:
        stream = ClickStream(self.seed, chunk_size=self.batch_size)
        return stream.read(
            first * self.world_size, end * self.world_size, self.rank, self.world_size
        )
