"""A rank is killed while it saves: the checkpoint before loads, and loading the torn one is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_cases import Setup, contents, differences, held, load, new, run_on, save, train
from checkpoint_kills import MOMENTS, kill_while_saving
from torch.distributed.checkpoint.api import CheckpointException

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
