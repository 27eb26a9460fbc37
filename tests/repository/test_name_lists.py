"""Lists of names in messages."""

import warnings

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.name_lists import listed


def test_few_names_are_a_list_in_python() -> None:
    assert listed(["a", "b'c"]) == str(["a", "b'c"])
    assert listed(f"t{number}" for number in range(8)) == str([f"t{n}" for n in range(8)])


def test_of_many_names_the_first_are_told_and_their_number() -> None:
    names = [f"t{number}" for number in range(1_000)]
    assert listed(names) == "['t0', 't1', 't2', 't3', 't4', 't5', 't6', 't7', ...] (1,000 names)"
    assert listed(names[:9]).endswith("'t7', ...] (9 names)")


def test_a_warning_for_a_thousand_tables_can_be_read() -> None:
    count = 1_000
    tables = [
        EmbeddingBagConfig(name=f"t{n}", embedding_dim=4, num_embeddings=8, feature_names=[f"f{n}"])
        for n in range(count)
    ]
    collection = dyn.DynamicEmbeddingBagCollection(tables)
    features = KeyedJaggedTensor(
        [f"f{n}" for n in range(count)],
        torch.zeros(count, dtype=torch.int64),
        lengths=torch.ones(count, dtype=torch.int64),
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        collection(features)
    texts = [str(one.message) for one in told if "expected an optimizer" in str(one.message)]
    assert len(texts) == 1 and "(1,000 names)" in texts[0] and len(texts[0]) < 400
