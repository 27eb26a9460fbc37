"""Reading the tables of a checkpoint: any chunks, keys anywhere, pieces of bounded size.

Of torn, truncated and bit-flipped ones: each a clear error, none of them a crash or a wrong number.
"""

import pickle
import shutil

import pytest
import torch
from checkpoint_damage import items_of
from hypothesis import given
from hypothesis import strategies as st
from saved_cases import (
    MODEL_KEY,
    config_bytes,
    model_state,
    optimizer_state,
    pieces,
    save_dict,
    save_table,
    with_checksum,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from torchrec_dyn.checkpoint_format.checkpoint_reader import _owners, open_checkpoint
from torchrec_dyn.checkpoint_format.chunked_tensor import ChunkedTensor

KEY = "model." + MODEL_KEY
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def only_table(path):
    (table,) = open_checkpoint(path).tables.values()
    return table


def joined(table, names, **options):
    chunks = list(table.chunks(names, **options))
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in names}


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_what_was_saved(tmp_path, dtype):
    state, optimizer = model_state(life=True, dtype=dtype), optimizer_state()
    save_table(tmp_path, state, optimizer)
    checkpoint = open_checkpoint(str(tmp_path))
    assert list(checkpoint.tables) == [KEY] and not checkpoint.ownerless
    table = checkpoint.tables[KEY]
    assert (table.key, table.name, table.num_rows, table.embedding_dim) == (KEY, "user", 50, 6)
    assert table.dtype == dtype and table.config["seed"] == 7 and not checkpoint.is_delta
    assert table.optimizer == {
        "format": 2,
        "optimizer": "exact_row_wise_adagrad",
        "cuts": [0, 6],
    }
    saved = {**state, "momentum1": optimizer["momentum1"], "step": optimizer["step"]}
    for name, tensor in saved.items():
        read = table.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
    rows = joined(table, table.row_names)
    assert set(rows) == {"ids", "weight", "last_seen", "count", "momentum1"}
    assert all(torch.equal(rows[name], saved[name]) for name in rows)
    assert torch.equal(table.read("optimizer_config"), optimizer["optimizer_config"])
    table.verify()


@given(
    rows=st.lists(st.integers(0, 50), max_size=4).map(sorted),
    id_rows=st.lists(st.integers(0, 50), max_size=4).map(sorted),
    columns=st.lists(st.integers(0, 6), max_size=3).map(sorted),
    chunk_bytes=st.integers(1, 2000),
)
def test_any_chunks_are_joined(tmp_path_factory, rows, id_rows, columns, chunk_bytes):
    path = tmp_path_factory.mktemp("saved")

    def cut(name, tensor):
        cuts = {"ids": (id_rows,), "weight": (rows, columns), "momentum1": (rows,)}
        return pieces(tensor, *cuts[name]) if name in cuts else tensor

    state, optimizer = model_state(), optimizer_state()
    save_table(path, state, optimizer, cut)
    table = only_table(path)
    table.verify()
    names = ("ids", "weight", "momentum1")
    chunks = list(table.chunks(names, chunk_bytes))
    assert all(list(chunk) == list(names) for chunk in chunks)
    sizes = [sum(one.numel() * one.itemsize for one in chunk.values()) for chunk in chunks]
    assert not sizes or max(sizes) <= max(chunk_bytes, 24 + 8 + 4)
    for name in names:
        expected = {**state, **optimizer}[name]
        read = [chunk[name] for chunk in chunks]
        assert torch.equal(torch.cat([expected[:0], *read]), expected)


def test_a_large_chunk_is_not_read_whole(tmp_path, monkeypatch):
    save_table(tmp_path, model_state(20_000))
    table = only_table(tmp_path)
    asked = []
    find = ChunkedTensor._load
    monkeypatch.setattr(
        ChunkedTensor, "_load", lambda *given: asked.append(given[-1]) or find(*given)
    )
    assert torch.equal(table.rows("weight", 5, 8), model_state(20_000)["weight"][5:8])
    assert asked == ["meta"]


def test_a_transposed_tensor_is_loaded_once_and_dropped(tmp_path, monkeypatch):
    state = model_state()
    state["weight"] = state["weight"].t().contiguous().t()
    assert not state["weight"].is_contiguous()
    save_table(
        tmp_path, state, cut=lambda name, one: pieces(one, [20]) if name == "weight" else one
    )
    table = only_table(tmp_path)
    asked = []
    find = ChunkedTensor._load
    monkeypatch.setattr(
        ChunkedTensor, "_load", lambda *given: asked.append(given[-1]) or find(*given)
    )
    assert torch.equal(joined(table, ("weight",), chunk_bytes=100)["weight"], state["weight"])
    assert asked.count("cpu") == 2
    assert list(table._tensors["weight"]._unpacked) == [1]
    monkeypatch.undo()
    state = model_state(life=True)
    state["waiting"] = state["waiting"].t().contiguous().t()
    save_table(tmp_path / "waiting", state)
    assert torch.equal(only_table(tmp_path / "waiting").read("waiting"), state["waiting"])


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("model.a.ebc.embedding_bags.user", "optimizer.state.a.ebc.embedding_bags.user"),
        ("ebc.embedding_bags.user", "state.ebc.embedding_bags.user"),
        ("embedding_bags.user", "fused.state.embedding_bags.user"),
        ("app.model.state.ebc.embeddings.user", "app.optim.state.state.ebc.embeddings.user"),
        ("ebc.embedding_bags.user", "state.optim.state.fused.ebc.embedding_bags.user"),
        ("model.ebc.embedding_bags.user", "optimizer.state.user"),
    ],
)
def test_the_optimizer_is_found_wherever_it_stands(tmp_path, model, optimizer):
    state = model_state()
    parts = {f"{model}.{name}": one for name, one in with_checksum(state, state["ids"]).items()}
    for name, one in with_checksum(optimizer_state(), state["ids"]).items():
        parts[f"{optimizer}.weight.user.{name}"] = one
    save_dict(parts, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tables) == [model] and not checkpoint.ownerless
    assert checkpoint.tables[model].optimizer["optimizer"] == "exact_row_wise_adagrad"
    checkpoint.tables[model].verify()


def test_optimizers_go_to_their_own_tables_or_to_none(tmp_path):
    state, optimizer = model_state(), optimizer_state()
    parts = {}
    for place in ("a.model.x", "a.model.y", "b.model.x", "ema.z", "copy.z", "w"):
        for name, one in with_checksum(state, state["ids"]).items():
            parts[f"{place}.ebc.embedding_bags.user.{name}"] = one
    for number, (place, path) in enumerate(
        [
            *(("a.optim", "x.ebc"), ("b.optim", "x.ebc"), ("a.optim", "y.ebc")),
            *(("opt", "z.ebc"), ("one", "w.ebc"), ("two", "w.ebc")),
        ]
    ):
        moments = {**optimizer, "step": torch.tensor(number)}
        for name, one in with_checksum(moments, state["ids"]).items():
            parts[f"{place}.state.{path}.embedding_bags.user.weight.user.{name}"] = one
    save_dict(parts, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    steps = {
        key.removesuffix(".ebc.embedding_bags.user"): int(table.read("step"))
        for key, table in checkpoint.tables.items()
        if table.optimizer is not None
    }
    assert steps == {"a.model.x": 0, "b.model.x": 1, "a.model.y": 2}
    assert set(checkpoint.ownerless) == {
        f"{place}.ebc.embedding_bags.user.weight.user"
        for place in ("opt.state.z", "one.state.w", "two.state.w")
    }


def test_a_delta_is_read(tmp_path):
    state = model_state(8)
    state |= {"removed": state["ids"][2:5], "base": torch.arange(12), "result": torch.arange(12)}
    parts = with_checksum(
        {k: v for k, v in state.items() if k in ("ids", "weight", "config")}, state["ids"]
    )
    save_dict(
        {f"t.embedding_bags.user.{name}": one for name, one in (state | parts).items()}, tmp_path
    )
    checkpoint = open_checkpoint(tmp_path)
    table = only_table(tmp_path)
    assert checkpoint.is_delta and table.is_delta
    assert torch.equal(table.read("removed"), state["removed"])
    assert torch.equal(table.read("base"), torch.arange(12))
    table.verify()
    parts |= {"base": state["base"], "removed": state["removed"].flip(0)}
    save_dict({f"t.embedding_bags.user.{name}": one for name, one in parts.items()}, tmp_path / "x")
    with pytest.raises(ValueError, match="expected removed ids in canonical order"):
        only_table(tmp_path / "x").verify()


def test_what_is_asked_for_wrongly(tmp_path):
    save_table(tmp_path)
    table = only_table(tmp_path)
    with pytest.raises(ValueError, match="expected names among ids, weight, got last_seen"):
        table.chunks(("ids", "last_seen"))
    with pytest.raises(ValueError, match=r"expected a name among .*, got 'step'"):
        table.read("step")


def test_not_one_of_ours_is_left_alone(tmp_path):
    save_dict(
        {
            "a.config": torch.zeros(3, dtype=torch.uint8),
            "a.weight": torch.ones(2),
            "b.weight_checksum": torch.arange(7),
            "c.ids": torch.arange(4),
            "c.step": torch.tensor(4),
            "config": {"lr": 1},
        },
        tmp_path,
    )
    assert open_checkpoint(tmp_path).tables == {}


def test_unknown_format(tmp_path):
    state = model_state() | {
        "config": config_bytes({"format": 1, "table": "user", "embedding_dim": 6})
    }
    save_table(tmp_path, state)
    with pytest.raises(ValueError, match="expected a checkpoint of format 2, got 1"):
        open_checkpoint(tmp_path)


# Damage

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
    with pytest.raises(ValueError, match=r"torn: its save never finished\. Use an earlier check"):
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


def move_files(folder, name):
    """Writes another path of the only file into the metadata."""

    def change(metadata):
        for entry in metadata.storage_data.values():
            entry.relative_path = name

    change_metadata(folder, change)


@pytest.mark.parametrize(
    "name", ["../other/__0_0.distcp", "{}/other/__0_0.distcp", "a/../../other/__0_0.distcp"]
)
def test_files_outside_the_directory_are_not_read(copy, tmp_path, name):
    shutil.copytree(copy, tmp_path / "other")
    move_files(copy, name.format(tmp_path))
    with pytest.raises(ValueError, match=r"name of a file inside the directory, got '.*damaged"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", ["", ".", "..", "/", "\0"])
def test_what_is_no_name_of_a_file(copy, name):
    move_files(copy, name)
    with pytest.raises(ValueError, match=r"name of a file inside the directory, got .*damaged"):
        open_checkpoint(copy)


def test_files_in_a_directory_below_are_read(copy):
    (copy / "below").mkdir()
    (copy / "__0_0.distcp").rename(copy / "below/..2.distcp")
    move_files(copy, "below/..2.distcp")
    read_all(copy)


def test_a_file_that_shrinks_while_it_is_read(copy):
    table = open_checkpoint(copy).tables["model." + MODEL_KEY]
    list(table.chunks(("weight",)))
    for file, _, _ in entries(copy, "weight"):
        file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match="expected 24 bytes more, got the end of"):
        table.rows("weight", 49, 50)


@pytest.mark.everyday(9)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_seen_and_named(copy, name, bit):
    item = [one for one in items_of(copy) if one.key.endswith(f"user.{name}")][-1]
    length = {"config": 10, "step": 1}.get(name, 16)
    file = copy / item.file
    data = file.read_bytes()
    for at in range(item.begin, item.begin + length, 3):
        flip(file, at, bit)
        with pytest.raises(ValueError, match=r"damaged|of format 2") as caught:
            read_all(copy)
        assert name in str(caught.value) and "user" in str(caught.value)
        file.write_bytes(data)
    read_all(copy)


@pytest.mark.everyday(2)
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
    for name in ("ids", "weight", "last_seen", "waiting", "clock"):
        copy = shutil.copytree(saved, tmp_path / name)
        change_metadata(
            copy, lambda one, name=name: one.state_dict_metadata.pop(f"{prefix}.{name}")
        )
        with pytest.raises(ValueError, match=name):
            read_all(copy)


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
    with pytest.raises(ValueError, match="config of this table, got a config of 'user'"):
        open_checkpoint(tmp_path)


def test_one_of_many_tables_is_opened_alone(tmp_path, monkeypatch):
    """By its name or its key; nothing is read of the others."""
    parts = {}
    for name in ("user", "item"):
        state = model_state() | {
            "config": config_bytes({"format": 2, "table": name, "seed": 1, "embedding_dim": 6})
        }
        for part, one in with_checksum(state, state["ids"], name).items():
            parts[f"model.embedding_bags.{name}.{part}"] = one
    save_dict(parts, tmp_path)
    read, whole = [], ChunkedTensor.whole

    def noted(tensor):
        read.append(tensor._where)
        return whole(tensor)

    monkeypatch.setattr(ChunkedTensor, "whole", noted)
    for table in ("item", "model.embedding_bags.item"):
        assert list(open_checkpoint(tmp_path, table).tables) == ["model.embedding_bags.item"]
    assert read and not any("user" in one for one in read)
    assert not open_checkpoint(tmp_path, "model").tables
    assert len(open_checkpoint(tmp_path).tables) == 2 and any("user" in one for one in read)


class Counted(str):
    """A key that counts how often it is taken apart."""

    splits = 0

    def split(self, *options):
        Counted.splits += 1
        return super().split(*options)


def test_optimizer_states_are_compared_with_few_of_many_tables():
    names = [f"table_{number}" for number in range(300)]
    tables = {Counted(f"model.sparse.{name}"): None for name in names}
    optimizers = {f"optimizer.state.sparse.{name}.weight.{name}": None for name in names}
    owners, ownerless = _owners(optimizers, tables)
    assert owners == dict(zip(tables, optimizers, strict=True)) and not ownerless
    assert Counted.splits <= 2 * len(names)
