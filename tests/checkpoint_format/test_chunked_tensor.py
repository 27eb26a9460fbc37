"""Chunks that are saved alike are found by one load of an archive, others by their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly

from torchrec_dyn.checkpoint_format import ChunkedTensor, PlaceReader, SavedTensor
from torchrec_dyn.checkpoint_format.saved_tensor import Part


def read_back(folder: Path, key: str) -> ChunkedTensor:
    reader = PlaceReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    return ChunkedTensor.in_files(key, reader, key, metadata.state_dict_metadata[key])


def test_chunks_of_equal_and_other_archives(tmp_path: Path, monkeypatch) -> None:
    """Chunks of one shape: two plain ones, one after other numbers of its storage, one by columns."""
    whole = torch.arange(48.0).view(8, 6)
    chunks = [
        whole[:2].clone(),
        whole[2:4].clone(),
        whole[4:6],
        whole[6:].t().contiguous().t(),
    ]
    parts = [
        Part((2 * i, 0), (2, 6), lambda start, stop, chunk=chunk: chunk)
        for i, chunk in enumerate(chunks)
    ]
    saved = {"t": SavedTensor((8, 6), torch.float32, parts)}
    quietly(dcp.save, saved, checkpoint_id=tmp_path, no_dist=True)
    loads, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kw: loads.append(1) or load(*args, **kw))
    assert read_back(tmp_path, "t").whole().equal(whole)
    assert len(loads) <= 4  # the two plain ones share a load, the one by columns takes two
    loads.clear()
    assert read_back(tmp_path, "t").rows(0, 4).equal(whole[:4]) and len(loads) == 1


@pytest.mark.parametrize("rows", [1, 3, 5000])
def test_rows_and_columns_of_a_chunk(tmp_path: Path, rows: int) -> None:
    value = torch.arange(rows * 7.0).view(rows, 7)
    quietly(dcp.save, {"t": value}, checkpoint_id=tmp_path, no_dist=True)
    read = read_back(tmp_path, "t")
    assert read.whole().equal(value) and read.rows(rows - 1, rows).equal(value[-1:])
    assert read.rows(0, rows, slice(3, 5)).equal(value[:, 3:5])


def test_a_tensor_in_memory_drops_the_chunks_that_reads_have_passed() -> None:
    whole = torch.arange(24.0).view(8, 3)
    held = ChunkedTensor("t", "t", whole.shape, whole.dtype, is_read_once=True)
    for row, column in ((4, 0), (0, 2), (0, 0)):  # as they arrive
        block = held.new_block((4, 3 if row else 2 - column // 2))
        held.put((row, column), block.copy_(whole[row : row + 4, column : column + block.shape[1]]))
    assert held.rows(1, 6).equal(whole[1:6]) and held.rows(4, 8, slice(1, 3)).equal(whole[4:, 1:])
    with pytest.raises(ValueError, match="expected 6 numbers, got 3"):
        held.rows(3, 5)
