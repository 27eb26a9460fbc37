"""Optimizer classes on the parameter choose the rules of FBGEMM that TorchRec maps them to."""

import pytest
import torch
from table_cases import ids_of
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import LAMB, Adagrad, PartialRowWiseLAMB, RowWiseAdagrad

import torchrec_dyn as dyn
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

CLIPPED = {"gradient_clipping": True, "max_gradient": 0.5}


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        (LAMB, {"weight_decay": 0.1}, RowOptimizer(OptimizerKind.LAMB, 0.2, weight_decay=0.1)),
        (
            PartialRowWiseLAMB,
            {"betas": (0.5, 0.6)},
            RowOptimizer(OptimizerKind.PARTIAL_ROWWISE_LAMB, 0.2, beta1=0.5, beta2=0.6),
        ),
        (
            torch.optim.Adagrad,
            {"initial_accumulator_value": 0.3},
            RowOptimizer(OptimizerKind.EXACT_ADAGRAD, 0.2, initial_accumulator_value=0.3),
        ),
        (
            RowWiseAdagrad,
            {"max_norm": 2.0, "initial_accumulator_value": 0.0},
            RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, 0.2, max_norm=2.0),
        ),
        (Adagrad, CLIPPED, RowOptimizer(OptimizerKind.EXACT_ADAGRAD, 0.2, **CLIPPED)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_options_of_a_class_are_those_of_the_rule(optimizer, options, expected):
    tables = [EmbeddingBagConfig(100, 8, "t", feature_names=["f"])]
    made = dyn.DynamicEmbeddingBagCollection(tables)
    apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": 0.2, **options})
    batch = KeyedJaggedTensor(["f"], ids_of(1, 2), lengths=ids_of(2))
    made(batch).values().sum().backward()
    assert made.local_tables()["t"].optimizer == expected


def test_ftrl_is_a_string_and_begins_as_in_tensorflow():
    rule = RowOptimizer.from_fused_params({"optimizer": "ftrl", "l1": 0.5}, "here")
    assert rule == RowOptimizer(OptimizerKind.FTRL, l1=0.5, initial_accumulator_value=0.1)
    given = {"optimizer": "FTRL", "initial_accumulator_value": 0.0}
    assert RowOptimizer.from_fused_params(given, "here") == RowOptimizer(OptimizerKind.FTRL)
