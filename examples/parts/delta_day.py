"""A day of training that is published every hour, by real files: deltas, full saves and served tables."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from parts.click_trainer import UNSEEN, ClickTrainer
from parts.drifting_stream import Views
from parts.metrics import auc

from torchrec_dyn import serving
from torchrec_dyn.checkpoint import export_delta, mark, open_checkpoint


def size_of(folder: Path) -> int:
    """Returns the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def save_all(trainer: ClickTrainer, folder: Path) -> int:
    """Saves rows and optimizer state of the tables. Returns the bytes of the files."""
    state = {
        "model": trainer.rows.state_dict(),
        "optimizer": trainer.rows.fused_optimizer.state_dict(),
    }
    dcp.save(state, checkpoint_id=folder)
    return size_of(folder)


class Server:
    """Serves the tables of a directory of mapped files, with a copy of the dense part."""

    def __init__(self, trainer: ClickTrainer, folder: Path) -> None:
        self._folder = folder
        self._rows = serving.ServingEmbeddingBagCollection(folder, trainer.tables, unseen=UNSEEN)
        self._dense = copy.deepcopy(trainer.dense)

    @torch.no_grad()
    def predict(self, views: Views) -> np.ndarray:
        """Returns the logits, [B]."""
        return self._dense(self._rows(views.features()).values()).squeeze(1).numpy()

    def update(self, trainer: ClickTrainer, delta: Path) -> None:
        """Applies a delta to the tables, and copies the dense part, which deltas do not have."""
        serving.apply_delta(self._folder, delta)
        assert self._rows.refresh()
        self._dense.load_state_dict(trainer.dense.state_dict())


def publish_for_a_day(
    trainer: ClickTrainer, before: list[Views], hours: list[list[Views]]
) -> dict[str, object]:
    """Trains on `before`, then hour by hour; each hour ends with a delta and with a full save.

    Each batch is predicted by served tables that got the deltas of all hours before its own.

    Returns:
        deltas, fulls: bytes of the files of each hour.
        changed, rows: changed rows, and rows, of each hour, in both tables together.
        auc: of the served predictions.
        different: number of served predictions that are not those of the trainer at the start of the
            hour, bit for bit.
    """
    for views in before:
        trainer.learn(views)
    told: dict[str, list[int]] = {name: [] for name in ("deltas", "fulls", "changed", "rows")}
    served, different = [], 0
    with tempfile.TemporaryDirectory(prefix="anchors_") as name:
        folder = Path(name)
        marker = mark(trainer.rows)
        save_all(trainer, folder / "full")
        serving.build(folder / "full", folder / "served")
        server = Server(trainer, folder / "served")
        for batches in hours:
            for views in batches:
                served.append(server.predict(views))
                different += int((served[-1] != trainer.predict(views)).sum())
            for views in batches:
                trainer.learn(views)
            marker = export_delta(trainer.rows, folder / "delta", since=marker)
            server.update(trainer, folder / "delta")
            shutil.rmtree(folder / "full")
            told["fulls"].append(save_all(trainer, folder / "full"))
            told["deltas"].append(size_of(folder / "delta"))
            saved = open_checkpoint(folder / "delta").tables.values()
            told["changed"].append(sum(table.num_rows for table in saved))
            told["rows"].append(
                sum(trainer.rows.table(table.name).num_rows for table in trainer.tables)
            )
            shutil.rmtree(folder / "delta")
    labels = np.concatenate([views.labels for batches in hours for views in batches])
    return {**told, "auc": auc(labels, np.concatenate(served)), "different": different}
