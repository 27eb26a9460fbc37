"""The report of compare.py: a table as text, and a picture over the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Colours that colour-blind readers can distinguish, and dashes, because some lines overlap.
# Source: Okabe and Ito, "Color Universal Design", 2008.
STYLES = [("#000000", "-"), ("#D55E00", "-"), ("#0072B2", "--"), ("#009E73", ":")]
STYLES += [("#CC79A7", "-."), ("#56B4E9", "-.")]
COLUMNS = {  # columns of the table: key of a result, heading, number format
    "auc": ("AUC", ".4f"),
    "rows": ("rows", ",d"),
    "bytes": ("bytes", ",d"),
    "step": ("ms a step", ".2f"),
    "sharing": ("ids that shared a row", ",d"),
    "in_shared": ("lookups of shared rows", ".1%"),
    "without": ("lookups without a row", ".1%"),
}


def as_text(results: dict[str, dict[str, Any]]) -> str:
    """Returns a table with one line for each contestant."""
    lines = [("", *(heading for heading, _ in COLUMNS.values()))]
    lines += [
        (name, *(f"{result[key]:{form}}" for key, (_, form) in COLUMNS.items()))
        for name, result in results.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def draw(results: dict[str, dict[str, Any]], steps: list[int], title: str, picture: Path) -> None:
    """Draws AUC and bytes of all contestants over the stream, into an image file.

    Args:
        results: of each contestant, `auc_of_windows` and `bytes_of_windows`.
        steps: the last step of each window.
        title: set-up of the comparison.
        picture: the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (of_auc, of_bytes) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for (name, result), (colour, line) in zip(results.items(), STYLES, strict=False):
        look = {"color": colour, "linestyle": line, "linewidth": 1.6, "label": name}
        of_auc.plot(steps, result["auc_of_windows"], **look)
        of_bytes.plot(steps, [held / 1e6 for held in result["bytes_of_windows"]], **look)
    of_auc.set_ylabel("AUC, before learning")
    of_bytes.set_ylabel("MB of all tables (log)")
    of_bytes.set_yscale("log")
    for panel in (of_auc, of_bytes):
        panel.set_xlabel("training step")
        panel.grid(alpha=0.25)
    figure.legend(*of_auc.get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.suptitle(title, fontsize=10)
    figure.savefig(picture, dpi=84, metadata={"Software": None}, pil_kwargs={"optimize": True})
