"""TorchRec's feature processors around dynamic tables: every plan trains as the unsharded module does."""

import copy

import pytest
import torch
import torch.distributed as dist
import workers
from pipeline_model import Run
from pipeline_runs import check_same_states, train
from processed_training import (
    LONGEST,
    Model,
    backward,
    bags,
    learn,
    one_table,
    position_weights,
    processed,
    shard_processed,
    train_processed,
)
from sharded_cases import (
    FUSED_PARAMS,
    POOLED,
    SEQUENCE,
    SPREAD_ROWS,
    WHOLE_ROWS,
    Case,
    Table,
    usual_plan,
)
from sharded_training import batches, collection_of
from shards import deep_but
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn
from torchrec_dyn import DynamicTableConfig
from torchrec_dyn.planner import make_planner

every_plan = pytest.mark.parametrize("kinds", [WHOLE_ROWS, SPREAD_ROWS])


def tables_of(
    kinds: list[str], world: int, local: int, pooling: str = "SUM", scale: int = 1
) -> list[Table]:
    """Tables of other widths, of several features; one shares a feature."""
    dims, features = (8, 4, 12), (["a"], ["b", "c"], ["a", "d"])
    return [
        Table(
            f"t{i}",
            features[i],
            usual_plan(kind, dims[i] * scale, world, local, i),
            dims[i] * scale,
            pooling=pooling,
        )
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("form", ["collection", "dict"])
@pytest.mark.parametrize("kinds", [WHOLE_ROWS, SPREAD_ROWS, SEQUENCE])
def test_plans_train_as_unsharded(kinds: list[str], form: str) -> None:
    case = Case(tables_of(kinds, 2, 2), weighted=True, exact=False)
    assert sum(workers.run(train_processed, case, form, world_size=2)) > 0


@pytest.mark.everyday(4)
@pytest.mark.parametrize("kind", POOLED)
def test_a_plan_alone_trains_as_unsharded(kind: str) -> None:
    case = Case(tables_of([kind] * 3, 2, 2), weighted=True, exact=False)
    assert sum(workers.run(train_processed, case, "collection", world_size=2)) > 0


@every_plan
def test_four_ranks_on_two_nodes_and_uneven_batches(kinds: list[str]) -> None:
    case = Case(tables_of(kinds, 4, 2), weighted=True, exact=False, batch_sizes=[3, 1, 6, 4])
    workers.run(train_processed, case, "collection", False, world_size=4, local_size=2)


@every_plan
def test_a_batch_size_per_feature(kinds: list[str]) -> None:
    sizes = [3, 0, 5, 0]
    case = Case(
        tables_of(kinds, 4, 2), weighted=True, exact=False, variable=True, batch_sizes=sizes
    )
    workers.run(train_processed, case, "collection", False, world_size=4, local_size=2)


def test_rows_that_learn_by_the_sum_over_ranks() -> None:
    tables = tables_of(["table_wise", "row_wise", "row_wise"], 2, 2)
    for table in tables:
        table.config = DynamicTableConfig(gradient="sum")
    case = Case(tables, weighted=True, exact=False)
    workers.run(train_processed, case, "collection", True, True, world_size=2)


@every_plan
def test_mean_divides_by_the_number_of_ids(kinds: list[str]) -> None:
    case = Case(tables_of(kinds, 4, 2, "MEAN"), weighted=True, exact=False)
    workers.run(train_processed, case, "collection", world_size=4, local_size=2)


def train_beside_static(case: Case, form: str) -> None:
    """Trains beside TorchRec's static tables, sharded by the same plan; row i is id i."""
    rank = dist.get_rank()
    ours = processed(case, collection_of(case, fused_params=case.fused_params), form)
    ids = torch.arange(200)
    torch.manual_seed(3)  # the same static rows on every rank
    static = EmbeddingBagCollection(
        [copy.deepcopy(one) for one in ours.split()[1].embedding_bag_configs()], is_weighted=True
    )
    for name, table in static.embedding_bags.items():
        ours.split()[1].table(name).assign(ids, table.weight.detach()[:200])
    static_model = shard_processed(
        case,
        processed(case, static, form),
        FeatureProcessedEmbeddingBagCollectionSharder(
            EmbeddingBagCollectionSharder(fused_params=dict(case.fused_params))
        ),
    )
    dynamic_model = shard_processed(case, ours)
    # On the CPU TorchRec does not shard a module's weights: it creates new weights.
    saved = {name: table.weight.detach() for name, table in static.embedding_bags.items()}
    for path, held in static_model.state_dict().items():
        if "embedding_bags" in path:
            for shard in held.local_shards():
                (row, column), size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                rows = saved[path.split(".")[-2]][row : row + size[0], column : column + size[1]]
                shard.tensor.copy_(rows)
    for step in range(case.steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        lengths = torch.randint(LONGEST + 1, (4 * len(case.features()),), generator=generator)
        values = torch.randint(200, (int(lengths.sum()),), generator=generator)
        batch = KeyedJaggedTensor(case.features(), values, lengths=lengths)
        got, expected = dynamic_model(copy.deepcopy(batch)), static_model(batch)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
        backward(got), backward(expected)
        others = position_weights(static_model)
        for name, weight in position_weights(dynamic_model).items():
            torch.testing.assert_close(weight.grad, others[name].grad, rtol=1e-4, atol=1e-5)
        learn(dynamic_model), learn(static_model)


@pytest.mark.parametrize("form", ["collection", "dict"])
def test_as_static_tables_of_torchrec(form: str) -> None:
    case = Case(tables_of(SEQUENCE, 2, 2, scale=2), weighted=True)
    workers.run(train_beside_static, case, form, world_size=2)


def check_positions_of_each_plan(form: str) -> None:
    """Processors that rows spread over ranks made read positions, then whole rows, then no ranks."""
    spread, whole = one_table("row_wise"), one_table("table_wise")
    module = processed(spread, collection_of(spread), form)
    collection = module.split()[1]
    rows = torch.rand(40, 8, generator=torch.Generator().manual_seed(4))  # the same on all ranks
    collection.table("t").assign(torch.arange(100, 140), rows)
    untouched = copy.deepcopy(module).eval()
    batch = batches(spread, 0)[0][torch.distributed.get_rank()]
    expected = untouched(batch)["a"]
    plans = [shard_processed(one, module).eval() for one in (spread, whole)]
    for number in (0, 1, 0):
        assert torch.allclose(plans[number](batch)["a"], expected), number
    module.eval()
    assert torch.equal(module(batch)["a"], expected)


@pytest.mark.parametrize("form", ["collection", "dict"])
def test_what_one_plan_told_the_processors_is_not_believed_under_another(form: str) -> None:
    workers.run(check_positions_of_each_plan, form, world_size=2)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("before", "after", "moving"),
    [
        *(("table_wise", "row_wise", 2), ("row_wise", "column_wise", 2)),
        *(("grid_shard", "table_row_wise", 2), ("row_wise", "table_wise", 3)),
    ],
)
def test_tables_move_while_training(before: str, after: str, moving: int) -> None:
    """Positions begin or cease to travel, the processors and their gradients stay."""
    case = Case(tables_of([before] * 3, 4, 2), weighted=True, exact=False)
    moves = {table.name: table.plan for table in tables_of([after] * 3, 4, 2)[:moving]}
    workers.run(train_processed, case, "collection", True, False, moves, world_size=4, local_size=2)


# The planner and the pipelines


def plan_and_train(constraints: dict[str, ParameterConstraints] | None) -> str:
    case = one_table()
    model = Model(processed(case, collection_of(case), "collection"))
    sharders = [dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(dict(FUSED_PARAMS))]
    planner = make_planner(Topology(2, "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    backward(model(bags(2, 1)))
    (chosen,) = plan.plan["collection"].values()
    return chosen.sharding_type


def test_the_planner_plans_them() -> None:
    kinds = workers.run(plan_and_train, None, world_size=2)
    assert set(kinds) <= {"table_wise", "column_wise", "table_column_wise"}
    asked = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    assert set(workers.run(plan_and_train, asked, world_size=2)) == {"row_wise"}


@pytest.mark.parametrize("kind", deep_but(["row_wise"], ["table_wise", "row_wise", "grid_shard"]))
def test_pipelines(kind: str) -> None:
    run = Run([kind] * 3, ["table_wise"], processed=True, steps=4)
    by_name = [workers.run(train, run, name, world_size=2) for name in ("base", "sparse_dist")]
    for expected, got in zip(*by_name, strict=True):
        assert got["losses"] == expected["losses"] and len({*got["losses"]}) == 4
        check_same_states(got["states"], expected["states"])


# Tables that are saved and converted

MIXED = ["row_wise", "table_wise", "column_wise"]


def trained(case: Case, steps: int = 2) -> DistributedModelParallel:
    model = shard_processed(case, processed(case, collection_of(case), "collection"))
    for step in range(steps):
        backward(model(batches(case, step)[0][dist.get_rank()]))
    return model


def contents(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """All rows and position weights."""
    _, collection = model.module.collection.split()
    found = {name: weight.detach().clone() for name, weight in position_weights(model).items()}
    for table in case.tables:
        ids = dyn.read_ids(collection, table.name)
        found[f"{table.name} ids"] = ids
        found[f"{table.name} rows"] = dyn.lookup_rows(collection, table.name, ids)[0]
    return found


def save(folder: str) -> dict[str, Tensor]:
    case = Case(tables_of(MIXED, 2, 2), weighted=True)
    model = trained(case)
    with torch.no_grad():
        for weight in position_weights(model).values():
            weight += 1
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return contents(model, case)


def load(folder: str, world: int) -> dict[str, Tensor]:
    kinds = ["column_wise", "row_wise", "table_wise"]
    case = Case(tables_of(kinds, world, world), weighted=True)
    model = shard_processed(case, processed(case, collection_of(case), "collection"))
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder, planner=dyn.checkpoint.LoadPlanner())
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    assert dyn.read_stats(model.module.collection.split()[1], "t0")["rows"] > 0
    return contents(model, case)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, dict[str, Tensor]]:
    """Returns the folder of a checkpoint of two ranks, and its contents."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, workers.run(save, folder, world_size=2)[0]


@pytest.mark.parametrize("world", [1, 4])
def test_checkpoint_into_another_plan(saved, world: int) -> None:
    folder, saved = saved
    loaded = workers.run(load, folder, world, world_size=world)[0]
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name


def test_checkpoint_into_the_unsharded_module(saved) -> None:
    folder, saved = saved
    case = Case(tables_of(MIXED, 1, 1), weighted=True)
    model = Model(processed(case, collection_of(case), "collection"))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, planner=dyn.checkpoint.LoadPlanner())
    model.load_state_dict(state["model"])
    table = model.collection.split()[1].table("t0")
    assert torch.equal(table.lookup(saved["t0 ids"])[0], saved["t0 rows"])
    assert torch.equal(position_weights(model)["a"], saved["a"])


def test_make_dynamic_and_from_static_keep_the_processors() -> None:
    case = one_table()
    static = EmbeddingBagCollection(collection_of(case).embedding_bag_configs(), is_weighted=True)
    model = Model(processed(case, static, "collection"))
    changed = dyn.make_dynamic(copy.deepcopy(model))
    _, collection = changed.collection.split()
    assert type(collection) is dyn.DynamicEmbeddingBagCollection and collection.is_weighted()
    processors, _ = model.collection.split()
    moved = FeatureProcessedEmbeddingBagCollection(
        dyn.from_static(static, fused_params=FUSED_PARAMS), processors
    )
    batch = bags(3, 0, 2)
    torch.testing.assert_close(moved(batch)["a"], model(batch)["a"])
