"""TorchRec's own sharding test, pointed at our sharders and planned by the stock planner.

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
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from shards import deep_but
from torchrec import EmbeddingBagConfig
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils.test_model import TestSparseNN as SparseNN
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


class DynamicSparseNN(SparseNN):
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


def check_by_harness(trial: Trial) -> None:
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


TRIALS = {
    "table_wise": (Trial("table_wise"), 2),
    "row_wise": (Trial("row_wise"), 2),
    "column_wise": (Trial("column_wise"), 2),
    "table_row_wise": (Trial("table_row_wise", local_size=2), 4),
    "table_column_wise": (Trial("table_column_wise", local_size=2), 4),
    "grid_shard": (Trial("grid_shard", local_size=2), 4),
    "row_wise_alone": (Trial("row_wise"), 1),
    "row_wise_mean": (Trial("row_wise", mean=True), 2),
    "table_row_wise_mean": (Trial("table_row_wise", mean=True, local_size=2), 4),
    "grid_shard_mean": (Trial("grid_shard", mean=True, local_size=2), 4),
    "table_wise_unweighted": (Trial("table_wise", weighted=False), 2),
    "table_wise_batch_per_rank": (Trial("table_wise", options={"variable_batch_size": True}), 2),
    "column_wise_batch_per_rank": (Trial("column_wise", options={"variable_batch_size": True}), 2),
    "row_wise_batch_per_rank": (Trial("row_wise", options={"variable_batch_size": True}), 2),
    "grid_shard_batch_per_rank": (
        Trial("grid_shard", local_size=2, options={"variable_batch_size": True}),
        4,
    ),
    "table_wise_empty_batch": (Trial("table_wise", options={"allow_zero_batch_size": True}), 2),
    "row_wise_offsets": (Trial("row_wise", options={"use_offsets": True}), 2),
    "table_wise_half_comms": (Trial("table_wise", qcomm="FP16"), 2),
    "row_wise_half_comms": (Trial("row_wise", qcomm="FP16"), 2),
    "column_wise_half_comms": (Trial("column_wise", qcomm="BF16"), 2),
    "grid_shard_half_comms": (Trial("grid_shard", qcomm="FP16", local_size=2), 4),
}


EVERYDAY = {
    *("table_wise", "column_wise", "table_column_wise", "grid_shard", "row_wise_alone"),
    *(
        "table_row_wise_mean",
        "row_wise_batch_per_rank",
        "table_wise_empty_batch",
        "row_wise_offsets",
    ),
    *("table_wise_unweighted", "row_wise_half_comms"),
}


@pytest.mark.everyday(4)
@pytest.mark.parametrize("name", deep_but(EVERYDAY, TRIALS))
def test_torchrec_finds_no_difference(name: str) -> None:
    trial, world = TRIALS[name]
    workers.run(check_by_harness, trial, world_size=world, local_size=trial.local_size or world)
