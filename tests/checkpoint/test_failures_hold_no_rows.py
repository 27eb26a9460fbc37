"""A save, an export or a load that fails frees its rows with its error, not by the collector.

A second try would have its rows beside those of the first: Python's collector runs when there are many new
objects, however large they are.
"""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import workers
from checkpoint_cases import Setup, tables_of
from checkpoint_jobs import ONE, TWO, Job, failing, flip
from torch import Tensor

from torchrec_dyn.checkpoint import entry_writing, export_delta, mark

FEW = 10  # torch may leave some of its own; a call that keeps its rows leaves 22 or more


def tensors() -> int:
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


def left_to_the_collector(fail: Callable[[], Any]) -> int:
    """Returns how many tensors only the collector frees after a call."""
    gc.collect()
    gc.disable()
    try:
        fail()
        before = tensors()
        gc.collect()
        return before - tensors()
    finally:
        gc.enable()


def failures(path: Path, setup: Setup) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields calls that fail, by name, each with rows of its own."""
    job = Job(path / "kept", setup, full_every=3)

    def save(place: tuple[Any, str], method: str) -> None:
        with failing(*place), pytest.raises(OSError, match="No space left"):
            made = job.save(method)
            if method == "async_save":
                made.result()

    for place in [(os, "pwrite"), (entry_writing, "publish")]:
        for method in ("save", "async_save"):
            for kind in ("full", "delta"):
                yield f"{method} of a {kind}, {place[1]}", lambda p=place, m=method: save(p, m)
                assert job.save(full=kind == "full").kind == kind

    marker = mark(job.model)
    job.train()

    def export() -> None:
        with failing(os, "pwrite"), pytest.raises(OSError, match="No space left"):
            export_delta(job.model, path / "delta", marker)

    yield "export_delta", export

    job.checkpoints.close()


def found(path: str, setup: Setup) -> dict[str, int]:
    return {name: left_to_the_collector(fail) for name, fail in failures(Path(path), setup)}


@pytest.mark.parametrize("setup", [ONE, TWO], ids=["one", "two"])
def test_rows_of_a_failed_save_are_freed_with_its_error(setup: Setup, tmp_path: Path) -> None:
    told = (
        workers.run(found, str(tmp_path), setup, world_size=2)
        if setup.world
        else [found(str(tmp_path), setup)]
    )
    for of_rank in told:
        assert len(of_rank) == 9 and max(of_rank.values()) < FEW, of_rank


def test_rows_of_a_damaged_entry_are_freed_with_its_error(tmp_path: Path) -> None:
    job = Job(tmp_path, full_every=1)
    job.save()
    file = job.save().tables / "__0_0.distcp"
    row = tables_of(job.model)[0].export_state()["weight"][-1]
    flip(file, file.read_bytes().index(row.numpy().tobytes()))

    def restore() -> None:
        (skipped,) = job.restore().skipped
        assert "content sum" in skipped  # the rows were read

    assert left_to_the_collector(restore) < FEW
    job.checkpoints.close()
