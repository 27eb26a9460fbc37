"""`gradient_clipping` and `max_gradient`: the clamp of FBGEMM's CPU table, on the same gradients."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from table_cases import make_group, make_table, random_bags

from torchrec_dyn.initializers import Normal
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

pytestmark = pytest.mark.usefixtures("device")

POOL = torch.arange(40) * 7919 - 1000
MODES = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "none": PoolingMode.NONE}


def table_of(columns=12, **options):
    rule = RowOptimizer(OptimizerKind.EXACT_SGD, 0.07, **options)
    table = make_table(optimizer=rule, embedding_dim=columns, initializer=Normal(0.0, 0.5))
    table.find_or_insert(POOL)
    return table


@pytest.mark.parametrize("mode", ["sum", "mean", "none", "weighted"])
def test_steps_are_fbgemms(mode):
    """The gradient of the bag weights is that of the clamped gradient, too.

    Not compared is MEAN with weights: FBGEMM's backward on the CPU does not divide it by the length.
    """
    pooling, is_weighted = ("sum", True) if mode == "weighted" else (mode, False)
    table = table_of(gradient_clipping=True, max_gradient=0.3)
    static = SplitTableBatchedEmbeddingBagsCodegen(
        [(40, 12, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=0.07,
        pooling_mode=MODES[pooling],
        gradient_clipping=True,
        max_gradient=0.3,
    )
    static.split_embedding_weights()[0].copy_(table.lookup(POOL)[0])
    group = make_group(table, pooling=pooling)
    for step in range(4):
        ids, offsets = random_bags(50 + step, bags=12, longest=9, pool=40)
        given = torch.rand(ids.numel())
        weights = [given.clone().requires_grad_() if is_weighted else None for _ in range(2)]
        ours = group(ids, offsets, weights[0], training=True)
        theirs = static((ids + 1000) // 7919, offsets, weights[1])
        upstream = torch.randn(ours.shape)
        kept = upstream.clone()
        ours.backward(upstream)
        assert torch.equal(upstream, kept)
        theirs.backward(upstream)
        if is_weighted:
            torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        table.lookup(POOL)[0], static.split_embedding_weights()[0], rtol=1e-4, atol=1e-5
    )


def test_the_limit_is_fbgemms_and_off_by_default():
    given = {"optimizer": "EXACT_SGD"}
    assert not RowOptimizer.from_fused_params(given, "here").gradient_clipping
    rule = RowOptimizer.from_fused_params({**given, "gradient_clipping": True}, "here")
    assert make_group(make_table(optimizer=rule)).max_gradient == 1.0
    off = {**given, "gradient_clipping": False, "max_gradient": 0.5}
    assert (
        make_group(make_table(optimizer=RowOptimizer.from_fused_params(off, "here"))).max_gradient
        is None
    )


def test_infinite_gradients_are_clamped_and_nan_is_kept():
    table = table_of(columns=3, gradient_clipping=True, max_gradient=2.0)
    before = table.lookup(POOL[:1])[0]
    output = make_group(table)(POOL[:1], torch.tensor([0, 1]), training=True)
    output.backward(torch.tensor([[float("inf"), float("nan"), -9.0]]))
    (moved,) = table.lookup(POOL[:1])[0] - before
    assert moved[1].isnan()
    torch.testing.assert_close(moved[[0, 2]], torch.tensor([-0.14, 0.14]))
