"""Checkpoints whose files are elsewhere, or whose rows are beyond 2^31, are read as they are, or an error."""

import errno
import os
import pickle
import re
import shutil
from unittest import mock

import pytest
import torch
from saved_cases import MODEL_KEY, model_state, optimizer_state, save_table
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from torchrec_dyn.checkpoint_format import checkpoint_reader
from torchrec_dyn.checkpoint_format.checkpoint_reader import open_checkpoint

KEY = "model." + MODEL_KEY
ROWS = 50
BY_ROW = ("ids", "weight", "last_seen", "count", "momentum1")


@pytest.fixture
def folder(tmp_path):
    save_table(tmp_path / "saved", model_state(ROWS, life=True), optimizer_state())
    return tmp_path / "saved"


def repeat_rows(folder, times: int) -> None:
    """Writes into the index that every chunk by row is there `times` times, one after the other."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    for key, saved in index.state_dict_metadata.items():
        if key.rpartition(".")[2] in BY_ROW:
            (chunk,) = saved.chunks
            place = index.storage_data[MetadataIndex(key, chunk.offsets)]
            rows, *rest = saved.size
            saved.size = torch.Size([times * rows, *rest])
            firsts = [torch.Size([turn * rows, *chunk.offsets[1:]]) for turn in range(times)]
            saved.chunks = [ChunkStorageMetadata(first, chunk.sizes) for first in firsts]
            index.storage_data |= {MetadataIndex(key, first): place for first in firsts}
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_rows_beyond_32_bits_are_read_by_their_number(tmp_path):
    """A small file is a table of more than 2^31 rows: its chunks are all the same."""
    rows, times = 1 << 20, (1 << 11) + 1
    state, optimizer = model_state(rows, life=True), optimizer_state(rows)
    save_table(tmp_path, state, optimizer)
    repeat_rows(tmp_path, times)
    table = open_checkpoint(tmp_path).tables[KEY]
    assert table.num_rows == rows * times > 2**31
    for first in (2**31 - 3, 2**31, rows * times - 7):
        chunk = {name: table.rows(name, first, first + 7) for name in BY_ROW}
        numbers = torch.arange(first, first + 7) % rows
        for name in BY_ROW:
            assert torch.equal(chunk[name], {**state, **optimizer}[name][numbers]), name


@pytest.mark.parametrize("rows", [2**31, 2**32 + 1, 2**61, 2**63 - 1, 2**63, 2**70])
def test_rows_that_no_chunk_has_are_an_error(folder, rows):
    """Before anyone makes room for them."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    for name in ("ids", "weight", "last_seen", "count"):
        saved = index.state_dict_metadata[f"{KEY}.{name}"]
        if rows >= 2**63:  # beyond torch.Size
            saved.size = (rows, *saved.size[1:])
        else:
            saved.size = torch.Size([rows, *saved.size[1:]])
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(
        ValueError, match=rf"expected {rows}\d* numbers, got 50\. The checkpoint is"
    ):
        open_checkpoint(folder)


def test_files_that_are_links_to_sound_files_are_read(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in [*folder.iterdir()]:
        shutil.move(file, elsewhere / file.name)
        file.symlink_to(elsewhere / file.name)
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        open_checkpoint(path).tables[KEY].verify()


@pytest.mark.parametrize("target", ["nowhere", "__0_0.distcp", ".", "/dev/zero", "pipe"])
def test_a_link_to_anything_but_a_file_is_a_missing_file(folder, target):
    """A pipe would be waited for, and zeros read without an end."""
    os.mkfifo(folder / "pipe")
    file = folder / "__0_0.distcp"
    file.unlink()
    file.symlink_to(target)
    text = f"{folder}: expected the file {file.name}, got none. The checkpoint is damaged"
    with pytest.raises(ValueError, match=re.escape(text)):
        open_checkpoint(folder)
    index = folder / ".metadata"
    index.unlink()
    index.symlink_to(target.replace("__0_0.distcp", ".metadata"))
    with pytest.raises(ValueError, match=r"expected a checkpoint of .*, got a directory without"):
        open_checkpoint(folder)


def test_files_of_another_checkpoint_are_found(folder, tmp_path):
    """Of the same ids and sizes, so that every archive is where the index says."""
    save_table(tmp_path / "other", model_state(ROWS, life=True), optimizer_state())
    for name in ("weight", "ids"):
        state = model_state(ROWS, life=True)
        other = model_state(ROWS, seed=1, life=True)
        save_table(tmp_path / name, state | {name: other[name]}, optimizer_state())
        index = pickle.loads((folder / ".metadata").read_bytes())
        (place,) = [place for at, place in index.storage_data.items() if at.fqn == f"{KEY}.{name}"]
        mine, theirs = (one / place.relative_path for one in (folder, tmp_path / name))
        data, part = bytearray(mine.read_bytes()), slice(place.offset, place.offset + place.length)
        data[part] = theirs.read_bytes()[part]
        mixed = shutil.copytree(folder, tmp_path / f"mixed {name}")
        (mixed / place.relative_path).write_bytes(data)
        with pytest.raises(ValueError, match=r"expected the content sum .* of (weight|ids), got"):
            open_checkpoint(mixed).tables[KEY].verify()


def test_an_index_that_cannot_be_read_is_no_damage(folder, monkeypatch):
    for error in (OSError(errno.EIO, "Input/output error"), MemoryError()):
        read = mock.Mock(side_effect=error)
        monkeypatch.setattr(checkpoint_reader.PlaceReader, "read_metadata", read)
        with pytest.raises(type(error)):
            open_checkpoint(folder)
    monkeypatch.setattr(
        checkpoint_reader.PlaceReader, "read_metadata", mock.Mock(side_effect=KeyError)
    )
    with pytest.raises(ValueError, match=r"\.metadata that can be read, got KeyError.* is damaged"):
        open_checkpoint(folder)
