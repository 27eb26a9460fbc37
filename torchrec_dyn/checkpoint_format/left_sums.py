"""LeftSums: the checksum of a table whose rows are summed while they are written.

Then the rows are read once. The sums of all ranks are known when all have written: the writer of the files
(checkpoint/table_writer.py) adds them up and saves the checksum last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from torchrec_dyn.checkpoint_format.content_sums import add_sums, as_words


class LeftSums:
    """The checksum of a table, which has no words until all ranks have written their rows.

    Args:
        known: sums of the tensors that are not by row, and of rows that were summed before, by tensor.
        order: MODEL_TENSORS or OPTIMIZER_TENSORS.

    Attributes:
        known: as given.
        words: the words of the checksum, [W] int64; None until `settle`, which one rank calls.
    """

    def __init__(self, known: Mapping[str, int], order: tuple[str, ...]) -> None:
        self.known, self._order = dict(known), order
        self.words: Tensor | None = None

    def settle(self, of_ranks: Iterable[Mapping[str, int]]) -> Tensor:
        """Makes the words from the sums of the rows of all ranks, by tensor, and returns them."""
        self.words = as_words(add_sums(self.known, *of_ranks), self._order)
        return self.words

    def read(self, start: int, stop: int) -> Tensor:
        """Returns words [start, stop).

        Raises:
            RuntimeError: if they are not known.
        """
        if self.words is None:
            raise RuntimeError(
                "SavedTensor: expected to be saved by torchrec_dyn.checkpoint.TableWriter, as the state dict "
                "was made in a block of only_to_save, got another writer, a copy or a load. Call "
                "dcp.save(..., storage_writer=TableWriter(path)), or state_dict outside of the block."
            )
        return self.words[start:stop]
