"""A trained block or quotient-remainder collection served: the collections it holds are replaced."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly
from mixed_cases import batch, some_grad
from mixed_training import collection_of

from torchrec_dyn import serving


@pytest.mark.parametrize("kind", ["block", "mult", "concat"])
def test_served_rows_in_the_place_of_trained_ones(kind: str, tmp_path: Path) -> None:
    model = collection_of(kind)
    for step in range(2):
        output = model(batch(step)).values()
        output.backward(some_grad(output))
    model.eval()
    expected = model(batch(0)).values().detach()
    quietly(dcp.save, {"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    folder = tmp_path / "served"
    serving.build(tmp_path / "saved", folder)
    if kind == "block":
        configs = model.rows.embedding_bag_configs()
        model.rows = serving.ServingEmbeddingBagCollection(folder, configs)
    else:
        for width, one in model.rows.items():
            model.rows[width] = serving.ServingEmbeddingCollection(folder, one.embedding_configs())
    assert expected.abs().sum() > 0
    assert torch.equal(model(batch(0)).values(), expected)
