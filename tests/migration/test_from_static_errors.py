"""from_static: what has no dynamic counterpart is named before a row is copied."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from static_collections import OPTIMIZERS, batch, ebc, loss_of, weights_of
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_dyn as dyn
from torchrec_dyn.migration.trained_collections import from_static


def with_optimizer(static: nn.Module, kind: str, **options: Any) -> dict[str, Any]:
    group = {key: options.pop(key) for key in list(options) if key != "fused_params"}
    optimizer = OPTIMIZERS[kind](static.parameters())
    optimizer.param_groups[0].update(group)
    loss_of(static, batch(static, random.Random(0))).backward()
    optimizer.step()
    return {"optimizer": optimizer, **options}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            lambda s: with_optimizer(s, "EXACT_SGD", momentum=0.9),
            "expected momentum = 0 of SGD.*0.9",
        ),
        (
            lambda s: with_optimizer(s, "ADAM", weight_decay=0.1),
            "weight_decay = 0 of Adam.*0.1. Say",
        ),
        (
            # It decays all rows at every step, as no row rule does.
            lambda s: with_optimizer(s, "ADAMW", weight_decay=0.1),
            "weight_decay = 0 of AdamW.*0.1. Say",
        ),
        (lambda s: with_optimizer(s, "EXACT_ADAGRAD", lr_decay=0.1), "lr_decay = 0 of Adagrad"),
        (
            lambda s: with_optimizer(s, "EXACT_ADAGRAD", fused_params={"optimizer": "ADAM"}),
            "trained the rows, EXACT_ADAGRAD, got ADAM",
        ),
        (
            lambda s: {"optimizer": torch.optim.RMSprop(s.parameters())},
            "expected an optimizer like EXACT_SGD.*, got RMSprop",
        ),
        (
            lambda s: {"optimizer": torch.optim.SGD([s.embedding_bags["a"].weight])},
            r"table='b'\): expected an optimizer that holds the parameter of every table, got SGD",
        ),
        (lambda s: {"num_embeddings": {"a": 11}}, "at least the 12 rows of table 'a', got 11"),
        (lambda s: {"num_embeddings": {"x": 11}}, r"names among \['a', 'b'\], got 'x'"),
        (lambda s: {"dynamic": {"x": dyn.DynamicTableConfig()}}, r"names among .*got \['x'\]"),
    ],
)
def test_impossible_wishes(options: Callable[[nn.Module], dict[str, Any]], message: str) -> None:
    static = ebc()
    wishes = options(static)
    before = {name: one.clone() for name, one in weights_of(static).items()}
    with pytest.raises(ValueError, match=message):
        from_static(static, **wishes)
    assert all(torch.equal(before[name], one) for name, one in weights_of(static).items())


def test_impossible_collections() -> None:
    for wrong, message in (
        (nn.Linear(2, 2), "expected an unsharded EmbeddingBagCollection .* got Linear"),
        (from_static(ebc()), "got DynamicEmbeddingBagCollection"),
        (ebc(device=torch.device("meta")), "expected rows on the CPU, got meta"),
        (ebc().double(), "expected rows of float32, .* got torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            from_static(wrong)
    cut = ebc()
    cut.embedding_bags["a"].weight = nn.Parameter(torch.zeros(11, 8))
    with pytest.raises(ValueError, match=r"expected a weight \[12, 8\] .* got \[11, 8\]"):
        from_static(cut)
    two = ebc()
    for _ in range(2), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        apply_optimizer_in_backward(torch.optim.SGD, two.parameters(), {"lr": 0.1})
    with pytest.raises(
        ValueError, match=r"expected one optimizer on the parameter, got \['SGD', 'SGD"
    ):
        from_static(two)
