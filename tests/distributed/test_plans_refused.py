"""A plan, a name or an optimizer that cannot be honoured is refused before anything is built."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from policy_cases import SmallNorm
from sharded_cases import FUSED_PARAMS, Case, Table, shard_by_hand
from sharded_training import batches, collection_of, outputs_by_name, shard
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.types import (
    CacheParams,
    KeyValueParams,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn

Pieces = list[tuple[list[int], int, int]]
WHOLE: Pieces = [([0], 0, 8)]

# (what, pooled, sharding type, pieces, part of the message)
MADE_BY = "Make the plan with the planner or construct_module_sharding_plan."
BAD_PLANS: list[tuple[bool, str, Pieces, str]] = [
    (
        True,
        "data_parallel",
        WHOLE,
        "sharding type table_wise, .*, got 'data_parallel'. Every rank would",
    ),
    (
        False,
        "data_parallel",
        WHOLE,
        "sharding type table_wise, .*, got 'data_parallel'. Every rank would",
    ),
    (False, "table_row_wise", [([0, 1], 0, 8)], "got 'table_row_wise'"),
    (True, "column_wise", [([0], 0, 4)], r"columns 0 to 8 once, got .*\[\(0, 4\)\]"),
    (
        True,
        "column_wise",
        [([0], 0, 4), ([1], 4, 8)],
        r"columns 0 to 8 once, got .*\[\(0, 4\), \(4, 8\)\]",
    ),
    (
        True,
        "column_wise",
        [([0], 0, 3), ([1], 4, 4)],
        r"columns 0 to 8 once, got .*\[\(0, 3\), \(4, 4\)\]",
    ),
    (
        True,
        "column_wise",
        [([0], 0, 8), ([1], 8, 0)],
        r"columns 0 to 8 once, got .*\[\(0, 8\), \(8, 0\)\]",
    ),
    (True, "column_wise", [([0], 0, 4), ([2], 4, 4)], r"expected ranks from 0 to 1, got \[2\]"),
    (True, "table_wise", [([0], 0, 4), ([1], 4, 4)], "expected whole rows under table_wise"),
    (True, "row_wise", [([0], 0, 8)], "expected one row shard on each of 2 ranks"),
    (True, "row_wise", [([0, 0], 0, 8)], "expected one row shard on each of 2 ranks"),
    (True, "table_row_wise", [([1, 0], 0, 8)], "on the 2 ranks of one node in order"),
    (True, "grid_shard", [([0, 1], 0, 4), ([0], 4, 4)], "on the 2 ranks of one node in order"),
    (False, "column_wise", [([0], 0, 6), ([1], 6, 2)], "expected column shards of one width"),
]


def refusal(shard: Callable[[ShardingEnv], Any]) -> str:
    """The message of the ValueError; the same rank must still be able to shard afterwards."""
    assert dist.group.WORLD is not None
    with pytest.raises(ValueError) as caught:
        shard(ShardingEnv.from_process_group(dist.group.WORLD))
    return str(caught.value)


def refuse_plan(pooled: bool, plan: dict[str, ParameterSharding], **sharder: Any) -> str:
    case = Case([Table("t", ["a"], shard_by_hand("table_wise", WHOLE))], pooled=pooled)
    collection = collection_of(case)
    before = copy.deepcopy(plan)
    kind = (
        dyn.DynamicEmbeddingBagCollectionSharder
        if pooled
        else dyn.DynamicEmbeddingCollectionSharder
    )
    message = refusal(
        lambda env: kind(**sharder).shard(collection, plan, env, torch.device("cpu"), "model.c")
    )
    assert plan == before
    assert "('model.c')" in message
    return message


@pytest.mark.parametrize("pooled, kind, pieces, message", BAD_PLANS)
def test_bad_plan_is_refused(pooled: bool, kind: str, pieces: Pieces, message: str) -> None:
    plan = {"t": shard_by_hand(kind, pieces)}
    for text in workers.run(refuse_plan, pooled, plan, world_size=2):
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)
        assert "(table='t')" in text or "one width" in message


@pytest.mark.parametrize("kernel", ["dense", "quant_uvm", "key_value", "nonsense"])
def test_other_kernels_are_refused(kernel: str) -> None:
    plan = {"t": shard_by_hand("table_wise", WHOLE)}
    plan["t"].compute_kernel = kernel
    (text,) = workers.run(refuse_plan, True, plan, world_size=1)
    assert (
        "(table='t'): expected compute kernel 'fused', 'fused_uvm', 'fused_uvm_caching', got "
        f"'{kernel}'. In a plan"
    ) in text


def shard_whole_rows(kinds: dict[str, Pieces]) -> list[str]:
    """Shards a table whose policy reads rows under plans in turn; returns what each raises, or nothing."""
    config, told = dyn.DynamicTableConfig(eviction=SmallNorm()), []
    for kind, pieces in kinds.items():
        table = Table("t", ["a"], shard_by_hand(kind, pieces), 8, config=config)
        try:
            shard(Case([table]), collection_of(Case([table])))
            told.append("")
        except ValueError as error:
            told.append(str(error))
    return told


def test_columns_of_rows_that_a_policy_reads_are_refused() -> None:
    cut, rows = [([0], 0, 4), ([1], 4, 4)], [([0, 1], 0, 8)]
    both_rows = [([0, 1], 0, 4), ([0, 1], 4, 4)]
    refused: dict[str, Pieces] = {
        "column_wise": cut, "table_column_wise": cut, "grid_shard": both_rows,
    }  # fmt: skip
    for told in workers.run(shard_whole_rows, refused, world_size=2):
        for kind, text in zip(refused, told, strict=True):
            assert (
                "(table='t'): expected one column shard, since SmallNorm() reads whole rows, got "
                f"'{kind}' with 2 column shards. Choose one of ['table_wise', 'row_wise', "
                "'table_row_wise']."
            ) in text
    allowed = {"table_wise": WHOLE, "column_wise": WHOLE, "row_wise": rows, "table_row_wise": rows}
    assert workers.run(shard_whole_rows, allowed, world_size=2) == [[""] * 4] * 2


def test_missing_and_unknown_tables_are_refused() -> None:
    (text,) = workers.run(refuse_plan, True, {}, world_size=1)
    assert text.endswith("expected a plan for the tables ['t'], got one for []. " + MADE_BY)
    plan = {name: shard_by_hand("table_wise", WHOLE) for name in ("t", "u")}
    (text,) = workers.run(refuse_plan, True, plan, world_size=1)
    assert text.endswith("expected a plan for the tables ['t'], got one for ['t', 'u']. " + MADE_BY)


def test_shards_that_do_not_match_ranks_are_refused() -> None:
    plan = {"t": shard_by_hand("table_wise", WHOLE)}
    plan["t"].ranks = [0, 1]
    (text,) = workers.run(refuse_plan, False, plan, world_size=1)
    assert (
        "expected a rank for each of 1 shards, that of its placement, got ranks [0, 1] and" in text
    )
    plan["t"].sharding_spec = None
    (text,) = workers.run(refuse_plan, False, plan, world_size=1)
    assert "expected a sharding spec that lists its shards of rows and columns, got None." in text


def test_placements_on_other_ranks_than_the_plans_are_refused() -> None:
    plan = {"t": shard_by_hand("table_wise", WHOLE)}
    plan["t"].ranks = [1]
    for text in workers.run(refuse_plan, True, plan, world_size=2):
        assert "that of its placement, got ranks [1] and placements on [0]." in text


def test_overlapping_columns_are_refused() -> None:
    # torch lets them pass where the rows are apart.
    plan = {"t": shard_by_hand("column_wise", [([0], 0, 4), ([0], 4, 4)])}
    first, second = plan["t"].sharding_spec.shards  # type: ignore[union-attr]
    first.shard_sizes, second.shard_offsets, second.shard_sizes = [500, 4], [500, 3], [500, 5]
    (text,) = workers.run(refuse_plan, True, plan, world_size=1)
    assert (
        "expected shards that cover columns 0 to 8 once, got shards of (begin, size) [(0, 4), (3, 5)]."
        in text
    )


def test_column_range_listed_twice_is_refused() -> None:
    plan = {"t": shard_by_hand("column_wise", [([0, 0], 0, 8)])}
    (text,) = workers.run(refuse_plan, True, plan, world_size=1)
    assert "expected each range of columns on one rank under column_wise" in text


def refuse_optimizer(fused_params: dict[str, Any]) -> str:
    plan = {"t": shard_by_hand("table_wise", WHOLE)}
    return refuse_plan(True, plan, fused_params=fused_params)


@pytest.mark.parametrize(
    "fused_params, message",
    [
        ({"optimizer": EmbOptimType.SHAMPOO}, "SHAMPOO"),
        ({"optimizer": EmbOptimType.ADAM, "momentum": 0.9}, "momentum"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_bad_optimizer_is_refused(fused_params: dict[str, Any], message: str) -> None:
    (text,) = workers.run(refuse_optimizer, fused_params, world_size=1)
    assert message in text and "(table='t')" in text


def test_bad_option_of_a_plan_is_refused_on_every_rank() -> None:
    plan = {"t": shard_by_hand("table_wise", WHOLE)}  # on rank 0: there is no kernel on rank 1
    plan["t"].stochastic_rounding = False
    for text in workers.run(refuse_plan, True, plan, world_size=2):
        assert "(table='t'): expected stochastic_rounding=True, got False." in text
        assert "or the option of the table's ParameterConstraints" in text


PLACED: dict[str, Any] = {
    "cache_params": CacheParams(load_factor=0.2, prefetch_pipeline=True),
    "enforce_hbm": True,
    "key_value_params": KeyValueParams(ssd_storage_directory="/nowhere"),
}
# Fields of a plan that have an effect, or an error of their own.
READ = {*("sharding_type", "compute_kernel", "ranks", "sharding_spec")}
READ |= {*("output_dtype", "stochastic_rounding")}


def warnings_of_plans() -> dict[str, list[str]]:
    """Returns the warnings that a collection gives of each option of a plan, and of two of a sharder."""
    table = Table("t", ["a"], shard_by_hand("table_wise", WHOLE))
    told = {}
    for name in (*PLACED, "bounds_check_mode", "a sharder's"):
        plan, params = copy.deepcopy(table.plan), dict(FUSED_PARAMS)
        if name == "a sharder's":
            params |= {"cache_load_factor": 0.2, "prefetch_pipeline": False, "enforce_hbm": True}
        else:
            setattr(plan, name, PLACED.get(name, BoundsCheckMode.FATAL))
        case = Case([replace(table, plan=plan)], fused_params=params)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = shard(case, collection_of(case))
            model(batches(case, 0)[0][dist.get_rank()]).values().sum().backward()
        told[name] = [str(one.message) for one in caught if "a cache" in str(one.message)]
    return told


def test_options_of_plans_that_have_no_effect_are_warned_of() -> None:
    for told in workers.run(warnings_of_plans, world_size=2):
        assert told.pop("bounds_check_mode") == []
        (of_sharder,) = told.pop("a sharder's")
        assert "('collection'): expected no options for a cache" in of_sharder
        assert "got ['cache_load_factor', 'enforce_hbm'], which have no effect." in of_sharder
        for name, (text,) in told.items():
            assert f"got ['{name}'], which have no effect." in text
            assert (
                "compute kernel 'fused_uvm_caching' with CacheParams(load_factor=...) has" in text
            )


def test_every_field_of_a_plan_is_known() -> None:
    assert {one.name for one in fields(ParameterSharding)} == {*READ, *PLACED, "bounds_check_mode"}


def refuse_fused_params(plan: dict[str, ParameterSharding], fused_params: dict[str, Any]) -> str:
    return refuse_plan(True, plan, fused_params=fused_params)


def test_output_dtype_of_a_plan_or_a_sharder_is_refused_on_every_rank() -> None:
    said = (
        "(table='t'): expected output_dtype FP32, FP16 or BF16 of DataType or SparseType, or torch"
    )
    plan = {"t": shard_by_hand("table_wise", WHOLE)}  # on rank 0: there is no kernel on rank 1
    wrong = {**FUSED_PARAMS, "output_dtype": "fp16"}
    for text in workers.run(refuse_fused_params, plan, wrong, world_size=2):
        assert said in text and "got 'fp16'. Write one" in text
    plan["t"].output_dtype = DataType.INT8
    for text in workers.run(refuse_plan, True, plan, world_size=2):
        assert said in text and "got <DataType.INT8: 'INT8'>" in text


def refuse_output_dtypes(pooled: bool, *dtypes: DataType | None) -> str:
    tables = [
        Table(name, [name], shard_by_hand("table_wise", [([rank], 0, 8)]))
        for rank, name in enumerate(("t", "u"))
    ]
    plan = {table.name: table.plan for table in tables}
    for table, dtype in zip(tables, dtypes, strict=True):
        plan[table.name].output_dtype = dtype
    kind: Any = (
        dyn.DynamicEmbeddingBagCollectionSharder
        if pooled
        else dyn.DynamicEmbeddingCollectionSharder
    )
    collection = collection_of(Case(tables, pooled=pooled))
    return refusal(
        lambda env: kind(FUSED_PARAMS).shard(collection, plan, env, torch.device("cpu"), "model.c")
    )


@pytest.mark.parametrize("pooled", [True, False])
def test_output_dtypes_that_differ_by_table_are_refused(pooled: bool) -> None:
    # The ranks would send and expect different numbers of bytes.
    for text in workers.run(refuse_output_dtypes, pooled, DataType.FP16, None, world_size=2):
        which = "" if pooled else " that are table_wise"
        assert f"('model.c'): expected one output_dtype of all tables{which}, got torch.fl" in text
        assert (
            "torch.float16 of tables ['t']; torch.float32 of tables ['u']. Set it in fused_params, or"
            in text
        )


def look_up_in_two_dtypes() -> dict[str, torch.dtype]:
    tables = [
        Table("t", ["t"], shard_by_hand("table_wise", WHOLE)),
        Table("u", ["u"], shard_by_hand("row_wise", [([0, 1], 0, 8)])),
    ]
    case = Case(tables, pooled=False)
    tables[0].plan.output_dtype = DataType.FP16
    sharded = shard(case, collection_of(case))
    outputs = outputs_by_name(case, sharded(batches(case, 0)[0][dist.get_rank()]))
    torch.autograd.backward(list(outputs.values()), [torch.ones_like(v) for v in outputs.values()])
    return {name: output.dtype for name, output in outputs.items()}


def test_output_dtypes_may_differ_by_sharding_type_in_a_sequence_collection() -> None:
    for dtypes in workers.run(look_up_in_two_dtypes, world_size=2):
        assert dtypes == {"t": torch.float16, "u": torch.float32}


class TwoCollections(nn.Module):
    """Two collections that both have a table named `t`."""

    def __init__(self, sequence: bool) -> None:
        super().__init__()
        pooled = EmbeddingBagConfig(8, 100, name="t", feature_names=["a"])  # type: ignore[call-arg]
        other = EmbeddingConfig(8, 100, name="t", feature_names=["b"])  # type: ignore[call-arg]
        self.one = dyn.DynamicEmbeddingBagCollection([pooled])
        self.two = (
            dyn.DynamicEmbeddingCollection([other])
            if sequence
            else dyn.DynamicEmbeddingBagCollection([copy.deepcopy(pooled)])
        )


def refuse_two(sequence: bool, by: str) -> str:
    model = TwoCollections(sequence)
    dim = 100  # EmbeddingBagConfig(num_embeddings, embedding_dim, ...)
    plan = {"t": shard_by_hand("table_wise", [([0], 0, dim)], rows=8)}
    sharders = [
        dyn.DynamicEmbeddingBagCollectionSharder(FUSED_PARAMS),
        dyn.DynamicEmbeddingCollectionSharder(FUSED_PARAMS),
    ]
    make: Any = {"dmp": DistributedModelParallel, "shard_modules": shard_modules}[by]
    with pytest.raises(ValueError) as caught:
        make(
            model,
            plan=ShardingPlan({"one": plan, "two": plan}),  # type: ignore[dict-item]
            sharders=sharders,
        )
    return str(caught.value)


@pytest.mark.parametrize("sequence, by", [(False, "dmp"), (True, "dmp"), (True, "shard_modules")])
def test_one_name_in_two_collections_is_refused(sequence: bool, by: str) -> None:
    (text,) = workers.run(refuse_two, sequence, by, world_size=1)
    expected = "expected a name that is unique in the model, got the name of a table of 'one': "
    expected += "both would have the same initial rows, which depend on the name. Rename one"
    assert f"('two')(table='t'): {expected}" in text


def check_shard_a_student_and_its_teacher() -> None:
    case = Case([Table("t", ["a"], shard_by_hand("table_wise", WHOLE))])
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    models = [
        DistributedModelParallel(
            nn.ModuleDict({path: collection_of(case)}),
            env=env,
            plan=ShardingPlan({path: {"t": case.tables[0].plan}}),  # type: ignore[dict-item]
            sharders=[dyn.DynamicEmbeddingBagCollectionSharder(dict(FUSED_PARAMS))],  # type: ignore[list-item]
        )
        for path in ("student", "teacher")
    ]
    assert len(models) == 2


def test_two_models_over_one_environment_may_have_the_same_tables() -> None:
    workers.run(check_shard_a_student_and_its_teacher, world_size=1)
