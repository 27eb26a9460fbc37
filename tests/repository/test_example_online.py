"""examples/online.py: killed on the way and started again, it saves and serves what one run does."""

import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from example_criteo_files import EXAMPLES
from forked import die_before_commit, run_ranks
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_dyn import serving
from torchrec_dyn.checkpoint import Checkpoints

SCRIPT = EXAMPLES / "online.py"


def run_until(folder: str, dies_at: int | None, *url: str, **environment: str) -> None:
    """Runs the script; the rank that writes dies at the n-th entry, before its commit file is written."""
    os.environ.update(environment)
    os.chdir(tempfile.mkdtemp())
    if dies_at is not None and os.environ["RANK"] == "0":
        die_before_commit(dies_at)
    sys.argv = [str(SCRIPT), folder, *url]
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), {"__name__": "__main__"})


def served_rows(folder: Path) -> torch.Tensor:
    users = EmbeddingBagConfig(1, 8, "user", feature_names=["user"])
    ebc = serving.ServingEmbeddingBagCollection(folder / "served", [users])
    ids = torch.arange(4000)
    return ebc(KeyedJaggedTensor(["user"], ids, lengths=torch.ones_like(ids))).values()


def test_a_killed_run_serves_what_one_run_does(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run_ranks(run_until, str(whole), None, ranks=2)
    assert done.codes == [0, 0], done.stderr
    assert "batch 40: delta-00000004 is served" in done.stdout
    assert -signal.SIGKILL in run_ranks(run_until, str(killed), 3, ranks=2).codes
    assert [one.step for one in Checkpoints(killed / "checkpoints").entries()] == [10, 20]
    done = run_ranks(run_until, str(killed), None, ranks=2)
    assert done.codes == [0, 0] and "batch 20:" not in done.stdout, done.stderr
    assert served_rows(whole).equal(served_rows(killed)) and served_rows(whole).any()


def test_a_killed_run_goes_on_from_an_object_store(s3, tmp_path):
    """From another working directory, on other served files; what it prints and serves is the same."""
    run = partial(run_until, **s3.environment)
    urls = [f"{s3.new_bucket()}/run" for _ in range(2)]
    whole = run_ranks(run, str(tmp_path / "whole"), None, urls[0], ranks=2)
    assert whole.codes == [0, 0], whole.stderr
    killed = run_ranks(run, str(tmp_path / "killed"), 3, urls[1], ranks=2)
    assert -signal.SIGKILL in killed.codes
    assert [one.step for one in Checkpoints(urls[1]).entries()] == [10, 20]
    again = run_ranks(run, str(tmp_path / "again"), None, urls[1], ranks=2)
    assert again.codes == [0, 0], again.stderr
    assert killed.stdout + again.stdout == whole.stdout and "batch 40: delta-00" in whole.stdout
    rows = [served_rows(tmp_path / name) for name in ("whole", "again")]
    assert rows[0].equal(rows[1]) and rows[0].any()


def test_it_is_short():
    assert len([line for line in SCRIPT.read_text().splitlines() if line]) <= 60
