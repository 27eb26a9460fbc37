"""The directory of `Checkpoints`: three states of a folder, what is kept, and the flags of entries."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_jobs import Job, failing, names
from hypothesis import example, given
from hypothesis import strategies as st

from torchrec_dyn.checkpoint_format import Entry, entries, outdated, read_chain


def entry(sequence: int, is_full: bool, parent: int | None, **flags: Any) -> Entry:
    kind = "full" if is_full else "delta"
    return Entry(
        Path(f"{kind}-{sequence:08}"), kind, sequence, str(sequence),
        None if parent is None else str(parent), "1", sequence, 0.0, 1, {}, {}, "", {}, {}, **flags
    )  # fmt: skip


@st.composite
def directories(draw: st.DrawFn) -> list[Entry]:
    """Entries of which deltas continue any earlier one, as after a restore of an older step."""
    entries: list[Entry] = []
    for sequence in range(1, draw(st.integers(1, 12)) + 1):
        parent = draw(st.sampled_from(entries)) if entries else None
        is_full = parent is None or draw(st.booleans())
        restored_at = draw(st.sampled_from([None, None, None, *range(sequence, 13)]))
        flags = {
            "has_failed": draw(st.sampled_from([False, False, True])),
            "restored_at": restored_at,
        }
        entries.append(entry(sequence, is_full, parent and parent.sequence, **flags))
    return entries


def line(entries: list[Entry], last: Entry) -> list[Entry]:
    by_id = {one.id: one for one in entries}
    return [last] if last.is_full else [*line(entries, by_id[last.parent or ""]), last]


@given(directories(), st.integers(1, 4))
@example([entry(1, True, None), entry(2, True, None, has_failed=True), entry(3, True, None)], 2)
def test_what_is_kept(entries: list[Entry], keep: int) -> None:
    removed = outdated(entries, keep)
    kept = [one for one in entries if one not in removed]
    counted = [one.sequence for one in entries if one.is_full and not one.has_failed]
    assert [one.sequence for one in removed] == sorted((r.sequence for r in removed), reverse=True)
    assert {*counted[-keep:]} <= {one.sequence for one in kept} and entries[-1] in kept
    for one in kept:
        assert all(before in kept for before in line(entries, one))
    for one in entries:
        if one.has_failed and len([c for c in counted if c > one.sequence]) < keep:
            assert not removed
        if one.restored_at and len([c for c in counted if c > one.restored_at]) < keep:
            assert one in kept
    # Nothing stays without a reason: it is recent, flagged, the newest, or leads to one that is.
    recent = counted[-keep] if len(counted) >= keep else 0
    for one in kept if removed else ():
        leads_to = [other for other in kept if one in line(entries, other)]
        assert any(
            other.sequence >= recent or (other.restored_at or 0) >= recent or other is entries[-1]
            for other in leads_to
        )
    assert outdated(kept, keep) == [] or any(one.has_failed for one in entries)


def test_a_chain_of_thousands_is_judged_in_one_pass() -> None:
    entries = [entry(n, n == 1, n - 1 or None) for n in range(1, 30_000)]
    assert outdated(entries, 1) == []


def test_an_unfinished_save_is_cleared_away(tmp_path: Path) -> None:
    """And nobody sees it before."""
    kept = tmp_path / "kept"
    job = Job(kept, keep=9)
    job.save()
    for name in ("full-00000002", "delta-00000007"):
        (kept / name / "state").mkdir(parents=True)
        (kept / name / "state" / "__0_0.distcp").touch()
    chain = read_chain(kept)
    assert [one.sequence for one in chain.entries] == [1] == [chain.highest]
    assert len(chain.unfinished) == 2 and not chain.skipped
    assert job.restore().step == 1
    assert job.save().path.name == "full-00000002"
    assert names(kept) == ["full-00000001", "full-00000002"]
    job.checkpoints.close()


def foreign(folder: Path) -> None:
    folder.mkdir()
    (folder.parent / "commits" / "00000002").write_text('{"format": 99}')


def of_format_2(folder: Path) -> None:
    folder.mkdir()
    (folder / "entry.json").write_text('{"format": 2, "kind": "full"}')


def changed(folder: Path) -> None:
    commits = folder.parent / "commits"
    values = json.loads((commits / "00000001").read_text())
    folder.mkdir()
    (commits / "00000002").write_text(json.dumps({**values, "step": 99}))


def moved(folder: Path) -> None:
    """An entry with the name of another."""
    folder.mkdir()
    commits = folder.parent / "commits"
    (commits / "00000002").write_text((commits / "00000001").read_text())


def torn(folder: Path) -> None:
    folder.mkdir()
    (folder.parent / "commits" / "00000002").write_text('{"form')


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (foreign, "expected format 3, got 99. Read it with the version"),
        (of_format_2, "expected format 3, got an older one. Read it with the version"),
        (changed, "expected a commit with digest"),
        (moved, "expected a commit with digest"),
        (torn, "Unterminated string"),
    ],
)
def test_what_cannot_be_judged_stays_and_is_named(make: Any, reason: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    job = Job(kept, keep=1)
    job.save()
    make(kept / "full-00000002")
    (skipped,) = read_chain(kept).skipped
    assert skipped.startswith("full-00000002: ") and reason in skipped
    with pytest.raises(ValueError, match=r"full-00000002: .*newest before it is full-00000001: ca"):
        job.restore()
    with pytest.raises(ValueError, match="expected to write after a restore"):
        job.save()
    restored = job.restore(on_damage="previous")
    assert restored.step == 1 and restored.skipped == [skipped]
    for _ in range(2):
        job.save()
    assert names(kept) == ["full-00000002", "full-00000004"]
    assert job.restore().step == 3  # it is older than the newest entry
    with pytest.raises(ValueError, match=r"forget: expected folders that can be read"):
        job.forget({})
    job.checkpoints.close()


def test_a_read_error_is_no_judgement(tmp_path: Path) -> None:
    """Of a disk that fails for a moment: the entry is not removed, and none is loaded instead."""
    kept = tmp_path / "kept"
    job = Job(kept, keep=1)
    for _ in range(2):
        job.save()
    error = OSError(errno.EIO, os.strerror(errno.EIO), "f")
    with failing(Path, "read_bytes", 1, error), pytest.raises(ValueError, match="Input/output"):
        job.restore()
    assert names(kept) == ["full-00000002"] and job.restore().step == 2
    job.checkpoints.close()


def test_flags_are_in_the_directory(tmp_path: Path) -> None:
    """What failed to load is not counted, also by the next process; what was restored stays."""
    kept = tmp_path / "kept"
    job = Job(kept, keep=2)
    for _ in range(2):
        job.save()
    job.checkpoints.close()
    file = kept / "full-00000002" / "extra-0.pt"
    content = file.read_bytes()
    file.write_bytes(b"PK")
    assert Job(kept).restore(on_damage="previous").step == 1
    first, second = read_chain(kept).entries
    assert (first.restored_at, second.has_failed) == (2, True)
    job = Job(kept, keep=2)
    job.restore(step=1)
    job.step = 6
    job.save()
    assert names(kept) == ["full-00000001", "full-00000002", "full-00000003"]
    file.write_bytes(content)
    assert Job(kept).restore(step=2).step == 2
    assert not read_chain(kept).entries[1].has_failed
    job.save()
    assert names(kept) == ["full-00000002", "full-00000003", "full-00000004"]  # restored at 3
    job.save()
    assert names(kept) == ["full-00000004", "full-00000005"]
    job.checkpoints.close()


def test_a_directory_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    job = Job(tmp_path / "kept")
    job.save()
    job.checkpoints.close()
    denied = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with failing(entries, "write_file", 1, denied):
        assert Job(tmp_path / "kept").restore().step == 1
