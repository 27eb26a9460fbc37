"""The report of generative.py: a table as text, and a picture over the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WHO = {  # key of a result: its name, and its look in the picture
    "best": ("one who knows the stream", "#999999", ":"),
    "model": ("model", "#0072B2", "-"),
    "popular": ("popular in the window", "#D55E00", "--"),
    "random": ("random", "#000000", "-."),
}  # Colours: Okabe and Ito, "Color Universal Design", 2008.
OF_TABLE = {
    "items": ("items so far", "#000000", ":"),
    "limit": ("limit", "#D55E00", "--"),
    "rows": ("rows", "#0072B2", "-"),
}
METRICS = ("HR@10", "NDCG@10")


def means(results: list[dict[str, Any]], who: str) -> tuple[float, float]:
    """Returns HR@10 and NDCG@10 over all questions of some windows."""
    asked = sum(result["asked"] for result in results)
    hits, gains = (sum(result[who][metric] for result in results) for metric in (0, 1))
    return hits / asked, gains / asked


def as_text(results: list[dict[str, Any]]) -> str:
    """Returns the report: the figures over the second half of the windows."""
    half = [result for result in results[len(results) // 2 :] if result["asked"]]
    if not half:
        return "No user had a history in the second half of the windows: no figures."
    lines = [f"{'':<26}{METRICS[0]:>8}{METRICS[1]:>9}"]
    for who in [who for who in WHO if who in half[0]]:
        lines.append("{:<26}{:>8.4f}{:>9.4f}".format(WHO[who][0], *means(half, who)))
    asked, missed = (sum(result[key] for result in half) for key in ("asked", "missed"))
    last = results[-1]
    lines.append(
        f"Windows {half[0]['window'] + 1} to {last['window'] + 1}: {asked:,} events left out, each ranked\n"
        f"against all items with a row ({last['candidates']:,} at last). {missed / asked:.1%} were of items "
        "without a row."
    )
    lines.append(
        f"{last['rows']:,} rows, limit {last['limit']:,}; {last['items']:,} items in the stream, "
        f"{sum(result['evicted'] for result in results):,} rows evicted."
    )
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], title: str, picture: Path) -> None:
    """Draws HR@10, NDCG@10 and the rows of the table over the windows, into an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    asked = [result for result in results if result["asked"]]
    for metric, (panel, name) in enumerate(zip(panels, METRICS, strict=False)):
        for who, (label, colour, line) in WHO.items():
            if asked and who in asked[0]:
                panel.plot(
                    [result["window"] + 1 for result in asked],
                    [result[who][metric] / result["asked"] for result in asked],
                    color=colour, linestyle=line, label=label,
                )  # fmt: skip
        panel.set_ylabel(name)
    windows = [result["window"] + 1 for result in results]
    for key, (label, colour, line) in OF_TABLE.items():
        values = [result[key] for result in results]
        panels[2].plot(windows, values, color=colour, linestyle=line, label=label)
    panels[2].set_ylabel("rows of the table")
    panels[2].legend(frameon=False, fontsize=9)
    for panel in panels:
        panel.set_xlabel("window")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.suptitle(title, fontsize=10)
    figure.savefig(picture, dpi=84, metadata={"Software": None}, pil_kwargs={"optimize": True})
