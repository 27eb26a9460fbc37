"""TableWriter writes what DCP's writer writes, reads one chunk ahead, and writes no CRC-32 of rows."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly, state_dict_of
from checkpoint_damage import items_of
from checkpoint_small import case, on_one, sharded, step
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import get_crc32_options, set_crc32_options

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import TableWriter, open_checkpoint
from torchrec_dyn.checkpoint_format import SavedTensor

IDS = list(range(300))


def trained() -> Any:
    model = sharded(case(rows=1000))
    step(model, IDS)
    return model


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(knobs, "SAVED_CHUNK_BYTES", 1 << 11)
    patch.setattr(knobs, "LAST_CHUNK_BYTES", 1 << 7)


def archives(folder: Path) -> Iterator[tuple[str, zipfile.ZipFile]]:
    """Yields the keys and archives of all tensors."""
    for index, one in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        blob = (folder / one.relative_path).read_bytes()[one.offset :][: one.length]
        yield index.fqn, zipfile.ZipFile(io.BytesIO(blob))


def writes_the_same(path: str) -> bool:
    state = state_dict_of(trained())
    folders = [Path(path, name) for name in ("theirs", "ours", "threads")]
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        quietly(dcp.save, state, checkpoint_id=folders[0])
        for crc in (True, False):
            set_crc32_options(crc)
            quietly(dcp.save, state, storage_writer=TableWriter(folders[1]))
            assert get_crc32_options() == crc
        set_crc32_options(True)
        quietly(dcp.save, state, storage_writer=TableWriter(folders[2], thread_count=3))
    theirs, *others = [
        sorted((one.key, one.numbers.tolist()) for one in items_of(folder)) for folder in folders
    ]
    assert others == [theirs, theirs] and len(theirs) > 20
    assert all(one.testzip() is None for _, one in archives(folders[0]))
    for folder in folders[1:]:
        (table,) = open_checkpoint(folder).tables.values()
        assert len(table.row_keys) > 2  # of model and optimizer
        for key, one in archives(folder):  # rows have content sums
            assert (one.testzip() is None) == (key not in table.row_keys), key
    return True


def test_the_files_are_those_of_dcp_but_for_the_crc(tmp_path: Path) -> None:
    assert on_one(writes_the_same, tmp_path)


def reads_ahead(path: str) -> bool:
    """Notes which thread reads, and how many chunks are read and not yet written."""
    state = {**state_dict_of(trained()), "dense": torch.rand(3)}
    threads, waiting, most = [], 0, 0
    read, save = SavedTensor.__get_tensor_shard__, torch.save

    def shard_of(self: Any, index: Any) -> torch.Tensor:
        nonlocal waiting, most
        threads.append(threading.current_thread().name)
        waiting += 1
        most = max(most, waiting)
        return read(self, index)

    def written(value: Any, *options: Any) -> None:
        nonlocal waiting
        save(value, *options)
        waiting -= value.shape != (3,)

    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        patch.setattr(SavedTensor, "__get_tensor_shard__", shard_of)
        patch.setattr(torch, "save", written)
        quietly(dcp.save, state, storage_writer=TableWriter(path))
    ahead = [name.startswith("TableWriter") for name in threads]
    assert sum(ahead) == len(threads) - 1 > 10, threads  # all but the first
    assert most == 2 and waiting == 0
    return True


def test_one_chunk_is_read_ahead_by_a_thread(tmp_path: Path) -> None:
    assert on_one(reads_ahead, tmp_path)


def fails(path: str) -> bool:
    model = trained()
    state = state_dict_of(model)
    step(model, [5000])  # the chunks cannot be read any more
    with pytest.raises(CheckpointException, match="got a table that was trained"):
        quietly(dcp.save, state, storage_writer=TableWriter(path))
    assert get_crc32_options() and threading.active_count() < 20
    return not any(one.name.startswith("TableWriter") for one in threading.enumerate())


def test_an_error_of_a_read_ahead_is_raised_and_no_thread_is_left(tmp_path: Path) -> None:
    assert on_one(fails, tmp_path)
