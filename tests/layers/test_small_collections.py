"""Block and quotient-remainder collections: the interface of EmbeddingBagCollection that both share."""

import copy
from functools import partial

import pytest
import torch
from mixed_cases import SGD, batch, some_grad, tables, varied_batch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.layers.quotient_remainder import PAIR_OPS

MODULES = {
    "block": partial(dyn.BlockEmbeddingBagCollection, block_dim={"a": 2, "b": 4, "c": 8}),
    **{
        op: partial(
            dyn.QuotientRemainderEmbeddingBagCollection,
            buckets={"a": 7, "b": 2**32, "c": 2},
            op=op,
        )
        for op in PAIR_OPS
    },
}


@pytest.fixture(params=MODULES)
def make(request):
    return partial(MODULES[request.param], tables(), fused_params=SGD)


def rows_held(module):
    return sum(ids.numel() for key, ids in module.state_dict().items() if key.endswith(".ids"))


def test_outputs_are_those_of_an_embedding_bag_collection(make):
    ours, theirs = make(), EmbeddingBagCollection(tables())
    small = KeyedJaggedTensor(["f", "g", "h"], torch.arange(6), lengths=torch.ones(6).long())
    got, expected = ours(small), theirs(small)
    assert got.keys() == expected.keys() == ["g@a", "f", "g@b", "h"]
    assert got.length_per_key() == expected.length_per_key()
    assert got.values().shape == expected.values().shape
    assert [(c.name, c.embedding_dim) for c in ours.embedding_bag_configs()] == [
        (c.name, c.embedding_dim) for c in theirs.embedding_bag_configs()
    ]


def test_bags_that_vary_by_feature(make):
    varied, plain = varied_batch()
    ours = make()
    torch.testing.assert_close(ours(varied).values(), copy.deepcopy(ours)(plain).values())


@pytest.mark.parametrize("bags", [0, 3])
def test_batches_without_ids(make, bags):
    output = make()(batch(bags=bags, longest=0)).values()
    assert output.shape == (bags, 8 + 8 + 12 + 8) and output.eq(0).all()
    output.sum().backward()


def test_evaluation_reads_unseen_ids_as_zeros_and_inserts_nothing(make):
    ours = make().eval()
    assert ours(batch()).values().eq(0).all() and rows_held(ours) == 0


@pytest.mark.parametrize("module", MODULES)
def test_an_initializer_replaces_init_fn(module):
    config = EmbeddingBagConfig(9, 8, "a", feature_names=["f"], init_fn=torch.nn.init.zeros_)
    ones = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0), unseen="initial")
    sizes = {"block_dim": 8} if module == "block" else {"buckets": 3}
    ours = MODULES[module]([config], dynamic={"a": ones}, **sizes).eval()
    one_id = KeyedJaggedTensor(["f"], torch.tensor([5]), lengths=torch.tensor([1]))
    assert ours(one_id).values().abs().min() > 0


def test_state_dict_round_trip(make):
    trained, fresh = make(), make()
    for step in range(2):
        output = trained(batch(step)).values()
        output.backward(some_grad(output))
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.grad is not None:  # of a projection
                    parameter -= parameter.grad
    fresh.load_state_dict(trained.state_dict())
    expected = trained.eval()(batch(1)).values()
    assert expected.abs().sum() > 0
    assert torch.equal(fresh.eval()(batch(1)).values(), expected)


def test_a_missing_feature_is_named_and_nothing_changes(make):
    ours = make()
    with pytest.raises(ValueError, match="expected feature 'f'"):
        ours(KeyedJaggedTensor(["g"], torch.tensor([1]), lengths=torch.tensor([1])))
    assert rows_held(ours) == 0
