"""Under every plan a collection trains as the unsharded one does; to the bit, unless ranks add up outputs."""

from typing import Any

import pytest
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import (
    EVERY_PLAN,
    FUSED_PARAMS,
    POOLED,
    SEQUENCE,
    WHOLE_ROWS,
    Case,
    Table,
    case_of_plans,
    three_tables,
    usual_plan,
)
from sharded_training import check_trains_as_unsharded

every_plan = pytest.mark.parametrize("plans", EVERY_PLAN)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1},
    "adam": {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.02},
    "adam by row": {
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": 0.02,
        "use_rowwise_bias_correction": True,
    },
    "adamw": {"optimizer": "ADAMW", "learning_rate": 0.02, "weight_decay": 0.4},
    "ftrl": {"optimizer": "FTRL", "learning_rate": 0.1, "l1": 0.01, "l2": 0.1},
    "clipped": {**FUSED_PARAMS, "gradient_clipping": True, "max_gradient": 0.01},
    "begun": {**FUSED_PARAMS, "initial_accumulator_value": 0.5},
}


def check_trains(case: Case, world: int = 4, local: int = 2) -> list[int]:
    return workers.run(check_trains_as_unsharded, case, world_size=world, local_size=local)


@pytest.mark.everyday(4)
@pytest.mark.parametrize("world, local", [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2)])
@every_plan
def test_plans_train_as_unsharded(plans: str, world: int, local: int) -> None:
    assert sum(check_trains(case_of_plans(plans, world, local), world, local)) > 0


@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    "kind, pooled", [*((kind, True) for kind in POOLED), *((kind, False) for kind in SEQUENCE)]
)
def test_a_plan_alone_trains_as_unsharded(kind: str, pooled: bool) -> None:
    tables = three_tables([kind], 4, 2, (8, 4, 12) if pooled else (8, 8, 8))
    assert sum(check_trains(Case(tables, pooled, exact=kind in WHOLE_ROWS or not pooled))) > 0


def test_all_types_in_one_collection() -> None:
    tables = [
        Table(kind, [f"f{i}", "shared"], usual_plan(kind, 8, 4, 2, i))
        for i, kind in enumerate(POOLED)
    ]
    check_trains(Case(tables, exact=False))


@pytest.mark.everyday(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@every_plan
def test_optimizer_does_not_depend_on_plan(plans: str, optimizer: str) -> None:
    check_trains(case_of_plans(plans, fused_params=OPTIMIZERS[optimizer], steps=3))


@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    "name", ["EXACT_ROWWISE_ADAGRAD", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB"]
)
@pytest.mark.parametrize(
    "kinds, exact, pooled",
    [
        (["table_wise"], True, True),
        (["row_wise", "table_row_wise"], False, True),
        (["table_wise", "row_wise"], True, False),
    ],
)
def test_rowwise_optimizer_where_rows_are_whole(
    kinds: list[str], exact: bool, pooled: bool, name: str
) -> None:
    fused_params = {"optimizer": EmbOptimType[name], "learning_rate": 0.05}
    if name == "EXACT_ROWWISE_ADAGRAD":
        fused_params |= {"max_norm": 0.1, "initial_accumulator_value": 0.2}
    tables = three_tables(kinds, 2, 2)
    check_trains(Case(tables, exact=exact, pooled=pooled, fused_params=fused_params), 2, 2)


@pytest.mark.everyday(2)
@every_plan
def test_thousands_of_ids(plans: str) -> None:
    case = case_of_plans(plans, batch_sizes=[120] * 4, longest_bag=20, known_ids=300, steps=2)
    assert sum(check_trains(case)) > 6 * 900


def test_rows_spread_evenly() -> None:
    case = Case([Table("t", ["a"], usual_plan("row_wise", 8, 4, 4))], exact=False,
                batch_sizes=[200] * 4, longest_bag=10, known_ids=400, steps=1)  # fmt: skip
    rows = check_trains(case, 4, 4)
    share = sum(rows) / 4
    assert max(abs(count - share) for count in rows) < 5 * share**0.5


@pytest.mark.everyday(2)
@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
@every_plan
def test_rows_of_half_precision(plans: str, data_type: str) -> None:
    check_trains(case_of_plans(plans, 2, 2, data_type, tolerance=2e-2), 2, 2)
