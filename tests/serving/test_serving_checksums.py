"""Checksums of served files: every flipped bit is seen by a verification, and by a delta that reads it."""

import json
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from serving_cases import Plain, bag_configs, save, save_delta, sequence_configs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import __main__ as command_line
from torchrec_dyn import serving
from torchrec_dyn.checkpoint_format import SUMMED_BYTES, pace, sums_of
from torchrec_dyn.serving import update as serving_update
from torchrec_dyn.serving import verification
from torchrec_dyn.serving.checksums import CHECKSUMS, read_checksums
from torchrec_dyn.serving.manifest import LostManifest, current_generation, read_manifest

# 1.3 MB of rows: two chunks.
A = Plain("a", 64).with_random(range(5000))
B = Plain("b", 3).with_random(range(5), seed=1)
AFTER = [A.with_random(range(4000, 6000), seed=3).without([7]), B.with_random([2], seed=5)]
LAST = [AFTER[0].with_random([1], seed=4), AFTER[1]]
NOTE = (
    r"expected checksums.* Run `python -m torchrec_dyn verify --add .*/served`, or build it again\."
)

AGAIN = r"\. Build it again\.$"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "checkpoint", A, B)
    save_delta(folder / "delta", [A, B], AFTER)
    save_delta(folder / "delta2", AFTER, LAST)
    serving.build(folder / "checkpoint", folder / "before")
    serving.build(folder / "checkpoint", folder / "int8", rows=torch.int8)
    return folder


@pytest.fixture
def served(saved, tmp_path) -> Path:
    return shutil.copytree(saved / "before", tmp_path / "served")


def collection(folder: Path, **options) -> serving.ServingEmbeddingBagCollection:
    return serving.ServingEmbeddingBagCollection(folder, bag_configs(A, B), **options)


def rows_of(ours: serving.ServingEmbeddingBagCollection) -> torch.Tensor:
    ids = torch.arange(6000).repeat(2)
    features = KeyedJaggedTensor(["f_a", "f_b"], ids, lengths=torch.ones(len(ids)).long())
    return ours(features).values()


def files_of(served: Path) -> dict[str, Path]:
    """The files of the current generation."""
    name = current_generation(served)
    return {
        "rows": served / read_manifest(served, name).rows_file,
        "slots": served / name / "slots",
        "manifest": served / name / "manifest.json",
        "checksums": served / name / CHECKSUMS,
    }


def flip(path: Path, place: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def remedy(served: Path) -> str:
    """Returns the remedy in the error of a damaged file: `build_again` needs a manifest that can be read."""
    try:
        read_manifest(served, current_generation(served))
    except LostManifest:
        return r"\. Remove the directory, then build it\.$"
    return AGAIN


def contents(served: Path) -> dict[str, bytes]:
    """The bytes of all files, without those behind the rows in use."""
    used = read_manifest(served, current_generation(served)).rows_bytes
    return {
        str(path.relative_to(served)): path.read_bytes()[: used if "rows" in path.name else None]
        for path in served.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def without_checksums(served: Path) -> Path:
    """Makes the directory one of an older version."""
    files_of(served)["checksums"].unlink()
    return served


def test_sums_are_those_of_the_files(served, saved):
    """After a build, after deltas that append to chunks, and after all rows were rewritten."""
    for delta in (None, "delta", "delta2"):
        if delta is not None:
            serving.apply_delta(served, saved / delta)
        files = files_of(served)
        manifest = read_manifest(served, current_generation(served))
        found = read_checksums(files["slots"].parent, manifest.rows_file)
        for path in (files["rows"], files["slots"], files["manifest"]):
            blob = path.read_bytes()[: manifest.rows_bytes if path == files["rows"] else None]
            assert found.files[path.name] == sums_of(
                torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            ), path
        assert serving.verify(served) == sum(one.bytes for one in found.files.values())
    assert len(found.files[manifest.rows_file].sums) == 2


def test_rewritten_rows_have_sums(served, saved, monkeypatch):
    before = files_of(served)["rows"].name
    monkeypatch.setattr(serving_update, "_WASTE_BYTES", -(1 << 40))
    serving.apply_delta(served, saved / "delta")
    assert files_of(served)["rows"].name != before
    assert serving.verify(served) > 0


@pytest.mark.parametrize("what", ["rows", "slots", "manifest", "checksums"])
def test_every_flipped_bit_is_seen(served, what):
    path, chance = files_of(served)[what], random.Random(what)
    size = path.stat().st_size
    if what == "rows":
        size = read_manifest(served, current_generation(served)).rows_bytes
    places = [0, size - 1, *(chance.randrange(size) for _ in range(12))]
    for place in places:
        bit = chance.randrange(8)
        flip(path, place, bit)
        expected = remedy(served) if what == "manifest" else AGAIN
        with pytest.raises(ValueError, match=expected) as raised:
            serving.verify(served)
        if what in ("rows", "slots"):
            first = place // SUMMED_BYTES * SUMMED_BYTES
            last = min(first + SUMMED_BYTES, size) - 1
            where = rf"^{path}: expected the checksum \w+ of bytes {first} to {last}, got"
            assert raised.match(where), place
        flip(path, place, bit)
    assert serving.verify(served) > 0


def test_files_that_are_cut_or_exchanged(served, saved, tmp_path):
    files = files_of(served)
    others = files_of(saved / "int8")
    for name in ("rows", "slots", "manifest"):
        whole = files[name].read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2], b"", others[name].read_bytes()):
            files[name].write_bytes(damaged)
            expected = remedy(served) if name == "manifest" else AGAIN
            with pytest.raises(ValueError, match=expected):
                serving.verify(served)
        for end in (b" ", b"\0"):
            files[name].write_bytes(whole + end)
            if name != "rows":  # bytes after the last row are of a delta that was not finished
                expected = remedy(served) if name == "manifest" else AGAIN
                with pytest.raises(ValueError, match=expected):
                    serving.verify(served)
        files[name].write_bytes(whole)
    files["slots"].rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"got only some\. Build it again\.$"):
        serving.verify(served)
    files["slots"].symlink_to(tmp_path / "moved")  # the same bytes at another place
    assert serving.verify(served) > 0
    files["slots"].unlink()
    serving.build_again(served, saved / "checkpoint")
    assert serving.verify(served) > 0
    files_of(served)["manifest"].unlink()
    with pytest.raises(
        LostManifest, match=r"got only some\. Remove the directory, then build it\.$"
    ):
        serving.verify(served)


@pytest.mark.parametrize("what", ["read rows", "slots", "manifest", "checksums"])
def test_a_delta_refuses_what_it_reads_damaged(served, saved, what):
    files = files_of(served)
    if what == "read rows":
        row = A.rows[4500].numpy().tobytes()
        flip(files["rows"], files["rows"].read_bytes().find(row) + 3)
    elif what == "slots":  # the id of an unused slot: no count and no row number shows it
        pairs = torch.frombuffer(bytearray(files["slots"].read_bytes()), dtype=torch.int64)
        flip(files["slots"], 16 * int((pairs.view(-1, 2)[:, 1] == 0).nonzero()[0]))
    elif what == "manifest":
        blob = files["manifest"].read_bytes()
        flip(files["manifest"], blob.find(b'"seed": 0') + 8)
    else:
        flip(files["checksums"], files["checksums"].read_bytes().find(b'"sums": [') + 10)
    before = contents(served)
    with pytest.raises(ValueError, match=r"checksum.*\. It is damaged\. Build it again\."):
        serving.apply_delta(served, saved / "delta")
    assert contents(served) == before


def test_rows_are_checked_before_they_are_rewritten(served, saved, monkeypatch):
    monkeypatch.setattr(serving_update, "_WASTE_BYTES", -(1 << 40))
    files = files_of(served)
    row = A.rows[100].numpy().tobytes()  # not in the delta
    flip(files["rows"], files["rows"].read_bytes().find(row))
    before = contents(served)
    with pytest.raises(ValueError, match=r"rows-\w+: expected the checksum"):
        serving.apply_delta(served, saved / "delta")
    assert contents(served) == before


def test_a_delta_hands_damage_of_other_rows_on(served, saved):
    rows = files_of(served)["rows"]
    flip(rows, rows.read_bytes().find(A.rows[100].numpy().tobytes()))
    serving.apply_delta(served, saved / "delta")
    with pytest.raises(
        ValueError, match=rf"{rows}: expected the checksum \w+ of bytes 0 to 1048575"
    ):
        serving.verify(served)


def test_a_collection_verifies_what_it_serves(served, saved, monkeypatch):
    rows = files_of(served)["rows"]
    flip(rows, 5)
    collection(served)
    with pytest.raises(ValueError, match="of bytes 0 to 1048575, got"):
        collection(served, verify=True)
    with pytest.raises(ValueError, match="of bytes 0 to 1048575, got"):
        serving.ServingEmbeddingCollection(served, sequence_configs(A), verify=True)
    flip(rows, 5)
    ours = collection(served, verify=True)
    old, read = rows_of(ours), []
    real = verification._read_into
    monkeypatch.setattr(
        verification, "_read_into", lambda *args: (read.append(args[2:4]), real(*args))
    )
    serving.apply_delta(served, saved / "delta")
    flip(rows, 1_700_000)  # in an appended row
    with pytest.raises(ValueError, match="of bytes 1048576 to"):
        ours.refresh()
    assert torch.equal(rows_of(ours), old)
    flip(rows, 1_700_000)
    read.clear()
    assert ours.refresh() and not torch.equal(rows_of(ours), old)
    assert [place for path, place in read if path == rows] == [SUMMED_BYTES]  # not the first again


def test_the_note_of_an_older_directory(served, saved):
    without_checksums(served)
    with pytest.warns(UserWarning, match=NOTE):
        ours = collection(served)
    for call in (lambda: serving.verify(served), lambda: collection(served, verify=True)):
        with pytest.raises(ValueError, match=NOTE):
            call()
    with pytest.warns(UserWarning, match=NOTE):
        serving.apply_delta(served, saved / "delta")
    assert not files_of(served)["checksums"].exists()
    with pytest.warns(UserWarning, match=NOTE):
        assert ours.refresh()
    serving.add_checksums(served)
    assert serving.verify(served) > 0
    serving.apply_delta(served, saved / "delta2")
    collection(served, verify=True)


@pytest.mark.parametrize("what", ["rows", "ids", "slots"])
def test_checksums_are_not_added_to_damaged_tables(served, what):
    files = files_of(without_checksums(served))
    pairs = torch.frombuffer(bytearray(files["slots"].read_bytes()), dtype=torch.int64).view(-1, 2)
    taken = int(pairs[:, 1].nonzero()[0])
    if what == "rows":
        flip(files["rows"], 64 * 4 * 30)
    elif what == "ids":
        flip(files["slots"], 16 * taken + 4)
    else:  # two ids have exchanged their rows
        other = int(pairs[:, 1].nonzero()[1])
        pairs[[taken, other], 1] = pairs[[other, taken], 1]
        files["slots"].write_bytes(pairs.numpy().tobytes())
    with pytest.raises(
        ValueError, match=r"expected (ids|weight) of table 'a' with content sum|by the key in"
    ):
        serving.add_checksums(served)
    assert not files["checksums"].exists()


def test_rounded_rows_of_an_older_directory_are_taken_as_they_are(saved, tmp_path):
    served = without_checksums(shutil.copytree(saved / "int8", tmp_path / "served"))
    flip(files_of(served)["rows"], 70)
    serving.add_checksums(served)
    assert serving.verify(served) > 0


def test_a_verification_beside_deltas(served, saved, monkeypatch):
    """Its files are removed by two deltas while it reads them."""
    waits, first = [], current_generation(served)

    def wait(self, size):
        waits.append(size)
        if len(waits) < 3:
            serving.apply_delta(served, saved / ("delta", "delta2")[len(waits) - 1])

    monkeypatch.setattr(pace.Pace, "wait", wait)
    assert serving.verify(served) == sum(waits)
    assert not (served / first).exists()


def test_the_rate_of_a_verification(served, monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pace.time, "sleep", sleep)
    size = serving.verify(served, bytes_per_second=1 << 20)
    assert size / (1 << 20) - 1 < sum(slept) < size / (1 << 20)
    now[0] += 1000  # a pause: what was not read then is not made up for
    one, before = pace.Pace(100), len(slept)
    one.wait(50)
    now[0] += 1000
    one.wait(50)
    one.wait(50)
    assert slept[before:] == [0.5]
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=r"verify\.bytes_per_second: expected a number above 0"
        ):
            serving.verify(served, bytes_per_second=wrong)


def test_a_verification_in_a_thread(served):
    ours, found = collection(served), []
    thread = threading.Thread(target=lambda: found.append(serving.verify(served, 1e9)))
    thread.start()
    rows_of(ours)
    thread.join()
    assert found and found[0] > 1_300_000


class Disk:
    """A file of which reads are short, and that fails at its third read."""

    def __init__(self) -> None:
        self.reads = 0

    def seek(self, place: int) -> None:
        pass

    def readinto(self, data: memoryview) -> int:
        self.reads += 1
        if self.reads == 3:
            raise OSError(5, "Input/output error")
        data[:2] = b"ab"
        return 2


def test_reads_that_are_short_or_fail(tmp_path):
    chunk = torch.full((SUMMED_BYTES,), 7, dtype=torch.uint8)
    verification._read_into(chunk, Disk(), tmp_path / "f", 0, 4)
    assert bytes(chunk[:5].tolist()) == b"abab\0" and not chunk[4:].any()
    with pytest.raises(OSError, match=f"error: '{tmp_path}/f'"):
        verification._read_into(chunk, Disk(), tmp_path / "f", 0, 6)


def test_the_command(served, saved, capsys):
    assert command_line.main(["verify", str(served)]) == 0
    assert "bytes read and checked: no damage" in capsys.readouterr().out
    flip(files_of(served)["rows"], 99)
    assert command_line.main(["verify", str(served), "--rate", "1_000_000_000"]) == 1
    assert "expected the checksum" in capsys.readouterr().err
    flip(files_of(served)["rows"], 99)
    without_checksums(served)
    assert command_line.main(["verify", str(served)]) == 1
    assert "verify --add" in capsys.readouterr().err
    assert command_line.main(["verify", "--add", str(served)]) == 0
    assert command_line.main(["verify", "--add", str(served)]) == 0  # has them already
    assert command_line.main(["verify", str(served)]) == 0
    (served / "current").unlink()
    assert command_line.main(["verify", str(served)]) == 1
    assert "without the name of a generation" in capsys.readouterr().err
    assert command_line.main(["verify", "--add", str(saved / "checkpoint")]) == 1
    assert "expected a directory of served tables" in capsys.readouterr().err


def test_damaged_lists_of_sums(served):
    path = files_of(served)["checksums"]
    good = json.loads(path.read_text())
    rows_file = files_of(served)["rows"].name
    wrong = [
        b"", b"[]", b"{", b"[" * 100_000,
        *(json.dumps({**good, **change}).encode() for change in (
            {"format": 2}, {"chunk_bytes": 1}, {"files": {}}, {"files": 5},
            {"files": {**good["files"], "slots": {"bytes": 5, "sums": []}}},
            {"files": {**good["files"], "slots": {"bytes": -1, "sums": []}}},
            {"files": {**good["files"], "slots": {"bytes": "x", "sums": [1]}}},
            {"files": {**good["files"], rows_file: {"bytes": 5, "sums": ["1"]}}},
            {"files": {**good["files"], "more": {"bytes": 0, "sums": []}}},
        )),
    ]  # fmt: skip
    for text in wrong:
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"expected the checksums of .* Build it again\."):
            serving.verify(served)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rows_file_that_lacks_rows_is_not_filled_with_zeros(served, is_there):
    rows = files_of(served)["rows"]
    os.truncate(rows, rows.stat().st_size // 2) if is_there else rows.unlink()
    with pytest.raises((ValueError, FileNotFoundError)):
        serving.add_checksums(served)
    assert rows.exists() == is_there
    with pytest.raises((ValueError, FileNotFoundError)):
        collection(served)
