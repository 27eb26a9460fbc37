"""Jobs that train and save into a directory of `Checkpoints`, and faults in their saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import Setup, new, optimizer_of, quietly, train

from torchrec_dyn.checkpoint import Checkpoints

ONE, TWO = Setup(0, tables=1, optimizer="ADAM"), Setup(2, ("row_wise", "table_wise"), tables=2)


class Job:
    """A model that trains one batch for each save."""

    def __init__(self, path: Path | str, setup: Setup = ONE, **options: Any) -> None:
        self.setup, self.model = setup, new(setup)
        self.dense = torch.arange(9.0)
        getattr(self.model, "module", self.model).register_buffer("dense", self.dense)
        self.optimizer = optimizer_of(self.model)
        self.checkpoints = Checkpoints(path, **options)
        self.step = 0

    def save(self, method: str = "save", is_trained: bool = True, **options: Any) -> Any:
        if is_trained:
            self.train()
        call = getattr(self.checkpoints, method)
        extra = {"next": self.step}
        return quietly(call, self.model, self.optimizer, step=self.step, extra=extra, **options)

    def train(self) -> None:
        train(self.model, self.setup, [self.step])
        self.step += 1

    def forget(self, ids: dict[str, Any]) -> Any:
        call = self.checkpoints.forget
        extra = {"next": self.step}
        return quietly(call, self.model, self.optimizer, ids, step=self.step, extra=extra)

    def restore(self, **options: Any) -> Any:
        restored = quietly(self.checkpoints.restore, self.model, self.optimizer, **options)
        self.step = restored.step if restored is not None else 0
        return restored


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.is_dir() and one.name != "commits")


@contextmanager
def failing(
    place: Any, name: str, at: int = 1, error: BaseException | None = None
) -> Iterator[None]:
    """The n-th call of a function fails."""
    real, left = getattr(place, name), [at]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error or OSError(28, "No space left on device")
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, call)
        yield


def flip(file: Path, place: int | None = None) -> None:
    """Changes one bit of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    file.write_bytes(bytes(content))
