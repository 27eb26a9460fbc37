"""`describe()` of an unsharded collection: groups as in calls, numbers as in `stats`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn
from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.optimizers import OptimizerKind

SGD = {"optimizer": "EXACT_SGD", "learning_rate": 0.5}
KINDS = {  # of a pooled table: pooling, dtype
    "a": (PoolingType.SUM, DataType.FP32),
    "b": (PoolingType.MEAN, DataType.FP32),
    "c": (PoolingType.SUM, DataType.FP16),
    "d": (PoolingType.SUM, DataType.FP32),
}


def pooled(**options: Any) -> dyn.DynamicEmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=4, num_embeddings=100, feature_names=[f"{name}0", f"{name}1"],
            pooling=pooling, data_type=dtype,
        )
        for name, (pooling, dtype) in KINDS.items()
    ]  # fmt: skip
    return dyn.DynamicEmbeddingBagCollection(configs, fused_params=SGD, **options)


def features(collection: Any) -> KeyedJaggedTensor:
    keys = [f"{name}{i}" for name in KINDS for i in range(2)]
    lengths = torch.arange(1, len(keys) + 1)
    return KeyedJaggedTensor(keys, torch.arange(int(lengths.sum())), lengths=lengths)


def called(collection: Any) -> list[tuple[str, ...]]:
    """The tables of each call of a training forward."""
    calls = []
    look_up = TableGroup.__call__

    def noted(group: TableGroup, *arguments: Any) -> Any:
        calls.append(tuple(table.name for table in group.tables))
        return look_up(group, *arguments)

    with mock.patch.object(TableGroup, "__call__", noted):
        collection(features(collection))
    return calls


def test_groups_are_calls() -> None:
    collection = pooled()
    assert [group.tables for group in collection.describe().groups] == called(collection)
    described = collection.describe()
    assert [group.tables for group in described.groups] == [("a", "d"), ("b",), ("c",)]
    assert [group.pooling for group in described.groups] == ["sum", "mean", "sum"]
    assert [group.dtype for group in described.groups] == [torch.float32] * 2 + [torch.float16]
    assert all(group.optimizer.kind == OptimizerKind.EXACT_SGD for group in described.groups)
    collection.half()
    groups = [group.tables for group in collection.describe().groups]
    assert groups == called(collection) == [("a", "c", "d"), ("b",)]


def test_numbers_are_those_of_stats() -> None:
    collection = pooled(dynamic={"d": dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())})
    called(collection)
    collection.table("c").freeze()
    described = collection.describe()
    assert (described.rank, described.world_size) == (0, 1)
    assert described.rows == sum(collection.table(name).num_rows for name in KINDS) == 36
    total = 0
    for group in described.groups:
        for shard in group.shards:
            stats = collection.table(shard.table).stats()
            assert (shard.rows, shard.bytes) == (stats["rows"], stats["bytes"])
            assert shard.rows > 0 and shard.limit == 100 and shard.columns == (0, 4)
            assert shard.features == (f"{shard.table}0", f"{shard.table}1")
            assert shard.is_frozen == (shard.table == "c")
            assert described.plan[shard.table] == dyn.TablePlan("unsharded", ((0, 4),), ((0,),))
            total += shard.bytes
    assert described.bytes == sum(group.bytes for group in described.groups) == total
    assert [*described.plan] == [*KINDS]


def test_it_can_be_read() -> None:
    collection = pooled()
    called(collection)
    collection.table("c").freeze()
    lines = str(collection.describe()).splitlines()
    assert lines[0].startswith("DynamicEmbeddingBagCollection: 36 rows, ")
    assert lines[1].startswith(
        "group 0: rows of float32 on cpu, pooling sum, EXACT_SGD(learning_rate=0.5); 18 rows, "
    )
    assert [line.split()[0] for line in lines[1:]] == [
        "group",
        "a",
        "d",
        "group",
        "b",
        "group",
        "c",
    ]
    assert "3 of            100 rows" in lines[2] and lines[2].endswith("columns 0 to 3, unsharded")
    assert lines[7].endswith("unsharded, frozen")


def test_a_rule_of_ones_own_is_named() -> None:
    config = EmbeddingConfig(
        name="s", embedding_dim=4, num_embeddings=100, feature_names=["f"], data_type=DataType.BF16
    )
    collection = dyn.DynamicEmbeddingCollection([config], fused_params={"optimizer": dyn.Lion()})
    described = collection.describe()
    assert described.groups[0].pooling == "none" and described.rows == 0
    assert "rows of bfloat16 on cpu, pooling none, Lion(beta1=0.9, " in str(described)


def test_rows_on_the_meta_device_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected rows on a real device, got meta"):
        pooled(device="meta").describe()
