"""Programs of serving collections, for any number of bags and ids: exported, or compiled for C++.

A trace cannot read the numbers in the tensors of a KeyedJaggedTensor. In eager mode FeatureReader checks the
sums and bounds of the lengths. An exported program asserts the same when it runs.

The inputs of a compiled program are plain tensors: those of the model's call, then those of the served
tables, which the caller maps from the files of the current generation (generation.py). The names of the
latter are in the program's metadata.

Legend: F features, B bags of a feature, N ids.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.modules import as_int64, check_keyed, check_keys_once
from torchrec_dyn.serving.generation import mapped_tensors
from torchrec_dyn.serving.lookup import ServedLookup
from torchrec_dyn.serving.manifest import read_manifest, with_current

Inputs = Sequence[Tensor | KeyedJaggedTensor]

TABLES = "tables"  # the key in the program's metadata
_WHERE = "serving.compile_program"


def export_program(module: nn.Module, features: KeyedJaggedTensor) -> ExportedProgram:
    """Exports a module whose only input is a KeyedJaggedTensor of features, such as a serving collection.

    `torch.export.export` works too, but its program needs at least two bags if the example has two or more.
    The program contains copies of the present rows and id maps and does not refresh. `compile_program` makes
    a program that can refresh.

    Args:
        module: a serving collection, or a module that contains a serving collection.
        features: an example. The program takes the same features in the same order, with any number of bags
            and ids.

    Returns:
        The program. Import torchrec_dyn.serving before you load it; the import registers its ops. It reads
        only values, weights and lengths [F, B], and neither strides nor inverse_indices.

    Raises:
        ValueError: if the example is not a KeyedJaggedTensor, or has variable batch sizes per feature (VBE).
    """
    check_keyed(features, "serving.export_program")
    check_one_batch_size(features, "serving.export_program")
    plain = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths().reshape(-1),  # [F, B] would fix the number of bags
    )
    leaves, _ = torch.utils._pytree.tree_flatten(plain)
    shapes: list[Any] = [None if leaf is None else {0: Dim.DYNAMIC} for leaf in leaves]
    with any_size():
        program = torch.export.export(module, (plain,), dynamic_shapes=(shapes,), strict=False)
    # The inputs hold a KeyedJaggedTensor, which torch.export.load would have to unpickle.
    program.example_inputs = None
    return program


def compile_program(module: nn.Module, inputs: Inputs, out: str | os.PathLike[str]) -> None:
    """Compiles a module that contains serving collections, with AOTInductor, for programs without Python.

    The program takes one list of tensors: each input tensor, and for features their values, lengths and, if
    present, weights; then those tensors of a generation's index whose names are in the metadata "tables",
    separated by spaces. It returns the tensors of the module's output. Sizes of dimension 0 may differ from
    the example, and may be 0 or 1. The module's other weights are part of the program.

    Do not call the module in another thread during the call.

    Args:
        module: a serving collection, or a module with serving collections of one directory, in evaluation.
        inputs: example arguments of a call of the module: tensors, and features as KeyedJaggedTensor.
        out: the file to write, `*.pt2`.

    Raises:
        ValueError: if the module has no serving collection, has collections of several directories or a
            collection with unseen="initial", or features have variable batch sizes (VBE).
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
        [None if name.endswith(".key") else _any_length(tensors[name]) for name in names],
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


def any_size() -> AbstractContextManager[None]:
    """Returns a context in which programs are traced for dynamic sizes 0 and 1, too.

    Else torch treats these sizes as special cases: the program of an example with many bags refuses them.
    """
    patched: AbstractContextManager[None] = symbolic_shapes.patch(  # type: ignore[attr-defined]
        backed_size_oblivious=True
    )
    return patched


def check_one_batch_size(features: KeyedJaggedTensor, where: str) -> None:
    """Raises ValueError if the number of bags varies by feature, or samples may share bags (VBE)."""
    # A trace cannot compare strides by feature: they are inputs of its program.
    varies = features.variable_stride_per_key() and (
        torch.compiler.is_exporting() or len(set(features.stride_per_key())) > 1
    )
    if varies or features.inverse_indices_or_none() is not None:
        raise ValueError(
            f"{where}: expected as many bags for each feature and no inverse_indices, got a batch size per "
            "feature (VBE). Give each sample its own bag of each feature."
        )


def traced_features(
    features: KeyedJaggedTensor, names: Sequence[str], weighted: bool, where: str
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """Reads F features, which all have B bags, while a program is exported.

    `names` are in table order, repeats allowed.

    Returns:
        ids [N] int64, offsets [F * B + 1] int64, weights [N] float32 or None, and B of each feature.
    """
    check_one_batch_size(features, where)
    keys = features.keys()
    missing = [name for name in names if name not in keys]
    if missing:
        raise ValueError(f"{where}: expected features {list(names)}, got {keys}.")
    check_keys_once(keys, names, where)
    ids = as_int64(features.values(), where)
    if weighted and features.weights_or_none() is None:
        raise ValueError(f"{where}: expected weights for weighted bags, got none.")
    weights = features.weights().float() if weighted else None
    lengths = features.lengths().reshape(-1).long()
    count, batch = ids.shape[0], lengths.shape[0] // len(keys)
    # As in FeatureReader. Sizes are compared as tensors: a compiled program would not compare them.
    is_right = ((lengths >= 0) & (lengths <= count)).all() & (lengths.sum() == count)
    num_weights = count if weights is None else weights.shape[0]
    for difference in (lengths.shape[0] - batch * len(keys), num_weights - count):
        is_right &= torch.full((), difference, device="cpu") == 0
    torch._assert_async(
        is_right,
        f"{where}: expected as many lengths for each feature, not negative, that add up to the ids, and a "
        "weight for each id if bags have weights.",
    )
    # A compiler may move the assertion behind the ops: without lengths they read nothing.
    lengths = torch.where(is_right, lengths, 0)
    offsets = _summed(lengths)
    if list(names) != list(keys):
        chosen = torch.tensor([keys.index(name) for name in names], device="cpu")
        bags = (chosen[:, None] * batch + torch.arange(batch, device="cpu")).view(-1)
        lengths, begins = lengths[bags], offsets[bags]
        offsets = _summed(lengths)
        shift = (begins - offsets[:-1]).repeat_interleave(lengths)
        picked = torch.arange(shift.shape[0], device="cpu") + shift
        ids, weights = ids[picked], None if weights is None else weights[picked]
    return ids, offsets, weights, [batch] * len(names)


def _summed(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
