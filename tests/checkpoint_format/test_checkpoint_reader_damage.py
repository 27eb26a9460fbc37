"""Torn, truncated and bit-flipped checkpoints: each a clear error, none of them a crash or a wrong number."""

import pickle
import shutil

import pytest
import torch
from saved_cases import (
    MODEL_KEY,
    model_state,
    optimizer_state,
    pieces,
    save_dict,
    save_table,
    with_checksum,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from torchrec_dyn.checkpoint_format.checkpoint_reader import open_checkpoint

NAMES = ("ids", "weight", "last_seen", "count", "waiting", "clock", "config", "momentum1", "step")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")

    def cut(name, tensor):
        return pieces(tensor, [20]) if name in ("ids", "weight", "momentum1") else tensor

    save_table(path, model_state(life=True), optimizer_state(), cut)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def read_all(path):
    for table in open_checkpoint(path).tables.values():
        table.verify()


def entries(path, name):
    """(file, offset, length) of the chunks of one tensor."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    return [
        (path / entry.relative_path, entry.offset, entry.length)
        for index, entry in metadata.storage_data.items()
        if index.fqn.endswith(f"user.{name}")
    ]


def change_metadata(path, change):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def flip(file, at, bit=0):
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def test_whole_checkpoints_pass(copy):
    read_all(copy)


def test_torn(copy, tmp_path):
    (copy / ".metadata").rename(copy / ".metadata.tmp")
    with pytest.raises(ValueError, match=r"torn: its save never finished\. Use the one before\."):
        open_checkpoint(copy)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="torn"):
        open_checkpoint(tmp_path / "empty")


def test_not_a_checkpoint(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for path, got in (
        (tmp_path, "a directory without .metadata"),
        (tmp_path / "notes.txt", "no directory"),
        (tmp_path / "nowhere", "no directory"),
    ):
        with pytest.raises(ValueError, match=f"expected a checkpoint of .*, got {got}"):
            open_checkpoint(path)
    for other in ({"a": 1}, None, Metadata({})):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(other))
        with pytest.raises(ValueError, match=r"expected \.metadata that can be read"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("left", [0, 1, 100, 0.5, 0.99])
def test_truncated_metadata(copy, left):
    data = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes(
        data[: left if isinstance(left, int) else int(left * len(data))]
    )
    with pytest.raises(ValueError, match=r"expected \.metadata that can be read"):
        open_checkpoint(copy)


def test_truncated_and_missing_files(copy):
    file = copy / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(
        ValueError, match=rf"expected {len(data)} bytes in {file.name}, got .*truncated"
    ):
        open_checkpoint(copy)
    file.unlink()
    with pytest.raises(ValueError, match=f"expected the file {file.name}, got none"):
        open_checkpoint(copy)


def test_a_file_that_shrinks_while_it_is_read(copy):
    table = open_checkpoint(copy).tables["model." + MODEL_KEY]
    list(table.chunks(("weight",)))
    for file, _, _ in entries(copy, "weight"):
        file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match="expected 24 bytes more, got the end of"):
        next(table.chunks(("weight",), range(49, 50)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_seen_and_named(copy, name, bit):
    file, offset, _ = entries(copy, name)[-1]
    if name == "config":
        file, offset, _ = next(e for e in entries(copy, "config") if b"seed" in _text(e))
    length = {"config": 10, "step": 1}.get(name, 16)
    data = file.read_bytes()
    start = _numbers_at(data, offset)
    for at in range(start, start + length, 3):
        flip(file, at, bit)
        with pytest.raises(ValueError, match=r"damaged|of format 1") as caught:
            read_all(copy)
        assert name in str(caught.value) and "user" in str(caught.value)
        file.write_bytes(data)
    read_all(copy)


def _text(entry):
    file, offset, length = entry
    return file.read_bytes()[offset : offset + length]


def _numbers_at(data, offset):
    """Where the numbers of the archive at `offset` stand: torch aligns them to 64 bytes."""
    name = data.index(b"/data/0", offset)
    header = data.rindex(b"PK\x03\x04", offset, name)
    sizes = [int.from_bytes(data[header + i : header + i + 2], "little") for i in (26, 28)]
    return header + 30 + sum(sizes)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["ids", "weight", "momentum1"])
def test_anything_wrong_in_an_archive_is_an_error_or_harmless(copy, name):
    """Every byte of the frame around the numbers too: never a crash, never other numbers."""
    good = {key: table.read(name) for key, table in open_checkpoint(copy).tables.items()}
    file, offset, length = entries(copy, name)[0]
    data = file.read_bytes()
    for at in range(offset, offset + length, 29):
        flip(file, at, at % 8)
        try:
            for key, table in open_checkpoint(copy).tables.items():
                assert torch.equal(table.read(name), good[key])
        except ValueError as error:
            assert "damaged" in str(error)
        file.write_bytes(data)


def test_what_the_metadata_lost_is_missed(saved, tmp_path):
    prefix = "model." + MODEL_KEY
    for name in ("ids", "weight", "last_seen", "waiting", "clock", "config", "checksum"):
        copy = shutil.copytree(saved, tmp_path / name)
        change_metadata(
            copy, lambda one, name=name: one.state_dict_metadata.pop(f"{prefix}.{name}")
        )
        with pytest.raises(ValueError, match=name):
            open_checkpoint(copy)


def test_a_chunk_that_is_lost_or_elsewhere(saved, tmp_path):
    key = f"model.{MODEL_KEY}.weight"
    copy = shutil.copytree(saved, tmp_path / "lost")
    change_metadata(copy, lambda one: one.state_dict_metadata[key].chunks.pop())
    with pytest.raises(ValueError, match=r"weight.*expected 300 numbers, got 120"):
        read_all(copy)
    copy = shutil.copytree(saved, tmp_path / "other")
    halves = TensorProperties(dtype=torch.float16)
    change_metadata(copy, lambda one: setattr(one.state_dict_metadata[key], "properties", halves))
    with pytest.raises(
        ValueError, match=r"weight.*expected numbers of torch\.float16, got torch\.float32"
    ):
        read_all(copy)
    copy = shutil.copytree(saved, tmp_path / "unstored")
    change_metadata(
        copy,
        lambda one: [
            one.storage_data.pop(index) for index in list(one.storage_data) if index.fqn == key
        ],
    )
    with pytest.raises(ValueError, match=r"weight.*expected a saved chunk"):
        open_checkpoint(copy)


def test_rows_out_of_order_and_repeated_ids(tmp_path):
    for place, order in {"swapped": [0, 2, 1], "repeated": [0, 1, 1]}.items():
        state = {
            name: one[order] if name != "config" else one for name, one in model_state(3).items()
        }
        save_table(tmp_path / place, state)
        for size in (1, 1000):
            with pytest.raises(ValueError, match="expected ids in canonical order"):
                table = open_checkpoint(tmp_path / place).tables["model." + MODEL_KEY]
                list(table.chunks(chunk_bytes=size))


def test_shapes_that_do_not_fit(tmp_path):
    state = model_state(5, life=True)
    wrong = {
        "weight": torch.ones(5, 7),
        "ids": torch.arange(6),
        "count": torch.ones(5),
        "waiting": torch.ones(3, 4, dtype=torch.int64),
        "clock": torch.ones(3, 1, dtype=torch.int64),
    }
    for name, tensor in wrong.items():
        parts = with_checksum(state, state["ids"]) | {name: tensor}
        save_dict(
            {f"embedding_bags.user.{part}": one for part, one in parts.items()}, tmp_path / name
        )
        with pytest.raises(ValueError, match=r"expected \w+ \[.*, got \["):
            open_checkpoint(tmp_path / name)


def test_a_table_under_the_name_of_another(tmp_path):
    state = model_state()
    parts = with_checksum(state, state["ids"])
    save_dict({f"embedding_bags.item.{name}": one for name, one in parts.items()}, tmp_path)
    with pytest.raises(ValueError, match="expected a config of it, got that of 'user'"):
        open_checkpoint(tmp_path)
