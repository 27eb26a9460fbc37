"""Exported programs of serving collections, saved and loaded, give what the collections give."""

import io
import logging
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from serving_cases import Plain, bag_configs, batch, save, save_delta, sequence_configs
from shards import deep_but
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import serving
from torchrec_dyn.serving.export import export_with_tables

A = Plain("a", 16).with_random(range(-50, 50))
B = Plain("b", 16).with_random([2**63 - 1, -(2**63), 7, 9], seed=1)
C = Plain("c", 8)
EMPTY = Plain("c", 16)
IDS = [*range(-60, 60), 2**63 - 1, -(2**63)]
FEATURES = {"a": ["f1", "f2"], "b": ["f2"], "c": ["f3"]}
KEYS = ["f3", "x", "f2", "f1"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    save(folder / "checkpoint", A, B, EMPTY)
    for dtype in (torch.float32, torch.float16, torch.int8, torch.int4):
        serving.build(folder / "checkpoint", folder / str(dtype), rows=dtype)
    return lambda dtype: folder / str(dtype)


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(
        logging, "raiseExceptions", False
    )  # torch 2.13 logs a message it cannot format


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("dtype", "unseen", "weighted", "keys"),
    [
        (torch.float32, "zeros", False, KEYS),
        (torch.float16, "zeros", True, ["f1", "f2", "f2", "f3"]),
        (torch.int8, "zeros", False, KEYS),
        (torch.int8, "initial", True, KEYS),
        (torch.int4, "zeros", True, KEYS),
    ],
)
def test_pooled_programs(served, dtype, unseen, weighted, keys):
    keys = list(dict.fromkeys(keys))
    configs = bag_configs(A, B, EMPTY, features=FEATURES, pooling={"b": PoolingType.MEAN})
    ours = serving.ServingEmbeddingBagCollection(served(dtype), configs, weighted, unseen)
    program = serving.export_program(ours, batch(keys, IDS, 6, seed=0, weighted=weighted))
    run = saved_and_loaded(program)
    for size in (1, 0, 2, 33):
        features = batch(keys, IDS, size, seed=size + 1, weighted=weighted)
        seen, expected = run(features), ours(features)
        assert seen.keys() == expected.keys()
        assert torch.equal(seen.values(), expected.values()), size


@pytest.mark.everyday(3)
@pytest.mark.parametrize("unseen", ["zeros", "initial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int4])
def test_max_is_torchs_over_the_served_rows(tmp_path, dtype, unseen):
    """Tables of two widths, one of them with a sum beside; also as a program."""
    wide = replace(C.with_random(range(-50, 50)), pooling="max")
    tables = replace(A, pooling="max"), B, wide
    save(tmp_path / "checkpoint", *tables)
    serving.build(tmp_path / "checkpoint", tmp_path / "served", rows=dtype)
    features = {"a": ["f1", "f2"], "b": ["f2"], "c": ["f3"]}
    configs = bag_configs(*tables, features=features)
    ours = serving.ServingEmbeddingBagCollection(tmp_path / "served", configs, unseen=unseen)
    run = serving.export_program(ours, batch(KEYS, IDS, 6, seed=0)).module()
    for size in (1, 0, 33):
        given = batch(KEYS, IDS, size, seed=size)
        pooled = ours(given)
        for table, names in (("a", {"f1": "f1", "f2": "f2@a"}), ("c", {"f3": "f3"})):
            config = sequence_configs(tables["abc".index(table)], features=features)
            rows = serving.ServingEmbeddingCollection(tmp_path / "served", config, unseen=unseen)
            for feature, output in names.items():
                of = rows(given)[feature]
                expected = torch.nn.functional.embedding_bag(
                    torch.arange(len(of.values())), of.values(), of.offsets(), mode="max",
                    include_last_offset=True,
                )  # fmt: skip
                assert torch.equal(pooled[output], expected)
        assert torch.equal(run(given).values(), pooled.values())


def test_served_max_takes_no_weights_and_no_other_pooling(tmp_path):
    save(tmp_path / "checkpoint", replace(A, pooling="max"))
    serving.build(tmp_path / "checkpoint", tmp_path / "served")
    mean = {"a": PoolingType.MEAN}
    for weighted, pooling in ((True, None), (False, mean)):
        with pytest.raises(ValueError, match=r"expected pooling SUM and is_weighted=False"):
            serving.ServingEmbeddingBagCollection(
                tmp_path / "served", bag_configs(A, pooling=pooling), weighted
            )


def test_a_delta_of_another_pooling_is_refused(tmp_path):
    save(tmp_path / "checkpoint", A)
    serving.build(tmp_path / "checkpoint", tmp_path / "served")
    save_delta(tmp_path / "delta", [A], [replace(A, pooling="max").with_random([90])])
    with pytest.raises(ValueError, match="expected pooling '' as served, got 'max'"):
        serving.apply_delta(tmp_path / "served", tmp_path / "delta")


@pytest.mark.parametrize(
    ("dtype", "unseen"),
    deep_but([(torch.float32, "initial")], [(torch.float32, "initial"), (torch.int8, "zeros")]),
)
def test_sequence_programs(served, dtype, unseen):
    configs = sequence_configs(A, B, EMPTY, features=FEATURES)
    ours = serving.ServingEmbeddingCollection(served(dtype), configs, True, unseen)
    run = saved_and_loaded(serving.export_program(ours, batch(KEYS, IDS, 6, seed=0)))
    for size in (1, 0, 2, 33):
        features = batch(KEYS, IDS, size, seed=size + 1)
        seen, expected = run(features), ours(features)
        assert list(seen) == list(expected)
        for name, jagged in expected.items():
            assert torch.equal(seen[name].values(), jagged.values()), (size, name)
            assert torch.equal(seen[name].lengths(), jagged.lengths())
            assert torch.equal(seen[name].weights(), jagged.weights())


def test_programs_of_int32_ids(served):
    ours = serving.ServingEmbeddingBagCollection(served(torch.float32), bag_configs(A))
    wide = batch(["f_a"], IDS, 6, seed=0)
    narrow = KeyedJaggedTensor(["f_a"], wide.values().int(), lengths=wide.lengths())
    run = serving.export_program(ours, narrow).module()
    assert torch.equal(run(narrow).values(), ours(wide).values())
    assert torch.equal(ours(narrow).values(), ours(wide).values()) and ours(wide).values().any()


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_alone(served, strict):
    ours = serving.ServingEmbeddingBagCollection(served(torch.int8), bag_configs(A))
    features = batch(["f_a"], IDS, 6, seed=0)
    shapes = [{0: torch.export.Dim.DYNAMIC}, None, {0: torch.export.Dim.DYNAMIC}, None, None, None]
    program = torch.export.export(ours, (features,), dynamic_shapes=(shapes,), strict=strict)
    for size in (2, 40):
        features = batch(["f_a"], IDS, size, seed=size)
        assert torch.equal(program.module()(features).values(), ours(features).values())


@pytest.mark.parametrize("pooled", [True, False])
def test_lengths_by_feature(served, pooled):
    """An example with lengths [F, B] makes the same program, for any number of bags."""
    if pooled:
        ours = serving.ServingEmbeddingBagCollection(served(torch.float32), bag_configs(A, B))
    else:
        ours = serving.ServingEmbeddingCollection(served(torch.float32), sequence_configs(A, B))

    def outputs(found):
        parts = [found] if pooled else found.values()
        return torch.cat([one.values().flatten() for one in parts])

    def by_feature(features):
        lengths = features.lengths().view(2, -1)
        return KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths)

    features = batch(["f_b", "f_a"], IDS, 6, seed=0)
    run = serving.export_program(ours, by_feature(features)).module()
    for size in (1, 9):
        other = batch(["f_b", "f_a"], IDS, size, seed=size)
        assert torch.equal(outputs(run(other)), outputs(ours(other)))
        assert torch.equal(outputs(ours(by_feature(other))), outputs(ours(other)))
    run = torch.export.export(ours, (by_feature(features),), strict=False).module()
    assert torch.equal(outputs(run(by_feature(features))), outputs(ours(features)))
    example, _ = export_with_tables(ours, [by_feature(features)])
    assert example.example_inputs[0][0][1].shape == (12,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("keys", [["f_a", "f_b"], ["f_b", "f_a"]])
def test_programs_refuse_what_eager_mode_refuses(served, dtype, keys):
    """Else the first ends the process with float32 and other keys, the last read what is behind weights."""
    ours = serving.ServingEmbeddingBagCollection(served(dtype), bag_configs(A, B), True)
    run = serving.export_program(ours, batch(keys, IDS, 6, seed=0, weighted=True)).module()
    for lengths, weights in (
        ([2**62] * 4 + [1, 1, 1, 1], 4),  # their sum is 4 in 64 bits
        ([2**32 + 1, 1, 1, 1 - 2**32], 4),
        ([1, 1, 1, 1, 0], 4),
        ([1, 1, 0, 1], 4),
        ([0, 1, 2, 1], 3),
        ([0, 1, 2, 1], 5),
    ):
        parts = torch.arange(4), torch.ones(weights), torch.tensor(lengths)
        bad = KeyedJaggedTensor(
            keys, parts[0], parts[1], lengths=parts[2], stride=len(lengths) // 2
        )
        with pytest.raises(ValueError, match="expected"):
            ours(bad)
        with pytest.raises(RuntimeError, match=r"as many lengths .* and a weight for each id"):
            run(bad)


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_torch_jit_is_named(served, kind):
    """torch.jit.trace would record the bags of its example."""
    ours: torch.nn.Module = serving.ServingEmbeddingBagCollection(
        served(torch.int8), bag_configs(A)
    )
    if kind == "sequence":
        ours = serving.ServingEmbeddingCollection(served(torch.int8), sequence_configs(A))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse = ours

        def forward(self, values, lengths):
            found = self.sparse(KeyedJaggedTensor(["f_a"], values, lengths=lengths))
            return found.values() if kind == "pooled" else found["f_a"].values()

    model, example = Model(), (torch.tensor([1, 2, 3]), torch.tensor([1, 2]))
    way = rf"^{type(ours).__name__}: expected .*, got torch\.jit\.{{}}.*serving\.export_program"
    with warnings.catch_warnings(), pytest.raises(ValueError, match=way.format("trace")):
        warnings.simplefilter("ignore")  # of the tracer
        torch.jit.trace(model, example)
    with pytest.raises(ValueError, match=way.format("script")):
        torch.jit.script(model)
    assert model(*example).shape[1] == 16


def test_what_cannot_be_traced_is_named(served):
    ours = serving.ServingEmbeddingBagCollection(served(torch.int8), bag_configs(A))
    with pytest.raises(ValueError, match=r"expected features \['f_a'\], got \['f_b'\]"):
        serving.export_program(ours, batch(["f_b"], IDS, 6, seed=0))
    for call in (ours, partial(serving.export_program, ours)):
        with pytest.raises(ValueError, match="expected a KeyedJaggedTensor, got Tensor"):
            call(torch.arange(3))
        with pytest.raises(ValueError, match=r"once in a batch, got features \['f_a'\] repeatedly"):
            call(batch(["f_a", "f_a"], IDS, 6, seed=0))
    features = batch(["f_a"], IDS, 6, seed=0)
    small = KeyedJaggedTensor(["f_a"], features.values().short(), lengths=features.lengths())
    with pytest.raises(ValueError, match="expected ids of dtype int64"):
        serving.export_program(ours, small)
    weighted = serving.ServingEmbeddingBagCollection(served(torch.int8), bag_configs(A), True)
    with pytest.raises(ValueError, match="expected weights"):
        serving.export_program(weighted, features)


@pytest.mark.parametrize("strides", [None, [[1], [3]]])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_batch_size_per_feature_is_refused(served, tmp_path, pooled, strides):
    """A program reads values and lengths alone: it would split the lengths of [1, 3] bags in the middle."""
    if pooled:
        ours = serving.ServingEmbeddingBagCollection(served(torch.int8), bag_configs(A, B))
    else:
        ours = serving.ServingEmbeddingCollection(served(torch.int8), sequence_configs(A, B))
    features = KeyedJaggedTensor(
        ["f_a", "f_b"],
        torch.arange(4),
        lengths=torch.ones(4).long(),
        stride_per_key_per_rank=strides,
        inverse_indices=(["f_a", "f_b"], torch.zeros(2, 3).long()) if strides is None else None,
    )
    for export in (
        lambda: serving.export_program(ours, features),
        lambda: torch.export.export(ours, (features,)),
        lambda: serving.compile_program(ours, [features], tmp_path / "model.pt2"),
    ):
        with pytest.raises(ValueError, match=r"got a batch size per feature .* its own bag"):
            export()


def test_equal_strides_by_feature_are_one_batch_size(served):
    ours = serving.ServingEmbeddingBagCollection(served(torch.int8), bag_configs(A, B))
    features = KeyedJaggedTensor(
        ["f_a", "f_b"],
        torch.arange(4),
        lengths=torch.ones(4).long(),
        stride_per_key_per_rank=[[2], [2]],
    )
    plain = KeyedJaggedTensor(["f_a", "f_b"], torch.arange(4), lengths=torch.ones(4).long())
    expected = ours(plain).values()
    assert torch.equal(ours(features).values(), expected)
    program = serving.export_program(ours, features)
    assert torch.equal(program.module()(plain).values(), expected)
    export_with_tables(ours, [features])  # of compile_program
