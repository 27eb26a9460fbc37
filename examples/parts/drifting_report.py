"""The report of drifting_ids.py: a table as text, and a plot over time."""

from __future__ import annotations

import math
from pathlib import Path

# Colours that colour-blind readers can distinguish, and dashes, because some lines overlap.
# Source: Okabe and Ito, "Color Universal Design", 2008.
STYLES = [("#000000", "-"), ("#D55E00", "-"), ("#0072B2", "--"), ("#009E73", ":")]
STYLES += [("#CC79A7", "-."), ("#56B4E9", "-.")]
PANELS = {
    "rows": "rows, both tables",
    "hit_rate": "hit rate",
    "loss": "loss before learning",
}
COLUMNS = {  # columns of the table: key of a reading, and number format
    "rows": ",",
    "bytes": ",",
    "hit_rate": ".3f",
    "loss": ".4f",
    "refused": ",",
    "evicted_full": ",",
    "evicted_expired": ",",
}


def summarize(looks: list[dict[str, float]]) -> dict[str, float]:
    """Returns the last reading, with the mean hit rate and loss of the second half of the readings.

    In that half no initial id is in the stream any more.
    """
    late = looks[len(looks) // 2 :]
    means = {key: sum(look[key] for look in late) / len(late) for key in ("hit_rate", "loss")}
    return looks[-1] | means


def runs_as_text(runs: dict[str, list[dict[str, float]]]) -> str:
    """Returns a table with one line for each run."""
    lines = [("", *(key.replace("_", " ") for key in COLUMNS))]
    for name, looks in runs.items():
        last = summarize(looks)
        cells = (
            "-" if math.isnan(last[key]) else f"{last[key]:{form}}" for key, form in COLUMNS.items()
        )
        lines.append((name, *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def draw(runs: dict[str, list[dict[str, float]]], title: str, picture: Path) -> None:
    """Draws rows, hit rate and loss of all runs over the steps, into an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(PANELS), 1, figsize=(8, 7.5), sharex=True, layout="constrained"
    )
    for panel, (key, label) in zip(panels, PANELS.items(), strict=True):
        for (name, looks), (colour, line) in zip(runs.items(), STYLES, strict=True):
            steps = [look["step"] for look in looks]
            panel.plot(
                steps, [look[key] for look in looks], line, color=colour, label=name, linewidth=1.5
            )
        panel.set_ylabel(label)
        panel.grid(alpha=0.25)
    panels[0].yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    panels[-1].set_xlabel("training step")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.suptitle(title, fontsize=10)
    figure.savefig(picture, dpi=84, metadata={"Software": None}, pil_kwargs={"optimize": True})
