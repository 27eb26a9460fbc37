"""The histograms of a checkpoint as a picture; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrec_dyn.checkpoint.inspection import TableReport

_BLUE = "#3b6ea5"


def plot_fault(path: Path) -> str | None:
    """Tells why a picture cannot be made at a path, so that nobody reads a checkpoint for nothing."""
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
    """Draws a row of histograms for each table.

    Args:
        reports: what reading the tables has shown.
        path: of the picture.
    """
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
    figure.savefig(path, dpi=120)
