"""The command line: `python -m torchrec_dyn` lists its commands, with an example of each."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrec_dyn import serving
from torchrec_dyn.checkpoint_format import StorePath, place_of
from torchrec_dyn.optimizers import OPTIMIZER_NAMES, RowOptimizer
from torchrec_dyn.planner import print_size
from torchrec_dyn.serving import ROW_DTYPES
from torchrec_dyn.storage import lacks_memory
from torchrec_dyn.tools import (
    BATCH_BYTES,
    export_table,
    inspect_checkpoint,
    plot_fault,
    print_difference,
    print_report,
    verify_checkpoint,
    verify_rows_file,
)

_FAILED = 1
_IS_WRONG = 2  # of a command whose 1 is an answer
EXAMPLES = (
    "inspect checkpoints/step_1000",
    "diff run_a/step_1000 run_b/step_1000",
    "verify served/",
    "follow checkpoints/ --to served/",
    "export checkpoints/ --table user --to user.parquet",
    "size 50_000_000 64 --optimizer ADAM",
    "doctor",
)
_SERVED = {str(t).removeprefix("torch."): t for t in ROW_DTYPES}
_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16)}


def _from(least: float, most: float, expected: str) -> Callable[[str], Any]:
    """Returns a reader of the numbers of an option; they are integers if `least` is an integer."""

    def read(text: str) -> float:
        try:
            number = type(least)(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return number

    return read


_count = _from(1, 2**53, "a number from 1 to 2^53")


def _arguments() -> argparse.ArgumentParser:
    program = "python -m torchrec_dyn"
    parser = argparse.ArgumentParser(
        prog=program,
        description="Tools for checkpoints and served files of dynamic tables.",
        epilog="\n  ".join(["examples:", *(f"{program} {example}" for example in EXAMPLES)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", dest="command")
    inspect = commands.add_parser(
        "inspect",
        help="print the contents of a checkpoint or a delta",
        description="Prints, for each dynamic table of a checkpoint or delta, its rows, initializer, "
        "optimizer and fingerprint (equal contents have the same fingerprint under any plan), and the norms, "
        "ages and counts of its rows. A checkpoint's .metadata is a pickle: open only files that you trust.",
        epilog="Exit status: 0 no fault; 1 torn, damaged or not a checkpoint; 2 wrong usage.",
    )
    inspect.add_argument("path", help="directory or URL of the checkpoint or delta")
    inspect.add_argument("--verify", action="store_true", help="read and check everything")
    inspect.add_argument(
        "--plot", type=Path, metavar="out.png", help="also plot the histograms to this file"
    )
    inspect.set_defaults(
        run=lambda chosen: inspect_checkpoint(chosen.path, chosen.verify, chosen.plot)
    )
    diff = commands.add_parser(
        "diff",
        help="print what differs between two checkpoints, deltas or runs",
        description="Compares the dynamic tables of two checkpoints or two deltas number by number, whatever "
        "their plans, and prints the ids that only one side has, the numbers of rows that differ in each "
        "tensor, and the ranges of their ids. For two directories of Checkpoints, prints the first step at "
        "which the runs differ.",
        epilog="Exit status: 0 equal, bit for bit; 1 different; 2 torn, damaged or wrong usage.",
    )
    diff.add_argument("first", help="directory or URL of a checkpoint, a delta or a run")
    diff.add_argument("second", help="what to compare it with, of the same kind")
    diff.set_defaults(
        run=lambda chosen: not print_difference(chosen.first, chosen.second), failed=_IS_WRONG
    )
    _add_verify(
        commands.add_parser("verify", help="read and check all bytes of saved or served files")
    )
    _add_follow(
        commands.add_parser("follow", help="keep served tables up to date with a training job")
    )
    _add_export(commands.add_parser("export", help="write a table to Parquet or Arrow"))
    _add_size(commands.add_parser("size", help="print the memory that a table needs"))
    report = commands.add_parser(
        "doctor",
        help="print versions, machine and build for a bug report",
        description="Prints what a bug report needs: versions, the trio of torchrec, torch and fbgemm, CPU "
        "level, nvcc, GPUs, the devices that the extension has kernels for, and any faults found. If the "
        "package cannot be imported, run its file tools/doctor.py: the import error says how.",
        epilog="Exit status: 0 no fault; 1 faults found.",
    )
    report.set_defaults(run=lambda _: print_report())
    return parser


def _add_verify(verify: argparse.ArgumentParser) -> None:
    verify.description = (
        "Reads all bytes of a checkpoint, a delta, a directory of served tables or a .safetensors file that "
        "torchrec_dyn wrote, and checks them against the sums written with them. It may run during serving. "
        "The sums detect accidental damage, not forgery."
    )
    verify.epilog = "Exit status: 0 no damage; 1 torn, damaged or without sums; 2 wrong usage."
    verify.add_argument("path", help="the directory, file or URL")
    verify.set_defaults(run=_verify)


def _verify(chosen: argparse.Namespace) -> None:
    path = place_of(chosen.path)
    if isinstance(path, StorePath):  # served tables, and files of rows, lie on a disk
        print(verify_checkpoint(path))
    elif (path / "current").exists() or any(path.glob("rows-*")):
        size = serving.verify(path)
        print(f"served tables {path}: {size:,} bytes read and checked: no damage")
    elif path.is_file():
        print(verify_rows_file(path))
    else:
        print(verify_checkpoint(path))


def _add_follow(follow: argparse.ArgumentParser) -> None:
    follow.description = (
        "Keeps a directory of served tables at the newest entry of a directory of torchrec_dyn's "
        "Checkpoints, and prints a line for each new generation. Serving collections switch to it at "
        "their next refresh()."
    )
    follow.epilog = (
        "Exit status of --once: 0 the newest entry is served; 1 it is not, or cannot be."
    )
    follow.add_argument("path", help="the directory or URL of Checkpoints")
    follow.add_argument("--to", type=Path, required=True, help="the directory of served tables")
    follow.add_argument(
        "--every",
        type=_from(0.0, 1e9, "seconds from 0 to 10^9"),
        default=1.0,
        help="seconds between two checks; default: 1",
    )
    follow.add_argument("--once", action="store_true", help="end when the newest entry is served")
    follow.add_argument(
        "--dtype",
        choices=[*_SERVED],
        help="dtype of the served rows; default: the present dtype, float32 at first",
    )
    follow.add_argument(
        "--forks",
        action="store_true",
        help="serve the newest entry even if training diverged from what is served",
    )
    follow.set_defaults(run=_follow)


def _follow(chosen: argparse.Namespace) -> int:
    rows = _SERVED.get(chosen.dtype)
    if chosen.once:
        follower = serving.Follower(chosen.path, chosen.to, rows=rows, follow_forks=chosen.forks)
        follower.since = follower.served()
        if (followed := follower.poll()) is not None:
            _print_followed(followed)
        elif not chosen.to.exists():
            raise ValueError(
                f"follow: expected an entry of Checkpoints in {chosen.path}, got none."
            )
        elif follower.skipped:
            print("skipped", *follower.skipped, sep="\n  ", file=sys.stderr)
        return int(bool(follower.skipped))
    for followed in serving.follow(
        chosen.path, chosen.to, every=chosen.every, rows=rows, follow_forks=chosen.forks
    ):
        _print_followed(followed)
    return 0


def _print_followed(followed: serving.Followed) -> None:
    changed = followed.changed
    count = "all" if changed is None else f"{sum(map(len, changed.values())):,} changed"
    print(
        f"{followed.entry.path.name} (step {followed.entry.step}): generation {followed.generation}, "
        f"{count} rows, {followed.lag:.1f} s after they were trained",
        *followed.skipped,
        sep="\n  skipped ",
        flush=True,
    )


def _add_export(export: argparse.ArgumentParser) -> None:
    export.description = (
        "Writes the rows of a saved table to a Parquet or Arrow file, with a few row groups in memory at a "
        "time, from a checkpoint or from a step of a directory of torchrec_dyn's Checkpoints. The rows are "
        "checked as they are read; the file gets its name once it is complete. A checkpoint's .metadata is a "
        "pickle: open only files that you trust."
    )
    export.epilog = (
        "Exit status: 0 written; 1 torn, damaged, no such table or no disk space; 2 wrong usage."
    )
    export.add_argument("path", help="directory or URL of a checkpoint, or of Checkpoints")
    export.add_argument("--table", help="name or key of the table; default: the only table")
    export.add_argument(
        "--to", type=Path, required=True, help="the file to write, *.parquet or *.arrow"
    )
    export.add_argument(
        "--step", type=int, help="step of an entry of Checkpoints; default: the newest entry"
    )
    export.add_argument(
        "--ids", type=_ids, metavar="LO:HI", help="ids from LO to HI - 1; either may be left out"
    )
    export.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="columns to write; default: id,row and, with a policy, last_seen,count; others: last_seen_time, "
        "momentum1, momentum2, row_counter",
    )
    export.add_argument(
        "--waiting",
        action="store_true",
        help="write the ids that wait for admission instead of the rows",
    )
    export.add_argument(
        "--format",
        choices=("parquet", "arrow"),
        help="file format; default: by the suffix of the file",
    )
    export.add_argument(
        "--row-group",
        type=_count,
        default=BATCH_BYTES,
        metavar="BYTES",
        help=f"maximum bytes of a row group before compression; default: {BATCH_BYTES:_}",
    )
    export.set_defaults(run=_export)


def _export(chosen: argparse.Namespace) -> None:
    rows = export_table(
        chosen.path,
        chosen.table,
        chosen.to,
        columns=chosen.columns,
        ids=chosen.ids,
        step=chosen.step,
        waiting=chosen.waiting,
        kind=chosen.format,
        batch_bytes=chosen.row_group,
    )
    print(f"{chosen.to}: {rows:,} rows, {chosen.to.stat().st_size:,} bytes")


def _ids(text: str) -> range:
    low, colon, high = text.partition(":")
    try:
        ids = range(int(low or -(2**63)), int(high or 2**63))
    except ValueError:
        colon = ""
    if not colon or not -(2**63) <= ids.start <= ids.stop <= 2**63:
        raise argparse.ArgumentTypeError(f"expected LO:HI of int64, LO <= HI, got {text}")
    return ids


def _add_size(size: argparse.ArgumentParser) -> None:
    size.description = (
        "Prints an upper bound of the memory of a table on the CPU, in MiB (2^20 bytes). By default the "
        "table is a single shard (table_wise). row_wise: set --row-ranks to the number of ranks. "
        "column_wise: set --column-shards. table_row_wise: set --row-ranks to the number of ranks of a node. "
        "grid_shard: set both."
    )
    size.add_argument(
        "rows", type=_count, help="number of ids with a row, over all ranks, e.g. 50_000_000"
    )
    size.add_argument("columns", type=_count, help="embedding_dim of the table")
    size.add_argument(
        "--dtype", choices=_DTYPES, default="float32", help="dtype of the rows; default: float32"
    )
    size.add_argument(
        "--optimizer",
        choices=OPTIMIZER_NAMES,
        default="EXACT_ROWWISE_ADAGRAD",
        help="update rule of the rows; default: EXACT_ROWWISE_ADAGRAD",
    )
    size.add_argument(
        "--row-ranks", type=_count, default=1, help="number of ranks that share the rows"
    )
    size.add_argument("--column-shards", type=_count, default=1, help="number of column shards")
    size.add_argument(
        "--policy",
        action="store_true",
        help="the table has an admission or eviction policy: rows have scores",
    )
    size.add_argument(
        "--counters",
        type=_from(0, 2**53, "a number from 0 to 2^53"),
        default=0,
        help="number of ids that wait for admission; implies --policy",
    )
    size.set_defaults(run=_print_size)


def _print_size(chosen: argparse.Namespace) -> None:
    print_size(
        chosen.rows,
        chosen.columns,
        _DTYPES[chosen.dtype],
        RowOptimizer.from_fused_params({"optimizer": chosen.optimizer}, "size"),
        chosen.row_ranks,
        chosen.column_shards,
        chosen.policy or chosen.counters > 0,
        chosen.counters,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command."""
    parser = _arguments()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.exit(2, parser.format_help())  # wrong usage, as argparse ends it
    if getattr(options, "plot", None) is not None and (fault := plot_fault(options.plot)):
        parser.error(fault)
    status, fault = None, ""
    try:
        with warnings.catch_warnings():
            # torch warns about a damaged archive before it raises an error.
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", message="(serving.follow|Follower|export_table): ")
            warnings.showwarning = lambda message, *_: print(message, file=sys.stderr, flush=True)
            status = options.run(options)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError) as error:
        fault = str(error)
    except Exception as error:
        if not lacks_memory(error):
            raise
        fault = (
            f"{options.command}: expected memory for what it reads, got {type(error).__name__}: "
            f"{str(error) or 'out of memory'}. Give the process more memory, or end others."
        )
    if fault:
        print(" ".join(fault.split()), file=sys.stderr)
        return int(getattr(options, "failed", _FAILED))
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(main())
