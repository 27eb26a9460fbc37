"""examples/train_dlrm.py end to end: as a user starts it, and as its ranks that another test has started."""

import json

import numpy as np
import pytest
from another_process import without_fbgemm_warning
from example_criteo_files import EXAMPLES, write
from forked import run_script

SCRIPT = str(EXAMPLES / "train_dlrm.py")


def train(tmp_path, *arguments: str, ranks: int) -> tuple[dict, str]:
    """Runs the ranks of the script, without torchrun."""
    out = tmp_path / "results.json"
    ended = run_script(SCRIPT, "--json", str(out), *arguments, ranks=ranks)
    assert not any(ended.codes), ended.stderr
    return json.loads(out.read_text()), ended.stdout + ended.stderr


SMALL = ["--steps", "40", "--batch-size", "256", "--held-out", "8192", "--seed", "1"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The default plan on the made-up stream, small."""
    return train(tmp_path_factory.mktemp("mixed"), *SMALL, ranks=2)


def test_it_learns_the_stream(mixed):
    results, _ = mixed
    assert results["steps"] == 40 and results["samples"] == 40 * 256 * 2
    assert results["held_out"] == 8192
    assert results["auc"] > 0.72
    assert results["auc_of_constant"] == 0.5
    assert results["normalized_entropy"] < 0.93
    assert results["normalized_entropy_of_constant"] == pytest.approx(1.0, abs=0.02)


def test_it_shows_plan_progress_and_results(mixed):
    results, shown = mixed
    for kind in ("table_wise", "row_wise", "column_wise"):
        assert kind in shown
    for word in ("samples/s", "loss", "AUC", "normalized entropy", "constant", "MB resident"):
        assert word in shown
    assert f"{results['rows_per_table']['C26']:,}" in shown
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in without_fbgemm_warning(shown)


@pytest.mark.parametrize("plan", ["grid_shard"])
def test_another_plan_gives_the_same_tables_and_the_same_model(tmp_path, mixed, plan):
    results, shown = train(tmp_path, *SMALL, "--plan", plan, ranks=2)
    assert plan in shown and "row_wise" not in shown.replace(plan, "")
    assert results["rows_per_table"] == mixed[0]["rows_per_table"]
    # Row-wise Adagrad keeps one moment per column shard: close, not equal.
    assert results["auc"] == pytest.approx(mixed[0]["auc"], abs=0.01)


def test_one_process_adam_and_the_planner_s_own_choice(tmp_path):
    adam = ("--plan", "auto", "--optimizer", "adam", "--lr", "0.01")
    results, _ = train(tmp_path, *SMALL, "--world-size", "1", *adam, ranks=1)
    assert results["auc"] > 0.65
    assert len(results["rows_per_rank"]) == 1


def learnable_lines(count: int, seed: int = 0) -> list[str]:
    """Returns lines whose label depends on the id in C1 in nine of ten lines; some fields are empty."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 40, (count, 26))
    follows = random.random(count) < 0.9
    empty = random.random((count, 25)) < 0.1
    lines = []
    for row in range(count):
        label = (ids[row, 0] % 2 == 0) == follows[row]
        text = [f"{value:08x}" for value in ids[row]]
        text[1:] = ["" if gone else one for gone, one in zip(empty[row], text[1:], strict=True)]
        lines.append("\t".join([str(int(label)), *["7"] * 12, "", *text]))
    return lines


def test_a_bad_line_ends_all_ranks_with_its_number_and_no_stack_trace(tmp_path):
    lines = learnable_lines(400)
    lines[210] = lines[210][:-3] + "xyz"
    path = write(tmp_path / "log", lines)
    arguments = ["--data", str(path), "--batch-size", "16", "--world-size", "2"]
    done = run_script(SCRIPT, *arguments, ranks=2)
    assert {*done.codes} == {1}, done.stderr
    message = f"{path}, line 211: C26: expected 1 to 16 hexadecimal digits"
    assert (done.stdout + done.stderr).count(message) == 1
    assert "Traceback" not in done.stderr and "File " not in done.stderr
    assert "AUC" not in done.stdout
