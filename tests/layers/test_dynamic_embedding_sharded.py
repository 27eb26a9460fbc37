"""Modules of one table under DistributedModelParallel: every plan, uneven inputs, pipelines, checkpoints."""

import one_table_runs
import pytest
import workers
from one_table_runs import OneTable

SEQUENCE = ["table_wise", "row_wise", "column_wise"]
WHOLE_ROWS = ["table_wise", "column_wise", "table_column_wise"]
POOLED = [*WHOLE_ROWS, "row_wise", "table_row_wise", "grid_shard"]


def train(of: OneTable) -> int:
    rows = workers.run(
        one_table_runs.train_beside, of, world_size=of.world, local_size=of.local, timeout=120
    )
    return sum(rows)


@pytest.mark.parametrize("padding", [None, 100])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_rows(plan: str, padding: int | None) -> None:
    assert train(OneTable("rows", plan, options={"padding_idx": padding})) > 50


@pytest.mark.parametrize("plan", POOLED)
@pytest.mark.parametrize(("mode", "weighted"), [("sum", True), ("mean", False), ("mean", True)])
def test_bags(mode: str, plan: str, weighted: bool) -> None:
    exact = plan in WHOLE_ROWS
    of = OneTable(mode, plan, 4, 2, exact, weighted, options={"padding_idx": 100})
    assert train(of) > 50


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_bags_whose_weights_learn(mode: str, plan: str) -> None:
    of = OneTable(mode, plan, weighted=True, options={"weight_gradients": True})
    assert train(of) > 50


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_tiles(plan: str, weighted: bool) -> None:
    assert train(OneTable("tile", plan, weighted=weighted)) > 30


@pytest.mark.parametrize("mode", ["rows", "mean", "tile"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_several_calls_a_step(mode: str, plan: str) -> None:
    assert train(OneTable(mode, plan, calls=3)) > 30


@pytest.mark.parametrize("mode", ["rows", "mean", "tile"])
@pytest.mark.parametrize("plan", SEQUENCE)
def test_no_ids_on_any_rank(mode: str, plan: str) -> None:
    assert train(OneTable(mode, plan, empty=True)) == 0


@pytest.mark.parametrize("mode", ["rows", "tile"])
def test_each_id_is_sent_once(mode: str) -> None:
    assert train(OneTable(mode, "row_wise", exact=False, dedup=True)) > 30
