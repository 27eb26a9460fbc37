"""The results of a run: metrics on held-out clicks, number of rows, and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from parts.metrics import auc, normalized_entropy
from parts.plans import ranks_of_all_rows, tables_of
from parts.progress import Progress
from parts.ranks import gather, resident_megabytes, rows_here
from torch import nn
from torchrec.distributed.types import ShardingPlan


def collect_results(
    model: nn.Module,
    plan: ShardingPlan,
    progress: Progress,
    labels: np.ndarray,
    probabilities: np.ndarray,
) -> dict[str, Any]:
    """Returns the results of all ranks. Collective.

    Args:
        model: the trained, sharded model.
        plan: the sharding plan of the model.
        progress: the progress of the training.
        labels: [N], labels of this rank's held-out clicks.
        probabilities: [N], the model's predictions for these clicks.
    """
    tables = tables_of(plan)
    rows_by_rank = gather(rows_here(model, list(tables)))
    labels = np.concatenate(gather(labels))
    probabilities = np.concatenate(gather(probabilities))
    constant = np.full(len(labels), np.mean(gather(progress.click_rate)))
    return {
        "steps": progress.steps,
        "samples": progress.samples,
        "samples_per_second": round(progress.samples_per_second),
        "final_loss": progress.loss,
        "held_out": len(labels),
        "auc": auc(labels, probabilities),
        "auc_of_constant": auc(labels, constant),
        "normalized_entropy": normalized_entropy(labels, probabilities),
        "normalized_entropy_of_constant": normalized_entropy(labels, constant),
        "rows_per_table": {
            table: sum(rows_by_rank[rank][table] for rank in ranks_of_all_rows(sharding))
            for table, sharding in tables.items()
        },
        "rows_per_rank": [sum(here.values()) for here in rows_by_rank],
        "resident_megabytes_per_rank": gather(resident_megabytes()),
    }


def results_as_text(results: dict[str, Any]) -> str:
    """Returns the results as text."""
    rows = [f"{table} {count:,}" for table, count in results["rows_per_table"].items()]
    per_rank = zip(results["rows_per_rank"], results["resident_megabytes_per_rank"], strict=True)
    return "\n".join(
        [
            f"\ntrained on {results['samples']:,} clicks in {results['steps']:,} steps, "
            f"{results['samples_per_second']:,} samples/s over all ranks",
            f"{'on ' + format(results['held_out'], ',') + ' held-out clicks':<40}model  constant",
            f"  {'AUC':<36}{results['auc']:>7.4f}{results['auc_of_constant']:>10.4f}",
            f"  {'normalized entropy (less is better)':<36}{results['normalized_entropy']:>7.4f}"
            f"{results['normalized_entropy_of_constant']:>10.4f}",
            f"{sum(results['rows_per_table'].values()):,} rows in all tables, by table:",
            *("  " + "  ".join(rows[first : first + 8]) for first in range(0, len(rows), 8)),
            *(
                f"rank {rank}: {count:,} rows, whole or in columns; {memory:,} MB resident"
                for rank, (count, memory) in enumerate(per_rank)
            ),
        ]
    )
