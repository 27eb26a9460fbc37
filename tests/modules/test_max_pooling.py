"""Pooled collections of maximums have the bits of torch.nn.functional.embedding_bag(mode="max")."""

from dataclasses import replace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import embedding_bag
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
MAX = dyn.DynamicTableConfig(pooling="max", unseen="initial")
KEYS = ["a", "b", "c", "d"]
COLUMNS = {"one": 4, "two": 8, "three": 4}
CONFIGS = [
    EmbeddingBagConfig(100, 4, "one", feature_names=["a", "b"]),
    EmbeddingBagConfig(100, 8, "two", feature_names=["b", "c"]),
    EmbeddingBagConfig(100, 4, "three", feature_names=["d"], pooling=PoolingType.MEAN),
]
OUTPUTS = [("one", "a"), ("one", "b"), ("two", "b"), ("two", "c"), ("three", "d")]
NAMES = ["a", "b@one", "b@two", "c", "d"]


def collection() -> dyn.DynamicEmbeddingBagCollection:
    return dyn.DynamicEmbeddingBagCollection(
        CONFIGS, dynamic={"one": MAX, "two": MAX}, fused_params=SGD
    )


def batch_of(bags: dict[str, list[list[int]]], **options: object) -> KeyedJaggedTensor:
    flat = [bag for key in KEYS for bag in bags[key]]
    ids = torch.tensor([one for bag in flat for one in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in flat], dtype=torch.int64)
    return KeyedJaggedTensor(KEYS, ids, lengths=lengths, **options)


def expected_of(features: KeyedJaggedTensor, rows: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns each output; the row of id i is rows[table][i]."""
    return [
        embedding_bag(
            features[feature].values(), rows[table], features[feature].offsets(),
            mode="mean" if table == "three" else "max", include_last_offset=True,
        )
        for table, feature in OUTPUTS
    ]  # fmt: skip


def rows_of(ebc: dyn.DynamicEmbeddingBagCollection) -> dict[str, torch.Tensor]:
    ids = torch.arange(12)
    return {name: ebc.table(name).lookup(ids)[0].requires_grad_() for name in COLUMNS}


bag = st.lists(st.integers(0, 11), max_size=4)


of_sizes = st.integers(1, 4).map(lambda size: st.lists(bag, min_size=size, max_size=size))


@given(of_sizes.flatmap(lambda bags: st.tuples(*[bags] * 4)))
def test_outputs_and_gradients(bags: tuple[list[list[int]], ...]) -> None:
    ebc = collection()
    for name, width in COLUMNS.items():  # some values are equal
        values = torch.arange(12 * width).view(12, width)
        ebc.table(name).assign(torch.arange(12), (values % 5 - 2).float())
    features = batch_of(dict(zip(KEYS, bags, strict=True)))
    rows = rows_of(ebc)
    output, expected = ebc(features), torch.cat(expected_of(features, rows), dim=1)
    assert output.keys() == NAMES
    assert torch.equal(output.values(), expected)
    gradient = torch.linspace(-4, 4, expected.numel()).round().view(expected.shape)
    output.values().backward(gradient)
    expected.backward(gradient)
    for name, before in rows.items():
        learnt = ebc.table(name).lookup(torch.arange(12))[0]
        torch.testing.assert_close(learnt, before.detach() - 0.5 * before.grad)


def test_a_number_of_bags_for_each_feature() -> None:
    bags = {"a": [[1, 2], [3]], "b": [[4, 5, 1]], "c": [[], [7, 8], [9]], "d": [[1], [2, 3]]}
    of_samples = {"a": [0, 1, 1], "b": [0, 0, 0], "c": [2, 1, 0], "d": [1, 0, 1]}
    inverse = (KEYS, torch.tensor([of_samples[key] for key in KEYS]))
    sizes = [[len(bags[key])] for key in KEYS]
    varied = batch_of(bags, stride_per_key_per_rank=sizes, inverse_indices=inverse)
    plain = batch_of({key: [bags[key][i] for i in of_samples[key]] for key in KEYS})
    ebc = collection().eval()
    assert torch.equal(ebc(varied).values(), ebc(plain).values())


def test_deferred_updates_of_several_batches() -> None:
    fused = {**SGD, "defer_updates": True}
    ebc = dyn.DynamicEmbeddingBagCollection(CONFIGS[:1], dynamic=MAX, fused_params=fused)
    ebc.table("one").assign(torch.arange(12), torch.arange(48.0).view(12, 4))
    rows = ebc.table("one").lookup(torch.arange(12))[0].requires_grad_()
    for bags in ([[1, 2], [3]], [[3, 2], []], [[11], [1, 1]]):
        features = batch_of(dict.fromkeys(KEYS, bags))
        expected = [
            embedding_bag(
                features[key].values(), rows, features[key].offsets(), mode="max",
                include_last_offset=True,
            )
            for key in "ab"
        ]  # fmt: skip
        ebc(features).values().sum().backward()
        torch.cat(expected).sum().backward()
    ebc.fused_optimizer.step()
    learnt = ebc.table("one").lookup(torch.arange(12))[0]
    assert torch.equal(learnt, rows.detach() - 0.5 * rows.grad)


def test_an_unseen_id_takes_part_with_what_it_reads() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection(
        CONFIGS[1:2], dynamic=dyn.DynamicTableConfig(pooling="max"), fused_params=SGD
    )
    ebc.table("two").assign(torch.tensor([1]), torch.full((1, 8), -1.0))
    ebc.eval()
    features = KeyedJaggedTensor(["b", "c"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 1]))
    output = ebc(features).to_dict()
    assert output["b"].eq(0).all() and output["c"].eq(-1).all()


def test_described_as_max() -> None:
    assert [group.pooling for group in collection().describe().groups] == ["max", "max", "mean"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dyn.DynamicTableConfig(pooling="sum"), "pooling: expected \"max\" or None, got 'sum'"),
        (
            lambda: dyn.DynamicEmbeddingBagCollection(CONFIGS, dynamic=MAX),
            "expected pooling='max' for a table of a pooled collection whose config has pooling SUM, got "
            "EmbeddingBagConfig with pooling PoolingType.MEAN",
        ),
        (
            lambda: dyn.DynamicEmbeddingCollection([EmbeddingConfig(9, 4, "t")], dynamic=MAX),
            "got EmbeddingConfig with pooling none",
        ),
        (
            lambda: dyn.DynamicEmbeddingBagCollection(CONFIGS[:1], True, dynamic=MAX),
            "expected is_weighted=False with pooling='max'",
        ),
        (
            lambda: dyn.DynamicEmbeddingBag(4, 100, dynamic=MAX),
            "expected mode='max' with DynamicTableConfig(pooling='max'), got 'sum'",
        ),
        (
            lambda: dyn.BlockEmbeddingBagCollection(
                CONFIGS[:1], 2, dynamic=replace(MAX, eviction=dyn.LowestScore())
            ),
            "expected an eviction that needs no weights",
        ),
        (
            lambda: dyn.BlockEmbeddingBagCollection(CONFIGS[:1], 2, True, dynamic=MAX),
            "BlockEmbeddingBagCollection: expected is_weighted=False with pooling='max'",
        ),
        (
            lambda: dyn.QuotientRemainderEmbeddingBagCollection(
                CONFIGS[:1], 2, is_weighted=True, dynamic=MAX
            ),
            "expected is_weighted=False with pooling='max'",
        ),
    ],
)  # fmt: skip
def test_what_has_no_maximum_is_named(make, message) -> None:
    with pytest.raises(ValueError) as fault:
        make()
    assert message in str(fault.value)
