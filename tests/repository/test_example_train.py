"""examples/train_dlrm.py end to end: as a user starts it, and as its ranks that another test has started."""

import gzip
import json
import os
import re
import runpy
import sys

import pytest
import torch
from another_process import without_fbgemm_warning
from example_criteo_files import EXAMPLES, learnable_lines, write
from forked import Ended, run_ranks, run_script

from parts.devices import backend_for, device_of_process  # isort: skip
from parts.options import parse_options  # isort: skip

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


@pytest.mark.deep
def test_a_file_with_a_bad_line_skipped_on_uneven_ranks(tmp_path):
    lines = learnable_lines(6001)
    lines[99] = "1\tbroken"
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress("".join(f"{text}\n" for text in lines).encode()))
    arguments = ["--data", str(path), "--on-bad-line", "skip", "--batch-size", "32"]
    results, shown = train(tmp_path, *arguments, "--dense-lr", "0.01", ranks=3)
    assert "log.gz, line 100: expected 40 fields, got 2" in shown
    assert len(results["rows_per_rank"]) == 3
    # Each rank may drop less than one batch at the end, to stop with the others.
    trained_on = results["samples"] + results["held_out"]
    assert 6000 - 2 * 3 * 32 < trained_on <= 6000
    assert results["auc"] > 0.8  # of 0.9: the label follows the id nine times in ten
    assert results["rows_per_table"]["C1"] == 40


def start_by_torchrun(script: str, arguments: list[str]) -> None:
    """Runs a script as a user starts it, outside torchrun: torchrun's agent is this process."""
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC_", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(script, run_name="__main__")


def by_torchrun(*arguments: str, ranks: int) -> Ended:
    """Starts the script as a user does; `ranks` is among the arguments."""
    return run_ranks(start_by_torchrun, SCRIPT, [*arguments], time_limit=240.0)


def by_forks(*arguments: str, ranks: int) -> Ended:
    return run_script(SCRIPT, *arguments, ranks=ranks)


@pytest.mark.parametrize(
    ("run", "ranks"),
    [*(pytest.param(by_torchrun, n, marks=pytest.mark.deep) for n in (1, 2)), (by_forks, 2)],
)
def test_a_bad_line_ends_all_ranks_with_its_number_and_no_stack_trace(tmp_path, run, ranks):
    """The real torchrun starts the ranks in interpreters of their own: 3 s each."""
    lines = learnable_lines(400)
    lines[210] = lines[210][:-3] + "xyz"
    path = write(tmp_path / "log", lines)
    arguments = ["--data", str(path), "--batch-size", "16", "--world-size", str(ranks)]
    done = run(*arguments, ranks=ranks)
    assert {*done.codes} == {1}, done.stderr
    message = f"{path}, line 211: C26: expected 1 to 16 hexadecimal digits"
    assert (done.stdout + done.stderr).count(message) == 1
    assert "Traceback" not in done.stderr and "File " not in done.stderr
    assert "AUC" not in done.stdout


def test_a_file_too_short_for_the_ranks_is_named(tmp_path):
    path = write(tmp_path / "log", learnable_lines(1))
    ended = run_script(SCRIPT, "--data", str(path), ranks=2)
    assert ended.codes == [1, 1]
    assert "expected clicks for each of 2 ranks" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_a_gpu_the_error_says_what_is_missing(monkeypatch, capsys):
    """Each round mends what the error of the last one names."""

    def said(*more: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            parse_options(["--device", "cuda", *more])
        return capsys.readouterr().err

    kernels = set()
    monkeypatch.setattr(
        "torch._C._dispatch_has_kernel_for_dispatch_key", lambda op, key: (op, key) in kernels
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", None)
    assert "expected a build of torch with CUDA, got torch " in said()
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "expected a GPU for each of 1 processes, got 0. See docs/guide/install.md." in said()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert "expected a GPU for each of 4 processes, got 3" in said("--world-size", "4")
    assert "expected a build of fbgemm-gpu with kernels for CUDA" in said()
    kernels.add(("fbgemm::permute_2D_sparse_data", "CUDA"))
    assert "expected a build of torchrec_dyn with kernels for CUDA" in said()
    kernels.add(("torchrec_dyn::lookup", "CUDA"))
    assert parse_options(["--device", "cuda"]).world_size == 3  # a process a GPU
    assert parse_options([]).world_size == 2
    # Nodes of two processes each.
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert parse_options(["--device", "cuda"]).world_size == 8


def test_each_process_has_its_gpu_and_both_backends(monkeypatch):
    used = []
    monkeypatch.setattr("torch.cuda.set_device", used.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = device_of_process("cuda")
    assert used == [device] == [torch.device("cuda:1")]
    assert backend_for(device) == "cpu:gloo,cuda:nccl"
    assert backend_for(device_of_process("cpu")) == "gloo" and len(used) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere/log"], "expected a readable file, got /nowhere/log"),
        (["--json", "/nowhere/out"], "expected a file that can be written, got /nowhere/out"),
        (["--batch-size", "0"], "expected at least 1, got 0"),
        (["--lr", "-1"], "expected a number >= 0, got -1"),
        (["--lr", "nan"], "expected a number >= 0, got nan"),
        (["--seed", "-1"], r"expected a number in \[0, 2\^63\), got -1"),
        (["--plan", "diagonal"], "invalid choice: 'diagonal'"),
        (["--world-size", "3"], "expected 2, which torchrun started, got 3"),
    ],
)
def test_a_wrong_option_ends_with_a_usage_message(monkeypatch, capsys, arguments, message):
    if "--world-size" in arguments:
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments)
    told = capsys.readouterr().err
    assert re.search(message, told)
