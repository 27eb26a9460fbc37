"""Invalid configs and batches raise errors that name the rule; nothing has changed then."""

import warnings
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.types import LazyNoWait
from torchrec.modules.embedding_configs import DataType, NoEvictionPolicy, PoolingType
from torchrec.optim import Adagrad, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_dyn as dyn

GOOD = EmbeddingBagConfig(100, 4, "t", feature_names=["f"])
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}


def changed(**fields: object) -> EmbeddingBagConfig:
    """Returns GOOD with fields set after construction, which the checks of the dataclass do not see."""
    config = replace(GOOD)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(num_embeddings=0), r"table='t'\): expected num_embeddings .* above 0, got 0"),
        (changed(num_embeddings=-3), "expected num_embeddings"),
        (changed(num_embeddings=2.5), "expected num_embeddings"),
        (changed(num_embeddings=True), "expected num_embeddings"),
        (changed(num_embeddings=2**53 + 1), r"num_embeddings of at most 9007199254740992 .* 2\^32"),
        (
            changed(num_embeddings=2**62),
            "num_embeddings of at most .* embedding_dim=4, got 46116860",
        ),
        (changed(num_embeddings=2**70), "num_embeddings of at most .* got 11805916207174113"),
        (changed(num_embeddings=2**51, embedding_dim=1024), "at most 2251799813685247 for .*=1024"),
        (changed(embedding_dim=0), "expected embedding_dim"),
        (changed(name=""), "expected a table name that is not empty"),
        (changed(name="a.b"), "has no dot, got 'a.b'"),
        (changed(name="keys"), "ModuleDict does not use itself, got 'keys'"),
        (changed(data_type=DataType.INT8), "expected data_type FP32, FP16 or BF16, got"),
        (changed(pooling=PoolingType.NONE), "expected pooling SUM or MEAN"),
        (changed(feature_names=["f", "f"]), "expected a feature once in a table, got 'f' 2 times"),
        (
            changed(feature_names="usr"),
            r"expected feature_names as a list, got 'usr'. Write \['usr'\]",
        ),
        (changed(use_virtual_table=True), "expected use_virtual_table=False, got True"),
        (changed(virtual_table_eviction_policy=NoEvictionPolicy()), "virtual_table_eviction"),
        (changed(total_num_buckets=8), "expected total_num_buckets=None, got 8"),
        (changed(num_embeddings_post_pruning=8), "num_embeddings_post_pruning"),
        (changed(enable_embedding_update=True), "enable_embedding_update"),
        (changed(stash_weights=True), "stash_weights"),
        (
            changed(weight_init_min=2.0, weight_init_max=1.0),
            "expected weight_init_min < weight_init",
        ),
        (changed(init_fn=torch.nn.init.zeros_), r"expected init_fn to be left unset.*initializer="),
        (changed(init_fn=partial(torch.nn.init.uniform_, a=-1.0, b=1.0)), "add init_fn=None"),
        (changed(init_fn=None), "init_fn"),
        (EmbeddingConfig(100, 4, "t", feature_names=["f"]), "expected tables of type EmbeddingBag"),
    ],
)
def test_impossible_configs(config: EmbeddingBagConfig, message: str) -> None:
    with pytest.raises(ValueError, match="DynamicEmbeddingBagCollection.*" + message):
        dyn.DynamicEmbeddingBagCollection([config])


@pytest.mark.parametrize(("rows", "columns"), [(2**53, 4), (2**51 - 1, 1024)])
def test_the_largest_limits_train(rows: int, columns: int) -> None:
    config = EmbeddingBagConfig(rows, columns, "t", feature_names=["f"])
    ebc = dyn.DynamicEmbeddingBagCollection([config], fused_params=SGD)
    batch = KeyedJaggedTensor(["f"], torch.tensor([5, -(2**63)]), lengths=torch.tensor([2]))
    for _ in range(2):
        ebc(batch).values().sum().backward()
    assert ebc.table("t").num_rows == 2
    assert ebc.state_dict()["embedding_bags.t.weight"].shape == (2, columns)


def test_an_initializer_replaces_what_the_config_says_of_initial_rows() -> None:
    ones = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0))
    for given in (
        changed(init_fn=torch.nn.init.zeros_),
        changed(weight_init_min=0.0, weight_init_max=0.0),
    ):
        ebc = dyn.DynamicEmbeddingBagCollection([given], dynamic={"t": ones}, fused_params=SGD)
        batch = KeyedJaggedTensor(["f"], torch.tensor([5]), lengths=torch.tensor([1]))
        assert ebc(batch).values().eq(1).all()
        kept = ebc.embedding_bag_configs()[0].init_fn
        assert isinstance(kept, partial) and kept.func is torch.nn.init.uniform_


def test_impossible_collections() -> None:
    with pytest.raises(ValueError, match="expected at least one table, got none"):
        dyn.DynamicEmbeddingCollection([])
    for collection in (dyn.DynamicEmbeddingBagCollection, dyn.DynamicEmbeddingCollection):
        with pytest.raises(
            ValueError, match=r"expected a list of tables, got .* 't'. Write \[config"
        ):
            collection(GOOD)
    with pytest.raises(ValueError, match="expected a table name once, got 't' 2 times"):
        dyn.DynamicEmbeddingBagCollection([GOOD, GOOD])
    with pytest.raises(ValueError, match=r"dynamic: expected names among \['t'\], got \['x'\]"):
        dyn.DynamicEmbeddingBagCollection([GOOD], dynamic={"x": dyn.DynamicTableConfig()})
    with pytest.raises(ValueError, match=r"expected a DynamicTableConfig.*got str for table 't'"):
        dyn.DynamicEmbeddingBagCollection([GOOD], dynamic={"t": "zeros"})
    with pytest.raises(ValueError, match=r"expected a DynamicTableConfig.*got int for table 't'"):
        dyn.DynamicEmbeddingBagCollection([GOOD], dynamic=3)


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"optimizer": EmbOptimType.SHAMPOO}, r"among EXACT_SGD.* got SHAMPOO. Use one of them"),
        ({"optimizer": "RMSPROP"}, r"among EXACT_SGD.*got RMSPROP. .* write a dyn.RowRule"),
        ({"learning_rte": 0.1}, "got 'learning_rte'"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_impossible_fused_params(fused_params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dyn.DynamicEmbeddingBagCollection([GOOD], fused_params=fused_params)


def test_impossible_optimizers_on_the_parameter() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection([GOOD])
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
        apply_optimizer_in_backward(Adagrad, ebc.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"one optimizer.*\['RowWiseAdagrad', 'Adagrad'\]"):
        ebc(batch())
    ebc = dyn.DynamicEmbeddingBagCollection([GOOD])
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(torch.optim.SparseAdam, ebc.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="fuse"):
        ebc(batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lr": 0.1, "learning_rate": 0.2},
            "expected lr or learning_rate on the .* got lr and learn",
        ),
        (
            {"betas": (0.8, 0.9), "beta2": 0.9},
            "expected betas or beta1 and beta2 .* betas and beta2",
        ),
        (
            {"lr": 0.1, "optimizer": "EXACT_SGD"},
            "expected one optimizer .* got RowWiseAdagrad and EXACT_SGD",
        ),
    ],
)
def test_options_twice_on_the_parameter(options: dict[str, Any], message: str) -> None:
    ebc = dyn.DynamicEmbeddingBagCollection([GOOD])
    with pytest.warns(DeprecationWarning):
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), options)
    with pytest.raises(ValueError, match=r"\(table='t'\): " + message):
        ebc(batch())
    assert ebc.local_tables() == {}


READ = {
    "optimizer": EmbOptimType.EXACT_SGD,
    "output_dtype": DataType.FP32,
    "weight_decay_mode": 0,
    "stochastic_rounding": True,
    "gradient_clipping": True,
    **dict.fromkeys(("learning_rate", "eps", "beta1", "beta2", "weight_decay", "max_norm"), 0.0),
}
WARNED = {
    *("cache_algorithm", "cache_load_factor", "cache_precision", "cache_reserved_memory"),
    *("cache_sets", "enforce_hbm", "gather_uvm_cache_stats", "multipass_prefetch_config"),
    *("prefetch_pipeline", "record_cache_metrics", "uvm_host_mapped", "uvm_non_rowwise_momentum"),
}


def test_each_option_of_fbgemm_is_read_or_warned_of_or_refused() -> None:
    """Only bounds_check_mode is ignored in silence: any int64 is an id."""
    found: dict[str, set[str]] = {"read": set(), "warned": set(), "refused": set()}
    for option in list(signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters)[2:]:
        given = {**SGD, option: READ.get(option, 1)}
        try:
            ebc = dyn.DynamicEmbeddingBagCollection([GOOD], fused_params=given)
        except ValueError as error:
            alone = "expected gradient_clipping=True with max_gradient"  # so this one is read
            assert f"got '{option}'. " in str(error) or alone in str(error)
            found["read" if alone in str(error) else "refused"].add(option)
            continue
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):  # it warns once
                ebc(batch())
        found["warned" if told else "read"].add(option)
        for text in [str(warning.message) for warning in told]:
            assert f"cache or another place of the rows, got ['{option}'], which have no ef" in text
            assert (
                "DynamicTableConfig(storage=HostMemory(gpu_rows=...)) does the same. On the CPU"
                in text
            )
        assert len(told) < 2
    assert found["warned"] == WARNED
    assert found["read"] == {*READ, "max_gradient", "bounds_check_mode"}
    for option in ("feature_table_map", "momentum", "weights_precision", "stats_reporter_config"):
        assert option in found["refused"]


def test_options_that_ask_for_no_cache_are_not_warned_of() -> None:
    given = {**SGD, "prefetch_pipeline": False, "cache_precision": None, "enforce_hbm": False}
    dyn.DynamicEmbeddingBagCollection([GOOD], fused_params=given)(batch())


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_two_outputs_of_one_name(kind: Any) -> None:
    """Features "f" of two tables and "f@t": TorchRec names the output of a shared feature so, too."""
    tables = [
        kind(100, 4, name, feature_names=[feature])
        for name, feature in (("t", "f"), ("u", "f"), ("v", "f@t"))
    ]
    collection: Any = (
        dyn.DynamicEmbeddingBagCollection
        if kind is EmbeddingBagConfig
        else dyn.DynamicEmbeddingCollection
    )
    with pytest.raises(
        ValueError, match=r"an output name once, got 'f@t' 2 times.* rename the fea"
    ):
        collection(tables)
    collection(tables[1:])


def batch(**fields: object) -> KeyedJaggedTensor:
    """Returns a batch of two bags of one feature."""
    made = {"keys": ["f"], "values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([2, 1])}
    return KeyedJaggedTensor(**{**made, **fields})


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (batch(keys=["g"]), r"table='t'\): expected feature 'f', got features \['g'\]"),
        (
            batch(values=torch.tensor([1, 2, 3], dtype=torch.int16)),
            r"uint64, got torch.int16.*long",
        ),
        (
            batch(values=torch.tensor([1.0, 2.0, 3.0])),
            "ids of dtype int64, int32 or uint64, got torch.float32",
        ),
        (batch(lengths=torch.tensor([2, 2])), "add up to the 3 ids"),
        (batch(lengths=torch.tensor([4, -1])), "not negative"),
        (batch(lengths=torch.tensor([2, 1, 0]), stride=2), "expected 2 lengths"),
    ],
)
@pytest.mark.parametrize("pooled", [True, False])
def test_batches_that_do_not_fit(features: KeyedJaggedTensor, message: str, pooled: bool) -> None:
    if pooled:
        collection = dyn.DynamicEmbeddingBagCollection([GOOD], fused_params=SGD)
    else:
        config = EmbeddingConfig(100, 4, "t", feature_names=["f"])
        collection = dyn.DynamicEmbeddingCollection([config], fused_params=SGD)
    with pytest.raises(ValueError, match=message):
        collection(features)
    assert collection.table("t").num_rows == 0 and collection.table("t").stats()["step"] == 0


@pytest.mark.parametrize("pooled", [True, False])
def test_batches_of_another_type(pooled: bool) -> None:
    config = EmbeddingConfig(100, 4, "t", feature_names=["f"])
    collection: Any = (
        dyn.DynamicEmbeddingBagCollection([GOOD], fused_params=SGD)
        if pooled
        else dyn.DynamicEmbeddingCollection([config], fused_params=SGD)
    )
    ids = torch.arange(3)
    for features in (ids, None, JaggedTensor(ids, lengths=ids), {"f": ids}, [ids]):
        name = type(features).__name__
        message = rf"{type(collection).__name__}: expected a KeyedJaggedTensor, got {name}\. Name"
        with pytest.raises(ValueError, match=message):
            collection(features)


def test_a_batch_that_a_module_sends_is_awaited() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection([GOOD], fused_params=SGD)
    sent: Any = LazyNoWait(batch())
    assert torch.equal(ebc(sent).values(), ebc(batch()).values())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "expected weights for weighted bags, got none"),
        (torch.tensor([1, 2, 3]), "expected weights of a floating dtype, got torch.int64"),
        (torch.tensor([1.0, 2.0]), "expected one weight per id, got 2 for 3 ids"),
    ],
)
def test_weights_that_do_not_fit(weights: torch.Tensor | None, message: str) -> None:
    ebc = dyn.DynamicEmbeddingBagCollection([GOOD], is_weighted=True, fused_params=SGD)
    with pytest.raises(ValueError, match=message):
        ebc(batch(weights=weights))
    assert ebc.table("t").num_rows == 0


def test_unknown_table_and_full_table() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection([replace(GOOD, num_embeddings=2, init_fn=None)])
    with pytest.raises(ValueError, match=r"table: expected a name among \['t'\], got 'u'"):
        ebc.table("u")
    ebc = dyn.DynamicEmbeddingBagCollection(
        [replace(GOOD, num_embeddings=2, init_fn=None)], fused_params=SGD
    )
    ebc(batch(values=torch.tensor([1, 2, 1]))).values().sum().backward()
    before = ebc.state_dict()
    with pytest.raises(RuntimeError, match=r"'t'.*2 rows.*num_embeddings=2"):
        ebc(batch())
    after = ebc.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_time_that_one_table_refuses_is_set_in_no_table() -> None:
    timed = dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=60))
    tables = [GOOD, replace(GOOD, name="u", init_fn=None)]
    ebc = dyn.DynamicEmbeddingBagCollection(tables, dynamic=timed, fused_params=SGD)
    ebc.embedding_bags["u"].rows().set_time(9)
    with pytest.raises(ValueError, match=r"'u'\)\.set_time: expected"):
        ebc.set_time(5)
    assert [table.time for table in ebc.local_tables().values()] == [None, 9]


def test_rows_on_meta() -> None:
    ebc = dyn.DynamicEmbeddingBagCollection([GOOD], device="meta", fused_params=SGD)
    with pytest.raises(ValueError, match="expected rows on a real device, got meta"):
        ebc(batch())
    ebc.to_empty(device="cpu")
    assert ebc(batch()).values().shape == (2, 4)
