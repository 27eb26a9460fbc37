"""The command `python -m torchrec_dyn inspect`: prints a checkpoint or a delta, table by table.

Rows are read in chunks and counted in histograms, which are printed as bars of text and, with matplotlib,
drawn.

Legend: M values of a chunk, E edges of a histogram.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    SCORES,
    SavedCheckpoint,
    SavedTable,
    open_checkpoint,
    replace_file,
)

_MOST_BARS = 10
_BAR_WIDTH = 32
_BLUE = "#3b6ea5"


def inspect_checkpoint(path: Path, verify: bool, picture: Path | None) -> None:
    """Prints the tables of a checkpoint or a delta; with `picture`, also draws their histograms.

    Without `verify` only what is printed is read.
    """
    checkpoint = open_checkpoint(path)
    print("\n".join(headline(checkpoint)), flush=True)
    block = _block()
    reports = []
    for table in checkpoint.tables.values():
        reports.append(read_rows(table, verify))
        print("\n".join(table_lines(reports[-1], block)), flush=True)
    if verify:
        print("\neverything read and checked: no damage")
    if picture is not None:
        plot(reports, picture)
        print(f"\nhistograms drawn: {picture}")


def _block() -> str:
    """Returns the character of bars: a block if the output can show it, else #."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#"
    return "█"


def headline(checkpoint: SavedCheckpoint) -> list[str]:
    """Returns the lines that describe all tables together; reads no row."""
    tables = list(checkpoint.tables.values())
    kind = "delta" if checkpoint.is_delta else "checkpoint"
    rows, size = sum(one.num_rows for one in tables), sum(one.bytes for one in tables)
    count = f"{len(tables)} dynamic table{'s' * (len(tables) != 1)}"
    lines = [f"{kind} {checkpoint.path}: {count}, {rows:,} rows, {readable(size)}"]
    for title, states in (("fingerprint", (False,)), ("with optimizer state", (False, True))):
        totals = [
            total_fingerprint(
                (one.name, one.fingerprint(when, of_optimizer))
                for one in tables
                for of_optimizer in states
                if not of_optimizer or one.optimizer is not None
            )
            for when in _moments(checkpoint.is_delta)
        ]
        if len(states) == 1 or any(one.optimizer is not None for one in tables):
            lines.append(f"  {title:<22}{' -> '.join(f'{one:016x}' for one in totals)}")
    lines += [f"  optimizer state without a table: {key}" for key in checkpoint.ownerless]
    return lines


def table_lines(report: TableReport, block: str) -> Iterator[str]:
    """Yields the lines that describe one table; `block` is the character of bars."""
    table = report.table
    yield ""
    yield table.key
    dtype = str(table.dtype).removeprefix("torch.")
    changed = " changed" * table.is_delta
    yield titled(
        "rows",
        f"{table.num_rows:,}{changed} x {table.embedding_dim} {dtype}, {readable(table.bytes)}",
    )
    if table.is_delta:
        yield titled("removed", f"{table.rows_of('removed'):,} rows")
    yield titled("initial rows", f"{_initializer(table)}, seed {table.config.get('seed')}")
    if table.optimizer is not None:
        cuts = len(table.optimizer.get("cuts", ())) - 1
        shared = f", one number a row for each of {cuts} column shards" * (cuts > 1)
        yield titled(
            "optimizer", f"{table.optimizer['optimizer']}, step {_last_step(table):,}{shared}"
        )
    if waiting := table.rows_of("waiting"):
        yield titled("waiting ids", f"{waiting:,}")
    for title, of_optimizer in (("fingerprint", False), ("  of optimizer state", True)):
        if not of_optimizer or table.optimizer is not None:
            found = [table.fingerprint(when, of_optimizer) for when in _moments(table.is_delta)]
            yield titled(title, " -> ".join(f"{one:016x}" for one in found))
    if report.not_finite:
        yield titled("not finite", f"{report.not_finite:,} rows have a NaN or an infinite number")
    for histogram in report.histograms:
        if lines := histogram.lines(block):
            yield f"  {histogram.title}"
            yield from (f"    {line}" for line in lines)


def titled(title: str, text: str) -> str:
    """Returns a line of a report: a title and, in a second column, its text."""
    return f"  {title:<22}{text}"


def _initializer(table: SavedTable) -> str:
    fields = dict(table.config.get("initializer", {}))
    name = fields.pop("name", "unknown")
    return f"{name}({', '.join(f'{field}={value:.4g}' for field, value in fields.items())})"


def _moments(is_delta: bool) -> Sequence[str]:
    return ("base", "result") if is_delta else ("checksum",)


def total_fingerprint(parts: Iterable[tuple[str, int]]) -> int:
    """Returns the fingerprint of all tables, 64 bits, from the name and the fingerprint of each table.

    Keys have no part in it, so the place of the model in the checkpoint has no effect.

    Source: BLAKE2b with an 8 byte digest (RFC 7693).
    """
    text = "\0".join(f"{name} {fingerprint:016x}" for name, fingerprint in sorted(parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def readable(size: float) -> str:
    """Returns a number of bytes as text with a unit."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:,.{0 if units[0] == 'bytes' else 1}f} {units[0]}"


@dataclass(frozen=True)
class TableReport:
    """One table and the histograms of its rows."""

    table: SavedTable
    not_finite: int  # rows with a NaN or an infinite number
    histograms: list[Histogram]  # of the norms, and of ages and counts if scores are saved


def read_rows(table: SavedTable, verify: bool) -> TableReport:
    """Reads rows, scores and, with `verify`, all other tensors of a table, and returns the report."""
    if verify:
        table.verify_small()
    norms, not_finite = histogram_of_norms(), 0
    ages = histogram_of_steps("age of rows (steps since last seen)")
    counts = histogram_of_steps("count of rows (times seen)")
    scores = [name for name in SCORES if name in table.row_names]
    now = _last_step(table)
    for chunk in table.chunks(table.row_names if verify else ("weight", *scores)):
        lengths = _norms(chunk["weight"])
        finite = lengths.isfinite()
        norms.add(lengths[finite])
        not_finite += int((~finite).sum())
        if scores:
            ages.add((now - chunk["last_seen"]).clamp(min=0))
            counts.add(chunk["count"])
    return TableReport(table, not_finite, [norms, *([ages, counts] if scores else [])])


def _last_step(table: SavedTable) -> int:
    """Returns the step of the table; without optimizer state, the last step at which a row was seen, or 0."""
    if "step" in table.names:
        return int(table.read("step"))
    if "last_seen" not in table.row_names:
        return 0
    chunks = table.chunks(("last_seen",))
    return max((int(chunk["last_seen"].max()) for chunk in chunks), default=0)


def _norms(weight: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(weight.float(), dim=1).double()
    large = ~norms.isfinite()  # NaN, infinite, or too large to be squared in float32
    norms[large] = torch.linalg.vector_norm(weight[large].double(), dim=1)
    return norms


@dataclass(frozen=True)
class Bar:
    """The number of values in [low, high); if the values are whole numbers, from low to high - 1."""

    low: float
    high: float
    count: int


class Histogram:
    """A histogram of values >= 0. Its bins begin at 0 and at the edges, [E] ascending."""

    def __init__(self, title: str, edges: Tensor) -> None:
        self.title = title
        self._edges = edges
        self._counts = torch.zeros(len(edges) + 1, dtype=torch.int64, device="cpu")

    @property
    def is_whole(self) -> bool:
        """True if the values are whole numbers."""
        return not self._edges.is_floating_point()

    def add(self, values: Tensor) -> None:
        """Counts more values [M], in the dtype of the edges."""
        bins = torch.bucketize(values, self._edges, right=True)
        self._counts += torch.bincount(bins, minlength=len(self._counts))

    def bars(self) -> list[Bar]:
        """Returns at most 10 bars, from the lowest to the highest value; neighbouring bins are joined."""
        used = self._counts.nonzero().flatten().tolist()
        if not used:
            return []
        bounds = [0, *self._edges.tolist(), float("inf")]
        first, last = used[0], used[-1] + 1
        step = -(-(last - first) // _MOST_BARS)
        return [
            Bar(bounds[low], bounds[high], int(self._counts[low:high].sum()))
            for low in range(first, last, step)
            for high in [min(low + step, last)]
        ]

    def lines(self, block: str = "█") -> list[str]:
        """Returns the bars as lines of text; `block` is the character of bars."""
        bars = self.bars()
        names = [self.name_of(bar) for bar in bars]
        most = max((bar.count for bar in bars), default=0)
        widths = max(map(len, names), default=0), len(f"{most:,}")
        return [
            f"{name:>{widths[0]}}  {bar.count:>{widths[1]},}  "
            f"{block * -(-bar.count * _BAR_WIDTH // most)}".rstrip()
            for name, bar in zip(names, bars, strict=True)
        ]

    def name_of(self, bar: Bar) -> str:
        """Returns the range of a bar as text."""
        if not self.is_whole:
            return f"{bar.low:.3g} to {bar.high:.3g}"
        if bar.high == float("inf"):
            return f"{bar.low:,} or more"
        last = int(bar.high) - 1
        return f"{bar.low:,}" if last == bar.low else f"{bar.low:,} to {last:,}"


def histogram_of_norms() -> Histogram:
    """Returns an empty histogram of norms of rows: 0, and four bins an octave from 2^-64 to 2^64."""
    octaves = torch.arange(-256, 257, device="cpu") / 4
    return Histogram("norm (L2) of rows", 2.0 ** octaves.to(torch.float64))


def histogram_of_steps(title: str) -> Histogram:
    """Returns an empty histogram of whole numbers: 0, 1, 2 to 3, 4 to 7, ..."""
    return Histogram(title, 2 ** torch.arange(33, device="cpu"))


def plot_fault(path: Path) -> str | None:
    """Returns the error if a picture cannot be drawn at a path, else None.

    Call it before the checkpoint is read.
    """
    if not path.parent.is_dir():
        return (
            f"--plot: expected a file in a directory that exists, got {path}. Make {path.parent}."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return (
            "--plot: expected matplotlib to be installed, got none. Run `pip install matplotlib`."
        )
    formats = sorted(FigureCanvasAgg(Figure()).get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        return f"--plot: expected a name that ends in one of .{', .'.join(formats)}, got {path.name!r}."
    return None


def plot(reports: Sequence[TableReport], path: Path) -> None:
    """Draws a picture file with a row of histograms for each table."""
    from matplotlib.figure import Figure

    columns = max((len(report.histograms) for report in reports), default=1)
    figure = Figure(figsize=(5 * columns, 3.2 * max(1, len(reports))), layout="constrained")
    axes = figure.subplots(max(1, len(reports)), columns, squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for report, line in zip(reports, axes, strict=False):
        for histogram, ax in zip(report.histograms, line, strict=False):
            bars = histogram.bars()
            ax.set_visible(True)
            ax.barh(
                [histogram.name_of(bar) for bar in bars], [bar.count for bar in bars], color=_BLUE
            )
            ax.invert_yaxis()
            ax.set_title(f"{report.table.name}: {histogram.title}", fontsize="medium")
            ax.set_xlabel("rows")
            ax.spines[["top", "right"]].set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format=path.suffix[1:].lower())
    replace_file(path, drawn.getvalue())
