"""Where the clicks come from: a file or the made-up stream, each split over the ranks.

Training and held-out clicks never meet, and no two ranks read the same click.
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
    """Returns True for a tenth of the lines, strewn over the file, the same for any world size.

    Source: Fibonacci hashing, Knuth TAOCP 6.4; the high bits of the product are the mixed ones.
    """
    return (line_number * 2654435769 % 2**32) * 10 >> 32 == 0


@dataclass(frozen=True)
class FileSource:
    """A click log: line number % world size == rank decides who reads a line.

    Attributes:
        path: the log.
        on_bad_line: "error" or "skip".
        batch_size: clicks per rank and step.
        steps: batches to train on; None for the whole file.
        held_out: clicks to keep for the evaluation, over all ranks.
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
        """Yields this rank's batches of the lines that are not held out."""
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
    """The made-up stream: held out is what comes after the clicks trained on, newborn ids included.

    Attributes:
        seed: of the stream.
        batch_size: clicks per rank and step.
        steps: batches to train on.
        held_out: clicks to keep for the evaluation, over all ranks.
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
        """Yields this rank's batches of the clicks that follow."""
        most = -(-self.held_out // (self.batch_size * self.world_size))
        return self._batches(self.steps, self.steps + most)

    def _batches(self, first: int, end: int) -> Iterator[Clicks]:
        stream = ClickStream(self.seed, chunk_size=self.batch_size)
        return stream.read(
            first * self.world_size, end * self.world_size, self.rank, self.world_size
        )
