"""Damaged manifests: serving and deltas give the rows of before, or refuse; no other file is touched."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import Plain, bag_configs, save, save_delta, sequence_configs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import serving

# The rows of b begin at a multiple of their width: there are a few unused bytes between the tables.
A = Plain("a", 8).with_random(range(40))
B = Plain("b", 12).with_random(range(-10, 3), seed=1)
AFTER = [A.with_random([1, 50], seed=3).without([7]), B.with_random([2], seed=4)]
IDS = torch.arange(-10, 60)
ABSENT = object()
JUNK = [
    *(ABSENT, None, True, [], [0], {}, {"name": 5}, {"name": "Uniform", "low": 1, "high": 0}),
    *(0, -4, 1, 8, 2**31, 2**63, 2**70, -(2**70), 10**4000, 0.0, 1.5, math.nan, math.inf),
    *("", "x", "user", "nn", "Tensor", "rows-00000000", "current", "lock", "../victim", "\0", "." * 999),
]  # fmt: skip


def rows_of(folder: Path, unseen: str = "zeros") -> torch.Tensor:
    ours = serving.ServingEmbeddingBagCollection(folder, bag_configs(A, B), unseen=unseen)
    lengths = torch.ones(2 * len(IDS)).long()
    return ours(KeyedJaggedTensor(["f_a", "f_b"], IDS.repeat(2), lengths=lengths)).values()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save(folder / "checkpoint", A, B)
    save_delta(folder / "delta", [A, B], AFTER)
    serving.build(folder / "checkpoint", folder / "before")
    shutil.copytree(folder / "before", folder / "after")
    serving.apply_delta(folder / "after", folder / "delta")
    return folder


@pytest.fixture
def served(folder, tmp_path) -> Path:
    (tmp_path / "victim").write_bytes(b"\1" * 4096)
    yield shutil.copytree(folder / "before", tmp_path / "served")
    assert (tmp_path / "victim").read_bytes() == b"\1" * 4096
    assert sorted(path.name for path in tmp_path.iterdir()) == ["served", "victim"]


def manifest_of(served: Path) -> Path:
    return served / (served / "current").read_text().strip() / "manifest.json"


def contents(served: Path) -> dict[str, bytes]:
    files = [path for path in served.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(served)): path.read_bytes() for path in files}


def fields(manifest: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field, whole tables included."""
    for name, value in manifest.items() if isinstance(manifest, dict) else ():
        yield (*path, name)
        yield from fields(value, (*path, name))


def changed(manifest: dict[str, Any], path: tuple[str, ...], value: Any) -> str:
    inside = manifest = json.loads(json.dumps(manifest))
    for name in path[:-1]:
        inside = inside[name]
    if value is ABSENT:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return json.dumps(manifest)


def check(folder: Path, served: Path, what: Any) -> None:
    """Serves and applies a delta: the rows of before, or a ValueError that changes nothing."""
    before, refused = contents(served), []
    try:
        assert torch.equal(rows_of(served), rows_of(folder / "before")), what
    except ValueError as error:
        refused.append(str(error))
    try:
        serving.apply_delta(served, folder / "delta")
        assert torch.equal(rows_of(served), rows_of(folder / "after")), what
        shutil.rmtree(served)
        shutil.copytree(folder / "before", served)
    except ValueError as error:
        refused.append(str(error))
        assert contents(served) == before, what
    for message in refused:
        assert "uild" in message or "embedding_dim" in message, (what, message)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.deep)])
def test_every_field_with_any_value(folder, served, every):
    path = manifest_of(served)
    good = json.loads(path.read_text())
    found = list(fields(good))
    assert len(found) == 5 + 2 * (1 + 9 + 3 + 2)
    for number, field in enumerate(found):
        value = good
        for name in field:
            value = value[name]
        near = []
        if type(value) in (int, float):
            near = [value + 1, value - 1, value + 4, value - 4, 2 * value, -value, float(value)]
        for other in (*JUNK, *near)[number % every :: every]:
            path.write_text(changed(good, field, other))
            check(folder, served, (field, f"{other!r:.40}"))


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"5", b"{", b"\xff", b"[" * 100_000, b'{"format": 1, "tables": []}']
)
def test_a_manifest_that_is_none(served, folder, text):
    manifest_of(served).write_bytes(text)
    with pytest.raises(
        ValueError,
        match=r"a manifest of a format in \(1, 2, 3\), got .* damaged\. Remove the directory, then b",
    ):
        rows_of(served)
    check(folder, served, text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("embedding_dim", 0, r"expected embedding_dim of table 'b' in \[1, 2\^31\), got 0"),
        ("capacity", -4, r"expected capacity of table 'b' in \[0, 2\^63\), got -4"),
        ("capacity", 8, "expected 1152 bytes, got 1408: it is too long"),
        ("first_slot", 0, "expected first_slot 64 of table 'b', after the maps before, got 0"),
        ("num_rows", "x", r"expected num_rows of table 'b' in \[0, 2\^63\), got 'x'"),
        ("seed", 1.5, "expected seed of table 'b' as an integer, got 1.5"),
        ("initializer", 5, "expected initializer of table 'b' with a name and its numbers, got 5"),
        ("trained_as", "nn", r"expected trained_as of table 'b' among \['float32', .*\], got 'nn'"),
        ("sums", {"ids": 1}, r"expected sums of table 'b' of ids and weight, .*, got {'ids': 1}"),
        ("rows", "nn", r"expected rows among \['float32', 'float16', 'int8', 'int4'\], got 'nn'"),
        ("rows_bytes", -1, r"expected rows_bytes in \[0, 2\^63\), got -1"),
        ("rows_bytes", 1903, "expected at least 1904 rows_bytes for the rows of the tables, got"),
        ("rows_file", "rows-00000000", "expected all files of generation 000001-.*got only some"),
        ("tables", {}, "expected at least one table, got {}"),
    ],
)
def test_messages(folder, served, field, value, message):
    path = manifest_of(served)
    good = json.loads(path.read_text())
    where = (field,) if field in good else ("tables", "b", field)
    path.write_text(changed(good, where, value))
    # What the manifest says of other files may be right, and these are damaged.
    is_of_a_file = "too long" in message or "only some" in message
    remedy = "Build it again" if is_of_a_file else "Remove the directory, then build it"
    for call in (rows_of, lambda served: serving.apply_delta(served, folder / "delta")):
        with pytest.raises(
            ValueError,
            match=rf"{message}.*\. {remedy}\.$",
        ):
            call(served)


@pytest.mark.parametrize("name", ["../victim", "{}/victim", "current", "lock", "{0}/served/lock"])
def test_rows_of_another_file_are_neither_read_nor_overwritten(folder, served, name):
    path, before = manifest_of(served), (served / "current").read_bytes()
    path.write_text(
        changed(json.loads(path.read_text()), ("rows_file",), name.format(served.parent))
    )
    (served / "lock").write_bytes(b"\1" * 4096)
    for call in (rows_of, lambda served: serving.apply_delta(served, folder / "delta")):
        with pytest.raises(ValueError, match=r"name of a file inside .*manifest\.json is damaged"):
            call(served)
    assert (served / "lock").read_bytes() == b"\1" * 4096
    assert (served / "current").read_bytes() == before


@pytest.mark.parametrize("field", ["num_rows", "rows_bytes", "slots"])
def test_a_delta_finds_maps_that_are_not_those_of_the_manifest(folder, served, field):
    """Serving reads single slots; a delta reads them all before it writes."""
    path = manifest_of(served)
    good = json.loads(path.read_text())
    message = r"a map of 13 ids of table 'b' to rows in \[0, 40\), got 13 ids and rows up to 49"
    if field == "num_rows":
        path.write_text(changed(good, ("tables", "b", "num_rows"), 12))
        message = "a map of 12 ids of table 'b' .* got 13 ids"
    elif field == "rows_bytes":  # a delta would overwrite the last row
        path.write_text(changed(good, ("rows_bytes",), 1919))
        message = r"to rows in \[0, 39\), got 13 ids and rows up to 39"
    else:
        slots = path.with_name("slots")
        pairs = torch.frombuffer(bytearray(slots.read_bytes()), dtype=torch.int64).view(-1, 2)
        of_b = pairs[good["tables"]["b"]["first_slot"] :]
        of_b[of_b[:, 1].argmax(), 1] = 50
        slots.write_bytes(pairs.numpy().tobytes())
    before = contents(served)
    with pytest.raises(ValueError, match=message + r".*\. It is damaged\. Build it again\."):
        serving.apply_delta(served, folder / "delta")
    assert contents(served) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("row", [-6, 3000, 2**62])
def test_a_lookup_names_the_table_whose_map_has_rows_of_no_file(folder, tmp_path, dtype, row):
    served = tmp_path / "served"
    serving.build(folder / "checkpoint", served, rows=dtype)
    slots = manifest_of(served).with_name("slots")
    pairs = torch.frombuffer(bytearray(slots.read_bytes()), dtype=torch.int64).view(-1, 2)
    first = json.loads(manifest_of(served).read_text())["tables"]["b"]["first_slot"]
    pairs[first + pairs[first:, 1].argmax(), 1] = row + 1
    slots.write_bytes(pairs.numpy().tobytes())
    ids = torch.arange(-10, 3)
    lengths = torch.tensor([0] * len(ids) + [1] * len(ids))
    features = KeyedJaggedTensor(["f_a", "f_b"], ids, lengths=lengths)
    message = rf"\(table='b'\): expected rows in \[0, \d+\) in the id map {slots}, got {row}\. It"
    with pytest.raises(ValueError, match=message) as raised:
        serving.ServingEmbeddingBagCollection(served, bag_configs(A, B))(features)
    assert isinstance(raised.value.__cause__, RuntimeError)  # of the op
    sequences = serving.ServingEmbeddingCollection(served, sequence_configs(B))
    with pytest.raises(ValueError, match=message):
        sequences(KeyedJaggedTensor(["f_b"], ids, lengths=lengths[len(ids) :]))
    sound = KeyedJaggedTensor(["f_a", "f_b"], ids[:0], lengths=lengths[:0])
    serving.ServingEmbeddingBagCollection(served, bag_configs(A, B))(sound)


def test_a_delta_removes_files_of_served_tables_only(folder, served):
    (served / "202501-notes").mkdir()
    for name in ("rows-backup", "202501-notes/text"):
        (served / name).write_text("ours")
    for name in ("000000-0123abcd", "rows-0123abcd"):  # left by a writer that was killed
        (served / name).write_text("")
    serving.apply_delta(served, folder / "delta")
    assert (served / "rows-backup").exists() and (served / "202501-notes/text").exists()
    assert not list(served.glob("*-0123abcd"))


def test_the_name_of_a_table_is_no_path(tmp_path):
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
