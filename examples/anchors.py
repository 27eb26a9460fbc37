"""Measures what shared rows cost, what old rows cost, and how many bytes deltas save.

    python examples/anchors.py --plot anchors.png        # four minutes on one core
    python examples/anchors.py --quick                   # a small stream, a few seconds

A small click model trains on a stream whose ids come and go (parts/drifting_stream.py), and each batch is
predicted before the model learns from it. AUC is measured over the last day of the stream, for several
seeds of stream and model. The same batches are predicted by

- models whose ids are taken modulo a number of rows, so that a chosen share of the ids shares rows;
- older copies of the model: copies of a certain age, and copies that are synced at an interval;
- tables that are served from files, to which the deltas of the trainer are applied every hour.

docs/dev/anchors.md has the results and says what they do not show.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable

import numpy as np
from parts.anchors_report import as_text, draw
from parts.click_trainer import ClickTrainer
from parts.delta_day import publish_for_a_day
from parts.drifting_stream import FEATURES, DriftingStream, Views
from parts.fixed_rows import Modulo, measure_sharing
from parts.metrics import auc
from parts.options import add_sizes, hide_notes_to_developers, new_file, positive, set_sizes

import torchrec_dyn as dyn

SHARES = (0.05, 0.2, 0.5, 0.8)  # of the ids of the stream that share a row with another id
AGES = (0.05, 0.25, 1, 5, 24)  # hours between the training of the rows and the prediction
INTERVALS = (0.5, 1, 5, 24)  # hours from one sync to the next
DAYS_BEFORE = 2  # of training, before the day that is measured
LIFETIME_IN_DAYS = 2  # of an id, so that no id of the first batch is in the measured day
SIZES = {  # option: default, default with --quick, meaning
    "seeds": (5, 2, "runs with another stream and another model"),
    "batch_size": (512, 256, "views of a batch"),
    "hour": (20, 3, "batches of an hour"),
    "hours": (24, 6, "hours of a day"),
    "living": (10_000, 500, "users, and items, that live at a time"),
}

# The numbers of the batches that a copy predicts at a step, counted from the next batch.
Ahead = Callable[[int], Iterable[int]]


def copies(options: argparse.Namespace) -> dict[str, dict[int, Ahead]]:
    """Returns the older copies, by their age or their interval in steps.

    A copy of age k predicts batch n by the rows after batch n - k: so the model predicts the batch k steps
    ahead. A copy with interval k predicts the next k batches, every k steps.
    """

    def aged(steps: int) -> Ahead:
        return lambda step: (steps,)

    def synced(steps: int) -> Ahead:
        return lambda step: () if step % steps else range(steps)

    def in_steps(hours: Iterable[float]) -> list[int]:
        day = options.hour * options.hours
        return sorted({min(max(round(hour * options.hour), 1), day) for hour in hours})

    return {
        "ages": {steps: aged(steps) for steps in in_steps(AGES)},
        "intervals": {steps: synced(steps) for steps in in_steps(INTERVALS)},
    }


def predict_and_learn(
    trainer: ClickTrainer, batches: list[Views], first: int, aheads: list[Ahead]
) -> list[np.ndarray]:
    """Trains on all batches.

    Returns:
        The logits of the batches from `first` on, [steps, B]: of the model just before it learns from the
        batch, then of each copy.
    """
    shape = (len(batches) - first, len(batches[0].labels))
    logits = [np.empty(shape, np.float32) for _ in range(1 + len(aheads))]
    for step, views in enumerate(batches):
        for of_copy, ahead in zip(logits[1:], aheads, strict=True):
            for number in (step + more for more in ahead(step - first)):
                if first <= number < len(batches):
                    of_copy[number - first] = trainer.predict(batches[number])
        now = trainer.learn(views)
        if step >= first:
            logits[0][step - first] = now
    return logits


def rows_for(ids: int, share: float) -> int:
    """Returns the number of rows in which this share of so many ids is expected to share a row."""
    return max(round(1 / (1 - (1 - share) ** (1 / (ids - 1)))), 1)


def measure_seed(options: argparse.Namespace, seed: int, batches: list[Views]) -> dict[str, object]:
    """Returns the AUCs of the measured day, of one seed."""
    first = len(batches) - options.hour * options.hours
    late = batches[first:]
    labels = np.concatenate([views.labels for views in late])

    def auc_of(logits: np.ndarray) -> float:
        return auc(labels, logits.reshape(-1))

    kinds = copies(options)
    aheads = [ahead for kind in kinds.values() for ahead in kind.values()]
    own, *of_copies = predict_and_learn(ClickTrainer(options.dim, seed), batches, first, aheads)
    measured: dict[str, object] = {
        "truth": auc(labels, np.concatenate([views.probabilities for views in late])),
        "own": auc_of(own),
    }
    of_copy = iter(of_copies)
    for kind, of_kind in kinds.items():
        measured[kind] = [
            {"hours": steps / options.hour, "auc": auc_of(next(of_copy))} for steps in of_kind
        ]

    ids = [np.concatenate([views.ids[f] for views in batches]) for f in range(len(FEATURES))]
    num_ids = round(np.mean([len(np.unique(of_feature)) for of_feature in ids]))
    measured["num_ids"], of_shares = num_ids, []
    for share in SHARES:
        rows = rows_for(num_ids, share)
        sharing = [measure_sharing(of_feature, of_feature % rows) for of_feature in ids]
        trainer = ClickTrainer(options.dim, seed, modulo=Modulo(rows))
        [own] = predict_and_learn(trainer, batches, first, [])
        means = {key: float(np.mean([one[key] for one in sharing])) for key in sharing[0]}
        of_shares.append({"share": share, "rows": rows, "auc": auc_of(own), **means})
    return {**measured, "shared": of_shares}


def measure_days(options: argparse.Namespace, batches: list[Views]) -> dict[str, dict[str, object]]:
    """Returns what a day of deltas takes, without policies and with a table that keeps its size."""
    first = len(batches) - options.hour * options.hours
    hours = [batches[at : at + options.hour] for at in range(first, len(batches), options.hour)]
    bounded = {"admission": dyn.AdmitAfter(count=2), "eviction": dyn.LeastRecentlyUsed()}
    trainers = {
        "no policy": ClickTrainer(options.dim, 0),
        "AdmitAfter(2), LeastRecentlyUsed": ClickTrainer(options.dim, 0, options.living, bounded),
    }
    return {
        name: publish_for_a_day(trainer, batches[:first], hours)
        for name, trainer in trainers.items()
    }


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of the command line. Wrong options end the program with a usage message."""
    parser = argparse.ArgumentParser(
        prog="anchors.py", description="Measures what shared rows, old rows and full saves cost."
    )
    add_sizes(parser, SIZES)
    parser.add_argument("--dim", type=positive, default=16, help="columns of a row (default: 16)")
    parser.add_argument("--plot", type=new_file, metavar="OUT", help="draw the results")
    parser.add_argument("--json", type=new_file, metavar="OUT", help="write down all results")
    options = parser.parse_args(arguments)
    set_sizes(options, SIZES)
    if options.living < options.batch_size:
        parser.error(
            f"--living: expected at least --batch-size ({options.batch_size}), got "
            f"{options.living}. It is the limit of the tables with a policy, and the ids of one batch "
            "must have room together."
        )
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: expected matplotlib, got none. Run make build, which installs it.")
    return options


def main() -> None:
    """Measures, and prints the report."""
    options = parse_options(sys.argv[1:])
    hide_notes_to_developers()
    warnings.filterwarnings("ignore", "torch.distributed is")  # one process saves
    day = options.hour * options.hours
    results: dict[str, object] = {name: getattr(options, name) for name in (*SIZES, "dim")} | {
        "runs": []
    }
    for seed in range(options.seeds):
        begin = time.perf_counter()
        stream = DriftingStream(seed, options.batch_size, options.living, LIFETIME_IN_DAYS * day)
        batches = [stream.batch(number) for number in range((DAYS_BEFORE + 1) * day)]
        if seed == 0:
            results["days"] = measure_days(options, batches)
        results["runs"].append(measure_seed(options, seed, batches))
        print(f"seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(as_text(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
