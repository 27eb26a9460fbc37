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
    rule = RowOptimizer(OptimizerKind.EXACT_ADAGRAD, 0.07, eps=1e-6, **options)
    table = make_table(optimizer=rule, embedding_dim=columns, initializer=Normal(0.0, 0.5))
    table.find_or_insert(POOL)
    return table


@pytest.mark.parametrize("pooling", MODES)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_steps_are_fbgemms(pooling, is_weighted):
    """The gradient of the bag weights is that of the clamped gradient, too."""
    table = table_of(gradient_clipping=True, max_gradient=0.3)
    static = SplitTableBatchedEmbeddingBagsCodegen(
        [(40, 12, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.07,
        eps=1e-6,
        pooling_mode=MODES[pooling],
        gradient_clipping=True,
        max_gradient=0.3,
    )
    static.split_embedding_weights()[0].copy_(table.lookup(POOL)[0])
    group = make_group(table, pooling=pooling)
    for step in range(4):
        ids, offsets = random_bags(50 + step, bags=12, longest=9, pool=40)
        given = torch.rand(2, ids.numel()) if is_weighted and pooling != "none" else None
        weights = (
            [None, None]
            if given is None
            else [one.requires_grad_() for one in given[:1].repeat(2, 1)]
        )
        ours = group(ids, offsets, weights[0], training=True)
        theirs = static((ids + 1000) // 7919, offsets, weights[1])
        upstream = torch.randn(ours.shape)
        ours.backward(upstream)
        theirs.backward(upstream)
        assert upstream.abs().max() > 2  # neither clamps the caller's tensor
        if given is not None:
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
    torch.testing.assert_close(moved[[0, 2]], torch.tensor([-0.07, 0.07]))
