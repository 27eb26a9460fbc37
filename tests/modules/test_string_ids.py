"""Ids of strings, against vectors of XXH3 and in every container."""

import sys

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn

pytest.importorskip("xxhash")

# XXH3-64 with seed 0, as `xxhsum -H3` prints it.
VECTORS = {"": 0x2D06800538D394C2, "a": 0xE6C632B61E964E1F, "abc": 0x78AF5F94892F3950}
STRINGS = ["", "a", "abc", "user:17", "Zürich", "\0", "a\0", "x" * 1000]


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def test_vectors_of_xxh3() -> None:
    assert dyn.hash_strings(list(VECTORS)).tolist() == [*map(signed, VECTORS.values())]


def test_a_str_is_its_utf_8_bytes() -> None:
    ids = dyn.hash_strings(STRINGS)
    assert ids.dtype == torch.int64 and len(set(ids.tolist())) == len(STRINGS)
    assert torch.equal(dyn.hash_strings([one.encode() for one in STRINGS]), ids)
    assert torch.equal(dyn.hash_strings(one for one in STRINGS), ids)


def test_arrays_of_numpy() -> None:
    strings = STRINGS[:5]  # arrays of bytes and of Unicode have no zeros at the end
    ids = dyn.hash_strings(strings)
    for kind in (str, object):
        assert torch.equal(dyn.hash_strings(np.array(strings, kind)), ids)
    encoded = np.array([one.encode() for one in strings])
    assert torch.equal(dyn.hash_strings(encoded), ids)
    assert torch.equal(dyn.hash_strings(np.array([strings, strings])), torch.cat([ids, ids]))
    assert torch.equal(dyn.hash_strings(np.array(strings)[::-1]), ids.flip(0))
    assert dyn.hash_strings(np.array([], str)).shape == (0,)


def test_arrays_of_pyarrow() -> None:
    arrow = pytest.importorskip("pyarrow")
    ids = dyn.hash_strings(STRINGS)
    plain = arrow.array(STRINGS)
    chunked = arrow.chunked_array([plain[:3], plain[3:3], plain[3:]])
    for array in (plain, plain.cast(arrow.large_binary()), plain.dictionary_encode(), chunked):
        assert torch.equal(dyn.hash_strings(array), ids), array.type
    with pytest.raises(ValueError, match="expected str or bytes, got None at place 1"):
        dyn.hash_strings(arrow.array(["a", None]))


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (["a", None], "expected str or bytes, got None at place 1"),
        (np.array(["a", np.int64(7)], object), "got np.int64.7. at place 1"),  # has bytes, too
        (torch.arange(3), "got 0 at place 0"),
        ("abc", "expected several strings, got one, 'abc'"),
        (["a", "\ud800"], "expected strings of Unicode"),
    ],
)
def test_what_is_no_string_is_refused(strings: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dyn.hash_strings(strings)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match="hash_strings: expected the package xxhash, got none"):
        dyn.hash_strings(["a"])


def test_strings_get_rows_of_their_own() -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["a"])
    collection = dyn.DynamicEmbeddingBagCollection([config], fused_params={"learning_rate": 0.1})
    assert dyn.hash_strings([]).shape == (0,)
    ids = dyn.hash_strings(STRINGS)
    collection(KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([5, 3])))
    assert sorted(collection.table("t").ids().tolist()) == sorted(ids.tolist())
