"""The ids and lengths that a collection reads from batches, against the plain definition."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.modules.feature_ids import FeatureReader, read_features

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
CONFIGS = [
    EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=9, feature_names=[*features])
    for name, features in (("s", "a"), ("t", "bc"))
]


def batch(keys: str, lengths: list[int], dtype: torch.dtype = torch.int64, **more: object):
    """Returns a batch of the ids 0, 1, 2, ..."""
    made = torch.tensor(lengths, dtype=dtype)
    return KeyedJaggedTensor(list(keys), torch.arange(sum(lengths)), lengths=made, **more)


def plain(features: KeyedJaggedTensor, key: str) -> tuple[list[int], list[int]]:
    """Returns the ids and the lengths of one feature."""
    return features[key].values().tolist(), features[key].lengths().tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths", [[1] * 6, [3] * 6, [0] * 6, [2, 0, 1, 1, 3, 0], [0, 0, 0, 0, 0, 1], []]
)
def test_offsets_and_counts_are_sums_of_lengths(lengths: list[int], dtype: torch.dtype) -> None:
    read = read_features(batch("abc", lengths, dtype), False, "C")
    offsets = [sum(lengths[:bag]) for bag in range(len(lengths) + 1)]
    assert read.offsets().tolist() == offsets and read.offsets().dtype == torch.int64
    per_feature = len(lengths) // 3
    assert read.counts == [
        offsets[(f + 1) * per_feature] - offsets[f * per_feature] for f in range(3)
    ]


def test_int32_ids_are_widened_once() -> None:
    ids = torch.tensor([-(2**31), 2**31 - 1, -1])
    features = KeyedJaggedTensor(["a"], ids.int(), lengths=torch.tensor([1, 2]))
    read = read_features(features, False, "C")
    assert torch.equal(read.ids, ids) and read.ids.dtype == torch.int64
    features = KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([1, 2]))
    assert read_features(features, False, "C").ids is features.values()  # no copy


def test_uint64_ids_are_read_by_their_bits() -> None:
    ids = torch.tensor([-1, 2**63 - 1, -(2**63)])
    features = KeyedJaggedTensor(["a"], ids.view(torch.uint64), lengths=torch.tensor([1, 2]))
    read = read_features(features, False, "C")
    assert torch.equal(read.ids, ids) and read.ids.data_ptr() == ids.data_ptr()  # no copy


class Widenings(TorchDispatchMode):
    """Counts the conversions of int32 tensors to int64, by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.int32:
            self.sizes.append(args[0].numel())
        return result


def test_a_forward_widens_int32_ids_once() -> None:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=100, feature_names=[feature])
        for name, feature in (("t", "a"), ("u", "b"), ("v", "a"))
    ]
    collection = dyn.DynamicEmbeddingBagCollection(tables, fused_params={"learning_rate": 0.1})
    ids = torch.arange(17, dtype=torch.int32)
    with Widenings() as widenings:
        collection(KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([9, 8])))
    assert widenings.sizes == [17]


def test_bags_that_vary_by_feature() -> None:
    for lengths in ([1, 2, 0, 1], [1] * 4):
        features = batch("abc", lengths, stride_per_key_per_rank=[[1], [0], [3]])
        read = read_features(features, False, "C")
        assert read.varies and read.counts == [lengths[0], 0, sum(lengths[1:])]


@pytest.mark.parametrize("columns", [False, True])
def test_lengths_by_feature(columns: bool) -> None:
    """[F, B], which TorchRec's collections take, also as the columns of a matrix."""
    ids = torch.arange(9)
    flat = torch.tensor([2, 0, 1, 3, 2, 1])
    made = flat.view(2, 3).t().contiguous().t() if columns else flat.view(2, 3)
    two, one = (KeyedJaggedTensor(["a", "b"], ids, lengths=lengths) for lengths in (made, flat))
    config = EmbeddingConfig(100, 4, "t", feature_names=["a", "b"])
    sequences = dyn.DynamicEmbeddingCollection([config], fused_params=SGD)
    expected = sequences(one)
    for name, found in sequences(two).items():
        assert torch.equal(found.values(), expected[name].values())
        assert torch.equal(found.lengths(), expected[name].lengths())
    pooled = EmbeddingBagConfig(100, 4, "t", feature_names=["b"])
    bags = dyn.DynamicEmbeddingBagCollection([pooled], fused_params=SGD)
    assert torch.equal(bags(two).values(), bags(one).values())


def test_a_reader_follows_the_keys_of_each_batch() -> None:
    read = FeatureReader(CONFIGS, False, "C")
    for keys in ("abc", "cab", "abc", "abcd", "dabc", "adbc", "cab"):
        features = batch(keys, [1, 0, 2, 1, 0, 3, 1, 1][: 2 * len(keys)])
        found = read(features)
        parts = [plain(features, key) for key in "abc"]
        assert found.ids.tolist() == [one for ids, _ in parts for one in ids], keys
        assert found.lengths.tolist() == [one for _, lengths in parts for one in lengths], keys
        assert found.counts == [len(ids) for ids, _ in parts], keys
    for keys in ("ab", "abd", ""):
        for reader in (read, FeatureReader(CONFIGS, False, "C")):
            with pytest.raises(ValueError, match=r"table='[st]'\): expected feature"):
                reader(batch(keys, [1] * 2 * len(keys)))


def test_features_that_follow_each_other_are_not_copied() -> None:
    features = batch("dabc", [1, 0, 2, 1, 0, 3, 1, 1])
    found = FeatureReader(CONFIGS, False, "C")(features)
    assert found.ids.data_ptr() == features.values().data_ptr() + features.values()[:1].nbytes


def test_lengths_whose_sum_wraps_around() -> None:
    lengths = torch.tensor([2**62, 2**62, 2**62, 2**62, 3])
    features = KeyedJaggedTensor(["a"], torch.arange(3), lengths=lengths)
    with pytest.raises(ValueError, match="add up to the 3 ids"):
        assert read_features(features, False, "C").counts


def test_offsets_first_made_in_inference_mode_serve_training() -> None:
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["a"])
    ebc = dyn.DynamicEmbeddingBagCollection([config], fused_params={"learning_rate": 0.5})
    features = batch("a", [1] * 37)  # a number of bags that no other test has
    with torch.inference_mode():
        ebc.eval()(features)
    before = ebc.train()(features).values()
    before.sum().backward()
    after = ebc(features).values()
    assert torch.equal(after, before - 0.5)
