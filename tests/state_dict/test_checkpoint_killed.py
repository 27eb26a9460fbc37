"""A rank is killed while it saves: the checkpoint before loads, and loading the torn one is an error."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import workers
from checkpoint_cases import (
    LOCAL_SIZES,
    Setup,
    contents,
    differences,
    held,
    load,
    new,
    run_on,
    save,
    train,
)
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

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
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(process, signal.SIGKILL)


SETUP = Setup(2, ("row_wise", "three_columns"), tables=2)
UNSHARDED = Setup(0, tables=2)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two saves hold where nobody is killed."""
    folder = tmp_path_factory.mktemp("sound")
    model = new(UNSHARDED)
    train(model, UNSHARDED, range(2))
    save(model, folder / "first")
    train(model, UNSHARDED, range(2, 4))
    save(model, folder / "second")
    return folder


def load_torn(setup: Setup, folder: str) -> tuple[str, list[str]]:
    """The error of loading the torn checkpoint, and what that changed."""
    model = load(new(setup), f"{folder}/first")
    was = held(model)
    with pytest.raises(CheckpointException) as caught:
        load(model, f"{folder}/second")
    return str(caught.value), differences(held(model), was)


def check(folder: Path, sound: Path, setups: tuple[Setup, ...]) -> bool:
    """Asserts that the first save is whole and the second whole or torn; gives whether it is torn."""
    assert not differences(contents(folder / "first"), contents(sound / "first"))
    if (folder / "second" / ".metadata").exists():
        assert not differences(contents(folder / "second"), contents(sound / "second"))
        return False
    for setup in setups:
        for text, changed in run_on(setup, load_torn, str(folder)):
            assert "No such file or directory" in text and "second/.metadata" in text
            assert not changed
    return True


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "moment, victim, number",
    [("reads a chunk", 1, 1), ("has written a chunk", 0, 5), ("renames", 0, 0)],
)
def test_the_checkpoint_before_loads(
    tmp_path: Path, sound: Path, moment: str, victim: int, number: int
) -> None:
    assert not kill_while_saving(SETUP, tmp_path / "killed", victim, moment, number)
    assert check(tmp_path / "killed", sound, (UNSHARDED, SETUP))


@pytest.mark.deep
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", range(8))
def test_many_moments(tmp_path: Path, sound: Path, victim: int, moment: str, number: int) -> None:
    if "rename" in moment and (victim or number):
        pytest.skip("rank 0 renames once")
    saved = kill_while_saving(SETUP, tmp_path / "killed", victim, moment, number)
    is_torn = check(tmp_path / "killed", sound, (UNSHARDED,))
    assert is_torn == (moment != "has renamed" and not saved)


@pytest.mark.deep
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("turn", range(20))
def test_any_time(tmp_path: Path, sound: Path, victim: int, turn: int) -> None:
    kill_while_saving(SETUP, tmp_path / "killed", victim, "at any time", 150)
    check(tmp_path / "killed", sound, (UNSHARDED,))
