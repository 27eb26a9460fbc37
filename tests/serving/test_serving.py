"""Serving collections beside the training collections in evaluation, on the same rows."""

import pytest
import torch
from serving_cases import Plain, bag_configs, batch, decode, save, save_delta, sequence_configs
from tensordict import TensorDict
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import serving
from torchrec_dyn.serving.row_format import RowFormat

EXTREMES = [2**63 - 1, -(2**63), -1, 0]
IDS = [*range(-60, 60), *EXTREMES]  # of which 50 to 59 and -60 to -51 are in no table
A = Plain("a", 16).with_random(range(-50, 50))
B = Plain("b", 24).with_random([*EXTREMES, 7, 9], seed=1)
EMPTY = Plain("c", 8)
FEATURES = {"a": ["f1", "f2"], "b": ["f2"], "c": ["f3"]}  # f2 is read by two tables
KEYS = ["f3", "x", "f2", "f1"]
SUMS: dict = {}
MIXED = {"b": PoolingType.MEAN}
MEANS = dict.fromkeys("abc", PoolingType.MEAN)
DTYPES = [torch.float32, torch.float16, torch.int8, torch.int4]
# A bag has 5 ids at most, of rows of numbers up to 4: 5 * 8 / 255 / 2, 5 * 8 / 15 / 2 and 5 * 2^-9.
NEAR = {torch.float32: 0.0, torch.float16: 0.01, torch.int8: 0.08, torch.int4: 1.35}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for kind, tables in (("embedding_bags", (A, B, EMPTY)), ("embeddings", (A, narrow(B)))):
        save(folder / kind, *tables, kind=kind)
        for dtype in DTYPES:
            serving.build(folder / kind, folder / f"{kind} {dtype}", rows=dtype)
    return lambda dtype, kind="embedding_bags": folder / f"{kind} {dtype}"


def narrow(table: Plain) -> Plain:
    """The same ids with rows of 16 columns."""
    rows = {i: row[:16] for i, row in table.rows.items()}
    return Plain(table.name, 16, rows)


def trained(collection, *tables: Plain):
    """A training collection in evaluation that holds these rows."""
    for table in tables:
        saved = table.tensors()
        if "ids" in saved:
            collection.table(table.name).assign(saved["ids"], saved["weight"])
    return collection.eval()


@pytest.mark.everyday(18)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [SUMS, MIXED, MEANS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unseen", ["zeros", "initial"])
def test_pooled_as_in_training(served, dtype, pooling, weighted, unseen):
    configs = bag_configs(A, B, EMPTY, features=FEATURES, pooling=pooling)
    dynamic = dyn.DynamicTableConfig(unseen=unseen, initializer=dyn.Uniform(-0.5, 0.5))
    training = dyn.DynamicEmbeddingBagCollection(configs, is_weighted=weighted, dynamic=dynamic)
    trained(training, A, B)
    ours = serving.ServingEmbeddingBagCollection(
        served(dtype), configs, is_weighted=weighted, unseen=unseen
    )
    near = NEAR[dtype] if unseen == "zeros" else max(NEAR[dtype], 1e-5)
    for size in (0, 1, 6, 40):
        features = batch(KEYS, IDS, size, seed=size, weighted=weighted)
        with torch.no_grad():
            expected, seen = training(features), ours(features)
        assert seen.keys() == expected.keys() == ["f1", "f2@a", "f2@b", "f3"]
        assert seen.length_per_key() == expected.length_per_key()
        assert (
            seen.values().shape == expected.values().shape and seen.values().dtype == torch.float32
        )
        torch.testing.assert_close(seen.values(), expected.values(), rtol=0, atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unseen", ["zeros", "initial"])
@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences_as_in_training(served, dtype, unseen, need_indices):
    tables = A, narrow(B)
    configs = sequence_configs(*tables, features=FEATURES)
    dynamic = dyn.DynamicTableConfig(unseen=unseen, initializer=dyn.Uniform(-0.5, 0.5))
    training = trained(
        dyn.DynamicEmbeddingCollection(configs, need_indices=need_indices, dynamic=dynamic), *tables
    )
    folder = served(dtype, "embeddings")
    ours = serving.ServingEmbeddingCollection(folder, configs, need_indices, unseen)
    assert ours.need_indices() == need_indices and ours.embedding_dim() == 16
    assert ours.embedding_names_by_table() == training.embedding_names_by_table()
    for size in (0, 1, 6, 40):
        features = batch(KEYS, IDS, size, seed=size)
        with torch.no_grad():
            expected, seen = training(features), ours(features)
        assert list(seen) == list(expected) == ["f1", "f2@a", "f2@b"]
        for name, jagged in expected.items():
            near = NEAR[dtype] / 4
            torch.testing.assert_close(seen[name].values(), jagged.values(), rtol=0, atol=near)
            assert torch.equal(seen[name].lengths(), jagged.lengths())
            if need_indices:
                assert torch.equal(seen[name].weights(), jagged.weights())


def test_rows_of_one_table_of_several_can_be_served(served):
    (config,) = bag_configs(B)
    one = serving.ServingEmbeddingBagCollection(served(torch.int8), [config])
    features = KeyedJaggedTensor(["f_b"], torch.tensor([7, 9, 8]), lengths=torch.tensor([1, 1, 1]))
    expected = torch.stack([B.rows[7], B.rows[9], torch.zeros(24)])
    torch.testing.assert_close(one(features).values(), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int4])
def test_pooled_rows_are_sums_of_decoded_rows(served, dtype):
    """Nearer than the steps of the format: the same numbers as the rows themselves say."""
    configs = bag_configs(A, B)
    ours = serving.ServingEmbeddingBagCollection(served(dtype), configs)
    form, parts = RowFormat(dtype), []
    features = batch(["f_a", "f_b"], IDS, 30, seed=3)
    for table in (A, B):
        decoded = {i: decode(form, form.encode(row[None], "t"))[0] for i, row in table.rows.items()}
        bags = features[f"f_{table.name}"].to_dense()
        zeros = torch.zeros(table.dim)
        parts.append(
            torch.stack([sum((decoded.get(int(i), zeros) for i in bag), zeros) for bag in bags])
        )
    torch.testing.assert_close(ours(features).values(), torch.cat(parts, 1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_are_not_contiguous_are_read_as_they_are(served, dtype):
    ours = serving.ServingEmbeddingBagCollection(served(dtype), bag_configs(A), is_weighted=True)
    ids, lengths = torch.arange(20).repeat_interleave(2)[::2], torch.full((4,), 5)
    weights = torch.tensor([2.0]).expand(20)
    features = KeyedJaggedTensor(["f_a"], ids, weights=weights, lengths=lengths)
    plain = KeyedJaggedTensor(["f_a"], ids.clone(), weights=weights.clone(), lengths=lengths)
    assert torch.equal(ours(features).values(), ours(plain).values())


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (KeyedJaggedTensor(["f9"], torch.tensor([1]), lengths=torch.tensor([1])), "feature 'f_a'"),
        (KeyedJaggedTensor(["f_a"], torch.tensor([1]).short(), lengths=torch.tensor([1])), "int64"),
        (KeyedJaggedTensor(["f_a"], torch.tensor([1]), lengths=torch.tensor([2])), "add up to the 1 ids"),
        (KeyedJaggedTensor(["f_a"], torch.tensor([1]), lengths=torch.tensor([2, -1])), "not negative"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.int4])
def test_bad_batches_are_errors(served, dtype, features, message):
    one = serving.ServingEmbeddingBagCollection(served(dtype), bag_configs(A))
    with pytest.raises(ValueError, match=message):
        one(features)


@pytest.mark.parametrize("bags", [1, 2])
def test_a_batch_size_per_feature_is_refused(served, bags):
    """Pooled outputs have a row of each feature for each sample: two samples share bag 0 of a feature."""
    ours = serving.ServingEmbeddingBagCollection(served(torch.int8), bag_configs(A, B))
    features = KeyedJaggedTensor(
        ["f_a", "f_b"], torch.arange(bags + 2), lengths=torch.ones(bags + 2).long(),
        stride_per_key_per_rank=[[bags], [2]],
        inverse_indices=(["f_a", "f_b"], torch.tensor([[0, 0, 0], [0, 0, 1]])),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"got a batch size per feature .* its own bag"):
        ours(features)


def test_tensor_dicts_as_in_training(served):
    bags = [torch.tensor([1, 2, 3]), torch.tensor([7, 9])]
    of_features = {
        name: torch.nested.nested_tensor_from_jagged(ids, torch.tensor([0, 1, len(ids)]))
        for name, ids in zip(["f_a", "f_b"], bags, strict=True)
    }
    features = TensorDict(of_features, batch_size=[2])
    training = trained(dyn.DynamicEmbeddingBagCollection(bag_configs(A, B)), A, B)
    pooled = serving.ServingEmbeddingBagCollection(served(torch.float32), bag_configs(A, B))
    expected = training(features).values()
    assert torch.equal(pooled(features).values(), expected) and expected.any()
    configs = sequence_configs(A, narrow(B))
    training = trained(dyn.DynamicEmbeddingCollection(configs), A, narrow(B))
    ours = serving.ServingEmbeddingCollection(served(torch.float32, "embeddings"), configs)
    for name, jagged in training(features).items():
        assert torch.equal(ours(features)[name].values(), jagged.values())


def test_init_fn_of_a_config_is_not_used(served):
    features = batch(["f_a"], IDS, 30, seed=0)  # some in no table
    for make, configs, kind in (
        (serving.ServingEmbeddingBagCollection, bag_configs, "embedding_bags"),
        (serving.ServingEmbeddingCollection, sequence_configs, "embeddings"),
    ):
        ours, others = configs(A), configs(A)
        others[0].init_fn = torch.nn.init.ones_
        for unseen in ("zeros", "initial"):
            folder = served(torch.float32, kind)
            one, other = (
                make(folder, given, unseen=unseen)(features)["f_a"] for given in (ours, others)
            )
            if kind == "embeddings":
                one, other = one.values(), other.values()
            assert one.abs().max() > 0 and torch.equal(one, other)


def test_configs_that_do_not_fit_are_errors(served, tmp_path):
    folder = served(torch.float32)
    make = serving.ServingEmbeddingBagCollection
    with pytest.raises(ValueError, match=r"tables among \['a', 'b', 'c'\], got \['z'\]"):
        make(folder, bag_configs(Plain("z", 16)))
    with pytest.raises(ValueError, match=r"table='a'\): expected embedding_dim 16 .*, got 17"):
        make(folder, bag_configs(Plain("a", 17)))
    with pytest.raises(ValueError, match=r"a directory made by serving\.build"):
        make(tmp_path, bag_configs(A))
    with pytest.raises(ValueError, match=r'expected "zeros" or "initial", got .noise.'):
        make(folder, bag_configs(A), unseen="noise")
    with pytest.raises(ValueError, match="one embedding_dim"):
        serving.ServingEmbeddingCollection(folder, sequence_configs(A, B))


def test_serving_trains_nothing_and_saves_nothing(served):
    ours = serving.ServingEmbeddingBagCollection(served(torch.float32), bag_configs(A)).train()
    features = batch(["f_a"], IDS, 5, seed=0)
    assert not ours(features).values().requires_grad
    assert not list(ours.parameters()) and not ours.state_dict()
    assert [config.name for config in ours.embedding_bag_configs()] == ["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_serving_does_not_follow_torchs_default_device(tmp_path, dtype):
    save(tmp_path / "checkpoint", A, B)
    after = [A.with_random([1, 99], seed=3).without([2]), B]
    save_delta(tmp_path / "delta", [A, B], after)
    serving.build(tmp_path / "checkpoint", tmp_path / "expected", rows=dtype)
    serving.apply_delta(tmp_path / "expected", tmp_path / "delta")
    configs = bag_configs(A, B, pooling={"b": PoolingType.MEAN})
    features = batch(["f_b", "f_a"], IDS, 9, seed=1)
    served = tmp_path / "served"
    with torch.device("meta"):  # the default device of the user, as with torch.set_default_device
        serving.build(tmp_path / "checkpoint", served, rows=dtype)
        ours = serving.ServingEmbeddingBagCollection(served, configs, unseen="initial")
        sequences = serving.ServingEmbeddingCollection(
            served, sequence_configs(A), unseen="initial"
        )
        serving.apply_delta(served, tmp_path / "delta")
        assert ours.refresh() and sequences.refresh() and len(ours.ids("a")) == len(after[0].rows)
        seen, rows = ours(features).values(), sequences(features)["f_a"].values()
        serving.verify(served)
    expected = serving.ServingEmbeddingBagCollection(
        tmp_path / "expected", configs, unseen="initial"
    )
    assert torch.equal(seen, expected(features).values())
    expected = serving.ServingEmbeddingCollection(
        tmp_path / "expected", sequence_configs(A), unseen="initial"
    )
    assert torch.equal(rows, expected(features)["f_a"].values())
