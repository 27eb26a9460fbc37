"""Tables of unsharded modules that DCP has read into plain tensors: verified before any of them is loaded.

There is nothing to agree on: each process holds all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchrec_dyn.checkpoint_format import MODEL_TENSORS, OPTIMIZER_TENSORS
from torchrec_dyn.state_dict.unsharded import verify


def verify_plain(came: Mapping[str, Tensor], saved: Mapping[str, object]) -> None:
    """Verifies tables of a model and of its optimizer.

    Args:
        came: tensors by key of the checkpoint, of unsharded tables only.
        saved: whatever, by every key of the checkpoint.

    Raises:
        ValueError: if one is damaged.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in came.items():
        prefix, _, name = key.rpartition(".")
        groups.setdefault(prefix, {})[name] = tensor
    ids_of: dict[str, list[Tensor]] = {}
    for prefix, tensors in groups.items():
        if "ids" in tensors and "config" in tensors:
            table = prefix.rpartition(".")[2]
            left_out = _left_out(prefix, tensors, saved)
            verify(prefix, table, tensors, MODEL_TENSORS, tensors["ids"], left_out)
            ids_of.setdefault(table, []).append(tensors["ids"])
    for prefix, tensors in groups.items():
        ids = ids_of.get(prefix.rpartition(".")[2], [])
        if "step" in tensors and len(ids) == 1:  # else its own load verifies it
            left_out = _left_out(prefix, tensors, saved)
            name = prefix.rpartition(".")[2]
            verify(prefix, name, tensors, OPTIMIZER_TENSORS, ids[0], left_out)


def _left_out(prefix: str, tensors: Mapping[str, Tensor], saved: Mapping[str, object]) -> set[str]:
    """Names the tensors that are in the checkpoint and were not read."""
    names = {*MODEL_TENSORS, *OPTIMIZER_TENSORS}
    return {name for name in names if f"{prefix}.{name}" in saved and name not in tensors}
