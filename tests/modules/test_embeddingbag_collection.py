"""The pooled collection against TorchRec's, and the changes by training and evaluation."""

import pytest
import torch
from collection_oracle import (
    POOL,
    Batches,
    assert_same_rows,
    copy_initial_rows,
    initial_rows,
    stock_config,
)
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

import torchrec_dyn as dyn

KEYS = ["u", "shared", "i", "a1", "a2"]
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
INITIAL = dyn.DynamicTableConfig(unseen="initial")


def configs(mean: bool = True) -> list[EmbeddingBagConfig]:
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    return [
        EmbeddingBagConfig(1000, 8, "user", feature_names=["u", "shared"]),
        EmbeddingBagConfig(50, 4, "item", feature_names=["i"], pooling=pooling),
        EmbeddingBagConfig(3000, 12, "ad", feature_names=["shared", "a2", "a1"]),
        EmbeddingBagConfig(90, 16, "tag", feature_names=["i", "shared"], pooling=pooling),
    ]


def one_table(**options: object) -> dyn.DynamicEmbeddingBagCollection:
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"])
    return dyn.DynamicEmbeddingBagCollection([config], **{"fused_params": SGD, **options})


def bags(*bags: list[int], key: str = "f") -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=[key],
        values=torch.tensor([id for bag in bags for id in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags]),
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fused_params", [SGD, ADAGRAD])
def test_trains_as_the_stock_collection(weighted: bool, fused_params: dict) -> None:
    # TorchRec's MEAN bags take no weights.
    tables = configs(mean=not weighted)
    ebc = dyn.DynamicEmbeddingBagCollection(
        tables, is_weighted=weighted, dynamic=INITIAL, fused_params=fused_params
    )
    stock = EmbeddingBagCollection([stock_config(one) for one in tables], is_weighted=weighted)
    copy_initial_rows(ebc, stock)
    if fused_params is SGD:
        dense = torch.optim.SGD(stock.parameters(), lr=0.1)
    else:
        dense = torch.optim.Adagrad(stock.parameters(), lr=0.1, eps=1e-8)
    batches = Batches(["z", "a1", "u", "i", "shared", "a2"])  # an extra key, another order
    for step in range(6):
        ids, positions = batches.draw(5 + step, weighted)
        output, expected = ebc(ids), stock(positions)
        assert output.keys() == expected.keys()
        assert output.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(output.values(), expected.values(), rtol=1e-5, atol=1e-5)
        dense.zero_grad()
        slopes = torch.linspace(0.1, 1, output.values().shape[1])
        for one in (output, expected):
            (one.values().sin() * slopes).sum().backward()
        dense.step()
        if weighted:
            torch.testing.assert_close(
                ids.weights().grad, positions.weights().grad, rtol=1e-4, atol=1e-4
            )
    assert_same_rows(ebc, stock, 1e-4)


def test_first_forward_is_bit_equal_to_the_stock_collection() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection(configs(), dynamic=INITIAL, fused_params=SGD)
    stock = EmbeddingBagCollection([stock_config(one) for one in configs()])
    copy_initial_rows(ebc, stock)
    ids, positions = Batches(KEYS).draw(6, longest=1)  # bags of one id: no order of sums
    assert torch.equal(ebc(ids).values(), stock(positions).values())


def test_static_and_dynamic_collections_in_one_model() -> None:
    static = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "s", feature_names=["f"])])
    model = torch.nn.ModuleDict({"static": static, "dynamic": one_table()})
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    features = bags([1, 2], [1])
    before = {name: one(features).values().detach() for name, one in model.items()}
    torch.cat([one(features).values() for one in model.values()]).sum().backward()
    dense.step()
    for name, one in model.items():
        # Two bags hold id 1: its row changes by 2 * 0.1, the row of id 2 by 0.1.
        moved = one.eval()(features).values() - before[name]
        torch.testing.assert_close(moved, torch.tensor([[-0.3] * 4, [-0.2] * 4]))


@pytest.mark.parametrize("same_sizes", [False, True])
def test_variable_batch_per_feature_as_the_stock_collection(same_sizes: bool) -> None:
    tables = configs()
    ebc = dyn.DynamicEmbeddingBagCollection(tables, dynamic=INITIAL, fused_params=SGD)
    stock = EmbeddingBagCollection([stock_config(one) for one in tables])
    copy_initial_rows(ebc, stock)
    dense = torch.optim.SGD(stock.parameters(), lr=0.1)
    batches = Batches(KEYS)
    for _ in range(4):
        sizes = [5] * 5 if same_sizes else [2, 5, 6, 3, 4]
        ids, positions = batches.draw(sizes)
        inverse = torch.stack([torch.arange(7) * 3 % size for size in reversed(sizes)])
        ids._inverse_indices = positions._inverse_indices = (KEYS[::-1], inverse)
        output, expected = ebc(ids), stock(positions)
        assert output.values().shape == (7, sum(output.length_per_key()))
        torch.testing.assert_close(output.values(), expected.values(), rtol=1e-5, atol=1e-5)
        dense.zero_grad()
        output.values().sin().sum().backward()
        expected.values().sin().sum().backward()
        dense.step()
    assert_same_rows(ebc, stock, 1e-5)


def test_variable_batch_needs_inverse_indices() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection(configs(), fused_params=SGD)
    ids, _ = Batches(KEYS).draw([2, 5, 1, 3, 4])
    with pytest.raises(ValueError, match=r"as many bags for each feature.*inverse_indices"):
        ebc(ids)
    assert ebc.table("user").num_rows == 0


def test_unseen_ids_read_as_they_would_start() -> None:
    ebc = one_table(dynamic={"t": INITIAL})
    started = initial_rows(ebc, ebc.embedding_bag_configs()[0])
    assert ebc.table("t").num_rows == 0
    assert torch.equal(ebc(bags(*[[id] for id in POOL])).values(), started)
    assert started.abs().max() <= 0.1 and started.abs().max() > 0.05  # uniform in +-1/sqrt(100)


def test_weight_init_bounds_and_initializers() -> None:
    bounds = {"weight_init_min": 3.0, "weight_init_max": 4.0}
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"], **bounds)
    by_config = dyn.DynamicEmbeddingBagCollection([config], fused_params=SGD)
    output = by_config(bags(*[[id] for id in POOL])).values()
    assert output.min() >= 3 and output.max() <= 4
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"], weight_init_min=-3.0)
    by_one_bound = dyn.DynamicEmbeddingBagCollection([config], fused_params=SGD)
    output = by_one_bound(bags(*[[id] for id in POOL])).values()
    assert -3 <= output.min() < -2 and output.max() <= 0.1  # the other bound is the default's
    by_table = one_table(dynamic=dyn.DynamicTableConfig(initializer=dyn.Constant(0.5)))
    assert torch.equal(by_table(bags([1, 2])).values(), torch.ones(1, 4))


def test_later_changes_of_the_arguments_have_no_effect() -> None:
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"])
    fused_params = dict(SGD)
    ebc = dyn.DynamicEmbeddingBagCollection([config], fused_params=fused_params)
    config.feature_names.append("g")
    config.num_embeddings = 1
    fused_params["learning_rate"] = 9.0
    ebc(bags([1, 2]))
    assert ebc.table("t").num_rows == 2 and ebc.embedding_bag_configs()[0].feature_names == ["f"]
    assert ebc.fused_optimizer.param_groups[0]["lr"] == 0.1


def test_gradients_reach_weights_in_evaluation_and_of_frozen_tables() -> None:
    for freeze in (lambda ebc: ebc.eval(), lambda ebc: ebc.requires_grad_(False)):
        ebc = one_table(is_weighted=True)
        ebc.table("t").assign(torch.tensor([1, 2]), torch.tensor([[1.0] * 4, [2.0] * 4]))
        freeze(ebc)
        weights = torch.tensor([0.5, 3.0, 1.0], requires_grad=True)
        ids = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 9]), weights, torch.tensor([2, 1]))
        output = ebc(ids).values()
        assert torch.equal(output, torch.tensor([[6.5] * 4, [0.0] * 4]))
        output.sum().backward()
        assert torch.equal(weights.grad, torch.tensor([4.0, 8.0, 0.0]))
        assert torch.equal(ebc.table("t").lookup(torch.tensor([1]))[0], torch.ones(1, 4))
        assert ebc.table("t").num_rows == 2


def test_some_tables_frozen() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection(configs(), fused_params=SGD)
    ebc.embedding_bags["ad"].requires_grad_(False)
    ids, _ = Batches(KEYS).draw(8)
    ebc(ids).values().sum().backward()
    assert ebc.table("ad").num_rows == 0 and ebc.table("user").num_rows > 5
    ebc.requires_grad_(True)
    ebc(ids).values().sum().backward()
    assert ebc.table("ad").num_rows > 5


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_narrow_rows_give_float32(data_type: DataType) -> None:
    config = EmbeddingBagConfig(100, 8, "t", feature_names=["f"], data_type=data_type)
    ebc = dyn.DynamicEmbeddingBagCollection([config], fused_params=SGD)
    output = ebc(bags([1, 2], [1])).values()
    output.sum().backward()
    assert output.dtype == torch.float32
    assert ebc.table("t").lookup(torch.tensor([1]))[0].dtype == ebc.embedding_bags["t"].weight.dtype
    dtype = ebc.embedding_bags["t"].weight.dtype
    for spelled in (data_type, SparseType.from_dtype(dtype), dtype):
        fused_params = {**SGD, "output_dtype": spelled}
        ebc = dyn.DynamicEmbeddingBagCollection([config], fused_params=fused_params)
        assert ebc(bags([1])).values().dtype == dtype


def test_is_torchrecs_interface() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection(configs(), is_weighted=True, fused_params=SGD)
    assert isinstance(ebc, EmbeddingBagCollectionInterface)
    assert ebc.is_weighted() and ebc.device == torch.device("meta")
    assert [config.name for config in ebc.embedding_bag_configs()] == ["user", "item", "ad", "tag"]
    shapes = {name: (tuple(p.shape), p.device.type) for name, p in ebc.named_parameters()}
    assert shapes["embedding_bags.ad.weight"] == ((3000, 12), "meta") and len(shapes) == 4
    assert ebc.local_tables() == {}
    assert ebc.dynamic_configs()["item"] == dyn.DynamicTableConfig()
