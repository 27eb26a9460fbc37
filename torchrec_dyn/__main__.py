"""The command line: `python -m torchrec_dyn inspect PATH`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from torchrec_dyn.checkpoint import inspect_checkpoint, plot_fault

_DAMAGED = 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torchrec_dyn", description="Dynamic tables.")
    commands = parser.add_subparsers(required=True, metavar="command")
    inspect = commands.add_parser(
        "inspect",
        help="tell what a checkpoint or a delta holds",
        description="Tells of each dynamic table of a checkpoint, or of a delta: rows, initializer, "
        "optimizer, fingerprint (the same for the same contents, whatever the plan), and norms, ages and "
        "counts of its rows. A checkpoint's .metadata is a pickle: open only what you trust.",
        epilog="Exit status: 0 fine; 1 torn, damaged or no checkpoint; 2 wrong usage.",
    )
    inspect.add_argument("path", type=Path, help="directory of the checkpoint or delta")
    inspect.add_argument("--verify", action="store_true", help="read everything and check it")
    inspect.add_argument("--plot", type=Path, metavar="out.png", help="draw the histograms too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: command-line arguments; None: the arguments of this process.

    Returns:
        The exit status.
    """
    parser = _arguments()
    asked = parser.parse_args(arguments)
    if asked.plot is not None and (fault := plot_fault(asked.plot)):
        parser.error(fault)
    try:
        with warnings.catch_warnings():
            # torch warns about a damaged archive before it raises an error.
            warnings.simplefilter("ignore")
            inspect_checkpoint(asked.path, asked.verify, asked.plot)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return _DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(main())
