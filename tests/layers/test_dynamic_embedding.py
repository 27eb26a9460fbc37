"""DynamicEmbedding against torch.nn.Embedding with equal rows, for every form of input."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
VOCABULARY = torch.tensor([0, 1, -1, 5, 2**63 - 1, -(2**63), 10**15, 7])
DIM = 4


def pair(padding: int | None = None, **options: Any) -> tuple[dyn.DynamicEmbedding, nn.Embedding]:
    """Returns a DynamicEmbedding and torch's module with equal rows; `padding` is a place in VOCABULARY."""
    stock = nn.Embedding(len(VOCABULARY), DIM, padding_idx=padding)
    padding_idx = None if padding is None else int(VOCABULARY[padding])
    module = dyn.DynamicEmbedding(DIM, 100, padding_idx=padding_idx, fused_params=SGD, **options)
    known = torch.arange(len(VOCABULARY)) != (-1 if padding is None else padding)
    module.table.assign(VOCABULARY[known], stock.weight.detach()[known])
    return module, stock


def learn(ours: Tensor, expected: Tensor, stock: nn.Module) -> None:
    """Runs one step of both modules."""
    assert torch.equal(ours, expected)
    ours.sin().sum().backward()
    expected.sin().sum().backward()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter -= 0.5 * parameter.grad
            parameter.grad = None


def check_rows(module: dyn.DynamicEmbedding, stock: nn.Embedding) -> None:
    rows, found = module.table.lookup(VOCABULARY)
    torch.testing.assert_close(rows[found], stock.weight.detach()[found])
    assert VOCABULARY[~found].tolist() == (
        [] if module.padding_idx is None else [module.padding_idx]
    )


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 1, 3, 2), (0,), (3, 0), (0, 5)])
def test_dense_ids_train_as_torchs(shape: tuple[int, ...], padding: int | None) -> None:
    module, stock = pair(padding)
    generator = torch.Generator().manual_seed(len(shape))
    for _ in range(3):
        places = torch.randint(len(VOCABULARY), shape, generator=generator)
        output = module(VOCABULARY[places])
        assert output.shape == (*shape, DIM)
        learn(output, stock(places), stock)
    check_rows(module, stock)


@pytest.mark.parametrize("padding", [None, 2])
def test_jagged_tensor(padding: int | None) -> None:
    module, stock = pair(padding)
    places, lengths = torch.tensor([3, 2, 2, 0, 4, 3]), torch.tensor([2, 0, 3, 1])
    weights = torch.rand(6)
    for given_lengths in (lengths, lengths.int()):
        jagged = JaggedTensor(VOCABULARY[places], lengths=given_lengths, weights=weights)
        output = module(jagged)
        assert isinstance(output, JaggedTensor)
        assert torch.equal(output.lengths(), given_lengths)
        assert output.weights() is weights
        learn(output.values(), stock(places), stock)
    by_offsets = JaggedTensor(VOCABULARY[places], offsets=torch.tensor([0, 2, 2, 5, 6]))
    assert torch.equal(module(by_offsets).lengths(), lengths)
    assert module(JaggedTensor.empty(values_dtype=torch.int64)).values().shape == (0, DIM)
    check_rows(module, stock)


@pytest.mark.parametrize("padding", [None, 2])
def test_nested_tensor(padding: int | None) -> None:
    module, stock = pair(padding)
    bags = [torch.tensor([3, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([0, 4, 2])]
    nested = torch.nested.nested_tensor([VOCABULARY[bag] for bag in bags], layout=torch.jagged)
    output = module(nested)
    assert output.layout == torch.jagged and output.shape == (3, nested.shape[1], DIM)
    assert torch.equal(output.offsets(), nested.offsets())
    for ours, bag in zip(output.unbind(), bags, strict=True):
        assert torch.equal(ours, stock(bag))
    learn(output.values(), stock(torch.cat(bags)), stock)
    check_rows(module, stock)


@pytest.mark.parametrize("padding_idx", [None, 9])
def test_holes_of_a_nested_tensor_are_not_looked_up(padding_idx: int | None) -> None:
    module = dyn.DynamicEmbedding(DIM, 100, padding_idx=padding_idx, fused_params=SGD)
    dense = torch.arange(12).view(3, 4)
    nested = torch.nested.narrow(
        dense, 1, torch.tensor([1, 0, 0]), torch.tensor([2, 0, 3]), layout=torch.jagged
    )
    output = module(nested)
    assert set(module.table.ids().tolist()) == {1, 2, 8, 9, 10} - {padding_idx}
    assert output.shape[1] == nested.shape[1]  # so they can be concatenated
    for ours, bag in zip(output.unbind(), [[1, 2], [], [8, 9, 10]], strict=True):
        assert torch.equal(ours, module.table.lookup(torch.tensor(bag, dtype=torch.int64))[0])


def test_padding_gets_no_row_and_learns_nothing() -> None:
    module = dyn.DynamicEmbedding(DIM, 100, padding_idx=-1, fused_params=SGD)
    output = module(torch.tensor([[3, -1], [-1, -1]]))
    assert output.flatten(0, 1).abs().sum(1).gt(0).tolist() == [True, False, False, False]
    output.sum().backward()
    assert module.table.ids().tolist() == [3]
    assert module.table.stats()["ids_seen"] == 1
    # padding_idx is the id itself; in torch -1 would mean 99.
    assert module(torch.tensor([99])).abs().sum() > 0


def test_is_its_collection() -> None:
    module = dyn.DynamicEmbedding(DIM, 100, name="user", fused_params=SGD)
    config = EmbeddingConfig(100, DIM, "user", feature_names=["user"])
    other = dyn.DynamicEmbeddingCollection([config], fused_params=SGD)
    ids = torch.tensor([[1, 2**40], [-7, 1]])
    features = KeyedJaggedTensor(["user"], ids.flatten(), lengths=torch.tensor([2, 2]))
    assert torch.equal(module(ids).flatten(0, 1), other(features)["user"].values())
    assert module.fused_optimizer is module.collection.fused_optimizer
    assert module.fused_optimizer.param_groups[0]["lr"] == 0.5
    assert module.table.name == "user" and module.table.num_rows == 3


def test_event_time() -> None:
    policy = dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=10))
    module = dyn.DynamicEmbedding(DIM, 100, dynamic=policy, fused_params=SGD)
    module.set_time(100)
    module(torch.tensor(1))
    assert module.table.last_seen(torch.tensor([1])).tolist() == [100]
    module.set_time(120)
    module(torch.tensor(2))
    assert module.table.ids().tolist() == [2]


def test_several_calls_before_a_backward() -> None:
    module, stock = pair()
    first, second = torch.tensor([0, 3]), torch.tensor([[3, 4]])
    ours = torch.cat([module(VOCABULARY[first]), module(VOCABULARY[second])[0]])
    learn(ours, torch.cat([stock(first), stock(second)[0]]), stock)
    check_rows(module, stock)


def test_copies_and_state_dict() -> None:
    module, _ = pair()
    ids = VOCABULARY[:5]
    again = dyn.DynamicEmbedding(DIM, 100, fused_params=SGD)
    again.load_state_dict(copy.deepcopy(module.state_dict()))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), again):
        assert torch.equal(other(ids), module(ids))
        other(ids).sum().backward()
        assert not torch.equal(other(ids), module(ids)), "it has rows of its own"
    assert all(name.startswith("collection.") for name in module.state_dict())


def test_half_precision() -> None:
    module = dyn.DynamicEmbedding(DIM, 100, data_type=DataType.BF16, fused_params=SGD)
    assert module(torch.tensor([1])).dtype == torch.float32
    assert module.table.lookup(torch.tensor([1]))[0].dtype == torch.bfloat16
    other, _ = pair()
    assert other.half().table.lookup(VOCABULARY)[0].dtype == torch.float16
    narrow = dyn.DynamicEmbedding(
        DIM, 100, padding_idx=0, fused_params={**SGD, "output_dtype": DataType.FP16}
    )
    output = narrow(torch.tensor([[0, 1]]))
    assert output.dtype == torch.float16
    output.sum().backward()


def test_initial_rows_and_repr() -> None:
    module = dyn.DynamicEmbedding(DIM, 10_000, name="u", padding_idx=-1, fused_params=SGD)
    rows = module(torch.arange(1000))
    assert 0.009 < rows.abs().max() <= 1 / math.sqrt(10_000)
    assert repr(module).split("\n")[1].strip() == "4, 10000, name='u', padding_idx=-1"
    constant = dyn.DynamicTableConfig(initializer=dyn.Constant(2.0))
    other = dyn.DynamicEmbedding(DIM, 10, dynamic=constant, fused_params=SGD)
    assert other(torch.tensor(3)).tolist() == [2.0] * DIM


WHERE = r"DynamicEmbedding\(table='embedding'\)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding_dim": 0}, "expected embedding_dim to be an integer above 0, got 0"),
        ({"num_embeddings": -3}, "expected num_embeddings to be an integer above 0, got -3"),
        ({"num_embeddings": 1.5}, "expected num_embeddings to be an integer above 0, got 1.5"),
        ({"padding_idx": 2**63}, "expected padding_idx to be an int64 or None"),
        ({"padding_idx": True}, "expected padding_idx to be an int64 or None, got True"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{WHERE}: {message}"):
        dyn.DynamicEmbedding(**{"embedding_dim": 4, "num_embeddings": 10, **options})


def test_impossible_names_and_types() -> None:
    with pytest.raises(ValueError, match="expected a table name that is not empty"):
        dyn.DynamicEmbedding(4, 10, name="a.b")
    with pytest.raises(ValueError, match="expected data_type FP32, FP16 or BF16"):
        dyn.DynamicEmbedding(4, 10, data_type=DataType.INT8)
    with pytest.raises(
        ValueError, match=rf"{WHERE}\.dynamic: expected a DynamicTableConfig or .* int"
    ):
        dyn.DynamicEmbedding(4, 10, dynamic=3)
    with pytest.raises(
        ValueError, match=rf"{WHERE}\.dynamic: expected names among \['embedding'\]"
    ):
        dyn.DynamicEmbedding(4, 10, dynamic={"other": dyn.DynamicTableConfig()})


def test_options_by_name() -> None:
    options = dyn.DynamicTableConfig(seed=7)
    rows = [
        dyn.DynamicEmbedding(4, 10, name="n", dynamic=given, fused_params=SGD)(torch.arange(3))
        for given in (options, {"n": options}, {})
    ]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    scored = {"embedding": dyn.DynamicTableConfig(eviction=dyn.LowestScore())}
    with pytest.raises(ValueError, match=f"{WHERE}: expected an eviction that needs no weights"):
        dyn.DynamicEmbedding(4, 10, dynamic=scored)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint64])
def test_ids_of_other_dtypes_are_those_of_int64(dtype: torch.dtype) -> None:
    """uint64 by its bits: 2^64 - 1 is -1."""
    ids, offsets = torch.tensor([1, -1, 3, 1]), torch.tensor([0, 3, 4])
    other = ids.int() if dtype == torch.int32 else ids.view(torch.uint64)
    one, twin = (dyn.DynamicEmbedding(DIM, 100, padding_idx=-1, fused_params=SGD) for _ in range(2))
    for form in (
        lambda values: values.view(2, 2),
        lambda values: JaggedTensor(values, offsets=offsets),
        lambda values: torch.nested.nested_tensor_from_jagged(values, offsets),
    ):
        outputs = [module(form(given)) for module, given in ((one, other), (twin, ids))]
        is_dense = type(outputs[0]) is Tensor and not outputs[0].is_nested
        rows = outputs if is_dense else [output.values() for output in outputs]
        assert torch.equal(*rows)
        torch.autograd.backward([row.sin().sum() for row in rows])
    assert sorted(one.table.ids().tolist()) == [1, 3]
    assert all(map(torch.equal, one.table.lookup(ids), twin.table.lookup(ids)))


def nested(offsets: list[int], lengths: list[int]) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(
        torch.arange(4), torch.tensor(offsets), torch.tensor(lengths)
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1], dtype=torch.int16), r"expected ids of dtype int64.*ids.long\(\)"),
        (torch.rand(2), "expected ids of dtype int64, int32 or uint64, got torch.float32"),
        ([1, 2], "expected ids in a Tensor or a JaggedTensor, got list"),
        (
            KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1])),
            r'got KeyedJaggedTensor.*features\["name"\]',
        ),
        (torch.eye(2).long().to_sparse(), "expected a dense tensor of ids, got layout"),
        (
            torch.nested.nested_tensor([torch.ones(2, 2).long()], layout=torch.jagged),
            r"expected a nested tensor \[bags, ids\], got 3 dimensions",
        ),
        (nested([0, 2, 4], [1, 3]), "expected bags of a nested tensor that do not overlap"),
        (nested([0, 2, 9], [1, 1]), "expected bags of a nested tensor that do not overlap"),
        (JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 3])), "add up to the 3 ids"),
        (JaggedTensor(torch.arange(3), lengths=torch.tensor([4, -1])), "got a minimum of -1"),
        (JaggedTensor(torch.ones(3, 2).long(), lengths=torch.tensor([3])), r"with values \[N\]"),
    ],
)
def test_impossible_inputs(ids: Any, message: str) -> None:
    module = dyn.DynamicEmbedding(4, 10, fused_params=SGD)
    with pytest.raises(ValueError, match=f"{WHERE}: .*{message}"):
        module(ids)
    assert module.table.num_rows == 0


def test_strided_nested_tensor_is_refused() -> None:
    with pytest.warns(UserWarning, match="prototype"):
        strided = torch.nested.nested_tensor([torch.tensor([1])])
    with pytest.raises(ValueError, match=r"expected a nested tensor of layout torch\.jagged"):
        dyn.DynamicEmbedding(4, 10, fused_params=SGD)(strided)
