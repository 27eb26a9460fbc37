"""`DynamicTableConfig.on_nonfinite` of unsharded collections: the default, "skip" and "error"."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from mock_device import CUDA, MockDevice, run_lookups_backward
from table_cases import bits
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn

KINDS = [
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
]
IDS = torch.tensor([1, 2, 3])
DIM = 20


def collection(*choices, kind=EmbOptimType.ADAM, dtypes=(), defers=False, **options):
    """Returns a collection with a table for each choice of `on_nonfinite`: t0, t1, ..."""
    names = [f"t{t}" for t in range(len(choices))]
    dtypes = dtypes or [DataType.FP32] * len(names)
    return dyn.DynamicEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=100, feature_names=[name], data_type=dtype
            )
            for name, dtype in zip(names, dtypes, strict=True)
        ],
        dynamic={
            name: dyn.DynamicTableConfig(on_nonfinite=choice)
            for name, choice in zip(names, choices, strict=True)
        },
        fused_params={"optimizer": kind, "learning_rate": 0.1, "defer_updates": defers},
        **options,
    )  # fmt: skip


def batch(tables):
    return KeyedJaggedTensor(
        [f"t{t}" for t in range(tables)],
        IDS.repeat(tables),
        lengths=torch.ones(len(IDS) * tables, dtype=torch.int64),
    )


def train(model, spoiled=(), number=math.nan):
    """Trains ids 1, 2 and 3 of all tables; id 2 of the spoiled tables gets a gradient with this number."""
    tables = len(model.embedding_bag_configs())
    grad = torch.ones(len(IDS), DIM * tables)
    for table in spoiled:
        grad[1, DIM * table + 7] = number
    (model(batch(tables)).values().float() * grad).sum().backward()


def state_of(model, table):
    return {
        name: value.clone()
        for name, value in model.table(f"t{table}").shards[0].export_state().items()
    }


def same_rows(one, other, rows):
    """Returns whether some rows are the same in two states, with their optimizer state."""
    place = [one["ids"].tolist().index(row) for row in rows]
    return all(
        torch.equal(bits(one[name][place]), bits(other[name][place]))
        for name in one
        if one[name].dim() and len(one[name]) == len(one["ids"])
    )


def counts(model):
    return [
        model.table(f"t{t}").stats()["nonfinite"] for t in range(len(model.embedding_bag_configs()))
    ]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_skip_leaves_the_row_and_its_state(kind, number):
    model, other = (collection("skip", "write", "write", kind=kind) for _ in range(2))
    train(model), train(other)
    before = state_of(model, 0)
    train(model, (0, 1), number), train(other)
    after, whole = state_of(model, 0), state_of(other, 0)
    assert same_rows(after, before, [2]) and same_rows(after, whole, [1, 3])
    assert not same_rows(after, before, [1]) and not same_rows(after, before, [3])
    assert counts(model) == [1, 0, 0]
    row = model.table("t1").lookup(torch.tensor([2]))[0]
    assert not row.isfinite().all()  # as FBGEMM
    train(model)
    assert counts(model) == [1, 0, 0] and state_of(model, 0)["weight"].isfinite().all()


def test_the_default_writes():
    assert dyn.DynamicTableConfig().on_nonfinite == "write"
    model = collection("write")
    train(model, (0,))
    assert model.table("t0").lookup(IDS)[0].isfinite().all(1).tolist() == [True, False, True]
    assert counts(model) == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_error_is_raised_by_backward_and_changes_nothing(kind):
    model = collection("error", "write", "skip", kind=kind)
    train(model)
    before = [state_of(model, table) for table in range(3)]
    with pytest.raises(RuntimeError, match="got NaN or infinity in 1 rows"):
        train(model, (0, 2))
    for table in range(3):
        assert same_rows(state_of(model, table), before[table], [1, 2, 3])
    assert counts(model) == [1, 0, 1]
    train(model)  # the forward is closed, and training goes on
    assert counts(model) == [1, 0, 1]
    assert not same_rows(state_of(model, 0), before[0], [2])


@pytest.mark.parametrize("defers", [False, True])
def test_other_groups_have_their_update_when_the_error_is_raised(defers):
    for spoiled in (0, 1):
        dtypes = [DataType.FP32, DataType.BF16]
        model = collection("error", "error", dtypes=dtypes, defers=defers)
        train(model), model.fused_optimizer.step()
        before = [state_of(model, table) for table in range(2)]
        with pytest.raises(RuntimeError, match="got NaN or infinity in 1 rows"):
            train(model, (spoiled,)), model.fused_optimizer.step()
        changed = [not same_rows(state_of(model, t), before[t], [1, 2, 3]) for t in range(2)]
        assert changed == [spoiled == 1, spoiled == 0]
        train(model)  # the step has ended for both groups
        assert [model.table(f"t{t}").stats()["step"] for t in range(2)] == [3, 3]


def test_tables_of_another_optimizer_have_their_update_when_the_error_is_raised():
    model = collection("error", "error", defers=True)
    model.embedding_bags["t1"].mark_optimizer([torch.optim.SGD], [{"lr": 0.1}])
    train(model), model.fused_optimizer.step()
    before = [state_of(model, table) for table in range(2)]
    with pytest.raises(RuntimeError, match="got NaN or infinity in 1 rows"):
        train(model, (0,)), model.fused_optimizer.step()
    assert same_rows(state_of(model, 0), before[0], [1, 2, 3])
    assert not same_rows(state_of(model, 1), before[1], [1, 2, 3])


def test_the_first_of_several_errors_is_raised_and_none_is_left():
    model = collection("error", "error", dtypes=[DataType.FP32, DataType.BF16])
    with pytest.raises(RuntimeError, match="got NaN or infinity in 1 rows"):
        train(model, (0, 1))
    assert counts(model) == [1, 1]
    train(model)


@pytest.mark.parametrize("dtype", [DataType.FP16, DataType.BF16])
def test_a_row_that_overflows_as_it_is_stored_stays(dtype):
    model = collection("skip", kind=EmbOptimType.EXACT_SGD, dtypes=[dtype])
    train(model)
    largest = torch.finfo(torch.float16 if dtype == DataType.FP16 else torch.bfloat16).max
    model.table("t0").assign(IDS, torch.full((3, DIM), largest))
    grad = torch.full(
        (3, DIM), -10 * largest / 64
    )  # times the rate: more than half of the last step
    (model(batch(1)).values() * grad).sum().backward()
    assert torch.equal(model.table("t0").lookup(IDS)[0].float(), torch.full((3, DIM), largest))
    assert counts(model) == [3]


def test_a_frozen_table_counts_nothing():
    model = collection("error", "skip")
    train(model)
    model.table("t0").freeze()
    train(model, (0,))
    assert counts(model) == [0, 0]


def test_a_change_of_the_choice_of_others_counts_in_the_right_table():
    """The tables are listed again when one is loaded or converted."""
    model = collection("skip", "write", "skip")
    train(model, (0,))
    state = model.state_dict()
    train(model, (2,))
    model.load_state_dict(state)
    train(model, (2,))
    model.half()
    train(model, (0,))
    assert counts(model) == [2, 0, 2]


def test_copies_count_on_their_own():
    model = collection("skip")
    train(model, (0,))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stored, weights_only=False),
    ):
        assert counts(copied) == [1]
        train(copied, (0,))
        assert counts(copied) == [2] and counts(model) == [1]


@pytest.mark.parametrize("given", ["Skip", None, True, "raise"])
def test_another_choice_is_an_error(given):
    with pytest.raises(ValueError, match=r'on_nonfinite: expected "write", "skip" or "error", got'):
        dyn.DynamicTableConfig(on_nonfinite=given)


def test_on_a_gpu_the_error_is_raised_late():
    with MockDevice() as device:
        model = collection("error", "skip").to(CUDA)
        given = batch(2).to(CUDA)
        out = model(given)
        before = [model.table(name).lookup(IDS)[0].cpu() for name in ("t0", "t1")]
        grad = torch.ones(3, 2 * DIM)
        grad[1, 7] = math.nan
        device.forget()
        run_lookups_backward(out, grad=grad)
        assert device.reads == []  # nothing waits for the check
        with pytest.raises(RuntimeError, match="got NaN or infinity in 1 rows"):
            model(given)
        for name, rows in zip(("t0", "t1"), before, strict=True):
            assert torch.equal(model.table(name).lookup(IDS)[0].cpu(), rows)
        assert counts(model) == [1, 0]
        grad[1, 7], grad[1, DIM + 7] = 1.0, math.inf
        run_lookups_backward(model(given), grad=grad)
        model(given)
        assert counts(model) == [1, 1]
        after = model.table("t1").lookup(IDS)[0].cpu()
        assert (after != before[1]).any(1).tolist() == [True, False, True]
