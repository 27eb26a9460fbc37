"""Clicks, and their conversion to a batch for TorchRec's DLRM.

One click (one line of the Criteo log) is a label, 13 integers and 26 categoricals. A categorical
*is* an int64 id. Dynamic tables need no vocabulary and no modulo.

Legend: B clicks in a batch, 13 integer features, 26 categorical features.
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
    """Clicks of a log, one row of each array per click.

    Attributes:
        labels: [B] int64, 1 for clicked, 0 for not clicked.
        integers: [B, 13] float64; 0 for a missing field.
        ids: [B, 26] int64, any value; not used where `present` is False.
        present: [B, 26] bool, False for a missing field.
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
        """Returns the clicks as a batch for DLRM.

        A missing categorical becomes an empty bag, with zeros as pooled embedding. It gets no special
        id, because every int64 is a valid id, so no id can mean "missing". Also, an empty bag sends no
        data and needs no row.
        """
        present = self.present.T  # feature-major, the layout of a KeyedJaggedTensor
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
    """Returns log(1 + x) for x >= 0, and the mirror image -log(1 - x) for x < 0.

    The counts of the Criteo log span seven decades. The minimum of its second integer is -3, where
    log(1 + x) is not defined. The mirror image maps such values to different numbers; clipping would not.

    Args:
        integers: any shape.
    """
    return np.sign(integers) * np.log1p(np.abs(integers))
