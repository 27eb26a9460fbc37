"""Drops rows that `dcp.load` has read, if they are not to be loaded into the model after all."""

from __future__ import annotations

from torch import nn

from torchrec_dyn.state_dict import drop_awaited
from torchrec_dyn.whole_model import collections_of, lock_of


def drop_load(model: nn.Module) -> list[str]:
    """Drops the rows that `torch.distributed.checkpoint.load` has read with `LoadPlanner` for a model.

    They wait for `load_state_dict`, and a forward before it is an error. After this call the model trains on
    with the rows that it has. Not collective, but to be called on every rank of a sharded model.

    Args:
        model: DistributedModelParallel, any module, or a collection.

    Returns:
        The names of the tables whose rows were dropped, in order; none if nothing waited.

    Raises:
        ValueError: if the model has no dynamic collection.
    """
    dropped: list[str] = []
    for _, collection in collections_of(model, "drop_load"):
        dropped += drop_awaited(lock_of(collection))
    return sorted(dropped)
