"""Compiles a model with serving collections to a program that C++ runs without Python.

The inputs of the program are plain tensors: those of the model's call, then those of the served tables, which
the caller maps from the files of the current generation (tensor_index.py). The names of the latter are in the
program's metadata.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.serving.export import any_size, check_one_batch_size
from torchrec_dyn.serving.lookup import ServedLookup
from torchrec_dyn.serving.manifest import read_manifest, with_current
from torchrec_dyn.serving.tensor_index import is_key, mapped_tensors

Inputs = Sequence[Tensor | KeyedJaggedTensor]

TABLES = "tables"  # the key in the program's metadata
_WHERE = "serving.compile_program"


def compile_program(module: nn.Module, inputs: Inputs, out: str | os.PathLike[str]) -> None:
    """Compiles a module that contains serving collections, with AOTInductor, for programs without Python.

    The program takes one list of tensors: of each input its tensor, or of features their values, their
    lengths and, if they have any, their weights; then the tensors of the index of a generation that the
    metadata "tables" names, apart by spaces. It returns the tensors of the module's output. Sizes of
    dimension 0 may be others than in the example, 0 and 1 too. The module's other weights are part of the
    program.

    Do not call the module in another thread meanwhile.

    Args:
        module: a serving collection, or a module with serving collections of one directory, in evaluation.
        inputs: an example of the arguments of its call: tensors, and features as KeyedJaggedTensor.
        out: the file to write, `*.pt2`.

    Raises:
        ValueError: if the module has no serving collection, collections of several directories, or one with
            unseen="initial", or features have a batch size per feature (VBE).
    """
    path = Path(out)
    if path.suffix != ".pt2":
        raise ValueError(f"{_WHERE}: expected a file with the ending .pt2, got {path}.")
    program, names = export_with_tables(module, inputs)
    with (
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside,
        any_size(),
    ):
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=os.path.join(beside, path.name),
            inductor_configs={"aot_inductor.metadata": {TABLES: " ".join(names)}},
        )
        os.replace(package, path)


def export_with_tables(module: nn.Module, inputs: Inputs) -> tuple[ExportedProgram, list[str]]:
    """Exports a module as a program of two lists of tensors: of the call, and of the served tables."""
    lookups = _lookups_of(module)
    names = list(dict.fromkeys(name for lookup in lookups for name in lookup.tensor_names()))
    flat = _Flat(module, inputs, lookups, names)
    folder = lookups[0].folder
    # Of the current generation: the served one may have been removed.
    tensors = with_current(
        folder, lambda name: mapped_tensors(folder, name, read_manifest(folder, name))
    )
    tables = [tensors[name] for name in names]
    example = flat.tensors_of(inputs)
    shapes = [
        [_any_length(tensor) for tensor in example],
        # A key is always [1, 2].
        [None if is_key(name) else _any_length(tensors[name]) for name in names],
    ]
    with any_size():
        program = torch.export.export(flat, (example, tables), dynamic_shapes=shapes, strict=False)
    return program, names


def _lookups_of(module: nn.Module) -> list[ServedLookup]:
    lookups = [child for child in module.modules() if isinstance(child, ServedLookup)]
    folders = sorted({str(lookup.folder) for lookup in lookups})
    if len(folders) != 1:
        raise ValueError(
            f"{_WHERE}: expected a module with serving collections of one directory, got "
            f"{folders or 'a module without any'}."
        )
    if any(lookup.serves_initial for lookup in lookups):
        raise ValueError(
            f'{_WHERE}: expected collections with unseen="zeros", got unseen="initial", whose op is written '
            "in Python."
        )
    return lookups


def _any_length(tensor: Tensor) -> Any:
    return {0: Dim.DYNAMIC} if tensor.dim() else None


class _Flat(nn.Module):
    """A module as a function of plain tensors; its lookups read the tables that a call gets."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        lookups: Sequence[ServedLookup],
        names: Sequence[str],
    ) -> None:
        super().__init__()
        self._hidden = (module,)  # no submodule: the mapped tables would be buffers of the program
        self._lookups, self._names = lookups, names
        self._features: list[tuple[list[str], bool] | None] = []
        for value in inputs:
            if isinstance(value, KeyedJaggedTensor):
                check_one_batch_size(value, _WHERE)
                self._features.append((value.keys(), value.weights_or_none() is not None))
            elif isinstance(value, Tensor):
                self._features.append(None)
            else:
                raise ValueError(
                    f"{_WHERE}: expected inputs that are tensors or KeyedJaggedTensors, got "
                    f"{type(value).__name__}."
                )

    @staticmethod
    def tensors_of(inputs: Inputs) -> list[Tensor]:
        """Returns the plain tensors of inputs, in the order of the program."""
        tensors: list[Tensor] = []
        for value in inputs:
            if isinstance(value, Tensor):
                tensors.append(value)
                continue
            tensors += [value.values(), value.lengths().reshape(-1)]
            weights = value.weights_or_none()
            tensors += [] if weights is None else [weights]
        return tensors

    def forward(self, inputs: list[Tensor], tables: list[Tensor]) -> list[Tensor]:
        """Returns the tensors of the module's output, in the order of its pytree."""
        named = dict(zip(self._names, tables, strict=True))
        left = iter(inputs)
        arguments: list[Any] = []
        for features in self._features:
            if features is None:
                arguments.append(next(left))
                continue
            keys, weighted = features
            values, lengths = next(left), next(left)
            weights = next(left) if weighted else None
            arguments.append(KeyedJaggedTensor(keys, values, weights, lengths=lengths))
        try:
            for lookup in self._lookups:
                lookup.given = lookup.given_of(named)
            leaves, _ = torch.utils._pytree.tree_flatten(self._hidden[0](*arguments))
        finally:
            for lookup in self._lookups:
                lookup.given = None
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
