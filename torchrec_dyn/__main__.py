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
        help="print the contents of a checkpoint or a delta",
        description="Prints for each dynamic table of a checkpoint or delta: rows, initializer, "
        "optimizer, fingerprint (the same for the same contents under any plan), and the norms, ages and "
        "counts of its rows. A checkpoint's .metadata is a pickle: open only files that you trust.",
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
    options = parser.parse_args(arguments)
    if options.plot is not None and (fault := plot_fault(options.plot)):
        parser.error(fault)
    try:
        with warnings.catch_warnings():
            # torch warns about a damaged archive before it raises an error.
            warnings.simplefilter("ignore")
            inspect_checkpoint(options.path, options.verify, options.plot)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return _DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(main())
