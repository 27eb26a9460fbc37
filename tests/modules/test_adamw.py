"""ADAMW against torch.optim.AdamW row by row, at the step of the table, and against the formula of ReCIS."""

import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import Setup, load, new, quietly, state_dict_of, train
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from static_collections import OPTIMIZERS, ebc
from table_cases import bags_of, ids_of, make_group, make_table, same_state
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint_format.checkpoint_reader import open_checkpoint
from torchrec_dyn.initializers import Constant, Normal
from torchrec_dyn.migration import from_static
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

POOL = torch.arange(30) * 7919 - 1000
HYPER = {"learning_rate": 0.02, "eps": 0.1, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3}
TORCH = {"lr": 0.02, "eps": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.3}
EMPTY = bags_of([])


def adamw_table(dim=17, kind=OptimizerKind.ADAMW, hyper=None, **options):
    rule = RowOptimizer(kind, **(HYPER if hyper is None else hyper))
    start = options.pop("initializer", Normal(0.0, 0.5))
    table = make_table(optimizer=rule, embedding_dim=dim, initializer=start, **options)
    table.find_or_insert(POOL)
    return table


def rows_of(table):
    return table.lookup(POOL)[0]


def train_rows(table, numbers, grad):
    """Runs a step in which the ids POOL[numbers] get the gradients [M, D]."""
    group = make_group(table, pooling="none")
    output = group(POOL[numbers], torch.tensor([0, len(numbers)]), training=True)
    output.backward(grad)


class TorchRows:
    """torch.optim.AdamW on the rows of a batch only, at a given step."""

    def __init__(self, weight, **options):
        self.weight, self.options = weight.clone(), options
        self.moments = [torch.zeros_like(weight), torch.zeros_like(weight)]

    def update(self, numbers, grad, step):
        row = torch.nn.Parameter(self.weight[numbers])
        optimizer = torch.optim.AdamW([row], **self.options)
        kept = {"exp_avg": self.moments[0][numbers], "exp_avg_sq": self.moments[1][numbers]}
        optimizer.state[row] = {"step": torch.tensor(step - 1.0), **kept}
        row.grad = grad.to(row.dtype)
        optimizer.step()
        self.weight[numbers] = row.detach()
        self.moments[0][numbers] = optimizer.state[row]["exp_avg"]
        self.moments[1][numbers] = optimizer.state[row]["exp_avg_sq"]


@pytest.mark.parametrize("dim", [5, 16, 33])
def test_every_row_at_every_step_is_torchs_own(dim):
    """The error against torch in float64 is at most twice the error of torch in float32."""
    table, draw = adamw_table(dim), torch.Generator().manual_seed(dim)
    learners = []
    for dtype in (torch.float32, torch.float64):
        weight = torch.nn.Parameter(rows_of(table).to(dtype))
        learners.append((weight, torch.optim.AdamW([weight], **TORCH)))
    for _ in range(50):
        grad = torch.randn(30, dim, generator=draw)
        train_rows(table, list(range(30)), grad)
        for weight, optimizer in learners:
            weight.grad = grad.to(weight.dtype)
            optimizer.step()
    (theirs, _), (exact, _) = learners
    ours = (rows_of(table).double() - exact).abs().max()
    assert ours <= 2 * (theirs.double() - exact).abs().max()
    assert ours < 1e-6


def test_rows_learn_only_when_a_batch_names_them():
    """Rows outside a batch do not change, by decay or momentum either; the step is the table's."""
    table, draw = adamw_table(), torch.Generator().manual_seed(3)
    expected = TorchRows(rows_of(table).double(), **TORCH)
    for step in range(1, 40):
        if step % 5 == 0:  # counts as a step, though no row is updated
            make_group(table)(*EMPTY, training=True).sum().backward()
            continue
        numbers = torch.randperm(29, generator=draw)[:7].tolist()
        grad, before = torch.randn(7, 17, generator=draw), rows_of(table)
        train_rows(table, numbers, grad)
        expected.update(numbers, grad, step)
        others = [number for number in range(30) if number not in numbers]
        assert torch.equal(rows_of(table)[others], before[others])
    torch.testing.assert_close(rows_of(table).double(), expected.weight, rtol=1e-5, atol=1e-6)
    state = table.export_state()
    places = ((state["ids"] + 1000) // 7919).tolist()
    for name, moment in zip(("momentum1", "momentum2"), expected.moments, strict=True):
        torch.testing.assert_close(state[name].double(), moment[places], rtol=1e-4, atol=1e-7)
    assert table.step == 39


def test_it_is_the_rule_of_adam_whose_decay_is_decoupled():
    tables = [adamw_table(kind=kind) for kind in (OptimizerKind.ADAM, OptimizerKind.ADAMW)]
    for step in range(6):
        grad = torch.randn(30, 17, generator=torch.Generator().manual_seed(step))
        for table in tables:
            train_rows(table, list(range(30)), grad)
    assert same_state(*(table.export_state() for table in tables))


@pytest.mark.parametrize("step", [1, 2, 100])
def test_recis_weighs_eps_by_the_root_of_the_second_correction(step):
    """SparseAdamW: e(1 - lr wd) - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)."""
    eps, lr, beta1, beta2, decay = 0.05, 0.02, 0.8, 0.95, 0.3
    correction = (1 - beta2**step) ** 0.5
    table = adamw_table(hyper={**HYPER, "eps": eps / correction})
    weight, grad = rows_of(table).double(), torch.randn(30, 17)
    for _ in range(step - 1):
        make_group(table)(*EMPTY, training=True)
    train_rows(table, list(range(30)), grad)
    m, v = (1 - beta1) * grad.double(), (1 - beta2) * grad.double() ** 2
    rate = lr * correction / (1 - beta1**step)
    expected = weight * (1 - lr * decay) - rate * m / (v.sqrt() + eps)
    torch.testing.assert_close(rows_of(table).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_rows_keep_a_decay_below_their_rounding(dtype):
    """lr wd = 1e-4 is below half a unit of both dtypes at 0.75; the mean over many rows has all of it."""
    table = make_table(
        optimizer=RowOptimizer(OptimizerKind.ADAMW, 0.01, weight_decay=0.01),
        embedding_dim=64, num_embeddings=4000, initializer=Constant(0.75), dtype=dtype,
    )  # fmt: skip
    ids = torch.arange(2000)
    group = make_group(table, pooling="none")
    for _ in range(30):
        output = group(ids, torch.tensor([0, 2000]), training=True)
        output.backward(torch.zeros_like(output))
    rows = table.lookup(ids)[0].double()
    assert rows.unique().numel() > 1
    assert rows.mean().item() == pytest.approx(0.75 * (1 - 1e-4) ** 30, abs=8e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_rows_follow_torch_in_the_mean(dtype):
    weight = torch.randn(17).to(dtype)
    table = make_table(
        optimizer=RowOptimizer(OptimizerKind.ADAMW, **HYPER), embedding_dim=17, dtype=dtype
    )
    ids = torch.arange(800)
    table.assign(ids, weight.expand(800, 17))
    exact = TorchRows(weight.double()[None], **TORCH)
    for step in range(1, 11):
        grad = torch.randn(1, 17)
        output = make_group(table, pooling="none")(ids, torch.tensor([0, 800]), training=True)
        output.backward(grad.expand(800, 17))
        exact.update([0], grad, step)
    step_of_type = torch.finfo(dtype).eps * exact.weight.abs().clamp(min=0.1)
    error = (table.lookup(ids)[0].double().mean(0) - exact.weight).abs()
    assert (error < step_of_type).all()


def test_what_is_left_out_is_torchs_default():
    rule = RowOptimizer.from_fused_params({"optimizer": "AdamW"}, "here")
    told = inspect.signature(torch.optim.AdamW).parameters
    assert rule.kind == OptimizerKind.ADAMW
    assert (rule.learning_rate, rule.eps) == (told["lr"].default, told["eps"].default)
    assert (rule.beta1, rule.beta2) == told["betas"].default
    assert rule.weight_decay == told["weight_decay"].default == 0.01
    given = {"optimizer": "ADAMW", "learning_rate": 0.5, "weight_decay": 0, "weight_decay_mode": 2}
    rule = RowOptimizer.from_fused_params(given, "here")
    assert (rule.learning_rate, rule.weight_decay) == (0.5, 0.0)
    assert RowOptimizer.from_fused_params({"optimizer": "ADAM"}, "here").weight_decay == 0.0


def test_an_l2_term_is_not_adamw():
    message = (
        r"'user': expected a weight_decay_mode of DECOUPLE or none with ADAMW.*got L2\. Remove"
    )
    with pytest.raises(ValueError, match=message):
        RowOptimizer.from_fused_params(
            {"optimizer": "adamw", "weight_decay_mode": 1}, "table 'user'"
        )


def collection(**options):
    tables = [EmbeddingBagConfig(100, 8, name, feature_names=[name]) for name in "ab"]
    return dyn.DynamicEmbeddingBagCollection(tables, **options)


def rules(of):
    return {name: table.optimizer for name, table in of.local_tables().items()}


def test_torchs_class_in_backward():
    made = collection(fused_params={"optimizer": EmbOptimType.ADAM, "learning_rate": 0.7})
    apply_optimizer_in_backward(torch.optim.AdamW, [made.embedding_bags["a"].weight], TORCH)
    batch = KeyedJaggedTensor(["a", "b"], ids_of(1, 2, 3), lengths=ids_of(2, 1))
    made(batch).values().sum().backward()
    assert rules(made)["a"] == RowOptimizer(OptimizerKind.ADAMW, **HYPER)
    assert rules(made)["b"] == RowOptimizer(OptimizerKind.ADAM, 0.7)
    assert [one["lr"] for one in made.fused_optimizer.param_groups] == [0.02, 0.7]

    plain = collection()
    harmless = {"foreach": True, "fused": None, "capturable": False, "amsgrad": False}
    apply_optimizer_in_backward(torch.optim.AdamW, plain.parameters(), harmless)
    plain(batch)
    assert set(rules(plain).values()) == {
        RowOptimizer(OptimizerKind.ADAMW, 1e-3, weight_decay=1e-2)
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, r"table='a'.*expected amsgrad=False, got True. Row optimizers lack it"),
        ({"maximize": True}, "expected maximize=False"),
    ],
)
def test_options_that_rows_do_not_know(options, message):
    made = collection()
    apply_optimizer_in_backward(torch.optim.AdamW, made.parameters(), options)
    with pytest.raises(ValueError, match=message):
        made(KeyedJaggedTensor(["a", "b"], ids_of(1, 2), lengths=ids_of(1, 1)))


def test_betas_must_be_two():
    made = collection()
    made.embedding_bags["a"].mark_optimizer([torch.optim.AdamW], [{"betas": 0.9}])
    with pytest.raises(ValueError, match=r"expected betas as a pair of numbers, got 0\.9"):
        made(KeyedJaggedTensor(["a", "b"], ids_of(1, 2), lengths=ids_of(1, 1)))


def test_a_static_collection_learns_on_by_the_decay_that_is_named():
    static = ebc()
    optimizer = OPTIMIZERS["ADAMW"](static.parameters())
    optimizer.param_groups[0]["weight_decay"] = 0.2
    for parameter in static.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = from_static(static, optimizer, fused_params={"optimizer": "ADAMW", "weight_decay": 0.2})
    table = made.local_tables()["a"]
    assert (table.optimizer.weight_decay, table.step) == (0.2, 1)
    moment = optimizer.state[static.embedding_bags["a"].weight]["exp_avg_sq"]
    assert torch.equal(table.export_state()["momentum2"], moment[table.ids()])


def test_a_checkpoint_tells_the_rule_and_goes_into_no_other(tmp_path):
    setup, path = Setup(0, optimizer="ADAMW", tables=2), tmp_path / "c"
    model = new(setup)
    train(model, setup, range(3))
    quietly(dcp.save, state_dict_of(model), checkpoint_id=str(path))
    told = [table.optimizer for table in open_checkpoint(path).tables.values()]
    assert [one and one["optimizer"] for one in told] == ["adamw", "adamw"]

    def states(of):
        return [table.export_state() for table in of.collection.local_tables().values()]

    kept = states(model)
    assert all(map(same_state, states(load(new(setup), path)), kept))
    # The state has ADAM's shapes, but the optimizer differs, which is an error.
    other = new(Setup(0, optimizer="ADAM", tables=2))
    with pytest.raises(ValueError, match=r"optimizer state of adam as the model has, got .* adamw"):
        load(other, path)
    for state, theirs in zip(states(other), kept, strict=True):  # the model was loaded before
        assert torch.equal(state["weight"], theirs["weight"])
        assert not state["momentum1"].any() and theirs["momentum1"].any()
