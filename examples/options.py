"""The options of train_dlrm.py, and its start in several processes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

from plans import CHOICES
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ROW_OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"]
STEPS_OF_STREAM = 300


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line; ends the program with a usage message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="train_dlrm.py",
        description="Trains TorchRec's DLRM on raw ids with dynamic tables.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", type=_file, help="Criteo click log, plain or .gz (default: made up)"
    )
    data.add_argument(
        "--on-bad-line", choices=["error", "skip"], default="error", help="stop there, or go on"
    )
    data.add_argument(
        "--steps",
        type=_positive,
        help=f"batches per rank (default: {STEPS_OF_STREAM}, or the file)",
    )
    data.add_argument("--batch-size", type=_positive, default=512, help="clicks per rank and step")
    data.add_argument("--held-out", type=_positive, default=32768, help="clicks to evaluate on")
    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=_positive, default=16, help="columns of an embedding")
    model.add_argument(
        "--max-rows", type=_positive, default=4_000_000, help="limit on the rows of one table"
    )
    model.add_argument("--optimizer", choices=ROW_OPTIMIZERS, default="rowwise_adagrad")
    model.add_argument("--lr", type=_rate, default=0.1, help="learning rate of the rows")
    model.add_argument("--dense-lr", type=_rate, default=0.002, help="of the dense part (Adam)")
    model.add_argument("--seed", type=_seed, default=0, help="of stream, rows and dense weights")
    where = parser.add_argument_group("processes")
    where.add_argument("--plan", choices=CHOICES, default="mixed", help="how tables are sharded")
    where.add_argument(
        "--world-size", type=_positive, help="processes to start (default: 2, or torchrun's number)"
    )
    where.add_argument("--json", type=_new_file, metavar="OUT", help="also write the results there")
    options = parser.parse_args(arguments)
    started = int(os.environ.get("WORLD_SIZE", 0))
    if started and options.world_size not in (None, started):
        parser.error(
            f"--world-size: expected {started}, which torchrun started, got {options.world_size}. "
            "Leave it out under torchrun."
        )
    options.world_size = started or options.world_size or 2
    if options.data is None and options.steps is None:
        options.steps = STEPS_OF_STREAM
    return options


def start_processes(script: str, arguments: list[str], world_size: int) -> int:
    """Runs the script under torchrun on this machine; returns the exit status.

    torchrun ends the other ranks when one fails. That one has told why, unless it was killed;
    torchrun's own account, a stack trace of its insides, is kept from the screen.
    """
    threads = max(1, (os.cpu_count() or 1) // world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(["--standalone", f"--nproc-per-node={world_size}", script, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(
                f"train_dlrm.py: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr
            )
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def hide_notes_to_developers() -> None:
    """Keeps from the screen what torch and torchrec tell those who write them."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}.")
    return number


def _seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"expected a number in [0, 2^63), got {text}.")
    return number


def _rate(text: str) -> float:
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text}.")
    return number


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"expected a readable file, got {text}.")
    return path


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text}.")
    return path
