"""A rank that is killed at a chosen moment of a save."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import workers
from checkpoint_cases import LOCAL_SIZES, Setup, new, save, train
from torch.distributed.checkpoint import filesystem

from torchrec_dyn.checkpoint_format.saved_tensor import SavedTensor

# The moment at which a rank is killed: at the number-th such call.
MOMENTS = ("reads a chunk", "has written a chunk", "renames", "has renamed")


def train_and_save(setup: Setup, folder: str, victim: int, moment: str, number: int) -> None:
    """Saves twice; the victim is killed during the second save."""
    model = new(setup)
    train(model, setup, range(2))
    save(model, f"{folder}/first")
    train(model, setup, range(2, 4))
    if dist.get_rank() == victim:
        arm(moment, number)
        Path(folder, "saving").touch()
    save(model, f"{folder}/second")


def arm(moment: str, number: int) -> None:
    """Patches this process so that it kills itself at a moment of saving."""
    if moment == "reads a chunk":
        SavedTensor.__get_tensor_shard__ = killing(SavedTensor.__get_tensor_shard__, number, True)
    elif moment == "has written a chunk":
        filesystem._write_item = killing(filesystem._write_item, number, False)
    elif moment in ("renames", "has renamed"):
        rename = filesystem.FileSystem.rename
        filesystem.FileSystem.rename = killing(rename, 0, moment == "renames")


def killing(function: Callable[..., Any], number: int, is_before: bool) -> Callable[..., Any]:
    """Returns a function that kills the process before or after its number-th call."""
    calls = [0]

    def call(*args: Any, **options: Any) -> Any:
        is_last, calls[0] = calls[0] == number, calls[0] + 1
        if is_last and is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def kill_while_saving(setup: Setup, folder: Path, victim: int, moment: str, number: int) -> bool:
    """Runs `train_and_save` in new processes; returns True if the second save succeeded in spite of the kill.

    If `moment` is not in MOMENTS, another thread kills the victim after a random time of up to `number`
    milliseconds.
    """
    folder.mkdir()
    pool = workers._Pool(setup.world, LOCAL_SIZES[setup.world], 20.0)
    if moment not in MOMENTS:
        process = pool._processes[victim].pid
        threading.Thread(target=kill_soon, args=(process, folder, number), daemon=True).start()
    try:
        pool.run(train_and_save, (setup, str(folder), victim, moment, number), 60.0)
    except workers.WorkerError as error:
        assert "the process died" in str(error), error
        return False
    finally:
        pool.kill()
    return True


def kill_soon(process: int, folder: Path, most: int) -> None:
    """Kills a process at a random time of up to `most` milliseconds after it began to save."""
    while not (folder / "saving").exists():
        time.sleep(0.001)
    time.sleep(random.random() * most / 1000)
    os.kill(process, signal.SIGKILL)
