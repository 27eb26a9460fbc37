"""What a click is, and how clicks become a batch that TorchRec's DLRM reads.

One click (one line of the Criteo log) is a label, 13 integers and 26 categoricals. A categorical
*is* an int64 id: there is no vocabulary and no modulo, which is the point of the dynamic tables.

Letters: B clicks in a batch, 13 integer features, 26 categorical features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_INTEGERS = 13
NUM_CATEGORICALS = 26
INTEGER_NAMES = [f"I{i + 1}" for i in range(NUM_INTEGERS)]
CATEGORICAL_NAMES = [f"C{i + 1}" for i in range(NUM_CATEGORICALS)]


@dataclass
class Clicks:
    """Some clicks as they stand in a log, one row of each array per click.

    Attributes:
        labels: [B] int64, 1 for clicked, 0 for not.
        integers: [B, 13] float64; 0 where the field is missing.
        ids: [B, 26] int64, any value; meaningless where `present` is False.
        present: [B, 26] bool, False where the field is missing.
    """

    labels: np.ndarray
    integers: np.ndarray
    ids: np.ndarray
    present: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> Clicks:
        """Returns the first `count` of these clicks."""
        return Clicks(
            *(array[:count] for array in (self.labels, self.integers, self.ids, self.present))
        )

    def to_batch(self) -> Batch:
        """Turns the clicks into the batch that DLRM reads.

        A missing categorical becomes an empty bag, whose pooled embedding is zeros. It is not given
        an id of its own: every int64 is a legal id here, so none is free to mean "missing", and an
        empty bag sends nothing over the wire and makes no row.
        """
        present = self.present.T  # feature-major, as a KeyedJaggedTensor is laid out
        return Batch(
            dense_features=torch.from_numpy(signed_log1p(self.integers).astype(np.float32)),
            sparse_features=KeyedJaggedTensor(
                keys=CATEGORICAL_NAMES,
                values=torch.from_numpy(self.ids.T[present]),
                lengths=torch.from_numpy(present.astype(np.int32).reshape(-1)),
            ),
            labels=torch.from_numpy(self.labels),
        )


def signed_log1p(integers: np.ndarray) -> np.ndarray:
    """Returns log(1 + x) for x >= 0, and its mirror image -log(1 - x) below.

    The counts of the Criteo log span seven decades, and its second integer goes down to -3, where
    log(1 + x) is not defined. The mirror image keeps such values apart; clipping would not.

    Args:
        integers: any shape.
    """
    return np.sign(integers) * np.log1p(np.abs(integers))
