"""`serving.follow`: served tables are those of the newest entry, generation by generation."""

import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly
from follow_cases import IDS, TABLES, Trainer, rows_of, served_rows, sorted_ids
from torchrec import KeyedJaggedTensor

from torchrec_dyn import __main__ as command_line
from torchrec_dyn import serving


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    made = Trainer(tmp_path / "kept", full_every=4)
    yield made
    made.checkpoints.close()


def test_every_generation_is_the_trained_one(trainer: Trainer, tmp_path: Path) -> None:
    """Full, three deltas, full: with the ids that changed, the ids that went, and the dense part."""
    follower = serving.Follower(tmp_path / "kept", tmp_path / "served")
    assert follower.poll() is None and follower.lag() is None
    kinds = []
    served: Any = None
    for number in range(5):
        trainer.train(*range(10 * number, 10 * number + 20))
        if number == 2:
            trainer.model.sparse.table("user").erase(torch.tensor([3, 4]))
        entry = trainer.save()
        followed = follower.poll()
        assert followed is not None and followed.entry == entry and follower.poll() is None
        served = served or serving.ServingEmbeddingBagCollection(tmp_path / "served", TABLES)
        served.refresh()
        assert served.generation == followed.generation
        for name in ("user", "item"):
            ids = trainer.model.sparse.table(name).ids()
            assert served.ids(name).sort().values.equal(ids.sort().values)
        assert torch.equal(rows_of(served), trainer.rows())
        dense = {"model": {"over.bias": torch.zeros(1)}}
        quietly(dcp.load, dense, checkpoint_id=followed.dense)
        assert torch.equal(dense["model"]["over.bias"], trainer.model.over.bias)
        assert 0 <= followed.lag < 60 and followed.lag <= follower.lag() < 60
        kinds.append(followed.changed is not None)
        if followed.changed is not None:
            ids = [*range(10 * number, 10 * number + 20)]
            assert sorted_ids(followed.changed) == {"user": ids, "item": ids}
            assert sorted_ids(followed.removed) == {
                "user": [3, 4] if number == 2 else [],
                "item": [],
            }
    assert kinds == [False, True, True, True, False]
    with pytest.raises(ValueError, match=r"ids: expected a table of \['user', 'item'\], got 'x'"):
        served.ids("x")


def test_several_deltas_at_once(trainer: Trainer, tmp_path: Path) -> None:
    """An id that goes and comes again is a changed one; one that changes and goes is a removed one."""
    follower = serving.Follower(tmp_path / "kept", tmp_path / "served", tables=["user"])
    trainer.train(*range(20))
    trainer.save()
    follower.poll()
    table = trainer.model.sparse.table("user")
    trainer.train(1, 2, 3)
    trainer.save()
    table.erase(torch.tensor([2, 3, 5]))
    trainer.save()
    trainer.train(2, 9)
    trainer.save()
    followed = follower.poll()
    assert {name: sorted(ids.tolist()) for name, ids in followed.changed.items()} == {
        "user": [1, 2, 9]
    }
    assert {name: sorted(ids.tolist()) for name, ids in followed.removed.items()} == {
        "user": [3, 5]
    }
    served = serving.ServingEmbeddingBagCollection(tmp_path / "served", TABLES[:1])
    one = KeyedJaggedTensor(["user"], IDS, lengths=torch.ones_like(IDS))
    assert torch.equal(served(one).values(), trainer.rows()[:, :4])


def test_a_follower_goes_on_where_the_files_are(trainer: Trainer, tmp_path: Path) -> None:
    """A new follower, after the entries of what is served were removed, and after a newer full save."""
    trainer.checkpoints._keep = 1
    trainer.train(*range(20))
    trainer.save()
    serving.Follower(tmp_path / "kept", tmp_path / "served").poll()
    for number in range(6):
        trainer.train(number)
        trainer.save()
    assert [entry.step for entry in trainer.checkpoints.entries()] == [5, 6, 7]
    followed = serving.Follower(tmp_path / "kept", tmp_path / "served").poll()
    assert followed.entry.step == 7 and followed.changed is None and not followed.is_fork
    assert torch.equal(served_rows(tmp_path / "served"), trainer.rows())
    assert serving.Follower(tmp_path / "kept", tmp_path / "served").poll().entry == followed.entry


def test_several_deltas_are_one_generation(trainer: Trainer, tmp_path: Path) -> None:
    """Rows that change in each of them, rows that go and come again, and many new ones."""
    for dtype in (torch.float32, torch.int8):
        follower = serving.Follower(tmp_path / "kept", tmp_path / str(dtype), rows=dtype)
        trainer.train(1, 2, 3)
        trainer.checkpoints.save(trainer.model, trainer.optimizer, step=0, full=True)
        first = follower.poll()
        trainer.train(*range(2, 6))
        trainer.save()
        trainer.model.sparse.table("item").erase(torch.tensor([3, 4]))
        trainer.train(*range(100, 250))
        trainer.save()
        trainer.train(3, 100, 5)
        trainer.save()
        assert int(follower.poll().generation[:6]) == int(first.generation[:6]) + 1
        within = 0.01 if dtype == torch.int8 else 0
        found = served_rows(tmp_path / str(dtype))
        assert torch.allclose(found, trainer.rows(), atol=within, rtol=0)
        serving.verify(tmp_path / str(dtype))


def test_nothing_can_be_served(trainer: Trainer, tmp_path: Path) -> None:
    trainer.train(1)
    entry = trainer.save()
    shutil.rmtree(entry.tables)
    with pytest.raises(ValueError, match="full-00000001/state: expected a checkpoint of"):
        serving.Follower(tmp_path / "kept", tmp_path / "served").poll()
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("every", [-1, math.nan, math.inf, 1e10, "1", None])
def test_seconds_that_nobody_can_wait_are_refused_at_the_call(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str], every: Any
) -> None:
    trainer.train(1)
    trainer.save()
    kept, served = str(tmp_path / "kept"), str(tmp_path / "served")
    with pytest.raises(ValueError, match=r"follow: expected every to be .* 0 to 10\^9, got"):
        serving.follow(kept, served, every=every)
    with pytest.raises(SystemExit):
        command_line.main(
            ["follow", kept, "--to", served, f"--every={every if every != '1' else 'x'}"]
        )
    assert "--every: expected seconds from 0 to 10^9, got " in capsys.readouterr().err
    assert not Path(served).exists()


def test_the_path_of_one_checkpoint_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    """It has no entries, so a follower would wait for ever."""
    trainer.train(1)
    state = {"model": trainer.model.sparse.state_dict()}
    quietly(dcp.save, state, checkpoint_id=tmp_path / "one")
    for make in (serving.Follower, serving.follow):
        with pytest.raises(
            ValueError, match=r"expected a directory of Checkpoints, got .*/one, one"
        ):
            make(tmp_path / "one", tmp_path / "served")
    assert serving.Follower(tmp_path / "nothing yet", tmp_path / "served").poll() is None
    trainer.save()
    (tmp_path / "kept" / ".metadata").touch()  # beside entries it does no harm
    assert serving.Follower(tmp_path / "kept", tmp_path / "served").poll() is not None


def test_the_command(trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["follow", str(tmp_path / "kept"), "--to", str(tmp_path / "served"), "--once"]
    assert command_line.main(arguments) == 1 and "got none" in capsys.readouterr().err
    trainer.train(1, 2)
    trainer.save()
    assert command_line.main(arguments) == 0
    assert "full-00000001 (step 1): generation" in capsys.readouterr().out
    trainer.train(2)
    trainer.save()
    assert command_line.main(arguments) == 0
    assert "2 changed rows" in capsys.readouterr().out
    assert command_line.main(arguments) == 0 and not capsys.readouterr().out
    assert command_line.main([*arguments, "--dtype", "int8"]) == 1
    assert "with rows torch.int8, got torch.float32" in capsys.readouterr().err


def test_the_command_tells_errors_while_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def poll(_: serving.Follower) -> None:
        raise OSError(28, "No space left")

    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(serving.Follower, "poll", poll)
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        command_line.main(["follow", str(tmp_path), "--to", str(tmp_path / "served")])
    assert capsys.readouterr().err == "serving.follow: [Errno 28] No space left\n"
