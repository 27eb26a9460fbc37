"""Rules of rows in Python: against formulas, against the kernel, under plans, saved and loaded."""

from __future__ import annotations

import copy
import io
import math
from typing import Any, ClassVar

import pytest
import torch
import workers
from checkpoint_cases import Setup, load, new, run_on, save
from checkpoint_cases import train as train_steps
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from mock_device import CUDA, MockDevice, run_lookups_backward
from sharded_cases import Case, three_tables
from sharded_training import check_trains_as_unsharded
from table_cases import bits
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_types import OptimType
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import LarsSGD

import torchrec_dyn as dyn

IDS = torch.arange(8)


class Adagrad(dyn.RowRule):
    """EXACT_ADAGRAD, in Python."""

    name = "own_adagrad"
    states: ClassVar = {"sum_of_squares": dyn.RuleState(initial=0.25)}

    def __init__(self, eps: float = 1e-8) -> None:
        self.eps = eps

    def update(self, rows, grads, states, learning_rate, step):
        squares = states["sum_of_squares"].addcmul_(grads, grads)
        rows.addcdiv_(grads, squares.sqrt().add_(self.eps), value=-learning_rate)


class Spoils(dyn.RowRule):
    """Makes the rows of large gradients NaN, and raises an error for larger ones."""

    name = "spoils"
    states: ClassVar = {"steps": dyn.RuleState(rowwise=True), "last": dyn.RuleState()}

    def update(self, rows, grads, states, learning_rate, step):
        if grads.max() > 90:
            raise KeyError("too large")
        rows.sub_(torch.where(grads > 9, math.nan, grads))
        states["steps"].fill_(step)
        states["last"].copy_(grads)


def collection(rule: Any, dtype: str = "FP32", **options: Any) -> Any:
    kinds = {"a": (["f", "g"], 8), "b": (["h"], 4)}
    configs = [
        EmbeddingBagConfig(
            name=name,
            feature_names=features,
            embedding_dim=width,
            num_embeddings=100,
            data_type=DataType[dtype],
        )
        for name, (features, width) in kinds.items()
    ]
    dynamic = dyn.DynamicTableConfig(**options)
    fused = {"learning_rate": 0.1, **(rule if isinstance(rule, dict) else {"optimizer": rule})}
    return dyn.DynamicEmbeddingBagCollection(configs, fused_params=fused, dynamic=dynamic)


def batch() -> KeyedJaggedTensor:
    lengths = torch.randint(4, (15,))
    return KeyedJaggedTensor(
        ["f", "g", "h"], torch.randint(8, (int(lengths.sum()),)), lengths=lengths
    )


def train(models: list[Any], steps: int = 4) -> None:
    for _ in range(steps):
        features, grad = batch(), torch.randn(5, 20)
        for model in models:
            output = model(features).values()
            output.backward(grad.to(output.dtype))


def state(model: Any, table: str) -> dict[str, torch.Tensor]:
    return model.table(table).shards[0].export_state()


@pytest.mark.parametrize("defers", [False, True])
def test_adagrad_in_python_trains_as_the_kernel(defers: bool) -> None:
    torch.manual_seed(0)
    own = collection({"optimizer": Adagrad(), "defer_updates": defers})
    kernel = collection({"optimizer": "EXACT_ADAGRAD", "initial_accumulator_value": 0.25})
    for _ in range(4):
        train([own, kernel], 1)
        own.fused_optimizer.step()
    for table in ("a", "b"):
        one, other = state(own, table), state(kernel, table)
        assert torch.equal(one["ids"], other["ids"])
        for name in ("weight", "momentum1"):
            torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-7)
    assert own.table("a").stats()["step"] == 4


@pytest.mark.parametrize(
    "rule", [dyn.Lion(0.9, 0.99, 0.1), dyn.LarsSGD(0.02, 0.9, 0.1)], ids=["lion", "lars"]
)
def test_examples_follow_their_papers(rule: Any) -> None:
    """Row by row, with gradients summed by torch."""
    torch.manual_seed(1)
    model = collection(rule)
    with torch.no_grad():
        model(KeyedJaggedTensor(["f", "g", "h"], IDS.repeat(3), lengths=torch.full((3,), 8)))
    rows = model.table("b").lookup(IDS)[0].double()
    momentum = torch.zeros(8, 4, dtype=torch.float64)
    for _ in range(5):
        features, grad = batch(), torch.randn(5, 20)
        model(features).values().backward(grad)
        jagged = features.to_dict()["h"]
        of_ids = grad[:, 16:].double().repeat_interleave(jagged.lengths(), 0)
        grads = torch.zeros(8, 4, dtype=torch.float64).index_add(0, jagged.values(), of_ids)
        for i in jagged.values().unique().tolist():
            g, w, m = grads[i], rows[i], momentum[i]
            if isinstance(rule, dyn.Lion):
                rows[i] = w - 0.1 * ((0.9 * m + 0.1 * g).sign() + 0.1 * w)
                momentum[i] = 0.99 * m + 0.01 * g
            else:
                trust = 0.02 * w.norm() / (g.norm() + 0.1 * w.norm())
                momentum[i] = 0.9 * m + 0.1 * trust * (g + 0.1 * w)
                rows[i] = w - momentum[i]
    torch.testing.assert_close(model.table("b").lookup(IDS)[0].double(), rows, rtol=1e-4, atol=1e-6)


def test_half_rows_are_rounded_stochastically() -> None:
    """A change of a 64th of the spacing of float16 moves some numbers by a whole one, on average right."""

    class Moves(dyn.RowRule):
        name = "moves"

        def update(self, rows, grads, states, learning_rate, step):
            rows.add_(2.0**-16)

    model = collection(Moves(), "FP16", initializer=dyn.Constant(1.0))
    for _ in range(64):
        features = KeyedJaggedTensor(["f", "g", "h"], IDS, lengths=torch.tensor([8, 0, 0]))
        model(features).values().sum().backward()
    rows = model.table("a").lookup(IDS)[0].float()
    assert rows.unique().numel() > 2
    assert float(rows.mean()) == pytest.approx(1 + 64 * 2.0**-16, abs=3e-4)


class Replaces(dyn.RowRule):
    """Puts a state of another shape or dtype in the place of its state."""

    name = "replaces"
    states: ClassVar = {"last": dyn.RuleState()}

    def __init__(self, replace: Any) -> None:
        self.replace = replace

    def update(self, rows, grads, states, learning_rate, step):
        rows.sub_(grads)
        states["last"] = self.replace(states["last"])


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize(
    "replace", [lambda one: one.mean(1, keepdim=True), lambda one: one.double()]
)
def test_a_state_of_another_shape_or_dtype_changes_no_row(replace: Any, defers: bool) -> None:
    model = collection({"optimizer": Replaces(replace), "defer_updates": defers})
    with torch.no_grad():
        model(KeyedJaggedTensor(["f", "g", "h"], IDS.repeat(3), lengths=torch.full((3,), 8)))
    before = [state(model, table) for table in ("a", "b")]
    with pytest.raises(ValueError, match=r"expected the state 'last' after .* Change it in place"):
        train([model], 1), model.fused_optimizer.step()
    for table, was in zip(("a", "b"), before, strict=True):
        now = state(model, table)
        assert all(torch.equal(now[name], was[name]) for name in ("ids", "weight", "momentum1"))


@pytest.mark.parametrize("choice", ["skip", "error"])
def test_rows_that_are_not_finite_are_refused(choice: str) -> None:
    model = collection(Spoils(), on_nonfinite=choice)
    features = KeyedJaggedTensor(["f", "g", "h"], IDS[:3], lengths=torch.ones(3, dtype=torch.long))
    grad = torch.ones(1, 20)
    model(features).values().backward(grad)
    before = [state(model, table) for table in ("a", "b")]
    grad[0, 3] = 10.0  # of id 0 in a
    out = model(features).values()
    if choice == "error":
        with pytest.raises(RuntimeError, match=r"expected finite rows and states after Spoils\(\)"):
            out.backward(grad)
    else:
        out.backward(grad)
    after = [state(model, table) for table in ("a", "b")]
    place = before[0]["ids"].tolist().index(0)
    for name in ("weight", "momentum1", "momentum2"):
        assert torch.equal(after[0][name][place], before[0][name][place])
        changed = not torch.equal(after[1][name], before[1][name])
        assert changed == (choice == "skip" and name != "momentum2"), name
    assert model.table("a").stats()["nonfinite"] == 1


def test_an_error_of_a_rule_changes_no_row() -> None:
    model = collection(Spoils())
    features = KeyedJaggedTensor(["f", "g", "h"], IDS[:3], lengths=torch.ones(3, dtype=torch.long))
    out = model(features).values()
    before = [state(model, table)["weight"] for table in ("a", "b")]
    grad = torch.ones(1, 20)
    grad[0, 19] = 100.0  # in the second table
    with pytest.raises(KeyError, match="too large"):
        out.backward(grad)
    assert all(torch.equal(state(model, t)["weight"], w) for t, w in zip("ab", before, strict=True))


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("spoiled", range(3))
def test_an_error_of_a_rule_holds_back_no_other_group(spoiled: int, defers: bool) -> None:
    """Whatever its type: the other tables have their update, and no gradient of this step is in the next."""
    configs = [
        EmbeddingBagConfig(20, 4, name, feature_names=[name], data_type=DataType[dtype])
        for name, dtype in (("a", "FP32"), ("b", "BF16"), ("c", "FP16"))
    ]
    fused = {"optimizer": Spoils(), "defer_updates": defers}
    model = dyn.DynamicEmbeddingBagCollection(configs, fused_params=fused)
    features = KeyedJaggedTensor(["a", "b", "c"], IDS[:3], lengths=torch.ones(3, dtype=torch.long))

    def step(grad: torch.Tensor) -> list[torch.Tensor]:
        """Returns how much each table has changed."""
        before = [state(model, table)["weight"].float() for table in "abc"]
        try:
            output = model(features).values()
            output.backward(grad.to(output.dtype))
            model.fused_optimizer.step()
        except KeyError as error:
            assert "too large" in str(error) and grad.max() == 100
        after = [state(model, table)["weight"].float() for table in "abc"]
        return [float((one - other).mean()) for one, other in zip(before, after, strict=True)]

    step(torch.ones(1, 12))  # inserts
    grad = torch.ones(1, 12)
    grad[0, 4 * spoiled] = 100.0
    changes = [0.0 if table == spoiled else 1.0 for table in range(3)]
    assert step(grad) == pytest.approx(changes, abs=0.05)
    assert step(torch.ones(1, 12)) == pytest.approx([1.0] * 3, abs=0.05)
    assert [model.table(table).stats()["step"] for table in "abc"] == [3, 3, 3]


def test_saved_by_name_and_states(tmp_path: Any) -> None:
    torch.manual_seed(2)
    model = collection(Adagrad())
    train([model])
    saved, optimizer = io.BytesIO(), model.fused_optimizer.state_dict()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    other = collection(Adagrad())
    other.load_state_dict(torch.load(saved, weights_only=True))
    other.fused_optimizer.load_state_dict(optimizer)
    train([model, other])
    for name, numbers in state(model, "a").items():
        assert torch.equal(bits(numbers), bits(state(other, "a")[name])), name
    for wrong in ("EXACT_ADAGRAD", dyn.Lion()):
        with pytest.raises(ValueError, match="got that of own_adagrad with sum_of_squares"):
            another = collection(wrong)
            another.load_state_dict(model.state_dict())
            another.fused_optimizer.load_state_dict(optimizer)


def test_changes_are_recorded(tmp_path: Any) -> None:
    torch.manual_seed(3)
    model = collection(dyn.Lion())
    train([model])
    marker, replica = dyn.checkpoint.mark(model), copy.deepcopy(model)
    train([model])
    dyn.checkpoint.export_delta(model, tmp_path / "delta", since=marker)
    dyn.checkpoint.apply_delta(replica, tmp_path / "delta")
    for name, numbers in state(model, "a").items():
        assert torch.equal(bits(numbers), bits(state(replica, "a")[name])), name


def test_errors_of_rules() -> None:
    class Nameless(Spoils):
        name = ""

    for rule, text in (
        (dyn.Lion, "expected an object of Lion, got the class"),
        (Nameless(), "expected a RowRule with a name and at most 2 states"),
        ({"optimizer": dyn.Lion(), "eps": 0.1}, "in its constructor, got eps"),
    ):
        with pytest.raises(ValueError, match=text):
            collection(rule)(batch())
    assert dyn.Lion() == copy.deepcopy(dyn.Lion()) != dyn.Lion(0.8)


LARS = {"eta": 0.02, "momentum": 0.8, "weight_decay": 0.1}
LION = {"beta1": 0.5, "beta2": 0.75, "weight_decay": 0.1}
NAMED = [
    (EmbOptimType.LARS_SGD, LARS, dyn.LarsSGD(**LARS)),
    (OptimType.LARS_SGD, {"eta": 0.1}, dyn.LarsSGD(eta=0.1)),
    ("lars_sgd", {}, dyn.LarsSGD()),
    (OptimType.LION, LION, dyn.Lion(**LION)),
    ("LION", {}, dyn.Lion()),
]


@pytest.mark.parametrize(("name", "numbers", "rule"), NAMED)
def test_a_name_and_its_numbers_are_an_object(name: Any, numbers: Any, rule: dyn.RowRule) -> None:
    torch.manual_seed(0)
    by_name, by_object = collection({"optimizer": name, **numbers}), collection(rule)
    train([by_name, by_object])
    for table in ("a", "b"):
        one, other = state(by_name, table), state(by_object, table)
        assert one["momentum1"].any()
        for key, of_object in other.items():
            assert torch.equal(bits(one[key]), bits(of_object)), key
    by_object.fused_optimizer.load_state_dict(by_name.fused_optimizer.state_dict())


def test_lars_on_the_parameter() -> None:
    torch.manual_seed(0)
    in_backward = collection({})
    rate = {"lr": 0.2, "eta": 0.02}
    _apply_optimizer_in_backward(LarsSGD, in_backward.parameters(), rate)
    model = collection({"optimizer": "LARS_SGD", "learning_rate": 0.2, "eta": 0.02})
    train([model, in_backward])
    one, other = state(model, "a"), state(in_backward, "a")
    assert torch.equal(one["weight"], other["weight"]) and one["momentum1"].any()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"optimizer": "LION", "eps": 0.1, "l1": 0.0}, "of LION but learning_rate, beta1.*eps, l1"),
        ({"optimizer": "LION", "beta2": 1.0}, r"expected beta2 in \[0, 1\), got 1.0"),
        ({"optimizer": "LARS_SGD", "beta1": 0.9}, "expected no hyper-parameters of LARS_SGD but"),
        ({"optimizer": "LARS_SGD", "eta": -1}, "expected a finite eta >= 0, got -1"),
        ({"optimizer": "LARS_SGD", "weight_decay_mode": 1}, "got weight_decay_mode. Remove"),
        ({"optimizer": "ADAM", "momentum": 0.9}, "got 'momentum'. Remove it"),
        (
            {"optimizer": "LION", "use_rowwise_bias_correction": True},
            "expected use_rowwise_bias_correction with ADAM",
        ),
    ],
)
def test_numbers_that_a_named_rule_does_not_have(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        collection(given)(batch())


def test_a_rule_of_ones_own_may_have_such_a_name() -> None:
    class Own(Adagrad):
        name = "LION"

    model = collection(Own())
    train([model])
    assert state(model, "a")["momentum1"].ge(0.25).all()  # sums of squares


PLANS = {
    "tables and columns": Case(
        three_tables(("table_wise", "column_wise"), 2, 2, (8, 4, 12)),
        fused_params={"optimizer": dyn.Lion(), "learning_rate": 0.01},
    ),
    "sequences": Case(
        three_tables(("table_wise", "row_wise", "column_wise"), 2, 2),
        pooled=False,
        fused_params={"optimizer": dyn.Lion(), "learning_rate": 0.01},
    ),
    "by name": Case(
        three_tables(("table_wise", "row_wise", "column_wise"), 2, 2),
        pooled=False,
        fused_params={"optimizer": OptimType.LION, "learning_rate": 0.01, "beta2": 0.9},
    ),
    "LARS of whole rows": Case(
        three_tables(("table_wise", "row_wise"), 2, 2),
        pooled=False,
        fused_params={"optimizer": EmbOptimType.LARS_SGD, "learning_rate": 0.1, "eta": 0.1},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_under_plans_bit_for_bit(name: str) -> None:
    workers.run(check_trains_as_unsharded, PLANS[name], world_size=2)


def test_on_a_device_as_on_the_cpu() -> None:
    torch.manual_seed(4)
    ids = [torch.randint(8, (3 * number,)) for number in (2, 3)]
    batches = [
        (
            KeyedJaggedTensor(
                ["f", "g", "h"], of_batch, lengths=torch.full((6,), len(of_batch) // 6)
            ),
            torch.randn(2, 20),
        )
        for of_batch in (one.repeat(2) for one in ids)
    ]
    here = collection(dyn.Lion())
    for features, grad in batches:
        here(features).values().backward(grad)
    with MockDevice() as device:
        there = collection(dyn.Lion()).to(CUDA)
        for features, grad in batches:
            run_lookups_backward(there(features.to(CUDA)), grad=grad.to(CUDA))
        assert not device.mixed
        rows = {table: there.table(table).lookup(IDS)[0].cpu() for table in ("a", "b")}
    for table, of_table in rows.items():
        assert torch.equal(of_table, here.table(table).lookup(IDS)[0])


def test_lars_without_a_norm_takes_the_plain_rate() -> None:
    """A row of zeros, and a gradient of zeros, in which only the weight decay moves the row."""
    rule, rows = dyn.LarsSGD(0.02, 0.5, 0.1), torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]])
    grads = torch.tensor([[1.0, -2.0], [0.0, 0.0], [6.0, 8.0]])
    states = {"momentum": torch.ones(3, 2)}
    rate = 0.02 * 5 / (10 + 0.1 * 5)
    change = torch.tensor([[0.1, -0.2], [0.03, 0.04], [0.63 * rate, 0.84 * rate]])
    before = rows.clone()
    rule.update(rows, grads, states, 0.1, 1)
    torch.testing.assert_close(states["momentum"], 0.5 + change)
    torch.testing.assert_close(rows, before - 0.5 - change)


def saved_with_a_rule(setup: Setup, folder: str) -> None:
    model = new(setup)
    train_steps(model, setup, range(2))
    save(model, folder)


def check_refused_at_load(setup: Setup, folder: str) -> None:
    with pytest.raises(ValueError, match="got that of lion with momentum"):
        load(new(setup), folder)


@pytest.mark.parametrize("wrong", ["EXACT_ADAGRAD", "EXACT_SGD", "lars_sgd"])
def test_a_distributed_load_with_another_rule_is_refused(tmp_path: Any, wrong: str) -> None:
    setup = Setup(2, ("row_wise",), optimizer="lion", tables=1)
    run_on(setup, saved_with_a_rule, str(tmp_path / "saved"))
    run_on(
        Setup(2, ("row_wise",), optimizer=wrong, tables=1),
        check_refused_at_load,
        str(tmp_path / "saved"),
    )
