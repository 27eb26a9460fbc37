"""build and apply_delta on disks that are full, limited or failing: an OSError, and all is as it was."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from another_process import call
from full_disk import (
    FAILED,
    FULL,
    FailingFiles,
    fails_or_succeeds,
    room_left,
    small_disk,
)
from serving_cases import Plain, bag_configs, save, save_delta
from shards import deep_but
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import knobs, serving
from torchrec_dyn.serving.manifest import current_generation, read_manifest

Limit = Callable[[int], AbstractContextManager[None]]

# 128 KiB of rows and 91 KiB of slots, with a table of a few bytes beside it.
A = Plain("a", 8).with_random(range(4096))
B = Plain("b", 3).with_random(range(5), seed=1)
AFTER = [A.with_random(range(2048, 8192), seed=3).without([7]), B]
SMALL = Plain("a", 4).with_random(range(9))
SMALL_AFTER = SMALL.with_random(range(6, 12), seed=1).without([2])


def rows_of(folder: Path, *tables: Plain) -> torch.Tensor:
    """Rows of all ids, of files that were verified."""
    ours = serving.ServingEmbeddingBagCollection(folder, bag_configs(*tables), verify=True)
    ids = torch.arange(9000).repeat(len(tables))
    features = KeyedJaggedTensor(
        [f"f_{one.name}" for one in tables], ids, lengths=torch.ones(len(ids)).long()
    )
    return ours(features).values()


def contents(served: Path) -> dict[str, bytes]:
    """The bytes of all files; of a rows file its length and the bytes in use."""
    manifest = read_manifest(served, current_generation(served))
    found = {}
    for path in served.rglob("*"):
        if path.is_file() and path.name != "lock":
            blob = path.read_bytes()
            if path.name == manifest.rows_file:
                blob = blob[: manifest.rows_bytes] + str(len(blob)).encode()
            found[str(path.relative_to(served))] = blob
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name, before, after in (("large", [A, B], AFTER), ("small", [SMALL], [SMALL_AFTER])):
        (folder / name).mkdir()
        save(folder / name / "checkpoint", *before)
        save_delta(folder / name / "delta", before, after)
        serving.build(folder / name / "checkpoint", folder / name / "before")
        shutil.copytree(folder / name / "before", folder / name / "after")
        serving.apply_delta(folder / name / "after", folder / name / "delta")
    return folder


def check_build(folder: Path, limited: Limit, saved: Path, number: int) -> None:
    """Builds with more and more room; a failure leaves nothing."""
    done = []
    for room in range(0, 400 << 10, 28 << 10):
        with limited(room):
            one = fails_or_succeeds(
                lambda: serving.build(saved / "checkpoint", folder / "served"), number, folder
            )
        assert [path.name for path in folder.iterdir()] == ["served"] * one
        if one:
            assert torch.equal(rows_of(folder / "served", A, B), rows_of(saved / "before", A, B))
            shutil.rmtree(folder / "served")
        done.append(one)
    assert done == sorted(done) and not done[0] and done[-1]


def check_delta(folder: Path, limited: Limit, saved: Path, number: int) -> None:
    """Applies a delta with more and more room; after a failure all is as it was."""
    rows = {name: rows_of(saved / name, A, B) for name in ("before", "after")}
    served, done = folder / "served", []
    for room in range(0, 640 << 10, 48 << 10):
        shutil.copytree(saved / "before", served)
        was = contents(served)
        ours = serving.ServingEmbeddingBagCollection(served, bag_configs(A, B))
        with limited(room):
            one = fails_or_succeeds(
                lambda: serving.apply_delta(served, saved / "delta"), number, folder
            )
            assert ours.refresh() == one
        if not one:
            assert contents(served) == was, room
            assert torch.equal(rows_of(served, A, B), rows["before"])
            serving.apply_delta(served, saved / "delta")
        assert torch.equal(rows_of(served, A, B), rows["after"]), room
        shutil.rmtree(served)
        done.append(one)
    assert done == sorted(done) and not done[0] and done[-1]


def write_on(disk: Path, saved: Path) -> None:
    folder = disk / "inside"
    for check in (check_build, check_delta):
        folder.mkdir(exist_ok=True)
        check(folder, lambda room: room_left(disk, room), saved, FULL)


def test_a_full_disk(saved, tmp_path):
    """A write through a mapping to a page without room would kill the process."""
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        call(write_on, disk, saved / "large")


@pytest.mark.parametrize("every", deep_but([3], [3, 1]))
def test_a_disk_that_fails_at_any_call(saved, tmp_path, monkeypatch, every):
    """Every other write is short; a delta that rewrites all rows."""
    monkeypatch.setattr(knobs, "WASTE_BYTES", -(1 << 40))
    served, small, at, done = tmp_path / "served", saved / "small", 0, False
    while not done:
        at += every
        with FailingFiles(tmp_path, at) as files:
            fails_or_succeeds(lambda: serving.build(small / "checkpoint", served), FAILED, tmp_path)
        done = files.calls < at
        if served.exists():  # complete; only its name may not be on the disk yet
            assert torch.equal(rows_of(served, SMALL), rows_of(small / "before", SMALL))
            shutil.rmtree(served)
        assert not list(tmp_path.iterdir())
    assert at > 12
    new, at, done = rows_of(small / "after", SMALL), 0, False
    while not done:
        at += every
        shutil.copytree(small / "before", served)
        was, before = contents(served), current_generation(served)
        with FailingFiles(tmp_path, at) as files:
            fails_or_succeeds(
                lambda: serving.apply_delta(served, small / "delta"), FAILED, tmp_path
            )
        done = files.calls < at
        if current_generation(served) == before:
            assert contents(served) == was, at
            serving.apply_delta(served, small / "delta")
        assert torch.equal(rows_of(served, SMALL), new), at
        shutil.rmtree(served)
    assert at > 18


def test_links_are_not_written_through(saved, tmp_path):
    """Another program's file stays as it is, whatever links to it."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"\1" * 4096)
    for name in ("rows", "current.new"):
        served = shutil.copytree(saved / "small" / "before", tmp_path / "served")
        link = served / name
        if name == "rows":
            (link,) = served.glob("rows-*")
            victim.write_bytes(link.read_bytes())
            link.unlink()
        link.symlink_to(victim)
        was = victim.read_bytes()
        with pytest.raises(OSError, match=f"symbolic links: '{link}'"):
            serving.apply_delta(served, saved / "small" / "delta")
        assert victim.read_bytes() == was
        shutil.rmtree(served)
