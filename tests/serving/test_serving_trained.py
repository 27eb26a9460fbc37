"""From training to serving: what a trained module saves is what is served, deltas of its own included."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from serving_cases import Plain, bag_configs, batch, sequence_configs

import torchrec_dyn as dyn
from torchrec_dyn import checkpoint, serving

TABLES = Plain("a", 8), Plain("b", 8)
KEYS = ["f_b", "f_a"]
FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01}
DYNAMIC = {
    "a": dyn.DynamicTableConfig(initializer=dyn.Normal(0.0, 0.1), unseen="initial", seed=3),
    "b": dyn.DynamicTableConfig(initializer=dyn.TruncatedNormal(0.0, 0.1, -0.1, 0.2), unseen="initial"),
}  # fmt: skip


def modules(kind: str, folder):
    """A training collection, and how to make the serving one and to read either's numbers."""
    if kind in ("pooled", "max"):
        configs = bag_configs(*TABLES)
        options = dict(DYNAMIC)
        if kind == "max":
            options["a"] = replace(DYNAMIC["a"], pooling="max")
        training = dyn.DynamicEmbeddingBagCollection(configs, dynamic=options, fused_params=FUSED)
        serve = serving.ServingEmbeddingBagCollection
        return training, lambda: serve(folder, configs, unseen="initial"), lambda out: out.values()
    configs = sequence_configs(*TABLES)
    training = dyn.DynamicEmbeddingCollection(configs, dynamic=DYNAMIC, fused_params=FUSED)
    serve = serving.ServingEmbeddingCollection
    return (
        training,
        lambda: serve(folder, configs, unseen="initial"),
        lambda out: torch.cat([one.values() for one in out.values()]),
    )


def train(training, numbers, seed: int) -> None:
    training.train()
    for step in range(5):
        features = batch(KEYS, list(range(-30, 30)), 8, seed=seed + step)
        (numbers(training(features)) ** 2).sum().backward()
    training.eval()


@pytest.mark.everyday(3)
@pytest.mark.parametrize("kind", ["pooled", "max", "sequences"])
@pytest.mark.parametrize("trained_as", [torch.float32, torch.float16, torch.bfloat16])
def test_a_trained_module_is_served_as_it_evaluates(tmp_path, kind, trained_as):
    training, serve, numbers = modules(kind, tmp_path / "served")
    training.to(trained_as)
    train(training, numbers, seed=0)
    dcp.save({"model": training.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    serving.build(tmp_path / "saved", tmp_path / "served")
    ours = serve()
    features = batch(KEYS, list(range(-60, 60)), 30, seed=9)  # half of them unseen
    near = 1e-6 if kind != "sequences" else 0.0  # of a bag, unseen ids are added last
    with torch.no_grad():
        expected = numbers(training(features))
    torch.testing.assert_close(numbers(ours(features)), expected, rtol=near, atol=near)
    since = checkpoint.mark(training)
    for number in range(3):
        train(training, numbers, seed=100 * number)
        training.table("a").erase(torch.arange(number * 5, number * 5 + 5))
        since = checkpoint.export_delta(training, tmp_path / f"delta{number}", since)
        serving.apply_delta(tmp_path / "served", tmp_path / f"delta{number}")
    assert ours.refresh()
    with torch.no_grad():
        expected = numbers(training(features))
    torch.testing.assert_close(numbers(ours(features)), expected, rtol=near, atol=near)
