"""serving.build: what it writes, what it refuses, and how little memory it takes."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from another_process import call
from serving_cases import Plain, bag_configs, save, save_delta, save_tensors
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import serving
from torchrec_dyn.serving import builder as serving_build
from torchrec_dyn.storage.id_map import canonical_order

A = Plain("a", 8).with_random(range(500))
B = Plain("b", 12, dtype=torch.float16).with_random(range(-20, 20))


def rows_of(folder: Path, table: Plain, ids) -> torch.Tensor:
    one = serving.ServingEmbeddingBagCollection(folder, bag_configs(table))
    ids = torch.tensor(list(ids))
    features = KeyedJaggedTensor([f"f_{table.name}"], ids, lengths=torch.ones(len(ids)).long())
    return one(features).values()


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path / "checkpoint", A, B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int4])
def test_bytes_follow_the_rows(checkpoint, tmp_path, dtype):
    out = tmp_path / "out"
    serving.build(checkpoint, out, rows=dtype)
    generation = out / (out / "current").read_text().strip()
    manifest = json.loads((generation / "manifest.json").read_text())
    of_row = {torch.int8: lambda dim: dim + 4, torch.int4: lambda dim: dim // 2 + 4}
    row_bytes = of_row.get(dtype, lambda dim: dim * dtype.itemsize)
    width = {name: row_bytes(dim) for name, dim in (("a", 8), ("b", 12))}
    # The rows of b begin at a multiple of their width.
    assert 0 <= manifest["rows_bytes"] - 500 * width["a"] - 40 * width["b"] < width["b"]
    assert (generation / "slots").stat().st_size == 16 * sum(
        table["capacity"] for table in manifest["tables"].values()
    )
    assert manifest["tables"]["a"]["capacity"] <= 500 / 0.7 + 8
    assert manifest["tables"]["b"]["trained_as"] == "float16"
    assert sorted(p.name.split("-")[0] for p in out.iterdir()) == [
        "000001",
        "current",
        "lock",
        "rows",
    ]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_memory_behind_the_last_row_can_be_read(tmp_path, dtype):
    """FBGEMM reads it; these rows fill whole pages."""
    table, out = Plain("a", 12).with_random(range(256)), tmp_path / "out"
    serving.build(save(tmp_path / "checkpoint", table), out, rows=dtype)
    (file,) = out.glob("rows-*")
    used = 256 * (16 if dtype == torch.int8 else 48)
    spare = 64 if dtype == torch.int8 else 0
    assert file.stat().st_size == used + spare
    ours = serving.ServingEmbeddingBagCollection(out, bag_configs(table))
    assert ours._lookup.served.rows.untyped_storage().nbytes() == used + spare
    save_delta(tmp_path / "delta", [table], [table.with_random([1])])
    serving.apply_delta(out, tmp_path / "delta")
    assert file.stat().st_size >= used + used // 256 + spare


def test_chosen_tables_only(checkpoint, tmp_path):
    serving.build(checkpoint, tmp_path / "out", tables=["b"])
    assert torch.equal(rows_of(tmp_path / "out", B, [3]), B.rows[3].float()[None])
    with pytest.raises(ValueError, match=r"tables among \['b'\], got \['a'\]"):
        rows_of(tmp_path / "out", A, [3])
    with pytest.raises(ValueError, match=r"tables among \['a', 'b'\], got \['z'\]"):
        serving.build(checkpoint, tmp_path / "other", tables=["b", "z"])
    assert not (tmp_path / "other").exists()


def test_there_is_nothing_until_all_is_there(checkpoint, tmp_path, monkeypatch):
    def switch(folder, generation):
        assert folder.parent == tmp_path and not (tmp_path / "out").exists()
        real(folder, generation)
        assert not (tmp_path / "out").exists()

    real = serving_build.switch
    monkeypatch.setattr(serving_build, "switch", switch)
    serving.build(checkpoint, tmp_path / "out")
    assert (tmp_path / "out").exists()


def test_nothing_is_overwritten(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="expected nothing at"):
        serving.build(checkpoint, tmp_path / "out")


def test_tables_of_one_name_are_not_mixed_up(tmp_path):
    parts = {}
    for collection in ("one", "two"):
        saved = A.summed(A.tensors())
        parts |= {f"{collection}.embedding_bags.a.{name}": part for name, part in saved.items()}
    save_tensors(tmp_path / "checkpoint", parts)
    with pytest.raises(ValueError, match=r"one table named 'a', got 'one.* and 'two"):
        serving.build(tmp_path / "checkpoint", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_damaged_checkpoint_leaves_nothing(checkpoint, tmp_path, dtype):
    (file,) = checkpoint.glob("*.distcp")
    damaged = bytearray(file.read_bytes())
    row = A.tensors()["weight"][250].numpy().tobytes()
    damaged[damaged.find(row) + 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="content sum"):
        serving.build(checkpoint, tmp_path / "out", rows=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_rows_that_do_not_fit_name_the_table(tmp_path):
    large = Plain("large", 4, {5: torch.full((4,), 1e6)})
    save(tmp_path / "checkpoint", large)
    with pytest.raises(
        ValueError, match=r"table='large'\): expected rows of numbers that int8 can hold"
    ):
        serving.build(tmp_path / "checkpoint", tmp_path / "out", rows=torch.int8)
    assert not (tmp_path / "out").exists()


def private_bytes() -> int:
    """The memory of this process's own; mapped files are not."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) << 10


def grown_by_a_build(checkpoint: Path, out: Path) -> int:
    """The growth of this process's own memory at the highest point of a build, in bytes."""
    serving.build(checkpoint, f"{out}-first", rows=torch.int8)  # loads what is loaded at first use
    before = most = private_bytes()
    done = False

    def watch() -> None:
        nonlocal most
        while not done:
            most = max(most, private_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    serving.build(checkpoint, out, rows=torch.int8)
    done = True
    thread.join()
    return most - before


def save_random(path: Path, name: str, rows: int, dim: int) -> Path:
    """Saves one table with `rows` random rows; returns the path."""
    ids = torch.arange(rows)
    ids = ids[canonical_order(ids)]
    one = Plain(name, dim)
    saved = one.summed({"config": one.config(), "ids": ids, "weight": torch.randn(rows, dim)})
    return save_tensors(path, one.named(saved, "embedding_bags"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_follow_the_rows(tmp_path):
    save_random(tmp_path / "checkpoint", "big", 400_000, 64)  # 102 MB of rows
    grown = call(grown_by_a_build, tmp_path / "checkpoint", tmp_path / "out")
    # A chunk of 8 MB, as it is read, in float32, divided, rounded, in bytes.
    assert grown < 64 << 20
    shutil.rmtree(tmp_path / "out")
