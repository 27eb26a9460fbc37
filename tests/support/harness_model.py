"""TorchRec's test model over dynamic collections, and TorchRec's test harness, run in our workers.

`sharding_single_rank_test_single_process` trains one step of the sharded model on each rank and of the
unsharded model on the global batch, and compares the predictions after it.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagConfig
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils.test_model import TestSparseNN
from torchrec.modules.embedding_configs import PoolingType

import torchrec_dyn as dyn

# The wheel of TorchRec has no tests, but the harness imports one class of them, for 2D sharding.
_missing = types.ModuleType("torchrec.distributed.tests.test_sequence_model")
_missing.TestEmbeddingCollectionSharder = object  # type: ignore[attr-defined]
sys.modules.setdefault("torchrec.distributed.tests", types.ModuleType("tests"))
sys.modules.setdefault(_missing.__name__, _missing)

from torchrec.distributed.test_utils.test_sharding import (  # noqa: E402
    sharding_single_rank_test_single_process,
)

LEARNING_RATE = 0.1  # learning rate of the harness's dense parts
_FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}


class DynamicSparseNN(TestSparseNN):
    """TorchRec's TestSparseNN with dynamic instead of static collections."""

    def __init__(self, tables: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tables, *args, **kwargs)
        options: dict[str, Any] = {
            "device": kwargs.get("sparse_device"),
            "fused_params": _FUSED_PARAMS,
        }
        self.sparse.ebc = dyn.DynamicEmbeddingBagCollection(tables, **options)
        weighted = kwargs.get("weighted_tables")
        if weighted:
            self.sparse.weighted_ebc = dyn.DynamicEmbeddingBagCollection(
                weighted, is_weighted=True, **options
            )


@dataclass
class Trial:
    """One run of the harness."""

    kind: str
    mean: bool = False
    weighted: bool = True
    qcomm: str | None = None
    learning_rate: float = LEARNING_RATE
    local_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # options of the harness


def run_harness(trial: Trial) -> None:
    """Runs the harness on this rank of the worker's process group."""
    tables, weighted = _tables(trial), _weighted_tables() if trial.weighted else None
    constraints = {
        table.name: ParameterConstraints(sharding_types=[trial.kind], min_partition=4)
        for table in [*tables, *(weighted or [])]
    }
    qcomms = None
    if trial.qcomm is not None:
        precision = CommType[trial.qcomm]
        qcomms = QCommsConfig(forward_precision=precision, backward_precision=precision)
    codecs = get_qcomm_codecs_registry(qcomms) if qcomms is not None else None
    fused_params = {**_FUSED_PARAMS, "learning_rate": trial.learning_rate}
    sharding_single_rank_test_single_process(
        pg=dist.group.WORLD,
        device=torch.device("cpu"),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_size=trial.local_size,
        model_class=DynamicSparseNN,  # type: ignore[arg-type]
        embedding_groups=_groups(tables),
        tables=tables,
        weighted_tables=weighted,
        sharders=[dyn.DynamicEmbeddingBagCollectionSharder(fused_params, codecs)],
        optim=EmbOptimType.EXACT_SGD,
        constraints=constraints,
        qcomms_config=qcomms,
        **trial.options,
    )


def see_a_difference(trial: Trial) -> None:
    """Asserts that the harness fails a trial; every rank fails at its last comparison."""
    with pytest.raises(AssertionError, match="not close"):
        run_harness(trial)


def _tables(trial: Trial) -> list[Any]:
    """Returns four tables of several widths, and two tables that share their features, as in the harness."""
    return [
        EmbeddingBagConfig(
            name=f"table_{i}",
            num_embeddings=(i % 4 + 1) * 10,
            embedding_dim=(i % 4 + 2) * 8,
            feature_names=[f"feature_{i % 4}"],
            pooling=PoolingType.MEAN if trial.mean else PoolingType.SUM,
        )
        for i in range(6)
    ]


def _weighted_tables() -> list[Any]:
    return [
        EmbeddingBagConfig(
            name=f"weighted_table_{i}",
            num_embeddings=(i + 1) * 10,
            embedding_dim=(i + 2) * 4,
            feature_names=[f"weighted_feature_{i}"],
        )
        for i in range(2)
    ]


def _groups(tables: list[Any]) -> dict[str, list[str]]:
    names = [name for table in tables for name in table.feature_names]
    return {
        "group_0": [
            f"{name}@{table.name}" if names.count(name) > 1 else name
            for table in tables
            for name in table.feature_names
        ]
    }
