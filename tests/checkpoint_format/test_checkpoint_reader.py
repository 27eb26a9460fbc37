"""Reading the tables of a checkpoint: any chunks, keys anywhere, pieces of bounded size."""

import pytest
import torch
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

from torchrec_dyn.checkpoint_format.checkpoint_reader import open_checkpoint
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
        "format": 1,
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
    assert torch.equal(table.read("optimizer.config"), optimizer["config"])
    table.verify()


@given(
    rows=st.lists(st.integers(0, 50), max_size=4).map(sorted),
    id_rows=st.lists(st.integers(0, 50), max_size=4).map(sorted),
    columns=st.lists(st.integers(0, 6), max_size=3).map(sorted),
    row_range=st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted),
    chunk_bytes=st.integers(1, 2000),
)
def test_any_chunks_are_joined(tmp_path_factory, rows, id_rows, columns, row_range, chunk_bytes):
    path = tmp_path_factory.mktemp("saved")

    def cut(name, tensor):
        cuts = {"ids": (id_rows,), "weight": (rows, columns), "momentum1": (rows,)}
        return pieces(tensor, *cuts[name]) if name in cuts else tensor

    state, optimizer = model_state(), optimizer_state()
    save_table(path, state, optimizer, cut)
    table = only_table(path)
    table.verify()
    names = ("weight", "ids", "momentum1")
    chunks = list(table.chunks(names, range(*row_range), chunk_bytes))
    assert all(list(chunk) == list(names) for chunk in chunks)
    sizes = [sum(one.numel() * one.itemsize for one in chunk.values()) for chunk in chunks]
    assert not sizes or max(sizes) <= max(chunk_bytes, 24 + 8 + 4)
    for name in names:
        expected = {**state, **optimizer}[name][slice(*row_range)]
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
    chunk = next(iter(table.chunks(("weight",), range(5, 8))))
    assert torch.equal(chunk["weight"], model_state(20_000)["weight"][5:8])
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


def test_an_empty_table_is_read(tmp_path):
    save_table(tmp_path, model_state(0), optimizer_state(0))
    table = only_table(tmp_path)
    assert table.num_rows == 0 and table.dtype == torch.float32 and "ids" not in table.names
    assert list(table.chunks(("ids", "weight"))) == []
    table.verify()


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
    state |= {"removed": state["ids"][2:5], "base": torch.arange(7), "result": torch.arange(7)}
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
    assert torch.equal(joined(table, ("removed",))["removed"], state["removed"])
    assert torch.equal(table.read("base"), torch.arange(7))
    table.verify()
    with pytest.raises(ValueError, match="expected tensors with the same rows, got ids, removed"):
        table.chunks(("ids", "removed"))
    parts |= {"base": state["base"], "removed": state["removed"].flip(0)}
    save_dict({f"t.embedding_bags.user.{name}": one for name, one in parts.items()}, tmp_path / "x")
    with pytest.raises(ValueError, match="expected removed ids in canonical order"):
        only_table(tmp_path / "x").verify()


def test_contents_tell_the_fingerprint(tmp_path):
    save_table(tmp_path / "one", optimizer=optimizer_state())
    save_table(
        tmp_path / "two",
        cut=lambda name, one: pieces(one, [7, 9]) if name in ("ids", "weight") else one,
        key="other.ebc.embedding_bags.user",
    )
    save_table(tmp_path / "three", model_state(seed=1))
    one, two, three = (only_table(tmp_path / name) for name in ("one", "two", "three"))
    assert one.fingerprint() == two.fingerprint() != three.fingerprint()


def test_what_is_asked_for_wrongly(tmp_path):
    save_table(tmp_path)
    table = only_table(tmp_path)
    with pytest.raises(ValueError, match=r"expected a name among ids, weight, .*, got 'last_seen'"):
        table.chunks(("ids", "last_seen"))
    with pytest.raises(ValueError, match=r"expected a name among .*, got 'step'"):
        table.read("step")
    for rows in (range(-1, 3), range(0, 51), range(0, 10, 2)):
        with pytest.raises(ValueError, match=r"expected rows in range\(0, 50\) by 1"):
            table.chunks(rows=rows)


def test_not_one_of_ours_is_left_alone(tmp_path):
    save_dict(
        {
            "a.config": torch.zeros(3, dtype=torch.uint8),
            "a.weight": torch.ones(2),
            "b.checksum": torch.arange(7),
            "c.ids": torch.arange(4),
            "c.step": torch.tensor(4),
            "config": {"lr": 1},
        },
        tmp_path,
    )
    assert open_checkpoint(tmp_path).tables == {}


def test_unknown_format(tmp_path):
    state = model_state() | {
        "config": config_bytes({"format": 2, "table": "user", "embedding_dim": 6})
    }
    save_table(tmp_path, state)
    with pytest.raises(ValueError, match="expected a checkpoint of format 1, got 2"):
        open_checkpoint(tmp_path)
