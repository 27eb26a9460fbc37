"""The sequence collection against TorchRec's, and the changes by training and evaluation."""

import pytest
import torch
from collection_oracle import (
    POOL,
    Batches,
    assert_same_rows,
    copy_initial_rows,
    stock_config,
)
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface

import torchrec_dyn as dyn

KEYS = ["u", "shared", "i", "a1", "a2"]
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
INITIAL = dyn.DynamicTableConfig(unseen="initial")


def configs() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(1000, 8, "user", feature_names=["u", "shared"]),
        EmbeddingConfig(50, 8, "item", feature_names=["i"]),
        EmbeddingConfig(3000, 8, "ad", feature_names=["shared", "a2", "a1"]),
    ]


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("fused_params", [SGD, ADAGRAD])
@pytest.mark.parametrize("varies", [False, True])
def test_trains_as_the_stock_collection(
    need_indices: bool, fused_params: dict, varies: bool
) -> None:
    ec = dyn.DynamicEmbeddingCollection(
        configs(), need_indices=need_indices, dynamic=INITIAL, fused_params=fused_params
    )
    stock = EmbeddingCollection([stock_config(one) for one in configs()])
    copy_initial_rows(ec, stock)
    if fused_params is SGD:
        dense = torch.optim.SGD(stock.parameters(), lr=0.1)
    else:
        dense = torch.optim.Adagrad(stock.parameters(), lr=0.1, eps=1e-8)
    batches = Batches(["z", "a1", "u", "i", "shared", "a2"])  # an extra key, another order
    for step in range(6):
        ids, positions = batches.draw([step, 4, 7, 6, 3, 5] if varies else 5 + step)
        output, expected = ec(ids), stock(positions)
        assert list(output) == list(expected)
        dense.zero_grad()
        for name, wanted in expected.items():
            if step == 0:
                assert torch.equal(output[name].values(), wanted.values())
            torch.testing.assert_close(output[name].values(), wanted.values(), rtol=1e-5, atol=1e-5)
            assert torch.equal(output[name].lengths(), wanted.lengths())
            if need_indices:
                assert torch.equal(output[name].weights(), ids[name.split("@")[0]].values())
            else:
                assert output[name].weights_or_none() is None
        for one in (output, expected):
            torch.cat([jagged.values() for jagged in one.values()]).sin().sum().backward()
        dense.step()
    assert_same_rows(ec, stock, 1e-5)


def test_groups_do_not_change_the_order_of_outputs() -> None:
    tables = configs()
    tables[1].data_type = DataType.BF16  # a separate group
    ec = dyn.DynamicEmbeddingCollection(tables, fused_params=SGD)
    for config, value in zip(ec.embedding_configs(), (1.0, 2.0, 3.0), strict=True):
        ec.table(config.name).assign(torch.tensor(POOL), torch.full((len(POOL), 8), value))
    ids, _ = Batches(KEYS).draw(6)
    output = ec(ids)
    values = {name: set(jagged.values().flatten().tolist()) for name, jagged in output.items()}
    assert values == {
        "u": {1.0}, "shared@user": {1.0}, "i": {2.0}, "shared@ad": {3.0}, "a2": {3.0}, "a1": {3.0}
    }  # fmt: skip
    assert all(jagged.values().dtype == torch.float32 for jagged in output.values())


def test_is_torchrecs_interface() -> None:
    ec = dyn.DynamicEmbeddingCollection(configs(), need_indices=True, fused_params=SGD)
    assert isinstance(ec, EmbeddingCollectionInterface)
    assert ec.need_indices() and ec.embedding_dim() == 8 and ec.device == torch.device("meta")
    assert ec.embedding_names_by_table() == [["u", "shared@user"], ["i"], ["shared@ad", "a2", "a1"]]
    assert [config.name for config in ec.embedding_configs()] == ["user", "item", "ad"]
    assert not ec.use_gather_select() and not ec.use_sorted_select()
    assert ec.use_gather_select_per_sharding() is None
    assert {name for name, _ in ec.named_parameters()} == {
        "embeddings.user.weight", "embeddings.item.weight", "embeddings.ad.weight"
    }  # fmt: skip


def test_one_embedding_dim() -> None:
    tables = [*configs(), EmbeddingConfig(10, 4, "odd", feature_names=["o"])]
    with pytest.raises(ValueError, match=r"expected one embedding_dim for all tables.*'odd': 4"):
        dyn.DynamicEmbeddingCollection(tables)
