"""make_dynamic: stock collections of an existing model become dynamic, in place."""

import pytest
import torch
from collection_oracle import EXTREMES
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.models.dlrm import DLRM
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_dyn as dyn


def ebc(*names: str, **options: object) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(50, 8, name, feature_names=[f"f_{name}"]) for name in names]
    return EmbeddingBagCollection(tables, **options)


def ec(*names: str, **options: object) -> EmbeddingCollection:
    tables = [EmbeddingConfig(50, 8, name, feature_names=[f"f_{name}"]) for name in names]
    return EmbeddingCollection(tables, **options)


class Model(nn.Module):
    """Collections at several depths; one of them is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = nn.Sequential(ebc("a", "b", is_weighted=True))
        self.named = nn.ModuleDict({"sequence": ec("c", need_indices=True)})
        self.again = self.pooled[0]
        self.over = nn.Linear(3, 3)


def test_all_collections_become_dynamic_in_place() -> None:
    model = Model().eval()
    over, configs = model.over, model.pooled[0].embedding_bag_configs()
    assert dyn.make_dynamic(model, dynamic={"a": dyn.DynamicTableConfig(seed=7)}) is model
    pooled, sequence = model.pooled[0], model.named["sequence"]
    assert type(pooled) is dyn.DynamicEmbeddingBagCollection and model.again is pooled
    assert type(sequence) is dyn.DynamicEmbeddingCollection and sequence.need_indices()
    assert pooled.is_weighted() and not pooled.training and model.over is over
    assert {name: one.seed for name, one in pooled.dynamic_configs().items()} == {"a": 7, "b": 0}
    assert pooled.embedding_bag_configs() == configs


def test_a_dlrm_trains_on_any_ids_afterwards() -> None:
    torch.manual_seed(0)
    model = DLRM(ebc("a", "b"), 4, [8], [4, 1])
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(
            RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": 0.3, "eps": 1e-4}
        )
    dyn.make_dynamic(model)
    collection = model.sparse_arch.embedding_bag_collection
    ids = KeyedJaggedTensor(
        ["f_a", "f_b"], torch.tensor(EXTREMES * 2), lengths=torch.ones(14, dtype=torch.int64)
    )
    losses = []
    for _ in range(60):
        loss = (model(torch.ones(7, 4), ids).flatten() - torch.arange(7.0)).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert sorted(collection.table("a").ids().tolist()) == sorted(EXTREMES)
    optimizer = collection.local_tables()["a"].optimizer
    assert (optimizer.kind.name, optimizer.eps) == ("EXACT_ROWWISE_ADAGRAD", 1e-4)


@pytest.mark.filterwarnings("ignore:.*expected an optimizer")
def test_rows_are_where_the_static_ones_have_moved_to() -> None:
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["t"])
    model = nn.Sequential(EmbeddingBagCollection([config], device=torch.device("meta")))
    moved = dyn.make_dynamic(model.to_empty(device="cpu"))
    moved[0](KeyedJaggedTensor(["t"], torch.tensor([7]), lengths=torch.tensor([1])))
    assert moved[0].table("t").num_rows == 1


def test_only_the_named_collections() -> None:
    model = Model()
    static = model.pooled[0]
    dyn.make_dynamic(model, tables=["c"], dynamic=dyn.DynamicTableConfig(seed=3))
    assert model.pooled[0] is static
    assert model.named["sequence"].dynamic_configs()["c"].seed == 3


def test_a_collection_that_is_the_model_is_returned_anew() -> None:
    made = dyn.make_dynamic(ebc("a", device=torch.device("meta")))
    assert type(made) is dyn.DynamicEmbeddingBagCollection
    with pytest.raises(ValueError, match="got meta"):
        made.table("a").ids()


def test_frozen_tables_stay_frozen() -> None:
    model = Model()
    model.pooled[0].embedding_bags["b"].requires_grad_(False)
    dyn.make_dynamic(model)
    assert [p.requires_grad for p in model.pooled.parameters()] == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": ["a"]}, r"all tables \['a', 'b'\] of collection 'pooled.0' or none.*\['a'\]"),
        ({"tables": ["a", "b", "x"]}, r"tables: expected names among \['a', 'b', 'c'\].*'x'"),
        ({"tables": "a"}, r"tables: expected names among .* got 'a'"),
        ({"dynamic": {"x": dyn.DynamicTableConfig()}}, r"dynamic: expected names among .*\['x'\]"),
    ],
)
def test_impossible_wishes_leave_the_model_alone(options: dict, message: str) -> None:
    model = Model()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        dyn.make_dynamic(model, **options)
    assert dict(model.named_modules()) == before


def test_a_table_that_cannot_be_dynamic_leaves_the_model_alone() -> None:
    model = Model()
    own = EmbeddingBagConfig(50, 8, "d", feature_names=["d"], init_fn=torch.nn.init.ones_)
    model.last = EmbeddingBagCollection([own])
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"table='d'\): expected init_fn to be left unset"):
        dyn.make_dynamic(model)
    assert dict(model.named_modules()) == before
    with pytest.raises(ValueError, match="expected a model with an EmbeddingBagCollection"):
        dyn.make_dynamic(nn.Linear(2, 2))


class Managed(nn.Module):
    """Managed collision around a pooled and a sequence collection, beside a plain collection."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = nn.Sequential(
            ManagedCollisionEmbeddingBagCollection(pooled := ebc("p"), remapping(pooled, "p"))
        )
        self.sequence = ManagedCollisionEmbeddingCollection(
            sequence := ec("s"), remapping(sequence, "s")
        )
        self.plain = ebc("a")


def remapping(collection: nn.Module, name: str) -> ManagedCollisionCollection:
    is_pooled = isinstance(collection, EmbeddingBagCollection)
    configs = collection.embedding_bag_configs() if is_pooled else collection.embedding_configs()
    module = MCHManagedCollisionModule(50, torch.device("cpu"), LFU_EvictionPolicy(), 1)
    return ManagedCollisionCollection({name: module}, configs)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (None, r"tables \['p'\] in the ManagedCollisionEmbeddingBagCollection 'pooled.0'"),
        (["a", "s"], r"tables \['s'\] in the ManagedCollisionEmbeddingCollection 'sequence'"),
    ],
)
def test_managed_collision_is_refused(tables: list[str] | None, message: str) -> None:
    model = Managed()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message + ".*Replace that whole module"):
        dyn.make_dynamic(model, tables)
    assert dict(model.named_modules()) == before


def test_other_collections_beside_managed_collision() -> None:
    model = Managed()
    before = dict(model.named_modules())
    dyn.make_dynamic(model, tables=["a"])
    after = dict(model.named_modules())
    assert type(model.plain) is dyn.DynamicEmbeddingBagCollection
    kept = [name for name in before if not name.startswith("plain")]
    assert len(kept) > 10 and all(after[name] is before[name] for name in kept)


def fill(weight: torch.Tensor) -> torch.Tensor:
    """An init_fn for the weights of the static tables only."""
    assert weight.device.type == "cpu" and weight.shape == (50, 8)
    return torch.nn.init.ones_(weight)


def own_init(cls: type, name: str) -> EmbeddingBagConfig | EmbeddingConfig:
    return cls(50, 8, name, feature_names=[f"f_{name}"], init_fn=fill)


ONES = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0), unseen="initial")


@pytest.mark.parametrize("dynamic", [ONES, {"a": ONES, "c": ONES}])
def test_an_initializer_replaces_init_fn(dynamic: object) -> None:
    pooled = EmbeddingBagCollection([own_init(EmbeddingBagConfig, "a")])
    sequence = EmbeddingCollection([own_init(EmbeddingConfig, "c")])
    model = dyn.make_dynamic(nn.Sequential(pooled, sequence), dynamic=dynamic).eval()
    ids = torch.tensor(EXTREMES)
    batch = KeyedJaggedTensor(["f_a", "f_c"], ids.repeat(2), lengths=torch.ones(14).long())
    for out in (model[0](batch).values(), model[1](batch)["f_c"].values()):
        assert out.shape == (7, 8) and out.eq(1).all()


def test_an_initializer_of_another_table_replaces_no_init_fn() -> None:
    tables = [own_init(EmbeddingBagConfig, "a"), own_init(EmbeddingBagConfig, "b")]
    with pytest.raises(ValueError, match=r"table='b'\): expected init_fn .* which replaces it"):
        dyn.make_dynamic(EmbeddingBagCollection(tables), dynamic={"a": ONES})
    unset = {"b": dyn.DynamicTableConfig(seed=3)}
    with pytest.raises(ValueError, match=r"table='b'\): expected init_fn"):
        dyn.make_dynamic(EmbeddingBagCollection(tables[1:]), dynamic=unset)


def test_tables_that_are_dynamic_already() -> None:
    model = dyn.make_dynamic(Model())
    for tables in (None, ["a"]):
        with pytest.raises(
            ValueError, match=r"got one whose tables \['.*'\] are dynamic already. Call"
        ):
            dyn.make_dynamic(model, tables)
    with pytest.raises(ValueError, match=r"make_dynamic.tables: expected names among \[.*got \[\]"):
        dyn.make_dynamic(Model(), [])
