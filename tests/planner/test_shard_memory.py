"""`python -m torchrec_dyn size`: the parts of a table's memory, against its shards one by one."""

import pytest
import torch

from torchrec_dyn.__main__ import main
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.planner import table_bytes, table_size
from torchrec_dyn.ranks import row_limit

ADAGRAD = RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD)


def printed(capsys, arguments):
    assert main(["size", *arguments.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = {line[:18].strip(): line[18:].replace(",", "").split() for line in lines[1:-1]}
    return {part: tuple(map(float, both)) for part, both in numbers.items()}, lines[-1]


def test_the_parts_are_the_bytes_of_a_row_and_their_sum_is_the_total():
    size = table_size(100_000, 64, torch.float16, RowOptimizer(OptimizerKind.ADAM), has_life=True)
    assert size.weights == 100_000 * 64 * 2
    assert size.optimizer_state == 100_000 * 2 * 64 * 4
    assert size.scores == 100_000 * 8
    assert 100_000 * 16 < size.id_map <= 100_000 * 32 + 2048
    assert size.counters == 0
    parts = (size.weights, size.optimizer_state, size.scores, size.id_map)
    assert (
        size.total
        == sum(parts)
        == table_bytes(100_000, 64, torch.float16, RowOptimizer(OptimizerKind.ADAM), has_life=True)
    )


def test_a_whole_table(capsys):
    parts, last = printed(capsys, "1_000_000 64")
    expected = table_size(1_000_000, 64, torch.float32, ADAGRAD)
    assert parts["total"] == (round(expected.total / 2**20, 1),) * 2
    assert parts["id map"][0] == round(expected.id_map / 2**20, 1)
    assert parts["scores"] == parts["counters"] == (0, 0)
    assert last.startswith("1 shards of at most 1,000,000 rows and 64 columns")


def test_rows_over_ranks_and_columns_in_shards(capsys):
    parts, last = printed(
        capsys, "1_000_000 10 --row-ranks 4 --column-shards 3 --counters 200_000 --dtype bfloat16"
    )
    most, waiting = row_limit(1_000_000, 4), row_limit(200_000, 4)
    largest = table_size(most, 4, torch.bfloat16, ADAGRAD, has_life=True, counters=waiting)
    assert parts["total"][0] == round(largest.total / 2**20, 1)
    even = [
        table_size(250_000, width, torch.bfloat16, ADAGRAD, has_life=True, counters=50_000)
        for width in (4, 3, 3)
    ]
    assert parts["total"][1] == round(4 * sum(one.total for one in even) / 2**20, 1)
    assert parts["weights"][1] == round(1_000_000 * 10 * 2 / 2**20, 1)
    assert parts["scores"][1] == round(1_000_000 * 3 * 8 / 2**20, 1)  # each column shard has scores
    assert parts["counters"][0] == round(largest.counters / 2**20, 1) > 0
    assert last.startswith(f"12 shards of at most {most:,} rows and 4 columns")


def test_shares_that_are_not_even_are_rounded_up(capsys):
    """Five rows of 1 MiB on two ranks are three rows a rank; three counters on 2^20 ranks are one a rank."""
    parts, _ = printed(capsys, "5 262_144 --row-ranks 2")
    assert parts["weights"] == (5, 6)
    parts, _ = printed(capsys, "1 1 --row-ranks 1_048_576 --counters 3")
    one = table_size(1, 1, torch.float32, ADAGRAD, has_life=True, counters=1)
    assert parts["counters"][1] == one.counters > 0


@pytest.mark.parametrize(
    "optimizer, columns", [("EXACT_SGD", 0), ("ADAM", 128), ("EXACT_ADAGRAD", 64)]
)
def test_optimizer_state(capsys, optimizer, columns):
    parts, _ = printed(capsys, f"1_000_000 64 --optimizer {optimizer} --policy")
    assert parts["optimizer state"][0] == round(1_000_000 * columns * 4 / 2**20, 1)
    assert parts["scores"][0] == round(1_000_000 * 8 / 2**20, 1)


def test_a_shard_for_each_column(capsys):
    parts, last = printed(capsys, "1_000_000 3 --column-shards 3")
    one = table_size(1_000_000, 1, torch.float32, ADAGRAD)
    assert parts["total"] == (round(one.total / 2**20, 1), round(3 * one.total / 2**20, 1))
    assert last.startswith("3 shards of at most 1,000,000 rows and 1 columns")


def test_more_shards_than_columns(capsys):
    assert main(["size", "10", "3", "--column-shards", "4"]) == 1
    assert (
        "size: expected at most 3 column shards, one per column, got 4." in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"rows": -1}, ": expected an integer, 0 or more, got -1"),
        ({"columns": 0}, r"\.columns: expected an integer, 1 or more, got 0\. Pass"),
        ({"dtype": "float32"}, ": expected torch.float32, .* got 'float32'"),
        ({"dtype": torch.int8}, ": expected torch.float32, .* got torch.int8"),
        (
            {"optimizer": {"optimizer": "ADAM"}},
            ": expected a RowOptimizer, .* Write RowOptimizer.from_fused_params",
        ),
        ({"device_type": "cuda:0"}, ".device_type: expected 'cpu' or 'cuda', got 'cuda:0'. Pass"),
        ({"device_type": torch.device("meta")}, r".device_type: .* got device\(type='meta'\)"),
        ({"device_type": None}, ".device_type: .* got None"),
        (
            {"limit": 9},
            ".limit: expected an integer, 10 or more, got 9. Pass the table's row limit",
        ),
        ({"limit": "many"}, ".limit: .* got 'many'"),
        ({"limit": True, "rows": 1}, ".limit: .* got True"),
        ({"counters": -1}, ".counters: expected an integer, 0 or more, got -1. Pass"),
        ({"counters": 1.5}, ".counters: .* got 1.5"),
        ({"counters": float("nan")}, ".counters: .* got nan"),
        ({"counters": None}, ".counters: .* got None"),
    ],
)
def test_wrong_arguments(changed, rule):
    given = {"rows": 10, "columns": 8, "dtype": torch.float32, "optimizer": ADAGRAD}
    with pytest.raises(ValueError, match=rf"^table_size\S*{rule}"):
        table_bytes(**{**given, **changed})
