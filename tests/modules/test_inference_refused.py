"""TorchRec's functions for inference would skip dynamic tables: an error says what serves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compiled_training import CALLS, configs, model_of
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.inference.modules import (
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from torchrec.quant import EmbeddingBagCollection as QuantEmbeddingBagCollection

import torchrec_dyn as dyn
from torchrec_dyn import serving

REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "quantize_embeddings": lambda model: quantize_embeddings(model, torch.int8, inplace=False),
    "quantize_embeddings in place": lambda model: quantize_embeddings(model, torch.int8, True),
    "quantize_inference_model": quantize_inference_model,
    "shard_quant_model": lambda model: shard_quant_model(
        model, world_size=2, compute_device="cpu", sharding_device="cpu"
    ),
}


def with_a_static_table(model: nn.Module) -> nn.Module:
    static = EmbeddingBagConfig(
        name="static", embedding_dim=8, num_embeddings=10, feature_names=["s"]
    )
    return nn.ModuleDict({"static": EmbeddingBagCollection([static]), "model": model})


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("kind", CALLS)
def test_the_error_says_what_serves_the_tables(call: str, kind: str) -> None:
    model = with_a_static_table(model_of(kind))
    name = call.partition(" ")[0]
    with pytest.raises(ValueError, match=f"expected no dynamic tables in {name}, got one") as error:
        REFUSED[call](model)
    for advice in ("serving.build(..., rows=torch.int8)", "ServingEmbeddingBagCollection"):
        assert advice in str(error.value)
    assert type(model["static"]) is EmbeddingBagCollection


def test_a_collection_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"DynamicEmbeddingBagCollection\(table='t0'\): expected"):
        quantize_embeddings(CALLS["pooled"](), torch.int8, inplace=True)


def test_served_tables_pass_beside_static_ones(tmp_path: Path) -> None:
    model: Any = with_a_static_table(model_of("pooled"))
    tables = configs(EmbeddingBagConfig)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    serving.build(tmp_path / "saved", tmp_path / "served", rows=torch.int8)
    served = serving.ServingEmbeddingBagCollection(tmp_path / "served", tables)
    model["model"].tables = served
    quantized = quantize_inference_model(model)
    assert type(quantized["static"]) is QuantEmbeddingBagCollection
    assert type(quantized["model"].tables) is type(served)


@pytest.mark.filterwarnings("ignore")
def test_torch_quantizes_the_dense_part() -> None:
    model: Any = model_of("pooled")
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert "quantized" in type(quantized.dense[0]).__module__
    assert isinstance(quantized.tables, dyn.DynamicEmbeddingBagCollection)
    assert not any(hasattr(module, "qconfig") for module in quantized.modules())
