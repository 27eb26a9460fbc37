"""The options of train_dlrm.py, types of options, and the start of a script in several processes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from parts.devices import missing_for_cuda
from parts.plans import CHOICES
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ROW_OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"]
STEPS_OF_STREAM = 300
Sizes = Mapping[str, tuple[int, int, str]]  # by option: usually, with --quick, its meaning


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of the command line. Wrong options end the program with a usage message."""
    parser = argparse.ArgumentParser(
        prog="train_dlrm.py",
        description="Trains TorchRec's DLRM on raw ids with dynamic tables.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=file, help="Criteo click log, plain or .gz (default: made up)")
    data.add_argument(
        "--on-bad-line", choices=["error", "skip"], default="error", help="stop there, or go on"
    )
    data.add_argument(
        "--steps",
        type=positive,
        help=f"batches per rank (default: {STEPS_OF_STREAM}, or the file)",
    )
    data.add_argument("--batch-size", type=positive, default=512, help="clicks per rank and step")
    data.add_argument("--held-out", type=positive, default=32768, help="clicks to evaluate on")
    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=positive, default=16, help="columns of an embedding")
    model.add_argument(
        "--max-rows", type=positive, default=4_000_000, help="limit on the rows of one table"
    )
    model.add_argument("--optimizer", choices=ROW_OPTIMIZERS, default="rowwise_adagrad")
    model.add_argument("--lr", type=rate, default=0.1, help="learning rate of the rows")
    model.add_argument("--dense-lr", type=rate, default=0.002, help="of the dense part (Adam)")
    model.add_argument("--seed", type=seed, default=0, help="of stream, rows and dense weights")
    where = parser.add_argument_group("processes")
    where.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU each")
    where.add_argument("--plan", choices=CHOICES, default="mixed", help="how tables are sharded")
    where.add_argument(
        "--world-size",
        type=positive,
        help="processes to start (default: torchrun's number, else 2, with cuda one a GPU)",
    )
    where.add_argument("--json", type=new_file, metavar="OUT", help="also write the results there")
    options = parser.parse_args(arguments)
    default = 2 if options.device == "cpu" else max(1, torch.cuda.device_count())
    options.world_size = agreed_world_size(parser, options.world_size, default)
    if options.device == "cuda":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", options.world_size))
        if missing := missing_for_cuda(here):
            parser.error(f"--device cuda: expected {missing}. See docs/guide/start/install.md.")
    if options.data is None and options.steps is None:
        options.steps = STEPS_OF_STREAM
    return options


def agreed_world_size(parser: argparse.ArgumentParser, asked: int | None, default: int) -> int:
    """Returns the number of processes: torchrun's number if torchrun started this process.

    Ends the program with a usage message if `asked` differs from that number.
    """
    started = int(os.environ.get("WORLD_SIZE", 0))
    if started and asked not in (None, started):
        parser.error(
            f"--world-size: expected {started}, which torchrun started, got {asked}. "
            "Leave it out under torchrun."
        )
    return started or asked or default


def start_processes(script: str, arguments: list[str], world_size: int) -> int:
    """Runs the script under torchrun on this machine. Returns the exit status.

    torchrun stops the other ranks if a rank fails. The failed rank has printed the reason, unless it was
    killed. torchrun's own message, an internal stack trace, is hidden.
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
                f"{Path(script).name}: rank {rank} was killed by {failure.signal_name()}",
                file=sys.stderr,
            )
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def hide_notes_to_developers() -> None:
    """Hides warnings of torch and torchrec for their developers."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def add_sizes(parser: argparse.ArgumentParser, sizes: Sizes) -> None:
    """Adds `--quick` and an option for each size."""
    parser.add_argument("--quick", action="store_true", help="a small stream, a few seconds")
    for name, (usual, quick, meaning) in sizes.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=positive,
            help=f"{meaning} (default: {usual:,}; with --quick: {quick:,})",
        )


def set_sizes(options: argparse.Namespace, sizes: Sizes) -> None:
    """Gives the sizes that were not named their default."""
    for name, (usual, quick, _) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)


def positive(text: str) -> int:
    """Returns the integer of an option, 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}.")
    return number


def seed(text: str) -> int:
    """Returns the seed of an option, an integer in [0, 2^63)."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"expected a number in [0, 2^63), got {text}.")
    return number


def rate(text: str) -> float:
    """Returns the number of an option, finite and 0 or more."""
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text}.")
    return number


def file(text: str) -> Path:
    """Returns the path of an option, a readable file."""
    path = Path(text)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"expected a readable file, got {text}.")
    return path


def new_file(text: str) -> Path:
    """Returns the path of an option, a file that can be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text}.")
    return path
