"""from_static: a trained static collection becomes a dynamic one that trains on as it would have."""

import random
import resource
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from another_process import call
from static_collections import OPTIMIZERS, ROWS, assert_same_rows, batch, ebc, loss_of, weights_of
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.migration.trained_collections import from_static

RULE = {"optimizer": "EXACT_SGD", "learning_rate": 0.1}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "CHUNK_BYTES", 5 * 4 * 8)  # rows 0 to 4, 5 to 9, ...


def wrapped(static: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> KeyedOptimizer:
    """Warm-up over one keyed optimizer for each table, combined."""
    parts = [
        (name, KeyedOptimizerWrapper({"weight": parameter}, make))
        for name, parameter in static.named_parameters()
    ]
    return WarmupOptimizer(
        CombinedOptimizer(parts), [WarmupStage(WarmupPolicy.CONSTANT, 99, value=0.5)], lr=0.1
    )


def ec(**options: Any) -> EmbeddingCollection:
    tables = [EmbeddingConfig(n, 8, name, feature_names=[f"f_{name}"]) for name, n in ROWS.items()]
    return EmbeddingCollection(tables, **options)


@pytest.mark.parametrize("how", ["given", "wrapped", "in backward"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("make", [ebc, ec])
def test_training_goes_on(make: Callable[..., nn.Module], kind: str, how: str) -> None:
    torch.manual_seed(1)
    static, draw, optimizer = make(), random.Random(2), None
    if how == "in backward":
        one = OPTIMIZERS[kind]([nn.Parameter(torch.zeros(1, 1))])
        names = ("lr", "eps", "betas", "weight_decay", "initial_accumulator_value")
        with pytest.warns(DeprecationWarning):
            apply_optimizer_in_backward(
                type(one),
                static.parameters(),
                {key: one.defaults[key] for key in names if key in one.defaults},
            )
    else:
        parameters = list(static.parameters())
        optimizer = (
            OPTIMIZERS[kind](parameters) if how == "given" else wrapped(static, OPTIMIZERS[kind])
        )

    def train(collection: nn.Module, features: KeyedJaggedTensor, learner: Any) -> None:
        loss_of(collection, features).backward()
        if learner is not None:
            learner.step()
            learner.zero_grad()

    for _ in range(3):
        train(static, batch(static, draw), optimizer)
    made = from_static(static, optimizer)
    assert_same_rows(made, static)
    for _ in range(4):
        features = batch(static, draw)
        torch.testing.assert_close(loss_of(made.eval(), features), loss_of(static, features))
        train(static, features, optimizer)
        train(made.train(), features, None)
    tables = made.local_tables()
    assert {table.optimizer.kind.name for table in tables.values()} == {kind}
    begun = {table.optimizer.initial_accumulator_value for table in tables.values()}
    assert begun == {0.1 if kind == "EXACT_ADAGRAD" else 0.0}  # of ids to come
    assert {table.step for table in tables.values()} == {4 if kind == "EXACT_SGD" else 7}
    assert_same_rows(made, static, exact=False)


def test_partial_rowwise_adam_comes_as_fbgemm_names_it() -> None:
    static = ebc()
    states, parameters = {}, {}
    for name, weight in static.named_parameters():
        table = name.split(".")[1]
        moment = {
            f"{table}.exp_avg_sq": torch.rand(len(weight)),
            f"{table}.step": torch.tensor(5.0),
        }
        states[weight] = {f"{table}.momentum1": torch.rand_like(weight), **moment}
        parameters[name] = weight
    keyed = KeyedOptimizer(parameters, states, [{"params": list(parameters.values()), "lr": 0.1}])
    with pytest.raises(
        ValueError, match=r"table='a'\): expected an optimizer like EXACT_SGD.*got Keyed"
    ):
        from_static(static, keyed)
    rule = {"optimizer": "PARTIAL_ROWWISE_ADAM", "learning_rate": 0.3}
    made = from_static(static, keyed, fused_params=rule)
    for name, weight in static.named_parameters():
        table = made.local_tables()[name.split(".")[1]]
        state, ids = table.export_state(), table.ids()
        theirs = states[weight]
        assert torch.equal(state["momentum1"], theirs[f"{table.name}.momentum1"][ids])
        assert torch.equal(state["momentum2"], theirs[f"{table.name}.exp_avg_sq"][ids])
        assert (table.step, table.optimizer.learning_rate) == (5, 0.3)
    assert_same_rows(made, static)
    for kind, got in (
        ("ADAM", r"momentum2 of ADAM as \[12, 8\], got \[12\]"),
        ("EXACT_SGD", "got"),
    ):
        with pytest.raises(ValueError, match=got):
            from_static(static, keyed, fused_params={"optimizer": kind})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_keep_the_dtype_they_have(dtype: torch.dtype) -> None:
    static = ebc().to(dtype)
    made = from_static(static)
    assert_same_rows(made, static)
    assert made.table("a").lookup(torch.tensor([0]))[0].dtype == dtype


def test_everything_else_comes_along() -> None:
    static = ebc(is_weighted=True).eval()
    static.embedding_bags["b"].requires_grad_(False)
    made = from_static(static, dynamic={"a": dyn.DynamicTableConfig(seed=7)})
    assert type(made) is dyn.DynamicEmbeddingBagCollection
    assert made.is_weighted() and not made.training
    assert [one.requires_grad for one in made.parameters()] == [True, False]
    assert {name: one.seed for name, one in made.dynamic_configs().items()} == {"a": 7, "b": 0}
    assert made.embedding_bag_configs() == static.embedding_bag_configs()
    features = batch(static, random.Random(0))
    torch.testing.assert_close(made(features).values(), static(features).values())
    sequence = from_static(ec(need_indices=True))
    assert type(sequence) is dyn.DynamicEmbeddingCollection and sequence.need_indices()


def test_a_frozen_table_needs_no_optimizer() -> None:
    static = ebc()
    static.embedding_bags["b"].requires_grad_(False)
    optimizer = torch.optim.SGD([static.embedding_bags["a"].weight], lr=0.1)
    assert_same_rows(from_static(static, optimizer), static)


def test_a_raised_limit_lets_new_ids_in() -> None:
    static = ebc()
    ids = KeyedJaggedTensor(
        ["f", "g", "h"], torch.tensor([-5, -5, 77]), lengths=torch.ones(3).long()
    )
    with pytest.raises(RuntimeError, match="at most 12 rows"):
        from_static(static, fused_params=RULE)(ids)
    made = from_static(static, None, None, RULE, {"a": 13, "b": 40})
    made(ids)
    assert made.table("a").num_rows == 13 and made.table("b").num_rows == 31


def test_rows_with_a_life_are_as_old_as_the_training() -> None:
    static = ebc()
    optimizer = OPTIMIZERS["ADAM"](static.parameters())
    loss_of(static, batch(static, random.Random(0))).backward()
    optimizer.step()
    life = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    made = from_static(static, optimizer, life)
    assert made.table("a").last_seen(torch.arange(12)).tolist() == [1] * 12
    new = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([99]), lengths=torch.tensor([1, 0, 0]))
    made(new)
    assert made.table("a").num_rows == 12  # the limit: an old row made room
    assert made.table("a").lookup(torch.tensor([99]))[1].all()


def grown_and_held() -> tuple[int, int]:
    """The growth of this process's peak in a conversion, and the size of the new table, in bytes."""
    small, large = (
        EmbeddingBagCollection([EmbeddingBagConfig(rows, 64, "t", feature_names=["f"])])
        for rows in (1000, 800_000)
    )
    optimizers = [torch.optim.Adagrad(one.parameters()) for one in (small, large)]
    from_static(small, optimizers[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = from_static(large, optimizers[1])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return grown * 1024, made.table("t").stats()["bytes"]


def test_memory_is_the_source_the_target_and_a_chunk() -> None:
    # 205 MB of weights and as much state are there before; the copy takes as much again.
    grown, target = call(grown_and_held)
    assert target > 2 * 800_000 * 256
    assert grown < target + (96 << 20)


# What has no dynamic counterpart is named before a row is copied


def with_optimizer(static: nn.Module, kind: str, **options: Any) -> dict[str, Any]:
    group = {key: options.pop(key) for key in list(options) if key != "fused_params"}
    optimizer = OPTIMIZERS[kind](static.parameters())
    optimizer.param_groups[0].update(group)
    loss_of(static, batch(static, random.Random(0))).backward()
    optimizer.step()
    return {"optimizer": optimizer, **options}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            lambda s: with_optimizer(s, "EXACT_SGD", momentum=0.9),
            "expected momentum = 0 of SGD.*0.9",
        ),
        (
            lambda s: with_optimizer(s, "ADAM", weight_decay=0.1),
            "weight_decay = 0 of Adam.*0.1. Set",
        ),
        (
            # It decays all rows at every step, as no row rule does.
            lambda s: with_optimizer(s, "ADAMW", weight_decay=0.1),
            "weight_decay = 0 of AdamW.*0.1. Set",
        ),
        (lambda s: with_optimizer(s, "EXACT_ADAGRAD", lr_decay=0.1), "lr_decay = 0 of Adagrad"),
        (
            lambda s: with_optimizer(s, "EXACT_ADAGRAD", fused_params={"optimizer": "ADAM"}),
            "trained the rows, EXACT_ADAGRAD, got ADAM",
        ),
        (
            lambda s: {"optimizer": torch.optim.RMSprop(s.parameters())},
            "expected an optimizer like EXACT_SGD.*, got RMSprop",
        ),
        (
            lambda s: {"optimizer": torch.optim.SGD([s.embedding_bags["a"].weight])},
            r"table='b'\): expected an optimizer that holds the parameter of every table, got SGD",
        ),
        (lambda s: {"num_embeddings": {"a": 11}}, "at least the 12 rows of table 'a', got 11"),
        (lambda s: {"num_embeddings": {"x": 11}}, r"names among \['a', 'b'\], got 'x'"),
        (lambda s: {"dynamic": {"x": dyn.DynamicTableConfig()}}, r"names among .*got \['x'\]"),
    ],
)
def test_impossible_wishes(options: Callable[[nn.Module], dict[str, Any]], message: str) -> None:
    static = ebc()
    wishes = options(static)
    before = {name: one.clone() for name, one in weights_of(static).items()}
    with pytest.raises(ValueError, match=message):
        from_static(static, **wishes)
    assert all(torch.equal(before[name], one) for name, one in weights_of(static).items())


def test_impossible_collections() -> None:
    for wrong, message in (
        (nn.Linear(2, 2), "expected an unsharded EmbeddingBagCollection .* got Linear"),
        (from_static(ebc()), "got DynamicEmbeddingBagCollection"),
        (
            ebc(device=torch.device("meta")),
            "expected the rows of all tables on one real device, got meta",
        ),
        (ebc().double(), "expected rows of float32, .* got torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            from_static(wrong)
    cut = ebc()
    cut.embedding_bags["a"].weight = nn.Parameter(torch.zeros(11, 8))
    with pytest.raises(ValueError, match=r"expected a weight \[12, 8\] .* got \[11, 8\]"):
        from_static(cut)
    two = ebc()
    for _ in range(2), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        apply_optimizer_in_backward(torch.optim.SGD, two.parameters(), {"lr": 0.1})
    with pytest.raises(
        ValueError, match=r"expected one optimizer on the parameter, got \['SGD', 'SGD"
    ):
        from_static(two)


def test_one_limit_for_all_tables() -> None:
    made = from_static(ebc(), fused_params=RULE, num_embeddings=90)
    assert {config.num_embeddings for config in made.embedding_bag_configs()} == {90}
    for wrong in (0, True, "many"):
        with pytest.raises(
            ValueError, match=f"expected at least the .* rows of table .* got {wrong!r}"
        ):
            from_static(ebc(), num_embeddings=wrong)


def test_a_limit_that_is_too_large() -> None:
    with pytest.raises(
        ValueError, match=r"expected num_embeddings of at most 90071.*, got 4611686"
    ):
        from_static(ebc(), num_embeddings={"a": 2**62})
