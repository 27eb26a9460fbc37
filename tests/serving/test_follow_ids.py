"""A follower tells its caller every id that changed since what the caller took, whatever fails in between."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import quietly
from follow_cases import TABLES, Trainer, sorted_ids
from torchrec import KeyedJaggedTensor

from torchrec_dyn import serving
from torchrec_dyn.serving import follower as follower_file


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """Entries 1 to 4: a full save and three deltas, which change 1 and 9, 2 and 9, and 3, and remove 1."""
    made = Trainer(tmp_path / "kept", full_every=4)
    made.train(*range(10))
    made.save()
    for ids in ((1, 9), (2, 9), (3,)):
        made.train(*ids)
        made.save()
    made.checkpoints.prune = list  # a test removes entries itself
    yield made
    made.checkpoints.close()


def follower_of(tmp_path: Path, **options: Any) -> serving.Follower:
    return serving.Follower(tmp_path / "kept", tmp_path / "served", **options)


def both(*ids: int) -> dict[str, list[int]]:
    return {"user": list(ids), "item": list(ids)}


def test_a_killed_follower_is_continued(trainer: Trainer, tmp_path: Path) -> None:
    """It published and was killed before its caller took the ids."""
    first, *_, last = trainer.checkpoints.entries()
    follower_of(tmp_path).poll()
    followed = follower_of(tmp_path, since=first.id).poll()
    assert followed.entry == last and sorted_ids(followed.changed) == both(1, 2, 3, 9)
    follower = follower_of(tmp_path, since=last.id)
    assert follower.poll() is None
    follower.since = trainer.checkpoints.entries()[2].id
    assert sorted_ids(follower.poll().changed) == both(3)


def test_a_caller_that_took_nothing_or_what_is_gone_reads_all(
    trainer: Trainer, tmp_path: Path
) -> None:
    followed = follower_of(tmp_path).poll()
    assert followed.changed is None and follower_of(tmp_path).poll().changed is None
    other = follower_of(tmp_path, since="0" * 32).poll()
    assert other.changed is None and other.generation == followed.generation


def test_an_error_after_the_deltas(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = follower_of(tmp_path)
    follower.poll()
    trainer.train(4)
    trainer.save()  # full
    follower.poll()
    trainer.train(5)
    trainer.save()
    with monkeypatch.context() as patched:
        patched.setattr(follower_file, "_seconds_since", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            follower.poll()
    trainer.model.sparse.table("user").erase(torch.tensor([5, 6]))
    trainer.save()
    followed = follower.poll()
    assert sorted_ids(followed.changed) == {"user": [], "item": [5]}
    assert sorted_ids(followed.removed) == {"user": [5, 6], "item": []}


def test_ids_are_read_before_their_delta_is_served(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer removes the entries while their deltas are applied."""
    follower = follower_of(tmp_path)
    follower.poll()
    for number in range(2):
        trainer.train(20 + number)
        trainer.save()  # full, delta
        if number == 0:
            follower.poll()
    applied = follower_file.apply_deltas

    def apply_and_remove(*arguments: Any) -> Any:
        told = applied(*arguments)
        for entry in trainer.checkpoints.entries():
            entry.path.rename(tmp_path / entry.path.name)
        return told

    monkeypatch.setattr(follower_file, "apply_deltas", apply_and_remove)
    assert sorted_ids(follower.poll().changed) == both(21)


def test_an_id_that_came_and_went_is_removed(trainer: Trainer, tmp_path: Path) -> None:
    follower = follower_of(tmp_path, tables=["user"])
    trainer.train(1)
    trainer.save()
    follower.poll()
    trainer.train(77, 78)
    trainer.save()
    trainer.model.sparse.table("user").erase(torch.tensor([77]))
    trainer.save()
    followed = follower.poll()
    assert sorted_ids(followed.changed) == {"user": [78]}
    assert sorted_ids(followed.removed) == {"user": [77]}


def test_no_file_has_a_forgotten_id(trainer: Trainer, tmp_path: Path) -> None:
    """Nor its row, as soon as tables are built without it; a reader of the former rows goes on."""
    secret, folder = 777000111, tmp_path / "served"
    trainer.train(secret)
    trainer.save()
    follower = follower_of(tmp_path)
    follower.poll()
    one = torch.tensor([secret])
    features = KeyedJaggedTensor(["user", "item"], one.repeat(2), lengths=torch.ones(2).long())
    reader = serving.ServingEmbeddingBagCollection(folder, TABLES)
    row = reader(features).values().clone()
    traces = [secret.to_bytes(8, "little"), row[0, :4].numpy().tobytes()]

    def found() -> list[bool]:
        files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        return [any(trace in file for file in files) for trace in traces]

    assert found() == [True, True]
    gone = {"user": one, "item": one}
    quietly(trainer.checkpoints.forget, trainer.model, trainer.optimizer, gone, step=9)
    assert follower.poll() is not None and found() == [False, False]
    assert reader(features).values().equal(row)
    assert reader.refresh() and not reader(features).values().any()
