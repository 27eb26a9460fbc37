"""Batches of all shapes: a size per feature, a size per rank, weighted, empty."""

from dataclasses import replace

import pytest
import torch
import workers
from sharded_cases import EVERY_PLAN, POOLED, Case, Table, case_of_plans, usual_plan
from sharded_training import (
    batches,
    check_trains_as_unsharded,
    collection_of,
    outputs_by_name,
    shard,
)
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn

every_plan = pytest.mark.parametrize("plans", EVERY_PLAN)


def check_trains(case: Case) -> None:
    workers.run(check_trains_as_unsharded, case, world_size=4, local_size=2)


@pytest.mark.everyday(2)
@every_plan
def test_a_batch_size_per_feature(plans: str) -> None:
    # Grid too, which TorchRec 1.8.0 cannot.
    check_trains(case_of_plans(plans, variable=True))


def test_batch_size_per_feature_under_all_types_and_two_groups() -> None:
    tables = [
        Table(
            f"t{i}",
            [f"f{i}", "shared"],
            usual_plan(kind, 8, 4, 2, i),
            data_type="FP32" if i < len(POOLED) else "FP16",
        )
        for i, kind in enumerate([*POOLED, *POOLED])
    ]
    check_trains(Case(tables, exact=False, variable=True, tolerance=1e-2))


def in_another_order(batch: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """Returns a batch with the opposite order of keys, and the inverse indices in the order of `names`."""
    places = list(range(len(batch.keys())))[::-1]
    made, inverse = batch.permute(places), batch.inverse_indices()
    made._inverse_indices = (names, inverse[1][[inverse[0].index(name) for name in names]])
    return made


def batches_in_turn(case: Case, step: int) -> tuple[list[KeyedJaggedTensor], KeyedJaggedTensor]:
    """Returns batches of one size, three with a size per feature in three orders, and again of one size."""
    per_rank, together = batches(replace(case, variable=step in (1, 2, 3)), step)
    keys = together.keys()
    if step == 2:
        per_rank = [in_another_order(batch, keys[::-1]) for batch in per_rank]
    if step == 3:
        per_rank = [in_another_order(batch, [keys[-1], *keys[:-1]]) for batch in per_rank]
    return per_rank, together


@every_plan
def test_orders_and_sizes_change_from_batch_to_batch(plans: str) -> None:
    case = case_of_plans(plans, steps=5)
    workers.run(check_trains_as_unsharded, case, batches_in_turn, world_size=4, local_size=2)


@pytest.mark.parametrize(("pooled", "variable"), [(True, False), (True, True), (False, True)])
def test_names_of_features_may_have_an_at_sign(pooled: bool, variable: bool) -> None:
    """TorchRec names the output of a feature of two tables "feature@table"."""
    tables = [
        Table("t", ["a@b", "c"], usual_plan("table_wise", 8, 4, 2)),
        Table("u", ["c", "a"], usual_plan("column_wise", 8, 4, 2)),
    ]
    check_trains(Case(tables, pooled, variable=variable))


@pytest.mark.parametrize("plans", ["whole rows", "spread rows"])
def test_weighted_bags(plans: str) -> None:
    check_trains(case_of_plans(plans, weighted=True))


@pytest.mark.everyday(3)
@every_plan
@pytest.mark.parametrize("sizes", [[3, 7, 1, 4], [0, 5, 0, 2]])
def test_a_batch_size_per_rank(plans: str, sizes: list[int]) -> None:
    # TorchRec 1.8.0 cannot run backward where rows are spread and the backend is gloo.
    check_trains(case_of_plans(plans, batch_sizes=sizes))


@every_plan
def test_a_batch_size_per_rank_and_feature(plans: str) -> None:
    check_trains(case_of_plans(plans, batch_sizes=[5, 9, 3, 4], variable=True))


@pytest.mark.everyday(3)
@every_plan
@pytest.mark.parametrize("sizes", [[0, 5, 0, 2], [0] * 4])
def test_ranks_without_examples_and_sizes_per_feature(plans: str, sizes: list[int]) -> None:
    check_trains(case_of_plans(plans, batch_sizes=sizes, variable=True, steps=1))


@every_plan
def test_a_batch_without_ids(plans: str) -> None:
    check_trains(case_of_plans(plans, longest_bag=0, steps=1))


@every_plan
def test_a_batch_without_examples(plans: str) -> None:
    check_trains(case_of_plans(plans, batch_sizes=[0] * 4, steps=1))


def check_columns_of_a_matrix_are_read(kind: str, pooled: bool) -> None:
    """Ids, lengths and weights as columns of matrices: gloo sends no tensors with gaps."""
    case = Case([Table("t", ["a"], usual_plan(kind, 8, 2, 2))], pooled=pooled, weighted=pooled)
    model = shard(case, collection_of(case, fused_params=case.fused_params)).eval()
    mine = batches(case, 0)[0][torch.distributed.get_rank()]
    parts = (mine.values(), mine.lengths(), mine.weights_or_none())
    ids, lengths, weights = (
        None if part is None else torch.stack([part, part], 1)[:, 0] for part in parts
    )
    gappy = KeyedJaggedTensor(keys=["a"], values=ids, lengths=lengths, weights=weights)
    got, expected = (outputs_by_name(case, model(one)) for one in (gappy, mine))
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("kind", "pooled"), [("row_wise", True), ("table_wise", False)])
def test_tensors_with_gaps(kind: str, pooled: bool) -> None:
    workers.run(check_columns_of_a_matrix_are_read, kind, pooled, world_size=2)


def check_weights_that_ask_are_refused(kind: str) -> None:
    case = Case([Table("t", ["a"], usual_plan(kind, 8, 2, 2))], weighted=True)
    model = shard(case, collection_of(case, fused_params=case.fused_params))
    mine = batches(case, 0)[0][torch.distributed.get_rank()]
    mine._weights = mine.weights().clone().requires_grad_()
    with pytest.raises(
        ValueError, match="expected weights that require no gradient, got requires_grad"
    ):
        model(mine)
    with torch.no_grad():
        model(mine)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_weights_that_ask_for_a_gradient_are_refused(kind):
    workers.run(check_weights_that_ask_are_refused, kind, world_size=2)


def check_scores_travel(case: Case) -> None:
    """Scores are those of an unsharded collection; wrong weights are refused before they are sent."""
    lowest = dyn.DynamicTableConfig(eviction=dyn.LowestScore(unit=2**-6, half_life_steps=2))
    case = replace(case, tables=[replace(table, config=lowest) for table in case.tables])
    unsharded = collection_of(case, fused_params=case.fused_params)
    model = shard(case, collection_of(case, fused_params=case.fused_params))
    for step in range(3):
        mine, together = batches(case, step)
        mine = mine[torch.distributed.get_rank()]
        outputs_by_name(case, model(mine))
        outputs_by_name(case, unsharded(together))
    for table in case.tables:
        ids = unsharded.table(table.name).ids()
        expected = unsharded.table(table.name).count(ids)
        assert torch.equal(dyn.read_counts(model.module.collection, table.name, ids), expected)
        assert expected.max() > 64
    without = KeyedJaggedTensor(
        mine.keys(), mine.values(), lengths=mine.lengths(), stride=mine.stride()
    )
    if case.variable:
        return
    wrong = KeyedJaggedTensor(
        mine.keys(), mine.values(), -1 - mine.weights(), lengths=mine.lengths()
    )
    with pytest.raises(ValueError, match=r"Collection.*finite weights from 0 on for Lo"):
        model(wrong)
    with pytest.raises(ValueError, match="expected weights"):
        model(without)
    if not case.pooled:
        # Ranks that evaluate need no weights, whatever the other ranks have.
        is_first = torch.distributed.get_rank() == 0
        model.eval()(mine if is_first else without)
        with pytest.raises(ValueError, match="expected every rank in the same mode"):
            model.train(is_first)(mine if is_first else without)
        model.train()
        with pytest.raises(ValueError, match=r"use_index_dedup=False with LowestScore, as in tabl"):
            shard(replace(case, dedup=True), collection_of(case))


@pytest.mark.everyday(2)
@every_plan
@pytest.mark.parametrize("variable", [False, True])
def test_scores_travel_with_the_ids(plans: str, variable: bool) -> None:
    case = case_of_plans(plans, weighted=True, variable=variable)
    workers.run(check_scores_travel, case, world_size=4, local_size=2)
