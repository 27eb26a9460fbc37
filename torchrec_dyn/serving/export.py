"""export_program: torch.export of a serving collection, for any number of bags and ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def export_program(module: nn.Module, features: KeyedJaggedTensor) -> ExportedProgram:
    """Exports a module that takes features alone, as a serving collection does.

    `torch.export.export` does as well, but fixes that there are two bags or more if there are in the example.
    The program holds copies of rows and id maps, as they are now: it does not refresh.

    Args:
        module: a serving collection, or a module around one.
        features: an example; programs are for the same features in the same order, of any sizes.

    Returns:
        The program. Who loads it must have imported torchrec_dyn.serving, which registers its ops.
    """
    plain = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
    )
    leaves, _ = torch.utils._pytree.tree_flatten(plain)
    shapes: list[Any] = [None if leaf is None else {0: Dim.DYNAMIC} for leaf in leaves]
    # Otherwise one bag or none, which broadcast, are taken for something else than many.
    with symbolic_shapes.patch(  # type: ignore[attr-defined]
        backed_size_oblivious=True
    ):
        program = torch.export.export(module, (plain,), dynamic_shapes=(shapes,), strict=False)
    program.example_inputs = (
        None  # a KeyedJaggedTensor, which torch.export.load would have to unpickle
    )
    return program
