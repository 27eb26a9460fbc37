"""Block embeddings against plain torch, which pools the projected rows bag by bag."""

import copy

import pytest
import torch
from mixed_cases import (
    IDS,
    SGD,
    batch,
    leaf_rows,
    options_of,
    pooled_by_hand,
    some_grad,
    tables,
)
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn

BLOCKS = {"a": 2, "b": 4, "c": 8}  # c has the full width


def collection(pooling="SUM", **options):
    torch.manual_seed(1)
    options = {**options_of(pooling), "fused_params": SGD, **options}
    return dyn.BlockEmbeddingBagCollection(tables(pooling), BLOCKS, **options)


def handle(ours, name):
    """Returns a table of the pooled collection, or of those whose rows are looked up one by one."""
    groups = [ours.rows, *ours.rows_of_max.values()]
    return next(one.table(name) for one in groups if name in one.dynamic_configs())


CASES = [("SUM", False), ("SUM", True), ("MEAN", False), ("MEAN", True), ("MAX", False)]


@pytest.mark.parametrize(("pooling", "weighted"), CASES)
def test_it_is_pooling_of_projected_rows_forward_and_backward(pooling, weighted):
    ours = collection(pooling, is_weighted=weighted)
    features = batch(weighted=weighted)
    output = ours(features)
    known = {name: torch.unique(_ids_of(features, name)) for name in BLOCKS}
    rows = {name: leaf_rows(handle(ours, name), known[name]) for name in BLOCKS}
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

    expected = torch.cat(pooled_by_hand(theirs, pooling, row_of), dim=1)
    torch.testing.assert_close(output.values(), expected)

    gradient = some_grad(expected)
    output.values().backward(gradient)
    expected.backward(gradient)
    for name, matrix in matrices.items():
        torch.testing.assert_close(ours.projections.tables[name].weight.grad, matrix.grad)
    for name, before in rows.items():
        learnt, _ = handle(ours, name).lookup(known[name])
        torch.testing.assert_close(learnt, before.detach() - 0.5 * before.grad)
    if weighted:
        torch.testing.assert_close(features.weights().grad, weights.grad)


def _ids_of(features, table):
    names = {"a": ["f", "g"], "b": ["g"], "c": ["h"]}[table]
    return torch.cat([features[name].values() for name in names])


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


def test_options_reach_the_narrow_tables():
    initial = dyn.DynamicTableConfig(initializer=dyn.Constant(0.25))
    ours = collection(dynamic={"a": initial}, is_weighted=True)
    ours(batch(weighted=True))
    rows, found = ours.rows.table("a").lookup(torch.tensor(IDS))
    assert rows[found].eq(0.25).all() and found.any() and rows.shape[1] == 2
    assert ours.is_weighted() and not collection().is_weighted()


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
