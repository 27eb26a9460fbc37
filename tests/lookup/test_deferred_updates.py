"""Deferred updates of unsharded collections: accumulation, clipping by norm, loss scaling."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_device import CUDA, MockDevice, run_lookups_backward
from table_cases import bits
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_dyn as dyn
from torchrec_dyn.lookup import TableGroup

FEATURES = ["f", "g", "h"]
WIDTHS = [8, 8, 4]
IDS = torch.arange(12)


def collection(defers: bool, **options: Any) -> Any:
    """Returns tables a, of the features f and g, and b, of h."""
    pooling = options.pop("pooling", PoolingType.SUM)
    dtype = DataType[options.pop("dtype", "FP32")]
    optimizer = options.pop("optimizer", "EXACT_ADAGRAD")
    more = options.pop("fused", {})
    config = options.pop("config", dyn.DynamicTableConfig())
    limit = options.pop("limit", 1000)
    kinds = {"a": (["f", "g"], 8), "b": (["h"], 4 if pooling else 8)}
    shared = {"num_embeddings": limit, "data_type": dtype}
    fused = {"optimizer": optimizer, "learning_rate": 0.1, "defer_updates": defers, **more}
    if pooling is None:
        configs = [
            EmbeddingConfig(name=name, feature_names=features, embedding_dim=width, **shared)
            for name, (features, width) in kinds.items()
        ]
        return dyn.DynamicEmbeddingCollection(
            configs, fused_params=fused, dynamic=config, **options
        )
    return dyn.DynamicEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, feature_names=features, embedding_dim=width, pooling=pooling, **shared
            )
            for name, (features, width) in kinds.items()
        ],
        fused_params=fused,
        dynamic=config,
        **options,
    )


Part = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def part(size: int, known: int = 12, most: int = 3) -> Part:
    """Returns the lengths, ids and weights of each feature of a batch of `size` samples."""
    lengths = [torch.randint(most + 1, (size,)) for _ in FEATURES]
    ids = [torch.randint(known, (int(of.sum()),)) for of in lengths]
    return lengths, ids, [torch.rand(len(of)) for of in ids]


def features_of(parts: list[Part], weighted: bool = False) -> KeyedJaggedTensor:
    lengths, ids, weights = (
        torch.cat([one[kind][f] for f in range(3) for one in parts]) for kind in range(3)
    )
    return KeyedJaggedTensor(FEATURES, ids, weights if weighted else None, lengths=lengths)


def grads_of(parts: list[Part], pooled: bool) -> list[list[torch.Tensor]]:
    """Returns the gradient of each part's outputs by feature."""
    return [
        [torch.randn(len(one[0 if pooled else 1][f]), WIDTHS[f] if pooled else 8) for f in range(3)]
        for one in parts
    ]


def backward(model: Any, features: KeyedJaggedTensor, grads: list[torch.Tensor]) -> None:
    out = model(features)
    if isinstance(out, dict):
        outputs = [out[name].values() for name in FEATURES]
    else:
        outputs = [out[name] for name in FEATURES]
    torch.autograd.backward(
        outputs, [one.to(of.dtype) for one, of in zip(grads, outputs, strict=True)]
    )


def states(model: Any) -> list[dict[str, torch.Tensor]]:
    return [model.table(name).shards[0].export_state() for name in ("a", "b")]


def check_same(one: Any, other: Any) -> None:
    for of_one, of_other in zip(states(one), states(other), strict=True):
        assert of_one.keys() == of_other.keys()
        for name, numbers in of_one.items():
            assert torch.equal(bits(numbers), bits(of_other[name])), name


CASES: dict[str, dict[str, Any]] = {
    "sum": {},
    "mean of float16": {"pooling": PoolingType.MEAN, "dtype": "FP16", "optimizer": "ADAM"},
    "weighted": {"is_weighted": True, "optimizer": "PARTIAL_ROWWISE_ADAM"},
    "sequences": {"pooling": None, "optimizer": "EXACT_ROWWISE_ADAGRAD"},
    "clamped": {"fused": {"gradient_clipping": True, "max_gradient": 0.5}},
    "counted": {"config": dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())},
}


@pytest.mark.parametrize("kind", CASES)
def test_micro_batches_train_as_one_large_batch_bit_for_bit(kind: str) -> None:
    """Two features share a table, ids repeat more often than a sum has pieces, and bags are empty."""
    torch.manual_seed(0)
    options = CASES[kind]
    large, small = collection(False, **options), collection(True, **options)
    weighted, pooled = options.get("is_weighted", False), options.get("pooling", 0) is not None
    for sizes in ([3, 1, 700], [5], [2, 2]):
        parts = [part(size) for size in sizes]
        grads = grads_of(parts, pooled)
        joined = [torch.cat([of[f] for of in grads]) for f in range(3)]
        backward(large, features_of(parts, weighted), joined)
        small.fused_optimizer.zero_grad()
        for one, of_one in zip(parts, grads, strict=True):
            backward(small, features_of([one], weighted), of_one)
        small.fused_optimizer.step()
        check_same(small, large)
    stats = small.table("a").stats()
    assert (stats["step"], stats["forwards"]) == (3, 6)
    assert stats["ids_seen"] == large.table("a").stats()["ids_seen"]


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("kind", ["ADAM", "counted"])
def test_zero_grad_before_a_forward_or_before_its_backward(kind: str, between: bool) -> None:
    """A step is one step in both orders, also after a step that was dropped."""
    torch.manual_seed(9)
    options = {"optimizer": "ADAM"} if kind == "ADAM" else CASES[kind]
    large, small = collection(False, **options), collection(True, **options)
    for _ in range(3):
        parts = [part(4), part(6)]
        grads = grads_of(parts, True)
        backward(large, features_of(parts), [torch.cat([of[f] for of in grads]) for f in range(3)])
        for number, (one, of_one) in enumerate(zip(parts, grads, strict=True)):
            if not number and not between:
                small.fused_optimizer.zero_grad()
            out = small(features_of([one]))
            if not number and between:
                small.fused_optimizer.zero_grad()
            torch.autograd.backward([out[name] for name in FEATURES], of_one)
        small.fused_optimizer.step()
        check_same(small, large)
    assert small.table("a").stats()["step"] == 3


def test_a_forward_before_zero_grad_drops_other_gradients_keeps_its_rows() -> None:
    """The step before was not written. The forward's rows are still those of the present step."""
    model = collection(
        True, limit=8, config=dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    )

    def forward(*ids: int) -> torch.Tensor:
        lengths = torch.tensor([len(ids), 0, 0])
        return model(KeyedJaggedTensor(FEATURES, torch.tensor(ids), lengths=lengths)).values().sum()

    skipped = forward(1, 2, 3, 4)
    skipped.backward()
    waits = forward(5, 6, 7, 8)
    model.fused_optimizer.zero_grad()
    waits.backward()
    with pytest.raises(RuntimeError, match="at most 8 rows"):
        forward(9)
    model.fused_optimizer.step()
    forward(9)
    assert (model.table("a").stats()["step"], model.table("a").stats()["late_grads"]) == (2, 0)
    model.fused_optimizer.zero_grad()
    forward(10)
    assert model.table("a").stats()["step"] == 3  # no forward waited


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_batches_train_as_one(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    large, small = collection(False), collection(True)
    for _ in range(2):
        parts = [part(size) for size in data.draw(st.lists(st.integers(0, 9), max_size=4))]
        grads = grads_of(parts, True)
        for one, of_one in zip(parts, grads, strict=True):
            backward(small, features_of([one]), of_one)
        small.fused_optimizer.step()
        if parts:
            joined = [torch.cat([of[f] for of in grads]) for f in range(3)]
            backward(large, features_of(parts), joined)
        check_same(small, large)


def on_device(model: Any, features: KeyedJaggedTensor, grads: list[torch.Tensor]) -> None:
    out = model(features)
    run_lookups_backward(out, grad=torch.cat(grads, dim=1).to(out.values().device))


def test_on_a_device_as_on_the_cpu() -> None:
    """Also the norm, and on the device no more reads of the host than without deferral."""
    config = dyn.DynamicTableConfig(eviction=dyn.LeastFrequentlyUsed())
    parts = [[part(4), part(6)], [part(3)]]
    grads = [grads_of(of_step, True) for of_step in parts]
    for of_step, of_parts in zip(parts, grads, strict=True):  # all features of one size
        for one, grad in zip(of_step, of_parts, strict=True):
            assert {len(lengths) for lengths in one[0]} == {len(grad[0])}
    here, norms = collection(True, config=config), []
    for of_step, of_parts in zip(parts, grads, strict=True):
        for one, grad in zip(of_step, of_parts, strict=True):
            backward(here, features_of([one]), grad)
        norms.append(dyn.clip_grad_norm_(here, 1.0))
        here.fused_optimizer.step()
    with MockDevice() as device:
        there = collection(True, config=config).to(CUDA)
        for of_step, of_parts, norm in zip(parts, grads, norms, strict=True):
            for one, grad in zip(of_step, of_parts, strict=True):
                on_device(there, features_of([one]).to(CUDA), grad)
            assert torch.equal(dyn.clip_grad_norm_(there, 1.0), norm)
            device.forget()
            there.fused_optimizer.step()
            assert device.reads == []
        for name in ("a", "b"):
            rows = there.table(name).lookup(IDS)[0].cpu()
            assert torch.equal(rows, here.table(name).lookup(IDS)[0])


def test_nothing_changes_until_the_step_and_zero_grad_drops() -> None:
    torch.manual_seed(2)
    model = collection(True)
    one = part(6)
    with torch.no_grad():
        model(features_of([one]))
    before = states(model)
    (grads,) = grads_of([one], True)
    backward(model, features_of([one]), grads)
    assert torch.equal(states(model)[0]["weight"], before[0]["weight"])
    model.fused_optimizer.zero_grad()
    model.fused_optimizer.step()
    assert torch.equal(states(model)[0]["weight"], before[0]["weight"])
    backward(model, features_of([one]), grads)
    saved = model.state_dict()  # whole: the rows of the last step
    assert torch.equal(saved["embedding_bags.a.weight"], before[0]["weight"])
    model.fused_optimizer.step()
    assert not torch.equal(states(model)[0]["weight"], before[0]["weight"])


def test_a_step_without_deferred_updates_asks_no_table(monkeypatch: Any) -> None:
    """Locks and the check of the stack would be a thirtieth of a small step."""
    asked: list[str] = []
    for name in ("write_updates", "drop_updates"):
        monkeypatch.setattr(TableGroup, name, lambda group, name=name: asked.append(name))
    for defers in (False, True):
        optimizer = collection(defers).fused_optimizer
        optimizer.zero_grad()
        optimizer.step()
        assert asked == (["drop_updates", "write_updates"] if defers else [])


def test_batches_may_be_overwritten_after_backward() -> None:
    torch.manual_seed(3)
    options: dict[str, Any] = {"is_weighted": True, "dtype": "FP16"}
    large, small = collection(False, **options), collection(True, **options)
    one = part(9)
    (grads,) = grads_of([one], True)
    backward(large, features_of([one], True), grads)
    features = features_of([one], True)
    backward(small, features, grads)
    features.values().fill_(7), features.weights().fill_(7.0), features.lengths().zero_()
    features.offsets().zero_()
    small.fused_optimizer.step()
    check_same(small, large)


def test_rows_are_recorded_as_changed_at_the_step(tmp_path: Any) -> None:
    """A marker between two batches of a step: the delta has the rows of the first batch, too."""
    config = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    model = collection(True, config=config)

    def forward(*ids: int) -> None:
        lengths = torch.tensor([len(ids), 0, 0])
        model(
            KeyedJaggedTensor(FEATURES, torch.tensor(ids), lengths=lengths)
        ).values().sum().backward()

    forward(1, 2, 3)
    marker, replica = dyn.checkpoint.mark(model), copy.deepcopy(model)
    forward(3, 4)
    model.fused_optimizer.step()
    dyn.checkpoint.export_delta(model, tmp_path / "delta", since=marker)
    dyn.checkpoint.apply_delta(replica, tmp_path / "delta")
    check_same(replica, model)


def test_no_row_of_the_step_is_evicted() -> None:
    """A table of 8 rows; the second micro-batch needs rows, which only older steps may give."""
    config = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    model = collection(True, limit=8, config=config)

    def forward(*ids: int) -> None:
        lengths = torch.tensor([len(ids), 0, 0])
        model(
            KeyedJaggedTensor(FEATURES, torch.tensor(ids), lengths=lengths)
        ).values().sum().backward()

    forward(*range(8))
    model.fused_optimizer.step()
    forward(5, 6, 7)
    forward(100, 101, 102, 103)
    assert {5, 6, 7, 100, 101, 102, 103} <= set(model.table("a").ids().tolist())
    with pytest.raises(RuntimeError, match=r"at most 8 rows here .* got 9 distinct ids"):
        forward(200, 201)
    before = dict(zip(model.table("a").ids().tolist(), states(model)[0]["weight"], strict=True))
    model.fused_optimizer.step()
    assert model.table("a").stats()["late_grads"] == 0
    after, _ = model.table("a").lookup(torch.tensor([5, 103]))
    assert not torch.equal(after[0], before[5]) and model.table("a").stats()["step"] == 2
    forward(200, 201)  # a new step: the rows of the one before may go
    assert model.table("a").stats()["step"] == 3


def test_scores_and_counters_of_one_step() -> None:
    """A waiting id is admitted by the micro-batch that reaches the count, with the counts of the step."""
    config = dyn.DynamicTableConfig(
        admission=dyn.AdmitAfter(3), eviction=dyn.ExpireAfter(time=5), unseen="zeros"
    )
    model = collection(True, config=config)
    model.set_time(10)
    ids = torch.tensor([1, 1])
    for time in (10, 30):
        model.set_time(time)  # nothing of the step expires
        features = KeyedJaggedTensor(FEATURES, ids, lengths=torch.tensor([2, 0, 0]))
        model(features).values().sum().backward()
    table = model.table("a")
    assert table.ids().tolist() == [1] and table.count(torch.tensor([1])).tolist() == [4]
    assert table.stats()["step"] == 1


@pytest.mark.parametrize("moves", [False, True])
def test_a_refused_batch_leaves_the_time_of_an_unfrozen_table(moves: bool) -> None:
    """A table that was frozen in the first micro-batch has no part in a step whose next batch is refused."""
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=2, num_embeddings=rows, feature_names=[name])
        for name, rows in (("aged", 100), ("small", 9))
    ]
    model = dyn.DynamicEmbeddingBagCollection(
        tables,
        dynamic={"aged": dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=50))},
        fused_params={"optimizer": "EXACT_SGD", "learning_rate": 0.1, "defer_updates": True},
    )
    aged, optimizer = model.table("aged"), model.fused_optimizer

    def forward(aged_id: int, *small_ids: int) -> torch.Tensor:
        lengths = torch.tensor([1, len(small_ids)])
        ids = torch.tensor([aged_id, *small_ids])
        return model(KeyedJaggedTensor(["aged", "small"], ids, lengths=lengths)).values().sum()

    def train(time: int, aged_id: int) -> None:
        model.set_time(time)
        forward(aged_id, 1).backward()
        optimizer.step()

    train(90, 2)
    train(100, 1)
    aged.freeze()
    if moves:
        model.set_time(110)
    forward(5, 2).backward()
    aged.unfreeze()
    with pytest.raises(RuntimeError, match="expected at most 9 rows"):
        forward(1, *range(11, 26))
    model.set_time(120)
    assert aged.last_seen(torch.tensor([1])).tolist() == [100]
    train(120, 7)  # within the open step, whose end it is
    train(160, 8)
    assert sorted(aged.ids().tolist()) == [7, 8]


def test_loads_and_conversions_between_backward_and_step_are_errors() -> None:
    torch.manual_seed(4)
    one = part(3)
    (grads,) = grads_of([one], True)
    for change in (lambda of: of.load_state_dict(of.state_dict()), lambda of: of.half()):
        model = collection(True)
        backward(model, features_of([one]), grads)
        change(model)
        with pytest.raises(RuntimeError, match=r"the optimizer's step\(\).* dropped"):
            model.fused_optimizer.step()
        model.fused_optimizer.step()
        backward(model, features_of([one]), grads)
        model.fused_optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])
def test_copies_have_no_pending_updates(copied: Any) -> None:
    torch.manual_seed(5)
    one = part(3)
    (grads,) = grads_of([one], True)
    model = collection(True)
    backward(model, features_of([one]), grads)
    other = copied(model)
    before = states(other)[0]["weight"]
    other.fused_optimizer.step()
    assert torch.equal(states(other)[0]["weight"], before)
    model.fused_optimizer.step()
    assert not torch.equal(states(model)[0]["weight"], before)
    backward(other, features_of([one]), grads)
    other.fused_optimizer.step()
    assert not torch.equal(states(other)[0]["weight"], before)


class Model(nn.Module):
    """A dense part on a collection of sums, or on the same tables of torch."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.head = nn.Linear(20, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        output = self.tables(features)
        pooled = output if isinstance(output, torch.Tensor) else output.values()
        return self.head(pooled).square().sum()


class Dense(nn.Module):
    """Tables of torch with the rows of a collection."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(12, 8 if name == "a" else 4, mode="sum") for name in ("a", "b")}
        )
        for name, bag in self.bags.items():
            bag.weight.data.copy_(model.table(name).lookup(IDS)[0])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        jagged = features.to_dict()
        return torch.cat(
            [
                self.bags[table](jagged[name].values(), jagged[name].offsets()[:-1])
                for name, table in zip(FEATURES, ("a", "a", "b"), strict=True)
            ],
            dim=1,
        )


def both_models(**options: Any) -> tuple[Any, Any, Any, Any]:
    """Returns a dynamic model and its optimizer, and the same of torch, trained with SGD."""
    torch.manual_seed(6)
    dynamic = Model(collection(True, optimizer="EXACT_SGD", **options))
    every = KeyedJaggedTensor(FEATURES, IDS.repeat(3), lengths=torch.full((3,), 12))
    with torch.no_grad():
        dynamic(every)
    static = Model(Dense(dynamic.tables))
    static.head.load_state_dict(dynamic.head.state_dict())
    dense = KeyedOptimizerWrapper(
        dict(dynamic.head.named_parameters()), lambda of: torch.optim.SGD(of, lr=0.1)
    )
    optimizer = CombinedOptimizer([dynamic.tables.fused_optimizer, dense])
    return dynamic, optimizer, static, torch.optim.SGD(static.parameters(), lr=0.1)


def check_close(dynamic: Any, static: Any) -> None:
    for name, bag in static.tables.bags.items():
        rows, _ = dynamic.tables.table(name).lookup(IDS)
        torch.testing.assert_close(rows, bag.weight.data, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dynamic.head.weight, static.head.weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("power", [2.0, 1.0, math.inf])
def test_clips_by_the_norm_of_torch(power: float) -> None:
    dynamic, optimizer, static, plain = both_models()
    for most in (0.01, 1e9, 0.5):
        optimizer.zero_grad(), plain.zero_grad()
        for _ in range(2):
            batch = features_of([part(5)])
            dynamic(batch).backward(), static(batch).backward()
        norm = dyn.clip_grad_norm_(dynamic, most, power)
        expected = nn.utils.clip_grad_norm_(static.parameters(), most, power)
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        optimizer.step(), plain.step()
        check_close(dynamic, static)


def test_gradients_after_a_clipping_are_not_clipped() -> None:
    dynamic, optimizer, static, plain = both_models()
    for most in (0.01, 0.02):
        batch = features_of([part(5)])
        dynamic(batch).backward(), static(batch).backward()
        dyn.clip_grad_norm_(dynamic, most)
        nn.utils.clip_grad_norm_(static.parameters(), most)
    batch = features_of([part(5)])
    dynamic(batch).backward(), static(batch).backward()
    optimizer.step(), plain.step()
    check_close(dynamic, static)


def test_errors_of_clipping() -> None:
    with pytest.raises(ValueError, match="clip_grad_norm_: expected deferred updates"):
        dyn.clip_grad_norm_(collection(False), 1.0)
    with pytest.raises(ValueError, match="clip_grad_norm_: expected norm_type > 0"):
        dyn.clip_grad_norm_(collection(True), -1.0)
    with pytest.raises(ValueError, match=r"norm_type > 0 and max_norm >= 0, got 2\.0 and None"):
        dyn.clip_grad_norm_(collection(True), None)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"GradScaler\.device: expected 'cpu' or 'cuda', got 'gpu'"
    ):
        dyn.GradScaler(collection(True), "gpu")
    with pytest.raises(ValueError, match="expected defer_updates as True or False, got 1"):
        collection(1)(features_of([part(1)]))  # type: ignore[arg-type]
    dynamic, optimizer, _, _ = both_models()
    before = states(dynamic.tables)[0]["weight"]
    (dynamic(features_of([part(4)])) * math.nan).backward()
    with pytest.raises(RuntimeError, match="expected a finite norm of the gradients, got nan"):
        dyn.clip_grad_norm_(dynamic, 1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(states(dynamic.tables)[0]["weight"], before)


def test_clips_and_scales_after_state_was_made() -> None:
    """`init_state` gives a gradient to each parameter, also to the placeholders; a restore calls it."""
    dynamic, optimizer, _, _ = both_models()
    scaler = dyn.GradScaler(dynamic, "cpu", init_scale=64.0)
    optimizer.init_state()
    optimizer.zero_grad()
    scaler.scale(dynamic(features_of([part(5)]))).backward()
    scaler.unscale_(optimizer)
    assert float(dyn.clip_grad_norm_(dynamic, math.inf)) > 0
    assert float(nn.utils.clip_grad_norm_(dynamic.parameters(), math.inf)) > 0  # of the dense part


def test_scaled_steps_are_those_of_torch() -> None:
    """The third step has an infinite gradient in one row of a table, the fourth in the dense part."""
    dynamic, optimizer, static, plain = both_models()
    scaler = dyn.GradScaler(dynamic, "cpu", init_scale=1024.0, growth_interval=2)
    of_torch = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(6):
        batch = features_of([part(5)])
        optimizer.zero_grad(), plain.zero_grad()
        for model, by in ((dynamic, scaler), (static, of_torch)):
            loss = by.scale(model(batch))
            if step == 3:
                loss = loss + model.head.weight.sum() * math.inf
            loss.backward()
        if step == 2:  # rows only: dense gradients stay finite
            pooled = dynamic.tables(batch).values()
            pooled.backward(torch.full_like(pooled, math.inf))
            for bag in static.tables.bags.values():
                bag.weight.grad[0] = math.inf
        if step == 4:
            scaler.unscale_(optimizer), of_torch.unscale_(plain)
            dyn.clip_grad_norm_(dynamic, 0.01)
            nn.utils.clip_grad_norm_(static.parameters(), 0.01)
        before = states(dynamic.tables)[0]["weight"].clone()
        scaler.step(optimizer), of_torch.step(plain)
        scaler.update(), of_torch.update()
        assert scaler.get_scale() == of_torch.get_scale()
        assert torch.equal(states(dynamic.tables)[0]["weight"], before) == (step in (2, 3))
        check_close(dynamic, static)


def test_clamps_after_the_scale_is_taken_off() -> None:
    """A clamp of scaled gradients would train other rows, and hide that they are infinite."""
    clamp = {"gradient_clipping": True, "max_gradient": 0.5}
    torch.manual_seed(7)
    plain, scaled = (collection(True, fused=clamp) for _ in range(2))
    scaler = dyn.GradScaler(scaled, "cpu", init_scale=64.0)
    for factor in (1.0, math.inf, 1.0):
        batch = features_of([part(5)])
        plain.fused_optimizer.zero_grad(), scaled.fused_optimizer.zero_grad()
        scaler.scale((scaled(batch).values() * factor).sum()).backward()
        if factor == 1.0:
            plain(batch).values().sum().backward()
        else:
            plain(batch)
        plain.fused_optimizer.step(), scaler.step(scaled.fused_optimizer)
        scaler.update()
        for one, other in zip(states(plain), states(scaled), strict=True):
            assert torch.equal(one["weight"], other["weight"])
    assert scaler.get_scale() == 32.0


def test_gradients_of_weights_are_not_clamped_with_the_loss_scale_on_them() -> None:
    clamp = {"gradient_clipping": True, "max_gradient": 1.0}
    scaled = collection(True, fused=clamp, is_weighted=True)
    scaler = dyn.GradScaler(scaled, "cpu", init_scale=1024.0)
    batch = features_of([part(5)])
    weights = torch.ones(batch.values().numel(), requires_grad=True)
    weighted = KeyedJaggedTensor(batch.keys(), batch.values(), weights, batch.lengths())
    scaler.scale((scaled(weighted).values() * 0.01).sum()).backward()
    jagged, found = batch.to_dict(), []
    for name, table in zip(FEATURES, "aab", strict=True):
        found.append(scaled.table(table).lookup(jagged[name].values())[0].sum(1) * 0.01)
    torch.testing.assert_close(weights.grad / 1024.0, torch.cat(found))


def test_a_scaler_of_rows_needs_deferred_updates() -> None:
    with pytest.raises(ValueError, match="GradScaler: expected deferred updates"):
        dyn.GradScaler(collection(False), "cpu")
    dyn.GradScaler(collection(False), "cpu", enabled=False)


def test_autocast_in_bfloat16_needs_no_scaler() -> None:
    dynamic, optimizer, static, plain = both_models()
    for _ in range(3):
        batch = features_of([part(5)])
        optimizer.zero_grad(), plain.zero_grad()
        for model in (dynamic, static):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch)
            loss.backward()
        optimizer.step(), plain.step()
        check_close(dynamic, static)
