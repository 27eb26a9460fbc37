"""`use_index_dedup=True` under every plan: outputs, rows and counts are as without it."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import pipeline_runs
import pytest
import torch
import torch.distributed as dist
import workers
from checkpoint_cases import tables_of
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from gradient_oracle import MODES, RATE, check_trains_as_dense
from life_cases import NOT_OF_THE_STREAM
from pipeline_model import Run
from sharded_cases import EXTREME_IDS, SEQUENCE, Case, Table, three_tables, usual_plan
from sharded_life import Beside, drifting_batch, make_batch
from sharded_training import (
    batches,
    check_trains_as_unsharded,
    collection_of,
    outputs_by_name,
    shard,
)
from shards import deep_but
from torch import Tensor
from torchrec import JaggedTensor
from torchrec.distributed import embedding

import torchrec_dyn as dyn
from torchrec_dyn import ops
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.sharding import batches as sent_batches
from torchrec_dyn.table.shard import TableShard

# Counts of received ids of a table without scores.
OF_ARRIVALS = {"ids_seen", "hits", "unseen", "refused"}


def exact_grad(output: Tensor, number: int) -> Tensor:
    """Returns small integers: sums of thousands of them are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-4, 5, output.shape, generator=generator).to(output.dtype)


def check_trains_as_without_dedup(
    case: Case, need_indices: bool = False, evaluate_at: int = 1, freeze_at: int | None = None
) -> dict[str, Any]:
    """Trains both sides and asserts that outputs, rows, states and counts are bit-equal."""
    rank = dist.get_rank()
    sides = {}
    for name in ("each", "once"):
        of_side = dataclasses.replace(case, dedup=name == "once")
        sides[name] = shard(of_side, collection_of(case, need_indices=need_indices))
    arrived = {name: _count_arrivals(model) for name, model in sides.items()}
    for step in range(case.steps):
        mine = batches(case, step)[0][rank]
        for model in sides.values():
            model.train(step != evaluate_at)
            if step == freeze_at:
                model.module.collection.table("t1").freeze()
        outputs = {name: model(mine) for name, model in sides.items()}
        each, once = ({**one} for one in outputs.values())
        assert each.keys() == once.keys()
        for name in each:
            _same_jagged(once[name], each[name], need_indices, f"step {step}, {name}")
        if step != evaluate_at:
            for one in (each, once):
                learning = [o.values() for o in one.values() if o.values().requires_grad]
                grads = [exact_grad(values, number) for number, values in enumerate(learning)]
                torch.autograd.backward(learning, grads)
    each_tables, once_tables = (tables_of(model) for model in sides.values())
    for one, other in zip(once_tables, each_tables, strict=True):
        _same_table(one, other)
    return {"rows": sum(table.num_rows for table in once_tables), **arrived}


def _count_arrivals(model: Any) -> list[int]:
    """Returns a list to which each later lookup on this rank appends its number of ids."""
    seen: list[int] = []
    for lookup in model.module.collection._lookups:
        lookup.register_forward_pre_hook(
            lambda _, arguments: seen.append(arguments[0].values().numel())
        )
    return seen


def _same_jagged(one: JaggedTensor, other: JaggedTensor, need_indices: bool, what: str) -> None:
    assert torch.equal(one.lengths(), other.lengths()), what
    assert one.values().dtype == other.values().dtype, what
    assert torch.equal(one.values(), other.values()), what
    ids, expected = one.weights_or_none(), other.weights_or_none()
    assert (ids is None) == (expected is None) == (not need_indices), what
    if ids is not None and expected is not None:
        assert torch.equal(ids, expected), what


def _same_table(one: TableShard, other: TableShard) -> None:
    got, expected = one.export_state(), other.export_state()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), f"{one.name}: {name}"
    left_out = NOT_OF_THE_STREAM if one.life is not None else NOT_OF_THE_STREAM | OF_ARRIVALS
    for name, count in other.stats().items():
        assert name in left_out or one.stats()[name] == count, f"{one.name}: {name}"


def case_of(kinds: list[str], world: int, **options: Any) -> Case:
    tables = three_tables(kinds, world, world, **options.pop("tables", {}))
    return Case(tables, pooled=False, **{"known_ids": 15, "longest_bag": 6, "steps": 3, **options})


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    "kinds, world",
    [*((SEQUENCE, world) for world in (1, 2, 4)), *(([kind], 4) for kind in SEQUENCE)],
)
def test_all_is_equal_to_the_bit_where_sums_are_exact(kinds: list[str], world: int) -> None:
    of_ranks = workers.run(check_trains_as_without_dedup, case_of(kinds, world), world_size=world)
    assert sum(one["rows"] for one in of_ranks) > 0
    once, each = (sum(sum(one[name]) for one in of_ranks) for name in ("once", "each"))
    assert 0 < once < 0.8 * each


# The features of t1 are two runs, those of t2 one: it has no feature that does all.
USES = {
    "t1": (dyn.FeatureUse("c", inserts=False, counts=False),),
    "t2": (dyn.FeatureUse("a", trains=False), dyn.FeatureUse("d", trains=False)),
}


@pytest.mark.parametrize("eviction", [None, dyn.ExpireAfter(steps=1)])
def test_features_of_other_uses_are_sent_apart(eviction: Any) -> None:
    case = case_of(SEQUENCE, 2, steps=4)
    tables = [
        dataclasses.replace(
            table,
            config=dyn.DynamicTableConfig(eviction=eviction, features=USES.get(table.name, ())),
        )
        for table in case.tables
    ]
    of_ranks = workers.run(
        check_trains_as_without_dedup, dataclasses.replace(case, tables=tables), world_size=2
    )
    assert sum(one["rows"] for one in of_ranks) > 0
    once, each = (sum(sum(one[name]) for one in of_ranks) for name in ("once", "each"))
    assert 0 < once < 0.8 * each


@pytest.mark.parametrize("world", [3, 4])
def test_trains_as_the_unsharded_collection(world: int) -> None:
    case = case_of(SEQUENCE, world, exact=False, dedup=True)
    assert sum(workers.run(check_trains_as_unsharded, case, world_size=world)) > 0


BATCHES = {
    "a size per feature": {"variable": True},
    "a size per rank and feature": {"variable": True, "batch_sizes": [5, 2, 8, 1]},
    "ranks without examples": {"batch_sizes": [0, 5, 0, 2]},
    "no rank has an example": {"batch_sizes": [0, 0, 0, 0]},
    "empty bags only": {"longest_bag": 0},
    "weights that nobody reads": {"weighted": True},
    "one id a bag": {"longest_bag": 1},
    "a batch of one id": {"known_ids": 1, "batch_sizes": [40] * 4},
}


@pytest.mark.everyday(3)
@pytest.mark.parametrize("batch", BATCHES)
def test_batches_of_all_shapes(batch: str) -> None:
    case = case_of(SEQUENCE, 4, **BATCHES[batch])
    workers.run(check_trains_as_without_dedup, case, True, world_size=4)


@pytest.mark.parametrize("data_type, output", [("FP16", "FP32"), ("BF16", "BF16")])
def test_half_precision(data_type: str, output: str) -> None:
    from torchrec.modules.embedding_configs import DataType

    rate = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05, "output_dtype": DataType[output]}
    case = case_of(SEQUENCE, 2, tables={"data_type": data_type}, fused_params=rate)
    workers.run(check_trains_as_without_dedup, case, world_size=2)


def test_a_sum_of_many_gradients_of_half_precision_does_not_stand_still() -> None:
    from torchrec.modules.embedding_configs import DataType

    config = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0))
    case = case_of(
        ["table_wise"], 2, dedup=True, tables={"config": config},
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0,
                      "output_dtype": DataType.BF16},
    )  # fmt: skip
    workers.run(check_repeat_one_id, case, world_size=2)


def check_repeat_one_id(case: Case) -> None:
    """Both ranks name one id 1000 times in one bag."""
    from torchrec import KeyedJaggedTensor

    model = shard(case, collection_of(case))
    features = KeyedJaggedTensor(
        case.features(), torch.full((4000,), 7), lengths=torch.full((4,), 1000)
    )
    output = outputs_by_name(case, model(features))["a@t0"]
    assert output.dtype == torch.bfloat16
    output.backward(torch.ones_like(output))
    for table in tables_of(model):
        if table.name == "t0":
            assert torch.equal(table.lookup(torch.tensor([7]))[0], torch.full((1, 8), -999.0))


def flag_of_torchrec(case: Case) -> list[bool]:
    embedding.EC_INDEX_DEDUP = True
    try:
        flagged = shard(case, collection_of(case))
    finally:
        embedding.EC_INDEX_DEDUP = False
    plain = shard(case, collection_of(case))
    return [bool(model.module.collection._send_once) for model in (flagged, plain)]


def test_torchrecs_flag_for_all_collections_is_honoured() -> None:
    assert workers.run(flag_of_torchrec, case_of(SEQUENCE, 2), world_size=2) == [[True, False]] * 2


# Frequencies, admission and eviction: exact counts travel with the ids

LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
LIVES: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "frequent": ({"eviction": (dyn.ExpireAfter(steps=6), LFU)}, 150, ["evicted_full"]),
    "after": ({"admission": dyn.AdmitAfter(3), "eviction": LRU, "unseen": "initial"}, 135,
              ["refused", "waiting"]),
    "chance": ({"admission": dyn.AdmitWithProbability(0.4), "eviction": LFU}, 135, ["refused"]),
}  # fmt: skip


def live_beside(case: Case, steps: int) -> dict[str, int]:
    """A stream beside unsharded tables: floats within rounding, all else exact. Counts of all ranks."""
    beside = Beside(case)
    for step in range(steps):
        beside.step(drifting_batch(case, step))
        if step % 2:  # a difference stays
            beside.check()
    counts: dict[str, int] = {}
    for one in beside.shards:
        for name, value in one.stats().items():
            counts[name] = counts.get(name, 0) + int(value)
    return counts


@pytest.mark.everyday(1)
@pytest.mark.parametrize("life", LIVES)
def test_lives_as_the_unsharded_table(life: str) -> None:
    config, limit, must_happen = LIVES[life]
    tables = [
        Table(
            f"t{i}", ["a", "b"][: i + 1], usual_plan(kind, 8, 3, 3, i, limit), rows=limit,
            config=dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.1, 0.1), **config),
        )
        for i, kind in enumerate(SEQUENCE)
    ]  # fmt: skip
    case = Case(tables, pooled=False, exact=False, dedup=True, longest_bag=8)
    of_ranks = workers.run(live_beside, case, 10, world_size=3, timeout=120)
    for name in must_happen:
        assert sum(counts[name] for counts in of_ranks) > 0, name


@pytest.mark.everyday(2)
@pytest.mark.parametrize("life", LIVES)
def test_states_and_counts_are_equal_to_the_bit(life: str) -> None:
    """Also of a table without a policy beside: counts travel past it."""
    config, limit, _ = LIVES[life]
    tables = three_tables(SEQUENCE, 2, 2, rows=limit, config=dyn.DynamicTableConfig(**config))
    tables += [Table("plain", ["a"], usual_plan(kind, 8, 2, 2)) for kind in SEQUENCE[1:2]]
    # Weights of the user's own, which sequences ignore, are no counts.
    case = Case(tables, pooled=False, steps=6, known_ids=15, longest_bag=6, weighted=True)
    workers.run(check_trains_as_without_dedup, case, False, 3, world_size=2)


def seen_by_each_table(case: Case) -> dict[str, int]:
    model = shard(case, collection_of(case))
    model(make_batch(case, [[[[1, 1, 2]]]] * 2).mine)["a@life"].values().sum().backward()
    return {table.name: table.stats()["ids_seen"] for table in tables_of(model)}


def test_a_table_without_a_policy_counts_arrivals_whatever_its_neighbours() -> None:
    plan, life = usual_plan("row_wise", 8, 2, 2), dyn.DynamicTableConfig(eviction=LFU)
    tables = [Table("life", ["a"], plan, config=life), Table("plain", ["a"], plan)]
    of_ranks = workers.run(seen_by_each_table, Case(tables, pooled=False, dedup=True), world_size=2)
    assert sum(seen["life"] for seen in of_ranks) == 6
    assert sum(seen["plain"] for seen in of_ranks) == 4


@pytest.mark.parametrize("config", [None, dyn.DynamicTableConfig(eviction=LFU)])
def test_frozen_beside_others(config: Any) -> None:
    for kinds in (["row_wise"], SEQUENCE):
        tables = three_tables(kinds, 2, 2, config=config)
        case = Case(tables, pooled=False, steps=3, known_ids=15, longest_bag=6)
        workers.run(check_trains_as_without_dedup, case, False, 0, 2, world_size=2)


def admit_over_ranks(case: Case) -> list[list[float]]:
    model = shard(case, collection_of(case))
    first, last = -(2**63), 2**63 - 1
    seen = []
    for bags in (
        [[[first, first]], [[last]], [[last]]],  # twice on one rank; once on each of two
        [[[5]], [[first, 5]], [[]]],  # first: the third. 5: once on each
        [[[last, last, 5]], [[]], [[9, 9, 9]]],  # last: four. 5: three. 9: at once
    ):
        out = outputs_by_name(case, model(make_batch(case, [[one] for one in bags]).mine))["a"]
        out.sum().backward()
        seen.append(out[:, 0].tolist())
    held = {}
    for one in tables_of(model):
        ids = one.ids()
        held.update(zip(ids.tolist(), one.count(ids).tolist(), strict=True))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, held)
    together = {id: count for held in of_ranks for id, count in held.items()}
    assert together == {first: 3, last: 4, 5: 3, 9: 3}
    return seen


@pytest.mark.parametrize("kind", SEQUENCE)
def test_repeats_on_several_ranks_cross_the_threshold_together(kind: str) -> None:
    config = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0), admission=dyn.AdmitAfter(3))
    plan = usual_plan(kind, 4, 3, 3, turn=1)
    case = Case([Table("t", ["a"], plan, 4, config=config)], pooled=False, dedup=True)
    case.fused_params["learning_rate"] = 0.0
    first, second, third = workers.run(admit_over_ranks, case, world_size=3)
    assert first == [[0.0, 0.0], [0.0], [1.0, 1.0, 1.0]]
    assert second == [[0.0], [1.0, 0.0], []]
    assert third == [[0.0], [], [1.0, 1.0, 1.0]]


# By id, so that a count that went to another id is seen: denormals, infinities and NaNs as floats.
PATTERNS = [1, 3, 2**23, 2**24 + 1, 0x7F800000, 0x7F800001, 0x7FA00001, 0x7FC00001, 2**31 - 1]


class LargeCounts:
    """`ops`, but every id has a count of its own, however often it occurs."""

    mix64 = staticmethod(ops.mix64)

    @staticmethod
    def of(ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor(PATTERNS)[ops.mix64(ids) % len(PATTERNS)]

    @staticmethod
    def collect_new(ids: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found, _, *more = ops.collect_new(ids, *others)
        return found, LargeCounts.of(found), *more


def count_largely(case: Case) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    sent_batches.ops = LargeCounts  # type: ignore[attr-defined]
    try:
        model = shard(case, collection_of(case))
        bags = [[[[*EXTREME_IDS, *range(20 * r, 30 + 20 * r)] * 2]] for r in range(world)]
        features = make_batch(case, [one * len(case.features()) for one in bags]).mine
        sum(output.values().sum() for output in model(features).values()).backward()
    finally:
        sent_batches.ops = ops
    ranks_with: dict[int, int] = {}
    for r in range(world):
        for one in {*EXTREME_IDS, *range(20 * r, 30 + 20 * r)}:
            ranks_with[one] = ranks_with.get(one, 0) + 1
    seen = 0
    for table in tables_of(model):
        ids = table.ids()
        often = torch.tensor([ranks_with[one] for one in ids.tolist()], dtype=torch.int64)
        expected = (LargeCounts.of(ids) * often).clamp(max=MOST_COUNT)
        assert torch.equal(table.count(ids), expected), f"rank {rank}, {table.name}"
        assert table.stats()["ids_seen"] == int((LargeCounts.of(ids) * often).sum())
        seen += ids.numel()
    return seen


@pytest.mark.parametrize("kinds", deep_but([SEQUENCE], [*([kind] for kind in SEQUENCE), SEQUENCE]))
def test_the_dists_carry_every_bit_of_a_count(kinds: list[str]) -> None:
    config = dyn.DynamicTableConfig(eviction=LFU)
    case = Case(three_tables(kinds, 3, 3, config=config), pooled=False, dedup=True)
    assert sum(workers.run(count_largely, case, world_size=3)) > 200


def weights_that_travel(case: Case) -> list[bool]:
    """Of each sharding type, whether ids came with counts."""
    model = shard(case, collection_of(case))
    seen: list[bool] = []
    for lookup in model.module.collection._lookups:
        lookup.register_forward_pre_hook(
            lambda _, arguments: seen.append(arguments[0].weights_or_none() is not None)
        )
    model(make_batch(case, [[[[1, 1]]] * len(case.features())] * 2).mine)["a@t0"].values().sum()
    return seen


def test_counts_travel_only_where_a_table_has_a_life() -> None:
    tables = three_tables(SEQUENCE, 2, 2)
    tables[1].config = dyn.DynamicTableConfig(eviction=LFU)
    case = Case(tables, pooled=False, dedup=True, weighted=True)
    assert workers.run(weights_that_travel, case, world_size=2) == [[False, True, False]] * 2


@pytest.mark.parametrize("kind", SEQUENCE)
def test_every_reduction_of_gradients(kind: str) -> None:
    """A sender is a rank that sent an id, however often it occurs there."""
    tables = [
        Table(
            mode, features, usual_plan(kind, 8, 3, 3, turn),
            config=dyn.DynamicTableConfig(gradient=mode, initializer=dyn.Constant(0.5)),
        )
        for turn, (mode, features) in enumerate(zip(MODES, [["a"], ["b", "c"], ["d"]], strict=True))
    ]  # fmt: skip
    sgd = {"optimizer": "EXACT_SGD", "learning_rate": RATE}
    case = Case(
        tables, pooled=False, dedup=True, fused_params=sgd, known_ids=10, batch_sizes=[5, 0, 3]
    )
    workers.run(check_trains_as_dense, case, world_size=3)


# Pipelines train and evaluate as plain loops do

PLAIN = Run(("row_wise",), ("row_wise", "table_wise", "column_wise"), dedup=True, new_ids=15)
PIPELINED_LIVES = [
    {"eviction": dyn.LeastFrequentlyUsed()},
    {"admission": dyn.AdmitAfter(3), "eviction": dyn.LeastRecentlyUsed()},
]
LIVING = "lives, a batch size per feature"
RUNS = {
    "plain": PLAIN,
    LIVING: dataclasses.replace(PLAIN, lives=PIPELINED_LIVES, variable=True, rows=90, drift=40),
}


@cache
def trained(run: str, pipeline: str) -> Any:
    if pipeline == "prefetched steps":
        return workers.run(pipeline_runs.train_with_steps_ahead, RUNS[run], world_size=2)
    return workers.run(pipeline_runs.train, RUNS[run], pipeline, world_size=2, timeout=120)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    "pipeline, run",
    deep_but(
        [
            ("sparse_dist", "plain"),
            *((name, LIVING) for name in ("fused", "prefetch", "prefetched steps")),
        ],
        itertools.product(["sparse_dist", "fused", "prefetch", "prefetched steps"], RUNS),
    ),
)
def test_trains_as_the_plain_loop(run: str, pipeline: str) -> None:
    for got, expected in zip(trained(run, pipeline), trained(run, "base"), strict=True):
        assert got["losses"] == expected["losses"]
        for table, state in expected["states"].items():
            for part, value in state.items():
                assert torch.equal(got["states"][table][part], value), f"{table} {part}"


def test_plain_loop_learns_as_without_dedup() -> None:
    each = dataclasses.replace(PLAIN, dedup=False)
    expected = workers.run(pipeline_runs.train, each, "base", world_size=2)
    for got, without in zip(trained("plain", "base"), expected, strict=True):
        assert got["losses"] == pytest.approx(without["losses"], rel=1e-5)


@pytest.mark.parametrize("pipeline", ["eval", "prefetch"])
def test_evaluates_as_the_plain_loop_and_changes_nothing(pipeline: str) -> None:
    unseen = workers.run(pipeline_runs.evaluate, PLAIN, pipeline, world_size=2, timeout=120)
    assert min(unseen) > 0
