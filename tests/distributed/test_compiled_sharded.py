"""torch.compile around DistributedModelParallel agrees with eager; inference sharding is refused."""

import pytest
import torch
import torch.distributed as dist
import workers
from compiled_training import (
    CALLS_IN_A_STEP,
    SGD,
    check_as_without_a_compiler,
    compare_calls,
    inputs,
    model_of,
)
from sharded_cases import usual_plan
from shards import deep_but
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.inference.modules import (
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)

import torchrec_dyn as dyn

COLLECTIONS = (dyn.DynamicEmbeddingBagCollection, dyn.DynamicEmbeddingCollection)
ALL = ("table_wise", "row_wise", "column_wise")


def planned(model: nn.Module, types: tuple[str, ...], world: int) -> ShardingPlan:
    """Returns a plan with the types in turn."""
    plan = {}
    for path, module in model.named_modules():
        if not isinstance(module, COLLECTIONS):
            continue
        of_tables = EmbeddingModuleShardingPlan()
        for turn, config in enumerate(module.table_configs()):
            kind = types[turn % len(types)]
            of_tables[config.name] = usual_plan(
                kind, config.embedding_dim, world, world, turn, config.num_embeddings
            )
        path = path.removesuffix("._embedding_bag_collection")
        plan[path] = of_tables
    return ShardingPlan(plan)


def sharded(
    model: nn.Module, types: tuple[str, ...], **options: object
) -> DistributedModelParallel:
    return DistributedModelParallel(
        model,
        plan=planned(model, types, dist.get_world_size()),
        sharders=dyn.default_sharders(fused_params={**SGD, **options}),
    )


def check_sharded_as_without_a_compiler(
    kinds: list[str], compiled: str, backend: str, types: tuple[str, ...]
) -> None:
    for kind in kinds:
        check_as_without_a_compiler(
            kind, compiled, backend, lambda model: sharded(model, types), dist.get_rank()
        )


def test_as_without_a_compiler() -> None:
    workers.run(check_sharded_as_without_a_compiler, ["pairs"], "model", "eager", ALL, world_size=2)


def test_the_dense_part_is_compiled() -> None:
    """The exchange of outputs ends before the next graph. Otherwise the code around it is not compiled."""
    workers.run(
        check_sharded_as_without_a_compiler,
        ["pooled"],
        "model",
        "eager",
        ("row_wise",),
        world_size=2,
    )


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_modules_and_aot_eager(world_size: int) -> None:
    kinds = ["pooled", "policies", "sequence", "rows", "sum", "blocks", "pairs", "processed"]
    run = workers.run
    run(
        check_sharded_as_without_a_compiler,
        kinds,
        "model",
        "aot_eager",
        ALL,
        world_size=world_size,
        timeout=300.0,
    )


def test_a_compiled_collection() -> None:
    """The forward is outside of graphs, and so is all that it calls."""
    kinds = ["pooled", "sequence"]
    workers.run(
        check_sharded_as_without_a_compiler, kinds, "tables", "eager", ("row_wise",), world_size=2
    )


@pytest.mark.deep
def test_a_compiled_training_step() -> None:
    workers.run(check_sharded_as_without_a_compiler, ["pooled"], "step", "eager", ALL, world_size=2)


def calls_in_a_step(calls: list[str]) -> None:
    for call in calls:
        compare_calls(call, lambda model: sharded(model, ("row_wise",), defer_updates=True))


USUAL_CALLS = ["clip_grad_norm_", "handle", "lookup_rows", "state_dict"]
# torch.compile fails at `param_groups` of an optimizer whose groups are of a subclass of dict.
CALLS = [call for call in CALLS_IN_A_STEP if "optimizer" not in call]


@pytest.mark.parametrize(
    ("calls", "world_size"), deep_but([(USUAL_CALLS, 1)], [(USUAL_CALLS, 1), (CALLS, 2)])
)
def test_calls_in_a_compiled_step(calls: list[str], world_size: int) -> None:
    workers.run(calls_in_a_step, calls, world_size=world_size, timeout=200.0)


def errors_of_compilers() -> list[str]:
    """Returns the errors of fullgraph and of torch.jit.script."""
    model = sharded(model_of("pooled"), ("table_wise",))
    whole = torch.compile(model.module, backend="eager", fullgraph=True)
    found = []
    for call in (lambda: whole(next(inputs("pooled"))), lambda: torch.jit.script(model.module)):
        with pytest.raises((RuntimeError, ValueError)) as error:
            call()
        found.append(str(error.value))
    return found


def test_errors() -> None:
    [(of_compile, of_script)] = workers.run(errors_of_compilers, world_size=1)
    assert "_forward: expected a graph break, got fullgraph=True" in of_compile
    assert "torchrec_dyn.serving" in of_compile
    assert "ShardedDynamicEmbeddingBagCollection: expected a call, got torch.jit.sc" in of_script
    assert "torchrec_dyn.serving" in of_script


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_shard_quant_model_is_an_error(kind: str) -> None:
    model = model_of(kind)
    with pytest.raises(ValueError, match=r"expected a process group, got none, .*_dyn.serving"):
        shard_quant_model(
            model,
            world_size=2,
            compute_device="cpu",
            sharding_device="cpu",
            sharders=dyn.default_sharders(fused_params=SGD),
            sharding_plan=planned(model, ("table_wise",), 2),
        )


def errors_of_inference(kind: str, types: tuple[str, ...]) -> list[str]:
    model = sharded(model_of(kind), types)
    found = []
    for module in (model, model.module):
        for call in (
            lambda one: quantize_embeddings(one, torch.int8, inplace=False),
            lambda one: quantize_embeddings(one, torch.int8, inplace=True),
            quantize_inference_model,
            lambda one: shard_quant_model(one, 2, "cpu", "cpu"),
            lambda one: shard_quant_model(one, 2, "cpu", "cpu", sharding_plan=ShardingPlan({})),
        ):
            with pytest.raises(ValueError, match="expected no dynamic tables in") as error:
                call(module)
            found.append(str(error.value))
    return found


@pytest.mark.parametrize("kind", ["pooled", "sequence", "rows"])
def test_inference_of_a_sharded_model_is_an_error(kind: str) -> None:
    for texts in workers.run(errors_of_inference, kind, ALL, world_size=2):
        for text in texts:
            assert "torchrec_dyn.serving.build(..., rows=torch.int8)" in text
