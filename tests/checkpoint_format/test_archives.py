"""The numbers of an archive of torch.save are found without a load, or not at all."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly

from torchrec_dyn.checkpoint_format import ChunkedTensor
from torchrec_dyn.checkpoint_format.archives import END_BYTES, find_numbers


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def found(blob: bytes) -> Any:
    return find_numbers(blob[:END_BYTES], blob[-END_BYTES:], len(blob))


@pytest.mark.parametrize("rows", [1, 3, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_numbers_are_where_torch_reads_them(rows: int, dtype: torch.dtype) -> None:
    value = torch.arange(rows * 7).view(rows, 7).to(dtype)
    blob = saved(value)
    numbers = found(blob)
    here = blob[numbers.at : numbers.at + numbers.size]
    assert torch.frombuffer(bytearray(here), dtype=dtype).view(rows, 7).equal(value)
    # Equal descriptions: shape, strides, dtype and first number are equal, and nothing else is told.
    assert found(saved(value + 1)).description == numbers.description
    others = (value.t(), value[:, 1:], value.view(-1), value.to(torch.float64))
    assert all(found(saved(other)).description != numbers.description for other in others)


def test_what_is_not_as_expected_is_not_found() -> None:
    value = torch.rand(100, 4)
    blob = saved(value)
    assert found(saved({"two": value, "tensors": value.clone()})) is None
    assert found(blob[:-30]) is None and found(b"") is None and found(b"PK\5\6") is None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:  # only the numbers are packed
        archive.writestr("archive/data.pkl", bytes(100))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", random.randbytes(500) + bytes(500), zipfile.ZIP_DEFLATED)
        # So long that the numbers would end inside.
        archive.writestr("archive/version", bytes(1000))
    assert found(packed.getvalue()) is None
    assert found(blob.replace(b"little", b"bigger")) is None


def test_rows_of_archives_with_equal_and_other_descriptions(tmp_path: Path) -> None:
    """Equal shapes are read by one description, views and other shapes by their own."""
    whole = torch.arange(60.0).view(10, 6)
    state = {f"t{i}": whole[2 * i : 2 * i + 2].clone() for i in range(3)}
    state |= {"t3": whole[:, :2].t().clone().t(), "t4": torch.empty(6, 10).t().copy_(whole)}
    quietly(dcp.save, state, checkpoint_id=tmp_path, no_dist=True)
    reader = dcp.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    for key, value in state.items():
        read = ChunkedTensor(key, reader, key, metadata.state_dict_metadata[key])
        assert read.whole().equal(value) and read.rows(1, 2).equal(value[1:2])
        part = torch.empty(len(value) - 1, 1)
        read.read_into(1, 1, part)
        assert part.equal(value[1:, 1:2])
