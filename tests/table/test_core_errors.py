"""Every error of the Python core names the expected and the given value."""

import enum
import re

import pytest
import torch
from table_cases import bags_of, bits, ids_of, make_group, make_table, same_state

from torchrec_dyn import LeastRecentlyUsed
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Constant, Normal, TruncatedNormal, Uniform
from torchrec_dyn.lookup.bag_layout import BagLayout
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

NAN, INF = float("nan"), float("inf")


def refuses(text, call):
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        (
            "initializer",
            0.1,
            "expected Uniform, Normal, TruncatedNormal, Constant, XavierUniform, XavierNormal, "
            "KaimingUniform, KaimingNormal or None, got 0.1.",
        ),
        ("seed", 1.5, "expected an integer, got 1.5."),
        ("seed", True, "expected an integer, got True."),
        ("unseen", "ones", """expected "zeros" or "initial", got 'ones'."""),
    ],
)
def test_config(field, value, rule):
    refuses(f"DynamicTableConfig.{field}: {rule}", lambda: DynamicTableConfig(**{field: value}))


def test_config_is_a_value():
    one = DynamicTableConfig(Uniform(0.0, 1.0), seed=3)
    assert one == DynamicTableConfig(Uniform(0.0, 1.0), seed=3)
    assert hash(one) == hash(DynamicTableConfig(Uniform(0.0, 1.0), seed=3))
    assert one != DynamicTableConfig(Uniform(0.0, 2.0), seed=3)
    with pytest.raises(AttributeError):
        one.seed = 4


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Uniform(NAN, 1.0), "Uniform.low: expected a finite number, got nan."),
        (lambda: Uniform(0.0, "1"), "Uniform.high: expected a finite number, got '1'."),
        (lambda: Uniform(1.0, 1.0), "Uniform: expected low < high, got 1.0 and 1.0."),
        (lambda: Normal(INF, 1.0), "Normal.mean: expected a finite number, got inf."),
        (lambda: Normal(0.0, 0.0), "Normal.std: expected a number > 0, got 0.0."),
        (lambda: Normal(0.0, None), "Normal.std: expected a finite number, got None."),
        (
            lambda: TruncatedNormal(0.0, -1.0, -1.0, 1.0),
            "TruncatedNormal.std: expected a number > 0, got -1.0.",
        ),
        (
            lambda: TruncatedNormal(0.0, 1.0, 2.0, 1.0),
            "TruncatedNormal: expected low < high, got 2.0 and 1.0.",
        ),
        (
            lambda: TruncatedNormal(0.0, 1.0, 50.0, 51.0),
            "TruncatedNormal: expected low and high between which the normal has some probability, "
            "got 50.0 and 51.0 with mean 0.0, std 1.0.",
        ),
        (lambda: Constant(-INF), "Constant.value: expected a finite number, got -inf."),
    ],
)
def test_initializers(make, text):
    refuses(text, make)


KEYS = (
    "expected a key among optimizer, learning_rate, eps, beta1, beta2, weight_decay, "
    "initial_accumulator_value, l1, l2, max_norm, max_gradient, weight_decay_mode, gradient_clipping, "
    "defer_updates, use_rowwise_bias_correction, output_dtype"
)


DIVIDE_BY_EPS = (
    "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM", "PARTIAL_ROWWISE_ADAM", "ADAMW", "LAMB",
)  # fmt: skip


class Int8(enum.Enum):
    INT8 = "INT8"


class Foreign:
    name = "SHAMPOO"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (
            {"optimizer": Foreign},
            f"expected an optimizer among {', '.join(OptimizerKind.__members__)}, LARS_SGD, LION, got "
            "SHAMPOO. Use one of them, or write a dyn.RowRule.",
        ),
        ({"learning_rate": -1}, "expected a finite learning_rate >= 0, got -1."),
        *[
            (
                {"output_dtype": value},
                "expected output_dtype FP32, FP16 or BF16 of DataType or SparseType, or torch.float32, "
                "torch.float16 or torch.bfloat16, "
                f"got {value!r}. Write one of them, or remove it for float32.",
            )
            for value in ("fp16", 1, torch.float64, Int8.INT8)
        ],
        ({"eps": NAN}, "expected a finite eps >= 0, got nan."),
        ({"eps": "small"}, "expected a finite eps >= 0, got 'small'."),
        *[
            ({"optimizer": name, "eps": eps}, f"expected eps of at least 1.2e-38 with {name}, got {eps}")
            for name in DIVIDE_BY_EPS
            for eps in (0.0, 1e-50)
        ],
        ({"weight_decay": None}, "expected a finite weight_decay >= 0, got None."),
        ({"beta1": 1.0}, "expected beta1 in [0, 1), got 1.0."),
        ({"beta2": 2}, "expected beta2 in [0, 1), got 2."),
        *[
            (
                {"weight_decay_mode": mode},
                f"expected a weight_decay_mode among NONE, L2, DECOUPLE, got {mode!r}.",
            )
            for mode in (3, -1, 1.5, "l2", None)
        ],
        ({"stochastic_rounding": False}, "expected stochastic_rounding=True, got False. Rows"),
        (
            {"momentum": 0.9},
            f"{KEYS}, got 'momentum'. Remove it.",
        ),
        *[
            (
                {key: 1.0},
                f"{KEYS}, got {key!r}. {remedy}",
            )
            for key, remedy in (
                ("lr", "Write learning_rate."),
                ("betas", "Write beta1 and beta2."),
            )
        ],
        (
            {"optimizer": "exact_sgd", "weight_decay": 0.1},
            "expected weight_decay = 0 with EXACT_SGD, whose rule has no weight decay, got 0.1.",
        ),
        (
            {"optimizer": "EXACT_ADAGRAD", "weight_decay": 0.1},
            "expected weight_decay = 0 with EXACT_ADAGRAD",
        ),
        (
            {"optimizer": "EXACT_ROWWISE_ADAGRAD", "weight_decay": 0.1},
            "expected a weight_decay_mode of L2 or DECOUPLE with weight_decay = 0.1, got NONE",
        ),
        ({"optimizer": "FTRL", "weight_decay": 0.1}, "expected weight_decay = 0 with FTRL, whose rule"),
        *[
            (
                {"optimizer": name, key: 0.5},
                f"expected {key} = 0 with {name}, whose rule does not have it, got 0.5. Remove it.",
            )
            for name, key in (
                ("ADAM", "initial_accumulator_value"),
                ("LAMB", "max_norm"),
                ("EXACT_ADAGRAD", "l1"),
                ("EXACT_SGD", "l2"),
            )
        ],
        ({"max_norm": -1}, "expected a finite max_norm >= 0, got -1."),
        ({"initial_accumulator_value": NAN}, "expected a finite initial_accumulator_value >= 0, got nan."),
        ({"gradient_clipping": 1.0}, "expected gradient_clipping as True or False, got 1.0."),
        ({"max_gradient": 2}, "expected gradient_clipping=True with max_gradient, got max_gradient = 2.0 "),
        ({"gradient_clipping": True, "max_gradient": -1}, "expected a finite max_gradient >= 0, got -1."),
        ({"gradient_clipping": True, "max_gradient": 0}, "expected max_gradient > 0, got 0.0, with"),
    ],
)  # fmt: skip
def test_fused_params(given, rule):
    refuses(
        f"fused_params of table 'user': {rule}",
        lambda: RowOptimizer.from_fused_params(given, "table 'user'"),
    )


def test_eps_0_of_a_rule_that_divides_by_no_eps():
    got = RowOptimizer.from_fused_params({"optimizer": "EXACT_SGD", "eps": 0}, "table 'user'")
    assert got == RowOptimizer(OptimizerKind.EXACT_SGD, eps=0.0)


def test_fused_params_that_only_place_a_table_are_ignored():
    given = {"optimizer": "ADAM", "cache_load_factor": 0.2, "output_dtype": None, "beta1": 0.5}
    got = RowOptimizer.from_fused_params(given, "table 'user'")
    assert got == RowOptimizer(OptimizerKind.ADAM, beta1=0.5)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"num_embeddings": 0}, ".num_embeddings: expected at least 1, got 0."),
        ({"embedding_dim": 0}, ".embedding_dim: expected at least 1, got 0."),
        ({"columns": 0}, ".columns: expected at least 1, got 0."),
        ({"row_limit": -3}, ".row_limit: expected at least 1, got -3."),
        ({"first_column": 2, "columns": 3}, ": expected columns inside [0, 4), got [2, 5)."),
        ({"first_column": -1, "columns": 2}, ": expected columns inside [0, 4), got [-1, 1)."),
        (
            {"dtype": torch.float64},
            ": expected rows of float32, float16 or bfloat16, got torch.float64. Set data_type",
        ),
    ],
)
def test_table(options, rule):
    refuses(f"DynamicTable('t'){rule}", lambda: make_table(**options))


def state_with(**changes):
    table = make_table(OptimizerKind.PARTIAL_ROWWISE_ADAM)
    table.assign(ids_of(1, 2), torch.ones(2, 4))
    state = table.export_state() | changes
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"ids": ids_of(1, 1)}, "expected distinct ids, got repeated ones."),
        ({"ids": torch.ones(2)}, "expected ids [M] of int64, got [2] of torch.float32. Convert"),
        (
            {"ids": None},
            "expected ids and weight, got ['momentum1', 'momentum2', 'step', 'weight'].",
        ),
        (
            {"weight": None},
            "expected ids and weight, got ['ids', 'momentum1', 'momentum2', 'step'].",
        ),
        ({"weight": torch.ones(2, 3)}, "expected weight of shape [2, 4], got [2, 3]. Was it saved"),
        ({"momentum1": torch.ones(2)}, "expected momentum1 of shape [2, 4], got [2]."),
        ({"momentum2": torch.ones(2, 4)}, "expected momentum2 of shape [2], got [2, 4]."),
        ({"step": torch.tensor(-1)}, "expected a step >= 0, got -1."),
        ({"step": ids_of(1, 2)}, "expected a step >= 0, got [1, 2]."),
    ],
)
def test_load_state_checks_before_any_change(changes, rule):
    table = make_table(OptimizerKind.PARTIAL_ROWWISE_ADAM)
    table.assign(ids_of(5, 6, 7), torch.ones(3, 4))
    before = table.export_state()
    refuses(
        f"DynamicTable('t').load_state: {rule}", lambda: table.load_state(state_with(**changes))
    )
    assert same_state(table.export_state(), before)


@pytest.mark.parametrize("method", ["lookup", "erase", "assign"])
@pytest.mark.parametrize("ids", [torch.tensor([1, 2]).int(), torch.tensor([[1, 2]])])
def test_ids_of_a_table(method, ids):
    table = make_table()
    rows = [torch.ones(2, 4)] if method == "assign" else []
    refuses(
        f"DynamicTable('t').{method}: expected ids [M] of int64, got {list(ids.shape)} of "
        f"{ids.dtype}. Convert with ids.long().flatten().",
        lambda: getattr(table, method)(ids, *rows),
    )
    assert table.num_rows == 0


def test_ids_and_rows_of_a_table_are_tensors():
    table = make_table(eviction=LeastRecentlyUsed())
    for method in ("lookup", "erase", "last_seen", "count", "assign"):
        rows = [torch.ones(1, 4)] if method == "assign" else []
        refuses(
            f"DynamicTable('t').{method}: expected ids as a tensor, got list. Convert with "
            "torch.as_tensor().",
            lambda: getattr(table, method)([1], *rows),
        )
    refuses(
        "DynamicTable('t').assign: expected rows as a tensor, got tuple. Convert with",
        lambda: table.assign(ids_of(1), (1.0, 1.0, 1.0, 1.0)),
    )
    assert table.num_rows == 0


@pytest.mark.parametrize("rows", [torch.ones(2, 3), torch.ones(1, 4), torch.ones(2, 4).long()])
def test_assigned_rows(rows):
    table = make_table()
    refuses(
        "DynamicTable('t').assign: expected floating point rows of shape [2, 4], got "
        f"{list(rows.shape)} of {rows.dtype}.",
        lambda: table.assign(ids_of(1, 2), rows),
    )
    assert table.num_rows == 0


def test_assign_respects_the_limit():
    table = make_table(num_embeddings=2)
    with pytest.raises(RuntimeError, match=r"at most 2 rows here .* got 0 and 3 new ids"):
        table.assign(ids_of(1, 2, 3), torch.ones(3, 4))
    assert table.num_rows == 0 and table.stats()["inserted"] == 0


def test_a_batch_may_need_all_rows_of_a_table_that_replaces_rows():
    table = make_table(num_embeddings=3, eviction=LeastRecentlyUsed())
    group = make_group(table)
    for batch in ([1, 2, 3], [4, 5, 6, 4]):
        group(*bags_of(batch), training=True)
        assert set(table.ids().tolist()) == set(batch)
    with pytest.raises(
        RuntimeError, match=r"batch that needs at most 3 rows here \(num_embeddings=3\), got 4"
    ):
        group(*bags_of([1, 2, 3, 4]), training=True)
    assert sorted(table.ids().tolist()) == [4, 5, 6]


def test_steps_that_fit_into_a_score():
    """The step 2^32 - 1 marks a row without an id."""
    table = make_table(eviction=LeastRecentlyUsed())
    table.assign(ids_of(1), torch.ones(1, 4))
    table.load_state(table.export_state() | {"step": torch.tensor(2**32 - 3)})
    group = make_group(table)
    group(*bags_of([1]), training=True)
    assert table.last_seen(ids_of(1)).item() == table.step == 2**32 - 2
    with pytest.raises(
        RuntimeError, match=r"\('t'\): expected a training step below 4294967295, got 4294967295"
    ):
        group(*bags_of([1]), training=True)
    assert table.step == 2**32 - 2


def test_layout():
    refuses(
        """expected pooling "sum", "mean", "max" or "none", got 'min'.""",
        lambda: BagLayout([4], [1], "min"),
    )
    refuses(
        "expected tables of one width for sequences, got [3, 4].",
        lambda: BagLayout([4, 3], [1, 1], "none"),
    )


IDS, OFFSETS = bags_of([1, 2], [3], [], [4])
OF_TABLES = "lookup of tables a, b: expected "


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ids": IDS.int()}, OF_TABLES + "ids [N] of int64, got [4] of torch.int32."),
        ({"ids": IDS[None]}, OF_TABLES + "ids [N] of int64, got [1, 4] of torch.int64."),
        ({"weights": torch.ones(3)}, OF_TABLES + "[4] floating point weights, got [3]"),
        ({"weights": torch.ones(1, 4)}, OF_TABLES + "[4] floating point weights, got [1, 4]"),
        ({"weights": IDS}, OF_TABLES + "[4] floating point weights, got [4] of torch.int64."),
        (
            {"offsets": OFFSETS.float()},
            OF_TABLES + "offsets [F * B + 1] of int64 or int32, got [5]",
        ),
        (
            {"offsets": OFFSETS[:4]},
            "expected offsets [F * B + 1] with F = 2 features, got 4 offsets.",
        ),
        ({"offsets": ids_of()}, "expected offsets [F * B + 1] with F = 2 features, got 0 offsets."),
        ({"offsets": OFFSETS - 1}, "expected offsets from 0 to 4, the number of ids, got -1 to 3."),
        ({"offsets": OFFSETS + 0 * 1, "ids": IDS[:3]}, "expected offsets from 0 to 3, the number"),
        ({"offsets": ids_of(0, 3, 2, 4, 4)}, "expected ascending offsets, got descending ones."),
        ({"offsets": ids_of(0, 2, 3, 9, 4)}, "expected ascending offsets, got descending ones."),
        (
            {"batch_sizes": [[2], [1]]},
            "expected batch sizes of 2 features that sum to 4 bags, got 2 features and 3 bags.",
        ),
        (
            {"batch_sizes": [[4]]},
            "expected batch sizes of 2 features that sum to 4 bags, got 1 features and 4 bags.",
        ),
        (
            {"batch_sizes": [[2], [1, 1]]},
            "expected batch sizes >= 0 of the same ranks for every feature, got [[2], [1, 1]].",
        ),
        ({"batch_sizes": [[3, -1], [1, 1]]}, "expected batch sizes >= 0 of the same ranks"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_lookup_checks_before_any_change(change, text, training):
    tables = make_table(name="a"), make_table(name="b")
    group = make_group(*tables)
    given = {"ids": IDS, "offsets": OFFSETS, **change}
    refuses(text, lambda: group(**given, training=training))
    assert [(t.num_rows, t.step, t.stats()["ids_seen"]) for t in tables] == [(0, 0, 0)] * 2
    if not {"weights", "batch_sizes"} & set(change):
        refuses(text, lambda: group.prefetch(**given))
        assert tables[0].num_rows == 0
    good = group(IDS, OFFSETS, training=True)
    good.sum().backward()
    assert bits(tables[0].lookup(ids_of(1))[0]).any()


def test_tables_that_cannot_share_a_call():
    float32, float16 = make_table(name="a"), make_table(name="b", dtype=torch.float16)
    refuses(
        "TableGroup: expected tables of one row dtype and one", lambda: make_group(float32, float16)
    )
    refuses(
        "BagLayout: expected the number of features of each of 1 tables, got [1, 1].",
        lambda: make_group(float32, features=[1, 1]),
    )
