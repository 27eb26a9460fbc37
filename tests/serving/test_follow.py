"""`serving.follow`: served tables are those of the newest entry, generation by generation."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_dyn as dyn
from torchrec_dyn import __main__ as command_line
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import Checkpoints

TABLES = [
    EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=1000, feature_names=[name])
    for name in ("user", "item")
]
IDS = torch.arange(300)


class Trainer:
    """A model that trains and saves; what it saved of each table as dicts."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.sparse = dyn.DynamicEmbeddingBagCollection(
            TABLES, fused_params={"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1}
        )
        self.model.over = nn.Linear(2, 1)
        dense = KeyedOptimizerWrapper(
            {f"over.{name}": one for name, one in self.model.over.named_parameters()},
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        self.optimizer = CombinedOptimizer([("sparse", self.model.sparse.fused_optimizer), dense])
        self.checkpoints = Checkpoints(folder, **options)
        self.step = 0

    def train(self, *ids: int) -> None:
        values = torch.tensor(ids * 2)
        features = KeyedJaggedTensor(["user", "item"], values, lengths=torch.ones_like(values))
        self.model.sparse(features).values().sum().backward()
        with torch.no_grad():
            self.model.over.bias += 1

    def save(self) -> Any:
        self.step += 1
        return quietly(self.checkpoints.save, self.model, self.optimizer, step=self.step)

    def rows(self) -> torch.Tensor:
        return rows_of(self.model.sparse.eval())


def rows_of(collection: Any) -> torch.Tensor:
    """The rows of all ids, [300, 8]; zeros for ids without a row."""
    features = KeyedJaggedTensor(["user", "item"], IDS.repeat(2), lengths=torch.ones(600).long())
    with torch.no_grad():
        values = collection(features).values()
    getattr(collection, "train", lambda: None)()
    return values.clone()


def sorted_ids(of_tables: Any) -> dict[str, list[int]]:
    return {name: sorted(ids.tolist()) for name, ids in of_tables.items()}


def served_rows(folder: Path) -> torch.Tensor:
    return rows_of(serving.ServingEmbeddingBagCollection(folder, TABLES))


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
    assert followed.entry.step == 7 and followed.changed is None
    assert torch.equal(served_rows(tmp_path / "served"), trainer.rows())


def test_another_branch_is_not_crossed_by_deltas(trainer: Trainer, tmp_path: Path) -> None:
    follower = serving.Follower(tmp_path / "kept", tmp_path / "served")
    for number in range(3):
        trainer.train(number)
        trainer.save()
    follower.poll()
    again = Trainer(tmp_path / "kept", full_every=4)
    trainer.checkpoints.close()
    quietly(again.checkpoints.restore, again.model, again.optimizer, step=2)
    again.train(200)
    again.step = 2
    assert again.save().kind == "delta"
    again.checkpoints.close()
    followed = follower.poll()
    assert followed.changed is None and followed.entry.sequence == 4
    assert torch.equal(served_rows(tmp_path / "served"), again.rows())


def damage(folder: Path) -> None:
    file = next(folder.glob("changes/*.distcp"))
    content = bytearray(file.read_bytes())
    for place in range(500, len(content), 64):
        content[place] ^= 1
    file.write_bytes(bytes(content))


def test_a_damaged_entry_is_told_and_what_is_sound_is_served(
    trainer: Trainer, tmp_path: Path
) -> None:
    follower = serving.Follower(tmp_path / "kept", tmp_path / "served")
    rows = []
    for number in range(3):
        trainer.train(number)
        trainer.save()
        rows.append(trainer.rows())
        if number == 0:
            follower.poll()
    damage(tmp_path / "kept" / "delta-00000003")
    followed = follower.poll()
    assert followed.entry.step == 2 and followed.skipped[0].startswith("delta-00000003: ")
    assert torch.equal(served_rows(tmp_path / "served"), rows[1])
    assert follower.poll() is None  # what comes before the damaged one is served
    (tmp_path / "kept" / "delta-00000003" / "entry.json").unlink()
    assert follower.poll() is None


def test_nothing_can_be_served(trainer: Trainer, tmp_path: Path) -> None:
    trainer.train(1)
    entry = trainer.save()
    shutil.rmtree(entry.tables)
    with pytest.raises(ValueError, match="expected an entry that can be served, got none"):
        serving.Follower(tmp_path / "kept", tmp_path / "served").poll()
    assert not (tmp_path / "served").exists()


def test_readers_see_whole_generations(trainer: Trainer, tmp_path: Path) -> None:
    """Each generation has one number in all its rows; a thread reads while they change."""
    table = [trainer.model.sparse.table(name) for name in ("user", "item")]

    def save(number: int) -> None:
        for one in table:
            one.assign(IDS, torch.full((300, 4), float(number)))
        trainer.save()

    save(1)
    follower = serving.Follower(tmp_path / "kept", tmp_path / "served")
    follower.poll()
    served = serving.ServingEmbeddingBagCollection(tmp_path / "served", TABLES)
    seen: list[float] = []
    ends = threading.Event()

    def read() -> None:
        while not ends.is_set():
            served.refresh()
            values = rows_of(served)
            seen.append(values[0, 0].item() if bool((values == values[0, 0]).all()) else -1.0)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(2, 8):
        save(number)
        follower.poll()
    ends.set()
    reader.join()
    assert -1.0 not in seen and seen == sorted(seen)
    served.refresh()
    assert rows_of(served).unique().tolist() == [7.0]


def test_the_generator_goes_on_after_an_error(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train(1)
    entry = trainer.save()
    poll, faults = serving.Follower.poll, [OSError(28, "No space left"), ValueError("torn")]
    monkeypatch.setattr(
        serving.Follower,
        "poll",
        lambda self: (_ for _ in ()).throw(faults.pop()) if faults else poll(self),
    )
    generations = serving.follow(tmp_path / "kept", tmp_path / "served", every=0)
    with pytest.warns(UserWarning, match="No space left"):
        assert next(generations).entry == entry


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
