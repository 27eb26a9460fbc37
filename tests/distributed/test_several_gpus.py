"""benchmarks/several_gpus.py runs on mock GPUs, one a rank, and tells a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from mock_device import MockDevice

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EVERYDAY = ["pooled, all plans, ADAM", "checkpoint, policies"]

pytestmark = pytest.mark.mock_only  # a machine with two GPUs runs it itself


def several_gpus() -> Any:
    """Returns the module, which is not on the path of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import several_gpus

        return several_gpus


def run_side(names: list[str], folder: Path, on_device: bool) -> None:
    several, chosen = several_gpus(), dict(enumerate(names))
    if not on_device:
        several.run_side(chosen, 2, torch.device("cpu"), folder)
        return
    with MockDevice() as device:
        torch.cuda.set_device(dist.get_rank())
        several.run_side(chosen, 2, torch.device("cuda", dist.get_rank()), folder)
    assert device.without_kernel == []
    assert [note for note in device.mixed if not note.place.startswith("torchrec/")] == []


@pytest.mark.parametrize("which", ["everyday", pytest.param("all", marks=pytest.mark.deep)])
def test_it_finds_equal_results_and_differences(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = several_gpus()
    names = EVERYDAY if which == "everyday" else list(several.trials(2))
    sides = [tmp_path / side for side in ("device", "cpu")]
    for side in sides:
        side.mkdir()
        on_device = side.name == "device"
        workers.run(run_side, names, side, on_device, world_size=2, timeout=300)
    assert several.compare(names, 2, *sides) == 0
    assert capsys.readouterr().out.count("equal bits") == len(names)

    changed, missing = map(names.index, EVERYDAY)
    file = sides[0] / f"{changed}.1"
    results = torch.load(file)
    output = next(name for name in results if name.startswith("output"))
    results[output] += 1e-7
    torch.save(results, file)
    assert several.compare(names, 2, *sides) == 0
    assert "equal up to 1e-07" in capsys.readouterr().out
    row = next(name for name in results if "momentum" in name)
    results[row].view(torch.int32)[0] ^= 1
    torch.save(results, file)
    (sides[1] / f"{missing}.0").unlink()
    assert several.compare(names, 2, *sides) == 2
    said = capsys.readouterr().out
    assert f"rank 1 differs in {row}" in said and "no result of rank 0" in said


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="has two GPUs")
def test_fewer_than_two_gpus_are_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert several_gpus().main([]) == 0
    assert "several_gpus: skipped: expected 2 GPUs or more" in capsys.readouterr().out
