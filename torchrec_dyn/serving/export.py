"""Exports a serving collection with torch.export, for any number of bags and ids.

A trace cannot read the numbers in the tensors of a KeyedJaggedTensor. In eager mode FeatureReader checks the
sums and bounds of the lengths. An exported program asserts the same when it runs.

Legend: F features, B bags of a feature, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.modules import as_int64, check_keyed, check_keys_once


def export_program(module: nn.Module, features: KeyedJaggedTensor) -> ExportedProgram:
    """Exports a module whose only input is features, such as a serving collection.

    `torch.export.export` works too, but its program needs two bags or more if the example has them.
    The program holds copies of the present rows and id maps: it does not refresh. `compile_program` makes one
    that does.

    Args:
        module: a serving collection, or a module that contains a serving collection.
        features: an example; the program takes the same features in the same order, with any number of bags
            and ids.

    Returns:
        The program. Import torchrec_dyn.serving before you load it; the import registers its ops. It reads
        values, weights and lengths [F, B] alone: neither the strides nor the inverse_indices of a batch.

    Raises:
        ValueError: if the example is no KeyedJaggedTensor or has a batch size per feature (VBE).
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


def begins_of(sizes: Sequence[int]) -> Tensor:
    """Returns the first bag of each feature, and the end of the last, [F + 1] int64, of sizes [F]."""
    if torch.compiler.is_exporting():  # all sizes are one, which is no number yet
        return torch.arange(len(sizes) + 1, device="cpu") * sizes[0]
    return torch.tensor([*accumulate(sizes, initial=0)], device="cpu")


def counts_between(bounds: Tensor, ids: Tensor) -> list[int]:
    """Returns the number of ids of each feature, as sizes whose values are known when the program runs.

    bounds: [F + 1] int64, the begin of each feature in ids [N] int64, and N.
    """
    if not torch.compiler.is_exporting():
        return cast(list[int], bounds.diff().tolist())
    counts = [
        cast(int, count.item()) for count in bounds.diff().unbind()
    ]  # int() would fix the sizes
    for count in counts:
        torch._check(count >= 0)
    torch._check(sum(counts) == ids.shape[0])
    return counts
