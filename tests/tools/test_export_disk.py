"""Exports, deltas and pictures on disks that are full, limited or failing: an OSError that names a file."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from another_process import call
from full_disk import (
    FAILED,
    FULL,
    FailingFiles,
    fails_or_succeeds,
    room_left,
    small_disk,
)
from saved_cases import save_dict
from torchrec import EmbeddingBagConfig

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import (
    LoadPlanner,
    apply_delta,
    export_delta,
    export_rows,
    export_saved_rows,
    import_rows,
    mark,
)
from torchrec_dyn.tools.safetensors_rows import SafetensorsWriter
from torchrec_dyn.tools.table_export import ArrowFile

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS = 3000


def collection() -> dyn.DynamicEmbeddingBagCollection:
    config = EmbeddingBagConfig(10_000, 4, "t", feature_names=["f"])
    return dyn.DynamicEmbeddingBagCollection(
        [config], fused_params={"optimizer": "EXACT_SGD", "learning_rate": 0.1}
    )


def filled(rows: int = ROWS) -> dyn.DynamicEmbeddingBagCollection:
    ebc = collection()
    ebc.table("t").assign(torch.arange(rows), torch.arange(4.0 * rows).view(-1, 4))
    return ebc


def save(ebc: dyn.DynamicEmbeddingBagCollection, path: Path) -> None:
    state = {"model": ebc.state_dict(), "optimizer": ebc.fused_optimizer.state_dict()}
    save_dict(state, path)


def load(path: Path) -> dyn.DynamicEmbeddingBagCollection:
    ebc = collection()
    state = {"model": ebc.state_dict(), "optimizer": ebc.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path, planner=LoadPlanner(), no_dist=True)
    ebc.load_state_dict(state["model"])
    ebc.fused_optimizer.load_state_dict(state["optimizer"])
    return ebc


def check_rows(folder: Path, limited, number: int) -> None:
    """Both exports of rows replace a file, or leave it."""
    ebc, done = filled(), []
    save(ebc, folder / "checkpoint")
    inside = folder / "inside"
    inside.mkdir()
    file = inside / "rows"
    for room in range(0, 132 << 10, 12 << 10):
        for export in (
            lambda: export_rows(ebc, "t", file),
            lambda: export_saved_rows(folder / "checkpoint", "t", file, checksum=True),
        ):
            file.write_bytes(b"before")
            with limited(room):
                done.append(fails_or_succeeds(export, number, inside))
            assert os.listdir(inside) == ["rows"]
            if done[-1]:
                assert import_rows(collection(), "t", file) == ROWS
            else:
                assert file.read_bytes() == b"before"
    assert done == sorted(done) and not done[0] and done[-1]


def check_delta(folder: Path, limited, number: int) -> None:
    """A delta that was not exported leaves nothing, and its marker stays valid."""
    ebc = filled(10)
    save(ebc, folder / "full")
    since, done = mark(ebc), []
    ebc.table("t").assign(torch.arange(5, ROWS), torch.ones(ROWS - 5, 4))
    (folder / "empty").mkdir()
    for room in range(0, 160 << 10, 16 << 10):
        for name in ("new", "empty"):
            path = folder / name / "delta" if name == "new" else folder / name
            with limited(room):
                done.append(
                    fails_or_succeeds(lambda: export_delta(ebc, path, since), number, folder)
                )
            if done[-1]:
                copied = load(folder / "full")
                apply_delta(copied, path)
                assert copied.table("t").num_rows == ROWS
                for file in path.iterdir():
                    file.unlink()
                if name == "new":
                    path.rmdir()
            assert not any((folder / "empty").glob("*"))
            assert not (folder / "new" / "delta").exists()
    assert done == sorted(done) and not done[0] and done[-1]


def write_on(disk: Path, check: str) -> None:
    globals()[check](disk, lambda room: room_left(disk, room), FULL)


@pytest.mark.parametrize("check", ["check_rows", "check_delta"])
def test_a_full_disk(tmp_path, check):
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        call(write_on, disk, check)


def test_rows_on_a_disk_that_fails_at_any_call(tmp_path):
    ebc, file, at, done = filled(20), tmp_path / "rows", 0, False
    while not done:
        at += 1
        file.write_bytes(b"before")
        with FailingFiles(tmp_path, at) as files:
            fails_or_succeeds(lambda: export_rows(ebc, "t", file, checksum=True), FAILED, tmp_path)
        done = files.calls < at
        assert os.listdir(tmp_path) == ["rows"]
        if file.read_bytes() != b"before":
            assert import_rows(collection(), "t", file) == 20
    assert at > 8


def test_a_link_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"\1" * 99)
    (tmp_path / "rows.partial").symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic links: '.*\.partial'"):
        export_rows(filled(3), "t", tmp_path / "rows")
    assert victim.read_bytes() == b"\1" * 99 and not (tmp_path / "rows").exists()


def publish_safetensors(path: Path) -> None:
    writer = SafetensorsWriter(path, {"ids": (torch.int64, (1,))}, {})
    writer.write("ids", torch.tensor([1]))
    writer.finish()


def publish_arrow(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    batch = arrow.record_batch({"ids": [1]})
    file = ArrowFile(arrow, path, batch.schema, "arrow")
    file.add(batch)
    file.finish()


@pytest.mark.parametrize("publish", [publish_safetensors, publish_arrow])
def test_a_file_is_locked_until_it_has_its_name(tmp_path, monkeypatch, publish):
    """An unlocked one is taken for one that a killed process left, and removed."""
    replace, seen = os.replace, []

    def is_locked(path):
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def replace_seen(source, to):
        seen.append(is_locked(source))
        replace(source, to)

    monkeypatch.setattr(os, "replace", replace_seen)
    publish(tmp_path / "f")
    assert seen == [True] and os.listdir(tmp_path) == ["f"] and not is_locked(tmp_path / "f")
