"""The commands `python -m torchrec_dyn inspect` and `verify`.

`inspect` prints a checkpoint or a delta, table by table. Rows are read in chunks and counted in histograms,
which are printed as bars of text and, with matplotlib, drawn.

Legend: M values of a chunk, E edges of a histogram.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    SCORES,
    Place,
    PlaceLike,
    SavedCheckpoint,
    SavedTable,
    open_checkpoint,
    open_files,
    own_policies_of,
    replace_file,
)
from torchrec_dyn.tools.safetensors_rows import FileRows

_MOST_BARS = 10
_BAR_WIDTH = 32


def inspect_checkpoint(path: PlaceLike, verify: bool, picture: Path | None = None) -> None:
    """Prints, and draws, the tables of a checkpoint or a delta; without `verify` it reads no more."""
    checkpoint = open_checkpoint(path)
    print("\n".join(headline(checkpoint)), flush=True)
    rows: dict[str, list[Histogram]] = {}
    for table in checkpoint.tables.values():
        rows[table.name], not_finite = _read_rows(table, verify)
        print("\n".join(_table_lines(table, rows[table.name], not_finite)), flush=True)
    if picture is not None:
        plot(rows, picture)
        print(f"\nhistograms drawn: {picture}")
    if verify:
        print("\neverything read and checked: no damage")


def headline(checkpoint: SavedCheckpoint) -> Iterator[str]:
    """Yields the lines that describe all tables together; reads no row."""
    tables = list(checkpoint.tables.values())
    kind = "delta" if checkpoint.is_delta else "checkpoint"
    rows, size = sum(table.num_rows for table in tables), sum(table.bytes for table in tables)
    count = f"{len(tables)} dynamic table{'s' * (len(tables) != 1)}"
    yield f"{kind} {checkpoint.path}: {count}, {rows:,} rows, {readable(size)}"
    yield titled("fingerprint", _fingerprints(tables, checkpoint.is_delta, (False,)))
    if any(table.optimizer is not None for table in tables):
        text = _fingerprints(tables, checkpoint.is_delta, (False, True))
        yield titled("with optimizer state", text)
    yield from (f"  optimizer state without a table: {key}" for key in checkpoint.ownerless)


def _fingerprints(tables: Sequence[SavedTable], is_delta: bool, states: Sequence[bool]) -> str:
    """Returns the fingerprints of all tables together: of a delta before and after it."""
    totals = [
        total_fingerprint(
            (table.name, table.fingerprint(when, is_state))
            for table in tables
            for is_state in states
            if not is_state or table.optimizer is not None
        )
        for when in _moments(is_delta)
    ]
    return " -> ".join(f"{total:016x}" for total in totals)


def _table_lines(
    table: SavedTable, histograms: Sequence[Histogram], not_finite: int
) -> Iterator[str]:
    """Yields the lines that describe one table."""
    yield ""
    yield table.key
    dtype = str(table.dtype).removeprefix("torch.")
    changed = " changed" * table.is_delta
    size = f"{table.num_rows:,}{changed} x {table.embedding_dim} {dtype}, {readable(table.bytes)}"
    yield titled("rows", size)
    if table.is_delta:
        yield titled("removed", f"{table.rows_of('removed'):,} rows")
    yield titled("initial rows", f"{_initializer(table)}, seed {table.config.get('seed')}")
    states = [False]
    if table.optimizer is not None:
        states.append(True)
        cuts = len(table.optimizer.get("cuts", ())) - 1
        shared = f", one number a row for each of {cuts} column shards" * (cuts > 1)
        rule = f"{table.optimizer['optimizer']}, step {_last_step(table):,}{shared}"
        yield titled("optimizer", rule)
    for kind, name in sorted(own_policies_of(table.config).items()):
        yield titled(f"own {kind}", name)
    if waiting := table.rows_of("waiting"):
        yield titled("waiting ids", f"{waiting:,}")
    for is_state in states:
        prints = [table.fingerprint(when, is_state) for when in _moments(table.is_delta)]
        title = "  of optimizer state" if is_state else "fingerprint"
        yield titled(title, " -> ".join(f"{number:016x}" for number in prints))
    if not_finite:
        yield titled("not finite", f"{not_finite:,} rows have a NaN or an infinite number")
    for histogram in histograms:
        if lines := histogram.lines():
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
    """Returns the fingerprint of all tables, 64 bits, from the name and the fingerprint of each table."""
    # Keys have no part in it, so the place of the model in the checkpoint has no effect.
    text = "\0".join(f"{name} {fingerprint:016x}" for name, fingerprint in sorted(parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def readable(size: float) -> str:
    """Returns a number of bytes as text with a unit."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:,.{0 if units[0] == 'bytes' else 1}f} {units[0]}"


def _read_rows(table: SavedTable, verify: bool) -> tuple[list[Histogram], int]:
    """Returns histograms of norms and scores, and the number of rows that are not finite."""
    if verify:
        table.verify_small()
    norms, not_finite = histogram_of_norms(), 0
    ages = histogram_of_steps("age of rows (steps since last seen)")
    counts = histogram_of_steps("count of rows (times seen)")
    scores = [name for name in SCORES if name in table.row_names]
    now = _last_step(table)
    for chunk in table.chunks(table.row_names if verify else ("weight", *scores)):
        lengths = torch.linalg.vector_norm(chunk["weight"], dim=1, dtype=torch.float64)
        finite = lengths.isfinite()
        norms.add(lengths[finite])
        not_finite += int((~finite).sum())
        if scores:
            ages.add((now - chunk["last_seen"]).clamp(min=0))
            counts.add(chunk["count"])
    return [norms, *([ages, counts] if scores else [])], not_finite


def _last_step(table: SavedTable) -> int:
    """Returns the step of the table; without optimizer state, the last step at which a row was seen, or 0."""
    if "step" in table.names:
        return int(table.read("step"))
    if "last_seen" not in table.row_names:
        return 0
    chunks = table.chunks(("last_seen",))
    return max((int(chunk["last_seen"].max()) for chunk in chunks), default=0)


class Histogram:
    """A histogram of values >= 0. Its bins begin at 0 and at the edges, [E] ascending."""

    def __init__(self, title: str, edges: Tensor) -> None:
        self.title = title
        self._edges = edges
        self._counts = torch.zeros(len(edges) + 1, dtype=torch.int64, device="cpu")

    def add(self, values: Tensor) -> None:
        """Counts more values [M], in the dtype of the edges."""
        bins = torch.bucketize(values, self._edges, right=True)
        self._counts += torch.bincount(bins, minlength=len(self._counts))

    def bars(self) -> list[tuple[str, int]]:
        """Returns at most 10 ranges of values and their counts; neighbouring bins are joined."""
        used = self._counts.nonzero().flatten().tolist()
        if not used:
            return []
        bounds = [0, *self._edges.tolist(), float("inf")]
        first, last = used[0], used[-1] + 1
        step = -(-(last - first) // _MOST_BARS)
        return [
            (self._range(bounds[low], bounds[high]), int(self._counts[low:high].sum()))
            for low in range(first, last, step)
            for high in [min(low + step, last)]
        ]

    def lines(self) -> list[str]:
        """Returns the bars as lines of text."""
        bars = self.bars()
        most = max((count for _, count in bars), default=0)
        widths = max((len(name) for name, _ in bars), default=0), len(f"{most:,}")
        return [
            f"{name:>{widths[0]}}  {count:>{widths[1]},}  "
            f"{'#' * -(-count * _BAR_WIDTH // most)}".rstrip()
            for name, count in bars
        ]

    def _range(self, low: float, high: float) -> str:
        """Returns the values in [low, high) as text; whole numbers from low to high - 1."""
        if self._edges.is_floating_point():
            return f"{low:.3g} to {high:.3g}"
        if high == float("inf"):
            return f"{low:,} or more"
        last = int(high) - 1
        return f"{low:,}" if last == low else f"{low:,} to {last:,}"


def histogram_of_norms() -> Histogram:
    """Returns an empty histogram of norms of rows: 0, and four bins an octave from 2^-64 to 2^64."""
    octaves = torch.arange(-256, 257, device="cpu") / 4
    return Histogram("norm (L2) of rows", 2.0 ** octaves.to(torch.float64))


def histogram_of_steps(title: str) -> Histogram:
    """Returns an empty histogram of whole numbers: 0, 1, 2 to 3, 4 to 7, ..."""
    return Histogram(title, 2 ** torch.arange(33, device="cpu"))


def plot_fault(path: Path) -> str | None:
    """Returns the error if a picture cannot be drawn at a path, else None."""
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


def plot(rows: Mapping[str, Sequence[Histogram]], path: Path) -> None:
    """Draws a picture with a line of histograms for each table; `rows` are those of the tables by name."""
    from matplotlib.figure import Figure

    lines, columns = max(1, len(rows)), max(map(len, rows.values()), default=1)
    figure = Figure(figsize=(5 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for (table, histograms), line in zip(rows.items(), axes, strict=False):
        for histogram, ax in zip(histograms, line, strict=False):
            bars = histogram.bars()
            ax.set_visible(True)
            ax.barh([name for name, _ in bars], [count for _, count in bars])
            ax.invert_yaxis()
            ax.set_title(f"{table}: {histogram.title}", fontsize="medium")
            ax.set_xlabel("rows")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format=path.suffix[1:].lower())
    replace_file(path, drawn.getvalue())


def verify_checkpoint(folder: Place) -> str:
    """Reads and checks all files of a checkpoint or a delta; returns a line that says what was checked."""
    # Rows by their content sums, all else by the CRCs that torch.save writes into its archives, unless
    # torch.serialization.set_crc32_options(False) left them out.
    checkpoint = open_checkpoint(folder)
    for table in checkpoint.tables.values():
        table.verify()
    total = sum(table.bytes for table in checkpoint.tables.values())
    summed = {key for table in checkpoint.tables.values() for key in table.row_keys}
    _, metadata = open_files(folder)
    others = {
        index: entry for index, entry in metadata.storage_data.items() if index.fqn not in summed
    }
    unchecked = 0
    for index, entry in others.items():
        path = folder / entry.relative_path
        with path.open("rb") as file:
            file.seek(entry.offset)
            archive = io.BytesIO(file.read(entry.length))  # DCP loads it whole, too
        unchecked += not _is_checked(f"'{index.fqn}' in {path}", archive)
        total += entry.length
    kind = "delta" if checkpoint.is_delta else "checkpoint"
    gap = f", but {unchecked} entries have no CRC" if unchecked else ""
    return (
        f"{kind} {folder}: {len(checkpoint.tables)} dynamic tables, {len(others)} other entries, "
        f"{readable(total)} read and checked: no damage{gap}"
    )


def _is_checked(where: str, file: IO[bytes]) -> bool:
    """Checks an archive of torch.save by its CRCs; returns False if it was written without."""
    try:
        with zipfile.ZipFile(file) as archive:
            if not any(record.CRC for record in archive.infolist()):
                return False
            damaged = archive.testzip()
    # Damaged bytes of a zip archive may raise any of these.
    except (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{where}: expected an archive of torch.save, got {type(error).__name__}: {error}. {DAMAGED}"
        ) from error
    if damaged is not None:
        raise ValueError(f"{where}: expected the CRC of {damaged}, got another. {DAMAGED}")
    return True


def verify_rows_file(path: Path) -> str:
    """Reads a file of `export_rows`, checks it, and returns a line that says what was checked."""
    rows = FileRows(path)
    if not rows.sums:
        raise ValueError(
            f"{path}: expected a file with content sums, got one without: only its header and "
            "lengths were checked. Export it with checksum=True."
        )
    for _ in rows.chunks():
        pass
    size = readable(path.stat().st_size)
    return f"file {path}: {rows.count:,} rows, {size} read and checked: no damage"
