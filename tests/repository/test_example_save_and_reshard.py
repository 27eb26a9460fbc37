"""examples/save_and_reshard.py end to end, in real processes, and what it says of its runs."""

import faulthandler
import multiprocessing
import os
import re
import sys

import forked
import pytest
from example_criteo_files import EXAMPLES
from forked import run_ranks, run_script

import save_and_reshard  # isort: skip

SCRIPT = str(EXAMPLES / "save_and_reshard.py")
TIME_LIMIT = 400  # seconds; a run takes about 10
MOVED = ["2 ranks, other plan", "3 ranks", "1 rank", "laptop"]


def start_ranks(script: str, arguments: list[str], world_size: int) -> int:
    """Starts the ranks of a run: in place of torchrun, which test_example_train.py has started."""
    ended = run_script(script, *arguments, ranks=world_size)
    print(ended.stdout, end="")
    print(ended.stderr, end="", file=sys.stderr)
    return int(any(ended.codes))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What one run of everything prints, and its folder."""
    folder = tmp_path_factory.mktemp("moves")
    ended = run_ranks(run_everything, str(folder), time_limit=TIME_LIMIT)
    assert ended.codes == [0], ended.stderr
    return ended.stdout, ended.stderr, folder


def run_everything(folder: str) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    # This process has the imports, and no threads of torch before its last run: the ranks are its forks.
    # A fork would wait for the thread of faulthandler, which it does not have.
    forked.forkserver = lambda: multiprocessing.get_context("fork")
    faulthandler.cancel_dump_traceback_later()
    sys.argv = [SCRIPT, "--folder", folder]
    sys.path.insert(0, str(EXAMPLES))
    save_and_reshard.start_processes = start_ranks
    raise SystemExit(save_and_reshard.main())


def line_of(text: str, name: str, part: int) -> str:
    """The line on one run in one of the paragraphs."""
    lines = text.split("\n\n")[part].splitlines()
    return next(line for line in lines if line.startswith(f"  {name:20} "))


def test_another_plan_on_as_many_ranks_changes_no_loss(shown):
    assert "all equal to the last bit" in line_of(shown[0], "2 ranks, other plan", 1)


@pytest.mark.parametrize("name", MOVED)
def test_losses_go_on_as_those_of_the_run_that_stayed(shown, name):
    line = line_of(shown[0], name, 1)
    apart = re.search(r"at most (\S+) apart", line)
    assert "last bit" in line or float(apart[1]) < 2e-4


@pytest.mark.parametrize("name", MOVED)
def test_what_was_loaded_is_saved_again_to_the_last_bit(shown, name):
    assert line_of(shown[0], name, 2).endswith("every tensor as it was, to the last bit")


def test_the_model_learns_before_and_after_the_move(shown):
    rows = re.findall(r"^ *\d+ to +\d+ +(\S+)", shown[0], re.M)
    means = [float(mean) for mean in rows]
    assert len(means) == 8
    assert means[0] - means[3] > 0.03 and means[4] - means[7] > 0.005
