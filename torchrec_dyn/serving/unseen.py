"""The initial rows of unseen ids, for collections that serve them instead of zeros.

Legend: M ids, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import INITIALIZERS, named_initializer
from torchrec_dyn.initializers import table_key
from torchrec_dyn.serving.manifest import ServedTable


@torch.library.custom_op("torchrec_dyn_serving::initial_rows", mutates_args=())
def _initial_rows(
    ids: Tensor, columns: int, dtype: torch.dtype, kind: int, parameters: list[float], key: int
) -> Tensor:
    # The op of the core writes into a block of 2^shift rows, a size that torch.export cannot express.
    shift = max(0, (ids.numel() - 1).bit_length())
    block = torch.empty(1 << shift, columns, dtype=dtype, device="cpu")
    rows = torch.arange(ids.numel(), device="cpu")
    ops.init_rows_(ids, rows, [block], shift, columns, 0, kind, parameters, key)
    return block[: ids.numel()].float().clone()


@_initial_rows.register_fake
def _(ids, columns, dtype, kind, parameters, key):  # type: ignore[no-untyped-def]
    return ids.new_empty(ids.shape[0], columns, dtype=torch.float32)


class UnseenRows:
    """The initial rows of one served table, the same as in training.

    Raises:
        ValueError: if this version lacks the table's initializer.
    """

    def __init__(self, name: str, table: ServedTable) -> None:
        self._columns = table.embedding_dim
        self._dtype = table.trained_dtype
        self._key = table_key(table.seed, name, "initial row")
        initializer = named_initializer(table.initializer)
        if initializer is None:
            raise ValueError(
                f"serving(table='{name}'): expected an initializer among {', '.join(INITIALIZERS)}, got "
                f"{table.initializer}. Serve it with unseen='zeros'."
            )
        self._kind, self._parameters = initializer.parameters()

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the initial rows [M, D] float32 of ids [M] int64."""
        return _initial_rows(
            ids, self._columns, self._dtype, self._kind, self._parameters, self._key
        )
