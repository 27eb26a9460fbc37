"""`Checkpoints.forget`: ids are erased from the model and the directory; the report says where they were."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from checkpoint_cases import EXTREME_IDS, LAST_IDS, Setup, contents, differences, held
from checkpoint_jobs import TWO, Job, names

from torchrec_dyn.checkpoint import checkpoints
from torchrec_dyn.checkpoint.forgetting import ids_in_entry
from torchrec_dyn.checkpoint_format import read_chain
from torchrec_dyn.whole_model import tables_of

# The last table counts occurrences of ids that wait for a row.
FOUR = Setup(0, tables=4, optimizer="ADAM")


def bytes_of(folder: Path) -> bytes:
    return b"".join(one.read_bytes() for one in folder.rglob("*") if one.is_file())


def test_ids_are_gone_and_the_report_says_where_they_were(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    job = Job(kept, FOUR, keep=9, full_every=2)
    for _ in range(3):
        job.save()
    job.restore(step=1)  # and a branch
    job.save()
    saved = {entry.path.name: contents(entry.tables) for entry in read_chain(kept).entries}
    prefix = next(name for name in saved["full-00000001"] if name.endswith("counted.waiting"))
    waiting = saved["full-00000003"][prefix][:, 0]
    ids = saved["full-00000001"][prefix.replace("counted.waiting", "plain.ids")]
    absent = 12345678
    of_all = [*LAST_IDS, *EXTREME_IDS]
    wanted = {name: torch.tensor(of_all) for name in ("sixteen", "brain")}
    wanted["plain"] = torch.tensor([*of_all, int(ids[0]), absent, int(ids[1]), int(ids[0])])
    wanted["counted"] = torch.cat([waiting[:1], wanted["brain"]])
    written = [one.to_bytes(8, "little", signed=True) for one in LAST_IDS]
    assert any(one in bytes_of(kept) for one in written)
    index = kept / "delta-00000002" / "changes" / ".metadata"
    index.write_bytes(index.read_bytes()[:-9])  # a flipped bit may be one of the path of the save
    (kept / "delta-00000099").mkdir()
    job.restore(step=2)
    told = job.forget(wanted)
    assert names(kept) == [told.entry.path.name] and told.entry.is_full
    assert sorted(path.name for path in told.removed) == sorted([*saved, "delta-00000099"])
    assert told.places["plain"][absent] == []
    first = told.places["plain"][int(ids[0])]
    assert first[:2] == ["the model", "full-00000001"] and "full-00000003" in first
    assert told.places["counted"][int(waiting[0])][-1] in saved
    assert "delta-00000002: " in told.unread[0] and "not searched, removed: delta" in str(told)
    assert f"plain {absent}: was in nothing; is gone" in str(told)
    left = contents(told.entry.tables)
    assert not torch.isin(
        left[prefix.replace("counted.waiting", "plain.ids")], wanted["plain"]
    ).any()
    assert not torch.isin(left[prefix][:, 0], wanted["counted"]).any()
    assert not any(one in bytes_of(kept) for one in written)
    assert job.restore().extra == {"next": told.entry.step}  # the job goes on
    assert job.save().kind == "delta"
    job.checkpoints.close()


def test_an_entry_that_only_names_a_removed_id_has_it(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept", full_every=9)
    job.save()
    number = int(held(job.model)["plain from 0: ids"][0])
    (table,) = tables_of(job.model, "here")
    table.erase(torch.tensor([number]))
    delta = job.save(is_trained=False)
    told = job.forget({"plain": torch.tensor([number])})
    assert told.places["plain"][number] == ["full-00000001", delta.path.name]
    job.checkpoints.close()


def forget_on_two(path: str) -> Any:
    job = Job(path, TWO, full_every=3)
    for _ in range(2):
        job.save()
    ids = torch.tensor([[100, 101], [102, 103]][dist.get_rank()])
    told = job.forget({"plain": ids})
    job.checkpoints.close()
    return told.places, told.entry.path.name


def test_each_rank_names_its_own(tmp_path: Path) -> None:
    one, other = workers.run(forget_on_two, str(tmp_path / "kept"), world_size=2)
    assert one == other and names(tmp_path / "kept") == [one[1]]
    assert set(one[0]["plain"]) == {100, 101, 102, 103}
    assert any("the model" in places for places in one[0]["plain"].values())
    (entry,) = read_chain(tmp_path / "kept").entries
    assert ids_in_entry(entry, {"plain": torch.tensor([100, 101, 102, 103])}) == {"plain": set()}


def test_a_file_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    """The save removes old entries, too; what it cannot remove is no entry any more."""
    kept, real = tmp_path / "kept", os.unlink
    job = Job(kept, keep=1)
    job.save()
    one = int(held(job.model)["plain from 0: ids"][0])
    ids = {"plain": torch.tensor([one])}

    def busy(path: Any, *args: Any, **options: Any) -> None:
        if str(path).endswith(".distcp"):
            raise OSError(16, "Device or resource busy", path)
        real(path, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", busy)
        with pytest.raises(OSError, match="Device or resource busy"):
            job.forget(ids)
    assert one.to_bytes(8, "little", signed=True) in bytes_of(kept)
    told = job.forget(ids)
    assert names(kept) == [told.entry.path.name]
    assert [path.name for path in told.removed] == ["full-00000002", "full-00000001"]
    job.checkpoints.close()


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "kept")
    job.save()
    ids = torch.tensor([int(held(job.model)["plain from 0: ids"][0])])
    rows = job.checkpoints.latest().sums
    with pytest.raises(ValueError, match=r"expected tables among \['plain'\], got 'user'"):
        job.forget({"user": torch.tensor([1])})
    with pytest.raises(ValueError, match=r"expected ids \[M\] of int64, got \[1\] of torch.int32"):
        job.forget({"plain": torch.tensor([1], dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"expected ids as a tensor, got list"):
        job.forget({"plain": [1]})
    assert job.save(is_trained=False).sums == rows  # nothing has changed
    other = Job(tmp_path / "kept")
    other.train()
    job.checkpoints.close()
    held_before = held(other.model)
    with pytest.raises(
        ValueError, match="expected to write after save 0, got a directory with save"
    ):
        other.forget({"plain": ids})
    assert not differences(held(other.model), held_before)
    other.checkpoints.close()
    job.restore()
    monkeypatch.setattr(checkpoints, "erase", lambda *_: None)
    with pytest.raises(
        RuntimeError, match=r"expected ids that are gone, got {'plain': {.*}} in the mo"
    ):
        job.forget({"plain": ids})
    job.checkpoints.close()
