"""`Checkpoints.async_save`: the files are written while training goes on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import workers
from checkpoint_cases import Setup, differences, held
from checkpoint_jobs import ONE, TWO, Job, failing, names

from torchrec_dyn.checkpoint import entry_writing


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Nothing is written until the event is set."""
    begin, real = threading.Event(), entry_writing.save_part

    def later(*args: Any, **options: Any) -> None:
        assert begin.wait(60)
        real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_writing, "save_part", later)
        try:
            yield begin
        finally:
            begin.set()


def write_while_training(path: str, setup: Setup) -> None:
    job = Job(path, setup, full_every=3)
    moments = {}
    for number in range(4):  # full, delta, delta, full
        with held_up() as begin:
            saving = job.save("async_save")
            moments[job.step] = held(job.model)
            job.train()
            assert differences(held(job.model), moments[job.step - 1])
            job.dense += 1
            assert not saving.is_done and len(job.checkpoints.entries()) == number
            begin.set()
            entry = saving.result()
        assert saving.is_done and entry.step == job.step - 1 and 0 < saving.pause < 60
    job.checkpoints.close()
    kinds = [entry.kind for entry in job.checkpoints.entries()]
    assert kinds == ["full", "delta", "delta", "full"]
    again = Job(path, setup)
    for number, (step, moment) in enumerate(moments.items()):
        assert again.restore(step=step).extra == {"next": step}
        assert not differences(held(again.model), moment)
        assert again.dense[0] == number


@pytest.mark.parametrize("setup", [ONE, TWO], ids=["one", "two"])
def test_the_rows_are_of_the_moment_of_the_call(setup: Setup, tmp_path: Path) -> None:
    if setup.world:
        workers.run(write_while_training, str(tmp_path / "kept"), setup, world_size=2)
    else:
        write_while_training(str(tmp_path / "kept"), setup)


def test_the_next_call_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before somebody waits for it."""
    for call in ("save", "async_save", "restore", "close", "prune"):
        job = Job(tmp_path / call, full_every=9)
        with held_up() as begin:
            saving = job.save("async_save")
            wait = type(saving).wait
            monkeypatch.setattr(type(saving), "wait", lambda one: (begin.set(), wait(one))[1])
            if call in ("save", "async_save"):
                job.save(call)
            elif call == "restore":
                assert job.restore().step == 1
            else:
                getattr(job.checkpoints, call)()
            assert saving.is_done
            monkeypatch.undo()
        job.checkpoints.close()


def test_an_error_in_the_background_is_raised_once(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept", full_every=9)
    job.save()
    for call in ("save", "async_save", "close"):
        with failing(entry_writing, "commit_entry"):
            saving = job.save("async_save")
            saving.wait()
        with pytest.raises(OSError, match="No space left"):
            getattr(job.checkpoints, call)() if call == "close" else job.save(call)
        assert names(tmp_path / "kept") == ["full-00000001"]
    with failing(entry_writing, "commit_entry"):
        saving = job.save("async_save")
        with pytest.raises(OSError, match="No space left"):
            saving.result()
    job.restore()
    assert job.save().kind == "delta" and job.save("async_save").result().sequence == 3
    job.checkpoints.close()


def fail_on_one_rank(path: str) -> list[str]:
    job = Job(path, TWO, full_every=9)
    job.save()
    with failing(entry_writing, "write_values", at=1 if dist.get_rank() else 9):
        saving = job.save("async_save")
        saving.wait()
    if dist.get_rank():  # told on one rank only
        with pytest.raises(OSError):
            saving.result()
    with pytest.raises(OSError) as caught:
        job.save()
    assert job.save().kind == "delta"
    job.checkpoints.close()
    return [str(caught.value)]


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    told = workers.run(fail_on_one_rank, str(tmp_path / "kept"), world_size=2)
    assert told[0] == told[1] and "No space left" in told[0][0]
