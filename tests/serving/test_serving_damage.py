"""Damaged and crafted files of served tables: a verification names them, and no other file is touched."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import Plain, bag_configs, save, save_delta, sequence_configs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import __main__ as command_line
from torchrec_dyn import knobs, serving
from torchrec_dyn.serving.manifest import _digest_of, current_generation, read_manifest

# The rows of b begin at a multiple of their width: there are a few unused bytes between the tables.
A = Plain("a", 64).with_random(range(400))
B = Plain("b", 12).with_random(range(-10, 3), seed=1)
AFTER = [A.with_random(range(300, 500), seed=3).without([7]), B.with_random([2], seed=5)]
IDS = torch.arange(-10, 500)
DTYPES = [torch.float32, torch.float16, torch.int8, torch.int4]


def collection(folder: Path, **options: Any) -> serving.ServingEmbeddingBagCollection:
    return serving.ServingEmbeddingBagCollection(folder, bag_configs(A, B), **options)


def rows_of(ours: serving.ServingEmbeddingBagCollection) -> torch.Tensor:
    lengths = torch.ones(2 * len(IDS)).long()
    return ours(KeyedJaggedTensor(["f_a", "f_b"], IDS.repeat(2), lengths=lengths)).values()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "checkpoint", A, B)
    save_delta(folder / "delta", [A, B], AFTER)
    for dtype in DTYPES:
        serving.build(folder / "checkpoint", folder / str(dtype), rows=dtype)
    return folder


@pytest.fixture
def served(saved: Path, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "victim").write_bytes(b"\1" * 4096)
    yield shutil.copytree(saved / "torch.float32", tmp_path / "served")
    assert (tmp_path / "victim").read_bytes() == b"\1" * 4096
    assert sorted(path.name for path in tmp_path.iterdir()) == ["served", "victim"]


def files_of(served: Path) -> dict[str, Path]:
    """The files of the current generation."""
    name = current_generation(served)
    rows = served / read_manifest(served, name).rows_file
    others = ("slots", "manifest.json", "tensors", "keys")
    return {"rows": rows, **{other: served / name / other for other in others}}


def flip(path: Path, place: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def slots_of(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int64).view(-1, 2)


def contents(served: Path) -> dict[str, bytes]:
    files = [path for path in served.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(served)): path.read_bytes() for path in files}


@pytest.mark.parametrize("is_updated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flipped_bit_of_a_row_or_an_id_is_seen(
    saved: Path, tmp_path: Path, dtype: torch.dtype, is_updated: bool
) -> None:
    """After a build, and after a delta: the message names the file."""
    served, chance = shutil.copytree(saved / str(dtype), tmp_path / "served"), random.Random(0)
    if is_updated:
        serving.apply_delta(served, saved / "delta")
    files = files_of(served)
    assert serving.verify(served) == sum(path.stat().st_size for path in files.values()) - (
        files["manifest.json"].stat().st_size
    )
    manifest = read_manifest(served, current_generation(served))
    slots, width = slots_of(files["slots"]), manifest.widths()["a"]
    of_a = slots[: manifest.tables["a"].capacity]
    for _ in range(6):
        slot = chance.choice(of_a[:, 1].nonzero().view(-1).tolist())
        row = int(slots[slot, 1]) - 1
        for path, place in (
            (files["rows"], row * width + chance.randrange(width)),
            (files["slots"], 16 * slot + chance.randrange(8)),
        ):
            bit = chance.randrange(8)
            flip(path, place, bit)
            with pytest.raises(ValueError, match=rf"^{path}: .*table 'a'.* Build it again\.$"):
                serving.verify(served)
            flip(path, place, bit)
    serving.verify(served)


@pytest.mark.parametrize("what", ["manifest.json", "tensors", "keys"])
def test_a_flipped_bit_of_a_small_file_is_seen(served: Path, what: str) -> None:
    path, chance = files_of(served)[what], random.Random(what)
    for _ in range(12):
        place = chance.randrange(path.stat().st_size)
        flip(path, place)
        with pytest.raises(ValueError, match=rf"^{path}: .*uild"):
            serving.verify(served)
        flip(path, place)
    serving.verify(served)


def test_maps_that_exchange_rows_or_slots_are_seen(served: Path) -> None:
    """The ids and the number of rows are the same then."""
    slots, manifest = files_of(served)["slots"], read_manifest(served, current_generation(served))
    good, of_a = slots_of(slots), slice(manifest.tables["a"].capacity)
    first, second = good[of_a, 1].nonzero().view(-1)[:2].tolist()
    pairs = good.clone()
    pairs[[first, second], 1] = pairs[[second, first], 1]
    slots.write_bytes(pairs.numpy().tobytes())
    with pytest.raises(ValueError, match="rows of table 'a' with content sum"):
        serving.verify(served)
    good[of_a] = good[of_a].flip(0)
    slots.write_bytes(good.numpy().tobytes())
    with pytest.raises(ValueError, match="in slots by the key in the manifest"):
        serving.verify(served)


def test_files_that_are_cut_or_gone(served: Path, tmp_path: Path) -> None:
    for name, path in files_of(served).items():
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2], b""):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="uild"):
                serving.verify(served)
        path.unlink()
        with pytest.raises(ValueError, match="expected all files of generation"):
            serving.verify(served)
        if name in ("rows", "slots"):
            with pytest.raises(ValueError, match="expected all files of generation"):
                collection(served)
        path.write_bytes(whole)
    serving.verify(served)


def test_damage_stays_seen_when_rows_are_moved(
    served: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta does not read the other rows, and takes them to a new file as they are."""
    monkeypatch.setattr(knobs, "WASTE_BYTES", -(1 << 40))
    rows = files_of(served)["rows"]
    flip(rows, rows.read_bytes().find(A.rows[100].numpy().tobytes()))  # not in the delta
    serving.apply_delta(served, saved / "delta")
    assert files_of(served)["rows"] != rows
    with pytest.raises(ValueError, match="rows of table 'a' with content sum"):
        serving.verify(served)


@pytest.mark.parametrize("what", ["number of ids", "row", "id", "manifest.json"])
def test_a_delta_refuses_damaged_maps(served: Path, saved: Path, what: str) -> None:
    files = files_of(served)
    pairs = slots_of(files["slots"])
    taken = pairs[:, 1].nonzero().view(-1)
    if what == "manifest.json":
        flip(files[what], files[what].read_bytes().find(b'"seed": 0') + 8)
    elif what == "number of ids":
        pairs[taken[0], 1] = 0
    elif what == "row":
        pairs[taken[0], 1] = 5000
    else:  # of a row that the delta removes
        pairs[(pairs[:, 0] == 7).nonzero()[0], 0] = 7000
    if what != "manifest.json":
        files["slots"].write_bytes(pairs.numpy().tobytes())
    before = contents(served)
    with pytest.raises(ValueError, match=r"[Bb]uild (it|from)"):
        serving.apply_delta(served, saved / "delta")
    assert contents(served) == before


def test_a_collection_verifies_what_it_serves(served: Path, saved: Path) -> None:
    rows = files_of(served)["rows"]
    flip(rows, 5)
    collection(served)
    with pytest.raises(ValueError, match="rows of table 'a'"):
        collection(served, verify=True)
    with pytest.raises(ValueError, match="rows of table 'a'"):
        serving.ServingEmbeddingCollection(served, sequence_configs(A), verify=True)
    flip(rows, 5)
    ours = collection(served, verify=True)
    old = rows_of(ours)
    serving.apply_delta(served, saved / "delta")
    flip(rows, read_manifest(served, current_generation(served)).rows_bytes - 1)
    with pytest.raises(ValueError, match="rows of table 'b'"):
        ours.refresh()
    assert torch.equal(rows_of(ours), old)


def test_the_command(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["verify", str(served)]) == 0
    assert "bytes read and checked: no damage" in capsys.readouterr().out
    flip(files_of(served)["rows"], 99)
    assert command_line.main(["verify", str(served)]) == 1
    assert "rows of table 'a' with content sum" in capsys.readouterr().err
    (served / "current").unlink()
    assert command_line.main(["verify", str(served)]) == 1
    assert "without the name of a generation" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"", b"[]", b"5", b"{", b"\xff", b"[" * 100_000, b"{}"])
def test_a_manifest_that_is_none(served: Path, saved: Path, text: bytes) -> None:
    files_of(served)["manifest.json"].write_bytes(text)
    for call in (collection, lambda served: serving.apply_delta(served, saved / "delta")):
        with pytest.raises(ValueError, match=r"expected a manifest, got .* Remove the directory, "):
            call(served)


def test_other_formats_are_refused_by_number(served: Path, saved: Path) -> None:
    path = files_of(served)["manifest.json"]
    good = path.read_text()
    for number in (1, 2, 3, 5, "x"):
        path.write_text(good.replace('"format": 4', f'"format": {json.dumps(number)}'))
        for call in (collection, lambda served: serving.apply_delta(served, saved / "delta")):
            with pytest.raises(
                ValueError, match=rf"of format 4, got format {number!r}\. Use the v"
            ):
                call(served)
        with pytest.raises(ValueError, match="got format"):
            serving.Follower(saved, served)


@pytest.mark.parametrize("name", ["../victim", "{}/victim", "current", "lock", "{0}/served/lock"])
def test_crafted_manifests_reach_no_other_file(served: Path, saved: Path, name: str) -> None:
    """Who can write a manifest can write its digest."""
    path, before = files_of(served)["manifest.json"], (served / "current").read_bytes()
    values = json.loads(path.read_text())
    del values["digest"]
    values["rows_file"] = name.format(served.parent)
    path.write_text(json.dumps({**values, "digest": _digest_of(values)}))
    (served / "lock").write_bytes(b"\1" * 4096)
    for call in (collection, lambda served: serving.apply_delta(served, saved / "delta")):
        with pytest.raises(ValueError, match=r"name of a file inside .*manifest\.json is damaged"):
            call(served)
    assert (served / "lock").read_bytes() == b"\1" * 4096
    assert (served / "current").read_bytes() == before


def test_current_leads_to_no_other_directory(served: Path, tmp_path: Path) -> None:
    for text in ("../victim", str(tmp_path / "victim"), "", "\0"):
        (served / "current").write_text(text)
        with pytest.raises(ValueError, match="without the name of a generation"):
            collection(served)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("row", [-6, 30_000, 2**62])
def test_rows_of_no_file_are_not_read(
    saved: Path, tmp_path: Path, dtype: torch.dtype, row: int
) -> None:
    served = shutil.copytree(saved / str(dtype), tmp_path / "served")
    slots = files_of(served)["slots"]
    pairs = slots_of(slots)
    pairs[pairs[:, 1].nonzero().view(-1), 1] = row + 1
    slots.write_bytes(pairs.numpy().tobytes())
    with pytest.raises(RuntimeError):
        rows_of(collection(served))


def test_a_delta_removes_files_of_served_tables_only(served: Path, saved: Path) -> None:
    (served / "202501-notes").mkdir()
    for name in ("rows-backup", "202501-notes/text"):
        (served / name).write_text("ours")
    for name in ("000000-0123abcd", "rows-0123abcd"):  # left by a writer that was killed
        (served / name).write_text("")
    serving.apply_delta(served, saved / "delta")
    assert (served / "rows-backup").exists() and (served / "202501-notes/text").exists()
    assert not list(served.glob("*-0123abcd"))


def test_the_name_of_a_table_is_no_path(tmp_path: Path) -> None:
    name = str(tmp_path / "outside")
    table = Plain(name, 4).with_random(range(5))
    save(tmp_path / "checkpoint", table)
    after = table.with_random([1, 7], seed=1)
    save_delta(tmp_path / "delta", [table], [after])
    serving.build(tmp_path / "checkpoint", tmp_path / "served")
    serving.apply_delta(tmp_path / "served", tmp_path / "delta")
    ours = serving.ServingEmbeddingBagCollection(
        tmp_path / "served", bag_configs(table), unseen="initial"
    )
    ids = torch.tensor(list(after.rows))
    found = ours(KeyedJaggedTensor([f"f_{name}"], ids, lengths=torch.ones(len(ids)).long()))
    assert torch.equal(found.values(), torch.stack(list(after.rows.values())))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "delta", "served"]
