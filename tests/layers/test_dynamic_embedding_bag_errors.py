"""What DynamicEmbeddingBag refuses, and what it says."""

from typing import Any

import pytest
import torch
from test_dynamic_embedding_bag import bag_of, jagged, nested
from torchrec import JaggedTensor

import torchrec_dyn as dyn

WHERE = r"DynamicEmbeddingBag\(table='embedding_bag'\)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding_dim": 0}, "expected embedding_dim to be an integer above 0, got 0"),
        ({"num_embeddings": 0}, "expected num_embeddings to be an integer above 0, got 0"),
        ({"mode": "max"}, 'expected mode "sum", "mean" or "tile", got \'max\''),
        ({"mode": "tile"}, "expected tile_length to be an integer above 0, got None"),
        (
            {"mode": "tile", "tile_length": 0},
            "expected tile_length to be an integer above 0, got 0",
        ),
        ({"tile_length": 2}, 'expected tile_length with mode "tile" only, got 2 with "sum"'),
        ({"padding_idx": 0.5}, "expected padding_idx to be an int64 or None, got 0.5"),
        ({"weight_gradients": True}, "expected weight_gradients of weighted bags only"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{WHERE}: {message}"):
        dyn.DynamicEmbeddingBag(**{"embedding_dim": 4, "num_embeddings": 10, **options})


TWO = torch.tensor([[1, 2]])


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        (torch.tensor(1), None, r"expected ids \[..., bag\], got a tensor of no dimensions"),
        (TWO.int(), None, "expected ids of dtype int64"),
        (TWO, TWO, "expected weights of a floating dtype, got torch.int64"),
        (TWO, [0.5, 0.5], "expected weights of a floating dtype, got list"),
        (TWO, torch.ones(2), r"expected weights of the shape of the ids, \[1, 2\], got \[2\]"),
        (jagged([[1], [2]]), torch.ones(1, 2), r"shape of the ids, \[2\], got \[1, 2\]"),
        (jagged([[1]], torch.ones(1)), torch.ones(1), "expected weights once, got them in the Jagged"),
        (nested([[1], [2]]), torch.ones(2), "expected weights of the shape of the ids"),
        (nested([[1], [2]]), nested([[1, 2], []]).float(), "expected weights of the shape of the ids"),
        (JaggedTensor(TWO[0], lengths=TWO[0]), None, "add up to the 2 ids"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["mean", "tile"])
def test_impossible_inputs(mode: str, ids: Any, weights: Any, message: str) -> None:
    module = bag_of(mode, is_weighted=True)
    with pytest.raises(ValueError, match=f"{WHERE}: .*{message}"):
        module(ids, weights)
    assert module.table.num_rows == 0


@pytest.mark.parametrize("mode", ["sum", "mean", "tile"])
def test_weights_want_a_weighted_module(mode: str) -> None:
    for ids, weights in ((TWO, torch.ones(1, 2)), (jagged([[1]], torch.ones(1)), None)):
        with pytest.raises(ValueError, match=r"expected no weights, got .*is_weighted=True"):
            bag_of(mode)(ids, weights)
