"""Batches of all shapes: a size per feature, a size per rank, weighted, empty."""

import pytest
import torch
import workers
from sharded_cases import EVERY_PLAN, POOLED, Case, Table, case_of_plans, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard, train_beside
from torchrec import KeyedJaggedTensor

every_plan = pytest.mark.parametrize("plans", EVERY_PLAN)


def run(case: Case) -> None:
    workers.run(train_beside, case, world_size=4, local_size=2)


@every_plan
def test_a_batch_size_per_feature(plans: str) -> None:
    # Grid too, which TorchRec 1.8.0 cannot.
    run(case_of_plans(plans, variable=True))


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
    run(Case(tables, exact=False, variable=True, tolerance=1e-2))


@pytest.mark.parametrize("plans", ["whole rows", "spread rows"])
def test_weighted_bags(plans: str) -> None:
    run(case_of_plans(plans, weighted=True))


@every_plan
@pytest.mark.parametrize("sizes", [[3, 7, 1, 4], [0, 5, 0, 2]])
def test_a_batch_size_per_rank(plans: str, sizes: list[int]) -> None:
    # TorchRec 1.8.0 cannot run backward where rows are spread and the backend is gloo.
    run(case_of_plans(plans, batch_sizes=sizes))


@every_plan
def test_a_batch_size_per_rank_and_feature(plans: str) -> None:
    run(case_of_plans(plans, batch_sizes=[5, 9, 3, 4], variable=True))


@every_plan
def test_a_batch_without_ids(plans: str) -> None:
    run(case_of_plans(plans, longest_bag=0))


@every_plan
def test_a_batch_without_examples(plans: str) -> None:
    run(case_of_plans(plans, batch_sizes=[0] * 4))


def columns_of_a_matrix(kind: str, pooled: bool) -> None:
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
    workers.run(columns_of_a_matrix, kind, pooled, world_size=2)


def weights_that_ask(kind: str) -> None:
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
    workers.run(weights_that_ask, kind, world_size=2)
