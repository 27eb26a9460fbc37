"""The .safetensors format: what we write others read, what is damaged is told, what is torn never shows."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_dyn.tools.safetensors_rows import SafetensorsReader, SafetensorsWriter

IDS = torch.tensor([-(2**63), -1, 0, 2**63 - 1])
ROWS = torch.tensor([[1.5, -2.0, 3.0], [0.0, -0.0, 1e-40], [1e30, 7.0, 8.0], [4.0, 5.0, 6.0]])
TENSORS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "ids": (torch.int64, (4,)),
    "rows": (torch.float32, (4, 3)),
}


def write(path: Path, rows: torch.Tensor = ROWS) -> None:
    tensors = {**TENSORS, "rows": (rows.dtype, tuple(rows.shape))}
    writer = SafetensorsWriter(path, tensors, {"table": "ä"})
    for first, last in ((0, 3), (3, 3), (3, 4)):
        writer.write("ids", IDS[first:last])
        writer.write("rows", rows[first:last])
    writer.finish()
    writer.drop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_written_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path / "f", ROWS.to(dtype))
    reader = SafetensorsReader(tmp_path / "f")
    assert reader.metadata == {"table": "ä"} and list(reader.entries) == ["ids", "rows"]
    assert reader.entries["rows"][:2] == (dtype, (4, 3))
    assert torch.equal(reader.rows("ids", 0, 4), IDS)
    read = torch.cat(
        [reader.rows("rows", 0, 1), reader.rows("rows", 1, 1), reader.rows("rows", 1, 4)]
    )
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), ROWS.to(dtype).view(torch.uint8))  # -0 and all
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_others_read_what_we_write(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    write(tmp_path / "f")
    with safetensors.safe_open(tmp_path / "f", framework="pt") as read:
        assert read.metadata() == {"table": "ä"}
        assert torch.equal(read.get_tensor("ids"), IDS)
        assert torch.equal(read.get_tensor("rows"), ROWS)
    assert int.from_bytes((tmp_path / "f").read_bytes()[:8], "little") % 8 == 0  # numbers aligned


def test_we_read_what_others_write(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    given = {"rows": ROWS.bfloat16(), "ids": IDS, "b": torch.empty(0, 5), "a": torch.tensor(3.0)}
    torch_files.save_file(given, tmp_path / "f")
    reader = SafetensorsReader(tmp_path / "f")
    assert reader.metadata == {} and reader.entries["a"][1] == ()
    for name in ("rows", "ids", "b"):
        assert torch.equal(reader.rows(name, 0, len(given[name])), given[name])


def header(**changes: Any) -> bytes:
    told: dict[str, Any] = {
        "ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "rows": {"dtype": "F32", "shape": [1, 2], "data_offsets": [8, 16]},
    }
    for name, change in changes.items():
        told[name] = {**told.get(name, {}), **change} if isinstance(change, dict) else change
    return json.dumps(told).encode()


def file_of(text: bytes, data: int = 16) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(data)


TEXTS = {
    "no JSON": b"{ids",
    "no UTF-8": b'{"\xff',
    "deep": b"[" * 99_999,
    "long number": b"[" + b"9" * 9999 + b"]",
    "a list": b"[1, 2]",
    "metadata": header(__metadata__={"a": 1}),
    "no tensor": header(ids=3),
    "float size": header(ids={"shape": [1.0]}),
    "bool size": header(ids={"shape": [True]}),
    "negative": header(rows={"shape": [-1, -2]}),
}
DAMAGED = {
    "empty": (b"", "the length of a header that fits, got 0 in a file of 0 bytes"),
    "short": (b"\1\0\0", "the length of a header that fits, got 1 in a file of 3"),
    "long header": (b"\xff" * 8 + b"{}", "a header that fits, got 18446744073709551615"),
    "cut header": (
        (100).to_bytes(8, "little") + b"{}",
        "a header that fits, got 100 in a file of 10",
    ),
    **{name: (file_of(text), "a header that describes ten.*, got") for name, text in TEXTS.items()},
    "three offsets": (file_of(header(ids={"data_offsets": [0, 4, 8]})), r"got \[0, 4, 8\]"),
    "dtype": (
        file_of(header(rows={"dtype": "F64"})),
        "of I64, F32, F16, BF16, got 'rows' of 'F64'",
    ),
    "no dtype": (file_of(header(rows={"dtype": None})), "got 'rows' of None"),
    "list dtype": (file_of(header(rows={"dtype": [1]})), r"got 'rows' of \[1\]"),
    "shape": (
        file_of(header(rows={"shape": [1, 3]})),
        r"\[8, 20\] of 'rows' \[1, 3\], got \[8, 16\]",
    ),
    "a gap": (
        file_of(header(rows={"data_offsets": [9, 17]}), 17),
        r"\[8, 16\] of 'rows' \[1, 2\], got \[9, 17\]",
    ),
    "a longer span": (file_of(header(rows={"data_offsets": [7, 16]})), r"got \[7, 16\]"),
    "an overlap": (file_of(header(rows={"data_offsets": [0, 8]}), 8), "data_offsets"),
    "truncated": (file_of(header(), 15), "a file of .* bytes, as its header says, got"),
    "longer": (file_of(header(), 17), "a file of .* bytes, as its header says, got"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "f").write_bytes(DAMAGED[name][0])
    with pytest.raises(ValueError, match=rf"^{tmp_path}/f: expected .*{DAMAGED[name][1]}"):
        SafetensorsReader(tmp_path / "f")


@given(st.data())
def test_any_change_of_the_header_is_an_error_or_another_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("any") / "f"
    write(path)
    whole = path.read_bytes()
    changed = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    end = 8 + int.from_bytes(whole[:8], "little")
    for place in data.draw(st.lists(st.integers(0, end - 1), max_size=3)):
        if place < len(changed):
            changed[place] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        reader = SafetensorsReader(path)
    except ValueError:
        return
    for name, (_, shape, _) in reader.entries.items():  # whatever it says now, it fits the file
        if shape:
            assert tuple(reader.rows(name, 0, shape[0]).shape) == shape


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "f")
    reader = SafetensorsReader(tmp_path / "f")
    os.truncate(tmp_path / "f", os.path.getsize(tmp_path / "f") - 1)
    assert reader.rows("rows", 0, 3).shape == (3, 3)
    with pytest.raises(ValueError, match="expected 12 bytes of 'rows', got the end of the file"):
        reader.rows("rows", 3, 4)


def test_an_unfinished_file_does_not_show(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"before")
    writer = SafetensorsWriter(tmp_path / "f", TENSORS, {})
    writer.write("ids", IDS)
    with pytest.raises(AssertionError, match=r"48 bytes of .* were not written"):
        writer.finish()
    writer.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"before"
