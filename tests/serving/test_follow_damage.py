"""Served tables whose manifest is damaged: a follower builds these anew, where it knows what they were."""

import json
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import quietly
from follow_cases import TABLES, Trainer, rows_of, served_rows
from full_disk import file_limit

from torchrec_dyn import __main__ as command_line
from torchrec_dyn import serving
from torchrec_dyn.serving import follower as follower_file
from torchrec_dyn.serving.manifest import current_generation, served_manifest


class Job:
    """A trainer that saved a full save and a delta, which a follower serves."""

    def __init__(self, folder: Path) -> None:
        self.kept, self.served = folder / "kept", folder / "served"
        self.trainer = Trainer(self.kept, full_every=8)
        self.follower = serving.Follower(self.kept, self.served)
        for step in range(2):
            self.save(step)
            self.follower.poll()
        self.generation = self.served / current_generation(self.served)

    def save(self, *ids: int) -> None:
        self.trainer.train(*ids, 50)
        self.trainer.save()

    def damage(self, what: str) -> None:
        manifest, current = self.generation / "manifest.json", self.served / "current"
        if what == "manifest is cut":
            manifest.write_bytes(manifest.read_bytes()[:200])
        elif what == "no manifest":
            manifest.unlink()
        elif what == "no generation":
            shutil.rmtree(self.generation)
        elif what == "current is empty":
            current.write_text("")
        elif what == "no current":
            current.unlink()

    def is_served(self) -> bool:
        return torch.equal(served_rows(self.served), self.trainer.rows())

    def files(self) -> set[str]:
        return {str(one.relative_to(self.served)) for one in self.served.rglob("*")}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.trainer.checkpoints.close()


@pytest.mark.parametrize(
    "what", ["manifest is cut", "no manifest", "no generation", "current is empty", "no current"]
)
def test_served_tables_without_a_manifest_are_built_anew(job: Job, what: str) -> None:
    reader = serving.ServingEmbeddingBagCollection(job.served, TABLES)
    before = rows_of(reader)
    job.damage(what)
    with pytest.raises(ValueError, match=r"Remove the directory, then build it\.$"):
        served_rows(job.served)
    with pytest.raises(ValueError, match=r"Remove the directory, then build it\.$"):
        serving.build_again(job.served, job.kept / "full-00000001" / "state")
    job.save(7)
    assert job.follower.served() is None and job.follower.lag() is None
    with pytest.warns(UserWarning, match=r"^Follower: .* The tables were built anew") as seen:
        followed = job.follower.poll()
    assert len(seen) == 1 and "Remove" not in str(seen[0].message)
    assert followed.entry.step == 3 and not followed.is_fork and followed.skipped == []
    assert torch.equal(rows_of(reader), before)  # an open reader keeps its generation
    assert reader.refresh() and torch.equal(rows_of(reader), job.trainer.rows())
    assert serving.verify(job.served) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert job.follower.poll() is None
        job.save(8)
        assert job.follower.poll().entry.step == 4 and job.is_served()


def test_numbers_of_generations_do_not_go_back(job: Job) -> None:
    for what, number in (("no generation", 4), ("no manifest", 6), ("no current", 8)):
        job.damage(what)
        with pytest.warns(UserWarning, match="built anew"):
            job.follower.poll()
        name = current_generation(job.served)  # of the delta; the full save before it has one, too
        assert name.startswith(f"{number:06}-") and job.is_served()
        job.generation = job.served / name


def test_a_damaged_delta_is_tried_again_at_once_on_other_tables(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same ones after a while only: here the time stands still."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job.save(7)
    delta = job.kept / "delta-00000003"
    (file,), content = delta.glob("changes/*.distcp"), spoil(delta)
    assert job.follower.poll() is None and len(job.follower.skipped) == 1
    file.write_bytes(content)
    assert job.follower.poll() is None and len(job.follower.skipped) == 1
    spoil(delta)
    job.damage("manifest is cut")
    with pytest.warns(UserWarning, match="built anew"):
        serving.Follower(job.kept, job.served, rows=torch.float32).poll()
    file.write_bytes(content)
    assert job.follower.poll().entry.step == 3 and job.is_served()


@pytest.mark.parametrize("before", ["build_again_from", "read_chain"])
def test_another_follower_built_the_tables_meanwhile(
    job: Job, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    job.save(7)
    job.damage("manifest is cut")
    call, generations = getattr(follower_file, before), []

    def late(*given: Any) -> Any:
        monkeypatch.setattr(follower_file, before, call)
        with pytest.warns(UserWarning, match="built anew"):
            other = serving.Follower(job.kept, job.served, rows=torch.float32)
            assert other.poll().entry.step == 3
        generations.append(current_generation(job.served))
        return call(*given)

    monkeypatch.setattr(follower_file, before, late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # this one builds nothing
        assert job.follower.poll().entry.step == 3 and job.is_served()
    assert generations == [current_generation(job.served)]


def test_a_follower_that_does_not_know_the_rows_says_so(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.damage("manifest is cut")
    follower, before = serving.Follower(job.kept, job.served), job.files()
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"then build it\. To have .* rows=torch\.float32 \(--.*\), and tables= if not",
        ):
            follower.poll()
        assert job.files() == before
    command = ["follow", str(job.kept), "--to", str(job.served), "--once"]
    assert command_line.main(command) == 1 and "--dtype float32" in capsys.readouterr().err
    assert command_line.main([*command, "--dtype", "float16"]) == 0
    assert "The tables were built anew" in capsys.readouterr().err
    assert follower.poll().entry.step == 2
    job.generation = job.served / current_generation(job.served)
    job.damage("manifest is cut")
    with pytest.warns(UserWarning, match="built anew"):  # the follower has read what was served
        assert follower.poll() is None
    assert serving.Follower(job.kept, job.served, rows=torch.float16).poll().entry.step == 2
    shutil.rmtree(job.served)  # the other remedy
    assert serving.Follower(job.kept, job.served).poll().entry.step == 2 and job.is_served()


def test_a_follower_knows_the_tables_that_it_built_or_read(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "kept", full_every=8)
    trainer.train(1, 2)
    trainer.save()
    maker = serving.Follower(
        tmp_path / "kept", tmp_path / "served", tables=["user"], rows=torch.float16
    )
    maker.poll()  # which has read no manifest
    reader = serving.Follower(tmp_path / "kept", tmp_path / "served")  # which was given no names
    both = serving.Follower(tmp_path / "kept", tmp_path / "both")
    both.poll()
    trainer.checkpoints.close()

    def cut(served: Path) -> None:
        path = served / current_generation(served) / "manifest.json"
        path.write_bytes(path.read_bytes()[:100])

    for follower, dtype, names in (
        (maker, "float16", ["user"]),
        (reader, "float16", ["user"]),
        (both, "float32", ["item", "user"]),
    ):
        cut(follower.to)
        with pytest.warns(UserWarning, match="built anew"):
            follower.poll()
        manifest = served_manifest(follower.to)[1]
        assert (manifest.rows, sorted(manifest.tables)) == (dtype, names)


def test_a_build_is_told_though_deltas_after_it_fail(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.damage("manifest is cut")
    full = OSError(28, "No space left on device", str(job.served / "rows-51ab20fe"))
    with monkeypatch.context() as changed:
        changed.setattr(follower_file, "apply_deltas", lambda *_: (_ for _ in ()).throw(full))
        with (
            pytest.warns(UserWarning, match=r"built anew from .*/kept/full-00000001\.$") as seen,
            pytest.raises(OSError, match="No space left"),
        ):
            job.follower.poll()
    assert len(seen) == 1 and seen[0].filename == __file__
    assert job.follower.poll() is None and job.is_served()


@pytest.mark.parametrize("is_cut_first", [False, True])
def test_a_running_follower_refuses_a_fork_also_without_a_manifest(
    job: Job, tmp_path: Path, is_cut_first: bool
) -> None:
    job.save(7)
    job.follower.poll()
    job.trainer.checkpoints.close()
    rest = Trainer(job.kept, full_every=8)
    quietly(rest.checkpoints.restore, rest.model, rest.optimizer, step=2)
    job.trainer, rest.step = rest, 2
    job.generation = job.served / current_generation(job.served)
    only_made = serving.Follower(job.kept, job.served)  # it has read the manifest, but never polled
    if is_cut_first:
        job.damage("manifest is cut")
    job.save(9)
    for one in (job.follower, only_made) * 2:
        with pytest.raises(serving.ForkedChain):
            one.poll()
        job.damage("manifest is cut")
    follower = serving.Follower(job.kept, job.served, rows=torch.float32, follow_forks=True)
    with pytest.warns(UserWarning, match="built anew"):
        assert follower.poll().entry.step == 3 and job.is_served()


def test_a_running_follower_serves_no_older_entry_without_a_manifest(job: Job) -> None:
    job.damage("manifest is cut")
    delta, before = job.kept / "delta-00000002" / "entry.json", job.files()
    text = delta.read_text()
    delta.unlink()
    with pytest.raises(ValueError, match=r"damaged\. Remove .* delta-00000002: expected entry"):
        job.follower.poll()
    assert job.files() == before
    delta.write_text(text)
    with pytest.warns(UserWarning, match="built anew"):
        assert job.follower.poll() is None and job.is_served()


def spoil(entry: Path) -> bytes:
    """Damages the rows of a delta, and returns the file as it was."""
    (file,) = entry.glob("changes/*.distcp")
    content = file.read_bytes()
    file.write_bytes(bytes(one ^ (place % 64 == 0) for place, one in enumerate(content)))
    return content


def test_a_damaged_delta_does_not_turn_rows_back_without_a_manifest(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full save before it is not served in the place of what was: a person may do so."""
    job.save(7)
    job.follower.poll()
    job.save(8)
    job.generation = job.served / current_generation(job.served)
    only_made = serving.Follower(job.kept, job.served)
    job.damage("manifest is cut")
    delta, before = job.kept / "delta-00000002", job.files()
    (file,), content = delta.glob("changes/*.distcp"), spoil(delta)
    for _ in range(2):
        for follower in (job.follower, only_made):
            with pytest.raises(
                ValueError, match=r"damaged\. Remove .* delta-00000003: delta-00000002 before it: "
            ):
                follower.poll()
            assert job.files() == before
    file.write_bytes(content)
    spoil(job.kept / "delta-00000004")  # newer than what was served
    now = time.monotonic() + follower_file._RETRY_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    chosen, read = follower_file.chosen_tables, []
    monkeypatch.setattr(
        follower_file, "chosen_tables", lambda *given: read.append(given[2]) or chosen(*given)
    )
    with pytest.warns(UserWarning, match="built anew"):
        assert job.follower.poll() is None
    assert [where[-10:-9] for where in read] == ["2", "3"]  # later ones are read once, as ever
    assert served_manifest(job.served)[1].entry.sequence == 3
    assert [line.split(":")[0] for line in job.follower.skipped] == ["delta-00000004"]


def test_nothing_is_left_of_a_build_that_failed(job: Job) -> None:
    job.damage("manifest is cut")
    before = job.files()
    with file_limit(100), pytest.raises(OSError, match="File too large"):
        job.follower.poll()
    assert job.files() == before
    full = job.kept / "full-00000001"
    shutil.move(full, full.with_name("aside"))
    with pytest.raises(
        ValueError, match=r"damaged\. .*delta-00000002: an entry before it is missing"
    ):
        job.follower.poll()
    shutil.move(full.with_name("aside"), full)
    with pytest.warns(UserWarning, match="built anew"):
        assert job.follower.poll() is None and job.is_served()


def test_a_later_version_is_no_damage(job: Job) -> None:
    path = job.generation / "manifest.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 4'))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"A later version wrote it: use that, or build elsewh"
        ):
            job.follower.poll()


def test_a_manifest_with_another_entry_is_damaged(job: Job) -> None:
    path = job.generation / "manifest.json"
    good = json.loads(path.read_text())
    with_field = r"expected entry with a sequence in \[0, 2\^63\) and an id, got .* Remove the dir"
    for entry, message in (
        ({"sequence": -1, "id": "a"}, with_field),
        ({"sequence": 1, "id": 5}, with_field),
        ({"sequence": 1}, "got TypeError: .* Remove the directory, then build it"),
        (None, "got TypeError: .* Remove the directory, then build it"),
    ):
        path.write_text(json.dumps({**good, "entry": entry}))
        with pytest.raises(ValueError, match=message):
            served_rows(job.served)
    path.write_text(json.dumps({key: one for key, one in good.items() if key != "entry"}))
    with pytest.raises(ValueError, match=r"got KeyError: 'entry'\. It is damaged\. Remove the dir"):
        served_rows(job.served)


def test_relative_paths_are_those_of_the_first_directory(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    follower = serving.Follower("kept", "served")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert follower.poll().entry.step == 2
    job.save(7)
    assert follower.poll().entry.step == 3 and job.is_served() and follower.lag() is not None
    assert list((tmp_path / "other").iterdir()) == []


def test_a_link_to_nothing_is_refused_before_a_build(job: Job, tmp_path: Path) -> None:
    link, full = tmp_path / "link", job.kept / "full-00000001" / "state"
    link.symlink_to("volume/served")
    before = sorted(tmp_path.iterdir())
    message = (
        rf"link: expected .* or nothing, got .* {tmp_path}/volume/served, where nothing is\. Give"
    )
    for make in (
        lambda: serving.Follower(job.kept, link),
        lambda: serving.build(full, link),
        lambda: next(serving.follow(job.kept, link)),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert sorted(tmp_path.iterdir()) == before
    serving.build(full, tmp_path / "volume" / "served")
    assert serving.Follower(job.kept, link).poll().entry.step == 2 and link.is_symlink()
    assert torch.equal(served_rows(link), job.trainer.rows())


def test_a_link_to_itself_is_refused(job: Job, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    full = job.kept / "full-00000001" / "state"
    for make in (
        lambda: serving.Follower(job.kept, tmp_path / "a"),
        lambda: serving.build(full, tmp_path / "a"),
    ):
        with pytest.raises(ValueError, match=r"a: expected .* got a link that leads to itself\. R"):
            make()


@pytest.mark.parametrize("name", ["a\0b", "a\0b/served"])
def test_a_path_with_a_zero_byte_is_refused(job: Job, tmp_path: Path, name: str) -> None:
    full, before = job.kept / "full-00000001" / "state", sorted(tmp_path.iterdir())
    path = tmp_path / name
    with pytest.raises(
        ValueError, match=r"^Follower: .*, got '.*/a\\x00b.*'\. Give a path without a zero byte\.$"
    ):
        serving.Follower(path, job.served)
    for make in (lambda: serving.Follower(job.kept, path), lambda: serving.build(full, path)):
        with pytest.raises(
            ValueError, match=r"^'.*/a\\x00b.*': expected .* got one with a zero byte\. G"
        ):
            make()
    assert sorted(tmp_path.iterdir()) == before
