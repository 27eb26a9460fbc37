"""The report of anchors.py: tables as text, and a picture of three panels."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from parts.compare_report import STYLES

KINDS = {"ages": "rows of age", "intervals": "synced every"}


def in_words(hours: float) -> str:
    """Returns a time in hours or minutes."""
    return f"{hours:g} h" if hours >= 1 else f"{hours * 60:g} min"


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Returns the mean and the standard deviation; 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def gains(
    runs: list[dict[str, Any]], kind: str
) -> list[tuple[dict[str, Any], float, float, float]]:
    """Returns a line for each measurement of a kind, over all runs.

    Returns:
        (the measurement of the first run, mean AUC, mean and standard deviation of its difference to the
        run's own model: raw ids, rows without age).
    """
    lines = []
    for at, measured in enumerate(runs[0][kind]):
        aucs = [run[kind][at]["auc"] for run in runs]
        differences = [auc - run["own"] for auc, run in zip(aucs, runs, strict=True)]
        lines.append((measured, statistics.mean(aucs), *mean_and_spread(differences)))
    return lines


def as_text(results: dict[str, Any]) -> str:
    """Returns the tables."""
    runs = results["runs"]
    lines = [f"AUC over the last day, mean of {len(runs)} seeds; differences: mean ± deviation"]
    for key, words in (("truth", "one who knows all traits"), ("own", "raw ids, rows without age")):
        mean, spread = mean_and_spread([run[key] for run in runs])
        lines.append(f"{words:<28} {mean:.4f} ± {spread:.4f}")
    for measured, auc, difference, spread in gains(runs, "shared"):
        of_ids, of_views, lost = (
            statistics.mean(
                one[key]
                for run in runs
                for one in run["shared"]
                if one["share"] == measured["share"]
            )
            for key in ("of_ids", "of_views", "lost")
        )
        name = f"{measured['share']:.0%} of ids share rows"
        lines.append(
            f"{name:<28} {auc:.4f}  {difference:+.4f} ± {spread:.4f}  ids {of_ids:.1%}, "
            f"views {of_views:.1%}, lost {lost:.2%}, rows {measured['rows']:,}"
        )
    for kind, words in KINDS.items():
        for measured, auc, difference, spread in gains(runs, kind):
            name = f"{words} {in_words(measured['hours'])}"
            lines.append(f"{name:<28} {auc:.4f}  {difference:+.4f} ± {spread:.4f}")
    lines.append("Files of the last day, first seed")
    for name, day in results["days"].items():
        deltas, fulls = sum(day["deltas"]), sum(day["fulls"])
        changed = statistics.mean(
            some / rows for some, rows in zip(day["changed"], day["rows"], strict=True)
        )
        lines.append(
            f"{name}: {len(day['deltas'])} deltas {deltas / 1e6:.1f} MB, full saves "
            f"{fulls / 1e6:.1f} MB, ratio {fulls / deltas:.1f}; {day['rows'][-1]:,} rows, "
            f"{changed:.1%} of them changed in an hour; bytes {deltas / sum(day['changed']):.0f} a "
            f"changed row, {fulls / sum(day['rows']):.0f} a saved row"
        )
        lines.append(
            f"  served from files, a delta an hour: AUC {day['auc']:.4f}, {day['different']} "
            "predictions differ from those of the trainer an hour before"
        )
    return "\n".join(lines)


def draw(results: dict[str, Any], picture: Path) -> None:
    """Draws AUC over shared rows, AUC over age, and bytes over the day, into an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = results["runs"]
    figure, (of_shares, of_ages, of_bytes) = pyplot.subplots(
        1, 3, figsize=(11, 3.9), layout="constrained"
    )
    looks = [{"color": colour, "linestyle": line} for colour, line in STYLES]

    shares = [
        (measured["share"], mean, spread) for measured, _, mean, spread in gains(runs, "shared")
    ]
    x, y, error = zip((0.0, 0.0, 0.0), *shares, strict=True)
    of_shares.errorbar([100 * share for share in x], y, error, marker="o", capsize=3, **looks[2])
    of_shares.set_xlabel("% of the ids that share a row (modulo)")
    of_shares.set_ylabel("AUC, difference to rows\nof their own, without age")

    for kind, label, look in (
        ("ages", "rows of one age", looks[1]),
        ("intervals", "synced at this interval", looks[3]),
    ):
        x, y, error = zip(
            *((one["hours"], mean, spread) for one, _, mean, spread in gains(runs, kind)),
            strict=True,
        )
        of_ages.errorbar(x, y, error, marker="o", capsize=3, label=label, **look)
    of_ages.set_xscale("log")
    times = sorted({one["hours"] for kind in KINDS for one in runs[0][kind]})
    of_ages.set_xticks(times, [in_words(hours) for hours in times], fontsize=8, rotation=40)
    of_ages.set_xticks([], minor=True)
    of_ages.set_xlabel("age, or interval (log)")
    of_ages.set_ylabel("AUC, the same difference")

    for (name, day), look in zip(results["days"].items(), (looks[0], looks[4]), strict=True):
        hours = range(1, len(day["deltas"]) + 1)
        for key, words, width in (("fulls", "full saves", 2.4), ("deltas", "deltas", 1.2)):
            total = [sum(day[key][:hour]) / 1e6 for hour in hours]
            of_bytes.plot(hours, total, label=f"{words}, {name}", linewidth=width, **look)
    of_bytes.set_yscale("log")
    of_bytes.set_ylim(bottom=min(day["deltas"][0] for day in results["days"].values()) / 1e6 / 20)
    of_bytes.set_xlabel("hour of the day")
    of_bytes.set_ylabel("MB written since the morning (log)")

    for panel in (of_shares, of_ages, of_bytes):
        panel.grid(alpha=0.25)
    of_ages.legend(frameon=False, fontsize=8, loc="lower left")
    of_bytes.legend(frameon=False, fontsize=7, loc="lower right")
    figure.suptitle(
        f"{results['living']:,} users and items live at a time, each for two days of {results['hours']} x "
        f"{results['hour']} steps of {results['batch_size']} views; bars: deviation of {len(runs)} seeds",
        fontsize=9,
    )
    figure.savefig(picture, dpi=84, metadata={"Software": None}, pil_kwargs={"optimize": True})
