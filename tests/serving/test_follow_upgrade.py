"""A follower across the upgrade of a trainer: entries before it do not tell their chain."""

import secrets
from pathlib import Path

import pytest
import torch
from checkpoint_cases import quietly
from follow_cases import Trainer, served_rows

from torchrec_dyn import serving
from torchrec_dyn.checkpoint import checkpoints
from torchrec_dyn.checkpoint_format import chain_of, read_chain


def older(_: str | None) -> str:
    """The id of an entry of a version whose ids do not tell their chain."""
    return secrets.token_hex(16)


@pytest.mark.parametrize("full_every", [1, 2, 8])
def test_a_trainer_that_is_upgraded_is_no_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_every: int
) -> None:
    """The served entry is of the old version, then of the new one; full saves lie between, or only deltas."""
    kept, served = tmp_path / "kept", tmp_path / "served"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "new_id", older)
        trainer = Trainer(kept, full_every=full_every, keep=1)
        for _ in range(2):
            trainer.train(trainer.step, 50)
            trainer.save()
        trainer.checkpoints.close()
    follower = serving.Follower(kept, served)
    assert follower.poll().entry.step == 2
    trainer = Trainer(kept, full_every=full_every, keep=1)
    quietly(trainer.checkpoints.restore, trainer.model, trainer.optimizer)
    trainer.step = 2
    for count in (2, 1):
        for _ in range(count):
            trainer.train(trainer.step, 50)
            trainer.save()
        followed = follower.poll()
        assert not followed.is_fork and torch.equal(served_rows(served), trainer.rows())
    trainer.checkpoints.close()
    chains = [chain_of(entry.id) for entry in read_chain(kept).entries if entry.sequence > 2]
    assert len({*chains}) == 1 and chains[0] is not None


@pytest.mark.parametrize("keep", [9, 1])
def test_a_downgrade_between_is_no_fork_while_its_entries_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """The entry after those of the older version begins other digits, and names its parent as before."""
    kept, served = tmp_path / "kept", tmp_path / "served"
    follower = serving.Follower(kept, served)
    new = checkpoints.new_id
    for step, write in enumerate((new, older, new)):
        monkeypatch.setattr(checkpoints, "new_id", write)
        trainer = Trainer(kept, full_every=1, keep=keep)
        quietly(trainer.checkpoints.restore, trainer.model, trainer.optimizer)
        trainer.step = step
        trainer.train(step, 50)
        trainer.save()
        trainer.checkpoints.close()
        if step == 0:
            follower.poll()
    if keep == 9:
        followed = follower.poll()
        assert followed.entry.step == 3 and not followed.is_fork
        assert torch.equal(served_rows(served), trainer.rows())
    else:  # the entry between was removed
        with pytest.raises(serving.ForkedChain):
            follower.poll()
