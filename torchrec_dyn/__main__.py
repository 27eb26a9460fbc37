"""The command line: `python -m torchrec_dyn inspect PATH`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchrec_dyn.checkpoint import (
    headline,
    names_to_read,
    plot,
    plot_fault,
    read_rows,
    table_lines,
)
from torchrec_dyn.checkpoint_format import open_checkpoint

_DAMAGED = 1
_SLOW = 1.0  # seconds after which a progress bar appears


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
        arguments: of the command line; None: the process's.

    Returns:
        The exit status.
    """
    parser = _arguments()
    asked = parser.parse_args(arguments)
    if asked.plot is not None and (fault := plot_fault(asked.plot)):
        parser.error(fault)
    try:
        with warnings.catch_warnings():
            # torch warns of damaged archives before it refuses them.
            warnings.simplefilter("ignore")
            _inspect(asked.path, asked.verify, asked.plot)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return _DAMAGED
    return 0


def _inspect(path: Path, verify: bool, picture: Path | None) -> None:
    checkpoint = open_checkpoint(path)
    print("\n".join(headline(checkpoint)), flush=True)
    block = _block()
    tables = checkpoint.tables.values()
    reports = []
    for table in tables:
        size = table.num_rows * table.row_bytes_of(names_to_read(table, verify))
        with _progress(size, table.name) as advance:
            reports.append(read_rows(table, verify, advance))
        print("\n".join(table_lines(reports[-1], block)), flush=True)
    if verify:
        print("\neverything read and checked: no damage")
    if picture is not None:
        plot(reports, picture)
        print(f"\nhistograms drawn: {picture}")


def _block() -> str:
    """What bars are made of, as far as the terminal can show it."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#"
    return "█"


@contextlib.contextmanager
def _progress(size: int, name: str) -> Iterator[Callable[[int], object]]:
    """Shows a bar on a terminal once a table takes long."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield lambda read: None
        return
    with tqdm(
        total=size, desc=name, unit="B", unit_scale=True, delay=_SLOW, disable=None, leave=False
    ) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
