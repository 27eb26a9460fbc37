"""Block embeddings against plain torch, which pools the projected rows bag by bag."""

import copy

import pytest
import torch
from mixed_cases import (
    IDS,
    SGD,
    batch,
    leaf_rows,
    numbers,
    pooled_by_hand,
    some_grad,
    tables,
    varied_batch,
)
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import torchrec_dyn as dyn

BLOCKS = {"a": 2, "b": 4, "c": 8}  # c has the full width


def collection(pooling=PoolingType.SUM, **options):
    torch.manual_seed(1)
    return dyn.BlockEmbeddingBagCollection(tables(pooling), BLOCKS, fused_params=SGD, **options)


def test_outputs_are_those_of_an_embedding_bag_collection():
    theirs = EmbeddingBagCollection(tables())
    small = KeyedJaggedTensor(["f", "g", "h"], torch.arange(6), lengths=torch.ones(6).long())
    got, expected = collection()(small), theirs(small)
    assert got.keys() == expected.keys() == ["g@a", "f", "g@b", "h"]
    assert got.length_per_key() == expected.length_per_key()
    assert got.values().shape == expected.values().shape
    ours = collection()
    assert [(c.name, c.embedding_dim) for c in ours.embedding_bag_configs()] == [
        (c.name, c.embedding_dim) for c in theirs.embedding_bag_configs()
    ]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_it_is_pooling_of_projected_rows_forward_and_backward(pooling, weighted):
    ours = collection(pooling, is_weighted=weighted)
    features = batch(weighted=weighted)
    output = ours(features)
    known = {name: torch.unique(_ids_of(features, name)) for name in BLOCKS}
    rows = {name: leaf_rows(ours.rows.table(name), known[name]) for name in BLOCKS}
    matrices = {
        name: copy.deepcopy(one.weight).requires_grad_()
        for name, one in ours.projections.tables.items()
    }
    weights = features.weights().detach().clone().requires_grad_() if weighted else None
    theirs = KeyedJaggedTensor(
        features.keys(), features.values(), weights=weights, lengths=features.lengths()
    )

    def row_of(table, feature):
        found = rows[table][torch.searchsorted(known[table], theirs[feature].values())]
        return found @ matrices[table].T if table in matrices else found

    expected = torch.cat(pooled_by_hand(theirs, pooling == PoolingType.MEAN, row_of), dim=1)
    torch.testing.assert_close(output.values(), expected)

    gradient = some_grad(expected)
    output.values().backward(gradient)
    expected.backward(gradient)
    for name, matrix in matrices.items():
        torch.testing.assert_close(ours.projections.tables[name].weight.grad, matrix.grad)
    for name, before in rows.items():
        learnt, _ = ours.rows.table(name).lookup(known[name])
        torch.testing.assert_close(learnt, before.detach() - 0.5 * before.grad)
    if weighted:
        torch.testing.assert_close(features.weights().grad, weights.grad)


def _ids_of(features, table):
    names = {"a": ["f", "g"], "b": ["g"], "c": ["h"]}[table]
    return torch.cat([features[name].values() for name in names])


def test_memory_saved_is_the_published_formula():
    rows, block, width = 1024**2, 128, 512
    config = EmbeddingBagConfig(name="t", embedding_dim=width, num_embeddings=rows)
    ours = dyn.BlockEmbeddingBagCollection([config], block, device="meta")
    full = dyn.BlockEmbeddingBagCollection([config], width, device="meta")
    assert numbers(ours) * 4 / 2**20 == 512.25
    assert numbers(full) * 4 / 2**20 == 2048
    assert numbers(full) - numbers(ours) == rows * (width - block) - block * width


def test_a_table_of_full_width_has_no_projection():
    ours = collection()
    assert set(ours.projections.tables) == {"a", "b"}
    assert ours.projections.tables["b"].weight.shape == (12, 4)
    assert ours.projections.tables["b"].bias is None
    output = ours(batch())
    rows, _ = ours.rows.table("c").lookup(batch()["h"].values()[:1])
    first = batch()["h"].lengths().nonzero()[0, 0]
    one = KeyedJaggedTensor(
        ["h", "g", "f"], batch()["h"].values()[:1], lengths=torch.tensor([1, 0, 0])
    )
    assert torch.equal(ours.eval()(one)["h"], rows) and output["h"][first].abs().sum() > 0


def test_projections_start_xavier_normal_and_rows_as_the_config_says():
    config = EmbeddingBagConfig(name="t", embedding_dim=512, num_embeddings=400)
    ours = dyn.BlockEmbeddingBagCollection([config], 128, fused_params=SGD)
    matrix = ours.projections.tables["t"].weight
    assert matrix.std().item() == pytest.approx((2 / (512 + 128)) ** 0.5, rel=0.02)
    ours(KeyedJaggedTensor(["t"], torch.arange(300), lengths=torch.ones(300).long()))
    rows, _ = ours.rows.table("t").lookup(torch.arange(300))
    assert 0.045 < rows.abs().max() <= 0.05  # 1/sqrt(400)
    torch.manual_seed(5)
    expected = nn.init.xavier_normal_(torch.empty(512, 128))
    torch.manual_seed(5)
    ours.projections.tables["t"].reset_parameters()
    assert torch.equal(matrix, expected)


def test_bags_that_vary_by_feature():
    varied, plain = varied_batch()
    ours = collection()
    assert torch.equal(ours(varied).values(), copy.deepcopy(ours)(plain).values())


@pytest.mark.parametrize("bags", [0, 3])
def test_batches_without_ids(bags):
    ours = collection()
    output = ours(batch(bags=bags, longest=0))
    assert output.values().shape == (bags, 8 + 8 + 12 + 8)
    assert output.values().eq(0).all()
    output.values().sum().backward()
    assert ours.projections.tables["a"].weight.grad.eq(0).all()


def test_evaluation_reads_unseen_ids_as_zeros_and_inserts_nothing():
    ours = collection().eval()
    assert ours(batch()).values().eq(0).all()
    assert ours.rows.table("a").num_rows == 0


def test_options_reach_the_narrow_tables():
    initial = dyn.DynamicTableConfig(initializer=dyn.Constant(0.25))
    ours = collection(dynamic={"a": initial}, is_weighted=True)
    ours(batch(weighted=True))
    rows, found = ours.rows.table("a").lookup(torch.tensor(IDS))
    assert rows[found].eq(0.25).all() and found.any() and rows.shape[1] == 2
    assert ours.is_weighted() and not collection().is_weighted()


def test_an_initializer_replaces_init_fn():
    config = EmbeddingBagConfig(9, 8, "t", feature_names=["f"], init_fn=torch.nn.init.zeros_)
    ones = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0), unseen="initial")
    ours = dyn.BlockEmbeddingBagCollection([config], block_dim=8, dynamic={"t": ones}).eval()
    one_id = KeyedJaggedTensor(["f"], torch.tensor([5]), lengths=torch.tensor([1]))
    assert ours(one_id).values().tolist() == [[1.0] * 8]


def test_state_dict_round_trip():
    trained, fresh = collection(), collection()
    for step in range(2):
        output = trained(batch(step)).values()
        output.backward(some_grad(output))
        with torch.no_grad():
            for one in trained.projections.parameters():
                one -= one.grad
    fresh.load_state_dict(trained.state_dict())
    seen = batch(1)
    assert torch.equal(fresh.eval()(seen).values(), trained.eval()(seen).values())
    assert trained(seen).values().abs().sum() > 0


@pytest.mark.parametrize(
    ("block_dim", "message"),
    [
        (9, r"an integer in \[1, 8\] for table 'a', got 9"),
        (0, r"an integer in \[1, 8\] for table 'a', got 0"),
        (True, r"an integer in .* for table 'a', got True"),
        (2.0, r"an integer in .* for table 'a', got 2.0"),
        ({"a": 2, "b": 2}, r"a number for each of the tables \['a', 'b', 'c'\], got \['a', 'b'\]"),
        ({**BLOCKS, "d": 1}, r"a number for each .* got \['a', 'b', 'c', 'd'\]"),
    ],
)
def test_a_wrong_width_is_named(block_dim, message):
    with pytest.raises(
        ValueError, match=f"^BlockEmbeddingBagCollection.block_dim: expected {message}"
    ):
        dyn.BlockEmbeddingBagCollection(tables(), block_dim)


def test_a_missing_feature_is_named_and_nothing_changes():
    ours = collection()
    with pytest.raises(ValueError, match="expected feature 'f'"):
        ours(KeyedJaggedTensor(["g"], torch.tensor([1]), lengths=torch.tensor([1])))
    assert ours.rows.table("a").num_rows == 0
