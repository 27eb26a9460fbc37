"""A loaded table takes the memory that the same table took in training."""

import sys

import pytest
import torch
from system_memory import advice_of, committed_pages
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LRU = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())


def made(config=LRU, ids=(), data_type=DataType.FP32, optimizer="EXACT_ADAGRAD"):
    item = EmbeddingBagConfig(1_000_000, 16, "t", feature_names=["f"], data_type=data_type)
    fused = {"optimizer": optimizer, "learning_rate": 0.1}
    collection = dyn.DynamicEmbeddingBagCollection([item], dynamic=config, fused_params=fused)
    train(collection, *ids)
    return collection


def train(collection, *ids):
    if ids:
        lengths = torch.tensor([len(ids)])
        collection(
            KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=lengths)
        ).values().sum().backward()


def first_blocks(collection):
    """Returns the first block of each store of the table: rows, optimizer state, scores."""
    table = collection.local_tables()["t"]
    return [store.blocks[0] for store in (*table.stores, table.life.scores.store)]


@pytest.mark.parametrize(
    ("config", "ids", "data_type"),
    [
        (LRU, (), DataType.FP32),
        (LRU, range(30, 9, -1), DataType.FP32),  # the optimizer state is put into this order
        (dyn.DynamicTableConfig(), (), DataType.FP32),  # rows without scores
        (LRU, (), DataType.FP16),  # rows are converted
    ],
)
def test_few_rows_stay_on_small_pages(config, ids, data_type):
    saved, loaded = made(config, range(10, 31)), made(LRU, ids, data_type)
    if not ids:
        loaded.load_state_dict(saved.state_dict())
    loaded.fused_optimizer.load_state_dict(saved.fused_optimizer.state_dict())
    for block in first_blocks(loaded):
        assert "nh" in advice_of(block) and committed_pages(block) <= 4
    train(loaded, *range(20_000))
    for block in first_blocks(loaded):
        assert "hg" in advice_of(block)


def test_few_numbers_a_row_take_few_pages():
    rowwise = {"optimizer": "EXACT_ROWWISE_ADAGRAD"}
    saved, loaded = made(ids=range(10, 31), **rowwise), made(**rowwise)
    loaded.load_state_dict(saved.state_dict())
    loaded.fused_optimizer.load_state_dict(saved.fused_optimizer.state_dict())
    assert max(map(committed_pages, first_blocks(loaded))) <= 4
