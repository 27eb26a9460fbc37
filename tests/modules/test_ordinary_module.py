"""An unsharded collection is an ordinary module: converted, copied, saved, loaded."""

import copy
import dataclasses
import io
import warnings

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from table_cases import same_state
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import Adagrad, Adam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_dyn as dyn

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
IDS = torch.tensor([1, -(2**63), 7, 2**63 - 1, 7])


def batch(ids: torch.Tensor = IDS) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([2, ids.numel() - 2]))


def pooled(**options: object) -> dyn.DynamicEmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(100, 4, "t", feature_names=["f"]),
        EmbeddingBagConfig(100, 8, "u", feature_names=["f"]),
    ]
    return dyn.DynamicEmbeddingBagCollection(tables, **{"fused_params": ADAM, **options})


def sequence(**options: object) -> dyn.DynamicEmbeddingCollection:
    tables = [
        EmbeddingConfig(100, 4, "t", feature_names=["f"]),
        EmbeddingConfig(100, 4, "u", feature_names=["f"]),
    ]
    return dyn.DynamicEmbeddingCollection(tables, **{"fused_params": ADAM, **options})


def output(collection: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    result = collection(batch(ids))
    if isinstance(result, dict):
        return torch.cat([one.values() for one in result.values()])
    return result.values()


def train(collection: nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        output(collection).cos().sum().backward()


@pytest.fixture(params=[pooled, sequence])
def collection(request: pytest.FixtureRequest) -> nn.Module:
    """Returns a trained collection."""
    made = request.param()
    train(made)
    return made


def assert_trains_alike(one: nn.Module, other: nn.Module) -> None:
    """Asserts equal outputs after two more steps: rows, state, step and learning rate are equal."""
    for collection in (one, other):
        train(collection, 2)
    assert torch.equal(output(one.eval()), output(other.eval()))
    assert output(one).abs().sum() > 0


def through_pickle(collection: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(collection, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies_are_whole_and_apart(collection: nn.Module, duplicate: object) -> None:
    collection.fused_optimizer.param_groups[0]["lr"] = 0.05
    rows = output(collection.eval()).clone()
    twin = duplicate(collection)
    train(twin.train())
    assert torch.equal(output(collection), rows)  # only the copy was trained
    assert not torch.equal(output(twin.eval()), rows)
    assert_trains_alike(collection.train(), duplicate(collection))
    assert twin.fused_optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies_keep_the_optimizer_set_on_the_parameters(duplicate: object) -> None:
    ebc = pooled(fused_params=None)
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.3, "eps": 1e-3})
    ebc.embedding_bags["u"].requires_grad_(False)
    twin = duplicate(ebc)
    assert {name: p.requires_grad for name, p in twin.named_parameters()} == {
        "embedding_bags.t.weight": True,
        "embedding_bags.u.weight": False,
    }
    assert_trains_alike(ebc, twin)
    assert twin.local_tables()["t"].optimizer.eps == 1e-3
    assert twin.fused_optimizer.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_converts_the_rows(collection: nn.Module, dtype: torch.dtype) -> None:
    before = output(collection.eval())
    optimizer = collection.fused_optimizer
    (collection.half if dtype == torch.float16 else collection.bfloat16)()
    after = output(collection)
    assert after.dtype == torch.float32
    torch.testing.assert_close(after, before, rtol=0.02, atol=0.02)
    rows, found = collection.table("t").lookup(IDS)
    assert rows.dtype == dtype and found.all()
    assert all(p.dtype == dtype and p.is_meta for p in collection.parameters())
    data_type = DataType.FP16 if dtype == torch.float16 else DataType.BF16
    assert [one.data_type for one in _configs(collection)] == [data_type] * 2
    train(collection.train())
    assert collection.fused_optimizer is optimizer  # a scheduler may hold it
    optimizer.param_groups[0]["lr"] = 0.0
    rows = output(collection.eval())
    train(collection.train())
    assert torch.equal(output(collection.eval()), rows)


def test_moving_keeps_rows_and_placeholders(collection: nn.Module) -> None:
    before = output(collection.eval())
    model = nn.Sequential(collection, nn.Linear(2, 2))
    model.to("cpu").cpu().to(torch.float32).to_empty(device="cpu").float()
    assert torch.equal(output(collection), before)
    assert all(p.is_meta for p in collection.parameters())
    with pytest.raises(ValueError, match=r"expected rows of float32.*got torch.float64"):
        collection.double()
    with pytest.raises(ValueError, match=r"got meta, where its 4 rows would be lost"):
        collection.to("meta")
    assert torch.equal(output(collection), before)
    collection.reset_parameters()
    assert output(collection.to("meta").to("cpu")).abs().sum() == 0


def test_initialising_functions_do_not_see_placeholders() -> None:
    def initialise(module: nn.Module) -> None:
        if hasattr(module, "weight"):
            module._parameters["weight"] = nn.Parameter(torch.ones(2, 2))

    model = nn.Sequential(pooled(), nn.Linear(2, 2)).apply(initialise)
    assert torch.equal(model[1].weight, torch.ones(2, 2))
    assert all(p.is_meta for p in model[0].parameters()) and len(list(model.parameters())) == 4


def test_state_dicts_carry_rows_and_optimizer_state(collection: nn.Module) -> None:
    holder = next(collection.named_children())[0]
    saved, saved_optimizer = collection.state_dict(), collection.fused_optimizer.state_dict()
    assert saved[f"{holder}.t.weight"].shape == (4, 4)
    assert torch.equal(saved[f"{holder}.t.ids"], collection.table("t").ids())
    assert saved_optimizer["state"][f"{holder}.t.weight"]["t.momentum1"].shape == (4, 4)
    twin = type(collection)(_configs(collection), fused_params=ADAM)
    output(twin, torch.tensor([5, 6, 7, 8, 9]))  # more rows and other rows: all are replaced
    assert str(twin.load_state_dict(saved)) == "<All keys matched successfully>"
    twin.fused_optimizer.load_state_dict(saved_optimizer)
    assert_trains_alike(collection, twin)
    assert collection.table("t").num_rows == twin.table("t").num_rows == 4


def test_states_are_loaded_one_after_another() -> None:
    """Optimizer state comes tensor by tensor; each load waits for all tensors of a table again."""
    ebc, twin = pooled(), pooled()
    for _ in range(2):
        train(ebc)
        twin.load_state_dict(ebc.state_dict())
        twin.fused_optimizer.load_state_dict(ebc.fused_optimizer.state_dict())
        got, expected = (one.local_tables()["t"].export_state() for one in (twin, ebc))
        assert same_state(got, expected)


def _configs(collection: nn.Module) -> list:
    if isinstance(collection, dyn.DynamicEmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def test_loading_reports_what_does_not_fit_and_changes_nothing() -> None:
    ebc = pooled()
    train(ebc)
    before, good = output(ebc.eval()), ebc.state_dict()
    narrow = {**good, "embedding_bags.u.weight": good["embedding_bags.u.weight"][:, :4]}
    with pytest.raises(
        ValueError, match=r"table='u'\): expected saved rows \[R, 8\], got .*\[4, 4\]"
    ):
        ebc.load_state_dict({**narrow, "embedding_bags.t.weight": torch.zeros(4, 4)})
    with pytest.raises(ValueError, match="expected 4 saved ids of dtype int64"):
        ebc.load_state_dict({**good, "embedding_bags.u.ids": torch.zeros(3, dtype=torch.int64)})
    some = {key: value for key, value in good.items() if ".u." not in key}
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags.u.weight"):
        ebc.load_state_dict(some)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*embedding_bags.u.rows"):
        ebc.load_state_dict({**good, "embedding_bags.u.rows": torch.zeros(1)})
    assert ebc.load_state_dict(some, strict=False).missing_keys == [
        "embedding_bags.u.weight",
        "embedding_bags.u.ids",
    ]
    assert torch.equal(output(ebc), before)
    other = pooled()
    with pytest.raises(ValueError, match="Load it with the state dict of the module"):
        other.fused_optimizer.load_state_dict(ebc.fused_optimizer.state_dict())


def test_learning_rate_and_optimizer_may_change_in_training() -> None:
    ebc = pooled()
    train(ebc)
    rows = output(ebc.eval())
    scheduler = torch.optim.lr_scheduler.LambdaLR(ebc.fused_optimizer, lambda step: 0.0)
    train(ebc.train())
    assert torch.equal(output(ebc.eval()), rows)
    assert scheduler.get_last_lr() == [0.0]
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.2})
    assert torch.equal(output(ebc), rows)
    assert ebc.fused_optimizer.param_groups[0]["lr"] == 0.2
    train(ebc.train())
    assert not torch.equal(output(ebc.eval()), rows)


def test_a_conversion_in_inference_mode_is_that_of_any_time(collection: nn.Module) -> None:
    twin = copy.deepcopy(collection)
    with torch.inference_mode():
        collection.half()
    twin.half()
    for one in (collection, twin):
        train(one)
        assert {weight.dtype for weight in one.parameters()} == {torch.float16}
        assert {config.data_type for config in _configs(one)} == {DataType.FP16}
    for name in ("t", "u"):
        rows = [one.local_tables()[name].export_state() for one in (collection, twin)]
        assert rows[0]["weight"].dtype == torch.float16 and same_state(*rows)
    collection.float()
    train(collection)


@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_a_learning_rate_filled_in_place_holds_from_the_next_call_on(call: str) -> None:
    """The optimizer does not see that the numbers of a tensor change."""
    ebc = pooled()
    train(ebc)
    ebc.fused_optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.1)
    rows = output(ebc.eval())
    rate.fill_(0.0)
    getattr(ebc.fused_optimizer, call)()
    train(ebc.train())
    assert torch.equal(output(ebc.eval()), rows)


def test_rates_last_when_optimizers_change_and_in_copies() -> None:
    """The rate set last is kept, whether the optimizer object is the same or made again."""
    ebc = pooled()
    ebc.fused_optimizer.param_groups[0]["lr"] = 0.05
    ebc.embedding_bags["u"].mark_optimizer([Adagrad], [{"lr": 0.3}])
    adam, adagrad = ebc.fused_optimizer.param_groups
    assert (adam["lr"], adagrad["lr"]) == (0.05, 0.3)
    adam["lr"] = 0.02
    assert [group["lr"] for group in copy.deepcopy(ebc).fused_optimizer.param_groups] == [0.02, 0.3]


def test_another_optimizer_keeps_a_loaded_initializer() -> None:
    """Initial rows depend on the limit by default; a load brings those of the saved table."""
    saved, unseen = pooled(), torch.tensor([11, 12, 13])
    train(saved)
    options = {"num_embeddings": 900, "init_fn": None}
    wider = [dataclasses.replace(config, **options) for config in _configs(saved)]
    ebc = dyn.DynamicEmbeddingBagCollection(wider, fused_params=ADAM)
    ebc.load_state_dict(saved.state_dict())
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.2})
    assert torch.equal(output(ebc, unseen), output(saved, unseen))


def test_another_optimizer_keeps_ids_that_wait() -> None:
    """A table without rows may hold counters: id 7 is twice in a batch, other ids once."""
    ebc = pooled(dynamic=dyn.DynamicTableConfig(admission=dyn.AdmitAfter(3)))
    train(ebc, 1)
    assert ebc.table("t").num_rows == 0
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.2})
    train(ebc, 1)
    assert ebc.table("t").ids().tolist() == [7]


def test_other_hyper_parameters_keep_optimizer_state_and_another_kind_does_not() -> None:
    ebc = pooled()
    train(ebc)
    trained = ebc.local_tables()["t"].export_state()
    mark = ebc.embedding_bags["t"].mark_optimizer
    mark([Adam], [{"lr": 0.2, "eps": 0.5}])
    rows = ebc.embedding_bags["t"].rows()
    assert rows.optimizer.eps == 0.5 and same_state(rows.export_state(), trained)
    mark([Adagrad], [{"lr": 0.2}])  # its momentum1 has the shape of ADAM's
    after = ebc.embedding_bags["t"].rows().export_state()
    assert torch.equal(after["weight"], trained["weight"]) and not after["momentum1"].any()


@pytest.mark.parametrize("other", [Adam, RowWiseAdagrad], ids=["eps", "kind"])
def test_a_forward_from_before_another_optimizer_has_no_backward(other: type) -> None:
    ebc = pooled()
    train(ebc)
    before = output(ebc)
    ebc.embedding_bags["t"].mark_optimizer([other], [{"lr": 0.2, "eps": 0.5}])
    ebc.fused_optimizer  # noqa: B018  here the other optimizer is seen
    with pytest.raises(RuntimeError, match="given another optimizer"):
        before.sum().backward()


def test_other_hyper_parameters_keep_steps_and_counts() -> None:
    """Also those of a table without rows."""
    ebc = pooled()
    for _ in range(2):
        ebc(KeyedJaggedTensor(["f"], IDS[:0], lengths=torch.tensor([0])))
    assert ebc.table("t").num_rows == 0
    before = ebc.table("t").stats()
    ebc.embedding_bags["t"].mark_optimizer([Adam], [{"lr": 0.2, "eps": 0.5}])
    assert ebc.table("t").stats() == before and before["step"] == 2


def test_marks_of_a_parameter_may_change_in_place() -> None:
    """`apply_optimizer_in_backward` adds to the lists that an earlier call has set."""
    ebc = pooled(fused_params=None)
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.2})
        train(ebc, 1)
        ebc.embedding_bags["t"].weight._optimizer_kwargs[0]["eps"] = 0.5
        assert ebc.embedding_bags["t"].rows().optimizer.eps == 0.5
        apply_optimizer_in_backward(Adam, ebc.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"one optimizer.*\['RowWiseAdagrad', 'Adam'\]"):
        train(ebc, 1)


def test_a_collection_without_rows_has_the_same_marks_and_keeps_its_own_copy() -> None:
    ebc = pooled(fused_params=None)
    ebc.embedding_bags["t"].mark_optimizer([Adagrad], [{"lr": 0.2}])
    ebc.embedding_bags["u"].requires_grad_(False)
    t, u = (table.weight for table in ebc.without_rows().embedding_bags.values())
    assert t._optimizer_classes == [Adagrad] and t._optimizer_kwargs == [{"lr": 0.2}]
    assert t.requires_grad and not u.requires_grad and not hasattr(u, "_optimizer_classes")
    t._optimizer_kwargs[0]["lr"] = 9.0
    assert ebc.embedding_bags["t"].rows().optimizer.learning_rate == 0.2


def test_tables_with_optimizers_of_their_own() -> None:
    def two_optimizers() -> dyn.DynamicEmbeddingBagCollection:
        ebc = pooled()
        with pytest.warns(DeprecationWarning):
            own = ebc.embedding_bags["u"].parameters()
            apply_optimizer_in_backward(RowWiseAdagrad, own, {"lr": 0.5})
        return ebc

    ebc, twin = two_optimizers(), two_optimizers()
    train(ebc)
    optimizer = ebc.fused_optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    state = optimizer.state_dict()["state"]
    told = ("optimizer_config", "step", "optimizer_checksum")
    for table, names in (("t", ("momentum1", "momentum2")), ("u", ("momentum1",))):
        entries = {f"{table}.{name}" for name in (*names, *told)}
        assert state[f"embedding_bags.{table}.weight"].keys() == entries
    twin.load_state_dict(ebc.state_dict())
    twin.fused_optimizer.load_state_dict(optimizer.state_dict())
    assert_trains_alike(ebc, twin)


def test_an_optimizer_over_the_parameters_is_warned_about_once() -> None:
    ebc = pooled(fused_params=None)
    adam = torch.optim.Adam(ebc.parameters(), lr=1.0)
    with pytest.warns(UserWarning, match=r"tables \['t', 'u'\], got none.*Set fused_params="):
        loss = output(ebc).sum()
    loss.backward()
    assert nn.utils.clip_grad_norm_(ebc.parameters(), 1.0) == 0
    adam.step()
    adam.zero_grad()
    row = ebc.table("t").lookup(torch.tensor([1]))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(ebc)
        train(pooled())
        output(pooled(fused_params=None).eval())
    moved = ebc.table("t").lookup(torch.tensor([1]))[0] - row
    assert moved.abs().sum() > 0  # by FBGEMM's default rate
