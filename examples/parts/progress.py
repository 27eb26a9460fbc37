"""The progress bar of a training on rank 0: loss, samples per second, and rows on each rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from parts.ranks import gather, rows_here
from torch import Tensor, nn
from tqdm import tqdm

LOOK_EVERY = 10  # steps between two readings of the rows; each reading is a small collective


class Progress:
    """A counter of the steps of one training. Every rank has a Progress object.

    Args:
        model: the sharded model.
        tables: names of its tables.
        steps: number of steps; None if it is not known.
    """

    def __init__(self, model: nn.Module, tables: list[str], steps: int | None) -> None:
        self._model = model
        self._tables = tables
        self._bar = tqdm(total=steps, unit="step", disable=dist.get_rank() != 0, mininterval=0.5)
        self._first_step_ended = 0.0
        self._seconds = 0.0  # since the first step, which includes the set-up and is not timed
        self._timed_samples = 0
        self.steps = 0
        self.samples = 0  # of all ranks
        # Tensors on the device of the model; the host reads them rarely, since a read waits for a GPU.
        self._loss = torch.tensor(float("nan"))  # of the last step, on this rank
        self._clicked = torch.tensor(0)  # on this rank

    def step(self, loss: Tensor, labels: Tensor) -> None:
        """Counts one step. Collective every LOOK_EVERY steps.

        Args:
            loss: [], the loss of this rank.
            labels: [B], the labels of this rank.
        """
        samples = len(labels) * dist.get_world_size()  # batches have the same size on all ranks
        now = time.perf_counter()
        if self.steps == 0:
            self._first_step_ended = now
        else:
            self._timed_samples += samples
            self._seconds = now - self._first_step_ended
        self.steps += 1
        self.samples += samples
        self._loss = loss
        self._clicked = self._clicked.to(labels.device) + labels.sum()
        self._bar.update()
        if self.steps % LOOK_EVERY == 0:
            rows = [sum(here.values()) for here in gather(rows_here(self._model, self._tables))]
            self._bar.set_postfix_str(
                f"loss {self.loss:.4f}, {self.samples_per_second:,.0f} samples/s, "
                f"rows {' + '.join(f'{count:,}' for count in rows)}"
            )

    @property
    def loss(self) -> float:
        """Loss of the last step on this rank."""
        return float(self._loss)

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all ranks, from the end of the first step."""
        return self._timed_samples / self._seconds if self._seconds else float("nan")

    @property
    def click_rate(self) -> float:
        """Share of clicked samples on this rank."""
        clicked = float(self._clicked) * dist.get_world_size()
        return clicked / self.samples if self.samples else float("nan")

    def close(self) -> None:
        """Closes the progress bar."""
        self._bar.close()
