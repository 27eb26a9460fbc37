"""Batches of all shapes: a size per feature, a size per rank, weighted, empty."""

import pytest
import torch
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard, train_beside
from torchrec import KeyedJaggedTensor

POOLED = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
]
WHOLE_ROWS = POOLED[:3]
SEQUENCE = ["table_wise", "column_wise", "row_wise"]


def tables_of(kind: str, world: int = 4, local: int = 2) -> list[Table]:
    features = (["a"], ["b", "c"], ["a", "d"])
    return [
        Table(f"t{i}", list(features[i]), usual_plan(kind, 8, world, local, i)) for i in range(3)
    ]


def run(case: Case) -> None:
    workers.run(train_beside, case, world_size=4, local_size=2)


@pytest.mark.parametrize("kind", POOLED)
def test_pooled_with_a_batch_size_per_feature(kind: str) -> None:
    # Grid too, which TorchRec 1.8.0 cannot.
    run(Case(tables_of(kind), exact=kind in WHOLE_ROWS, variable=True))


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


@pytest.mark.parametrize("kind", SEQUENCE)
def test_sequence_with_a_batch_size_per_feature(kind: str) -> None:
    run(Case(tables_of(kind), pooled=False, variable=True))


@pytest.mark.parametrize("kind", POOLED)
def test_weighted_bags(kind: str) -> None:
    run(Case(tables_of(kind), exact=kind in WHOLE_ROWS, weighted=True))


@pytest.mark.parametrize("kind", POOLED)
@pytest.mark.parametrize("sizes", [[3, 7, 1, 4], [0, 5, 0, 2]])
def test_pooled_with_a_batch_size_per_rank(kind: str, sizes: list[int]) -> None:
    # TorchRec 1.8.0 cannot run backward where rows are spread and the backend is gloo.
    run(Case(tables_of(kind), exact=kind in WHOLE_ROWS, batch_sizes=sizes))


@pytest.mark.parametrize("kind", POOLED)
def test_pooled_with_a_batch_size_per_rank_and_feature(kind: str) -> None:
    run(Case(tables_of(kind), exact=kind in WHOLE_ROWS, batch_sizes=[5, 9, 3, 4], variable=True))


@pytest.mark.parametrize("kind", SEQUENCE)
def test_sequence_with_a_batch_size_per_rank_and_feature(kind: str) -> None:
    run(Case(tables_of(kind), pooled=False, batch_sizes=[5, 9, 3, 4], variable=True))


@pytest.mark.parametrize("kind", SEQUENCE)
@pytest.mark.parametrize("sizes", [[3, 7, 1, 4], [0, 5, 0, 2]])
def test_sequence_with_a_batch_size_per_rank(kind: str, sizes: list[int]) -> None:
    run(Case(tables_of(kind), pooled=False, batch_sizes=sizes))


@pytest.mark.parametrize("kind", POOLED)
def test_pooled_batch_without_ids(kind: str) -> None:
    run(Case(tables_of(kind), exact=kind in WHOLE_ROWS, longest_bag=0))


@pytest.mark.parametrize("kind", POOLED)
def test_pooled_batch_without_examples(kind: str) -> None:
    run(Case(tables_of(kind), exact=kind in WHOLE_ROWS, batch_sizes=[0] * 4))


@pytest.mark.parametrize("kind", SEQUENCE)
def test_sequence_batch_without_ids(kind: str) -> None:
    run(Case(tables_of(kind), pooled=False, longest_bag=0))


@pytest.mark.parametrize("kind", SEQUENCE)
def test_sequence_batch_without_examples(kind: str) -> None:
    run(Case(tables_of(kind), pooled=False, batch_sizes=[0] * 4))


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
