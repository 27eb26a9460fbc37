"""export_saved_rows: a table of a checkpoint as a safetensors file."""

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec import EmbeddingBagConfig

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import export_rows, export_saved_rows

module = importlib.import_module("torchrec_dyn.checkpoint.safetensors_rows")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, 2**62, -(10**12)]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * 4 * 8)
    configs = [EmbeddingBagConfig(50, 8, name, feature_names=[f"f_{name}"]) for name in "tu"]
    made = dyn.DynamicEmbeddingBagCollection(configs, dynamic=dyn.DynamicTableConfig(seed=3))
    ids = torch.tensor([*EXTREMES, *range(100, 120)])
    made.table("t").assign(ids, torch.sin(ids[:, None] + torch.arange(8.0)))
    state = made.state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "c")
    dcp.save({"one": state, "other": state}, checkpoint_id=tmp_path / "two")
    return made, tmp_path


@pytest.mark.parametrize("table", ["t", "u"])  # u has no rows
def test_the_file_is_that_of_the_collection(saved: tuple[Any, Path], table: str) -> None:
    made, folder = saved
    export_rows(made, table, folder / "collection")
    export_saved_rows(folder / "c", table, folder / "checkpoint")
    assert (folder / "checkpoint").read_bytes() == (folder / "collection").read_bytes()
    export_saved_rows(folder / "two", f"other.embedding_bags.{table}", folder / "two_")
    assert (folder / "two_").read_bytes() == (folder / "collection").read_bytes()


def test_what_is_not_one_table(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    for path, table, got in (
        ("c", "x", r"expected one table 'x', got tables \['model.embedding_bags.t', 'model"),
        ("two", "t", r"got \['one.embedding_bags.t', 'other.embedding_bags.t'\]. Name one"),
        ("nowhere", "t", "expected a checkpoint"),
    ):
        with pytest.raises(ValueError, match=got):
            export_saved_rows(folder / path, table, folder / "f")
    assert not (folder / "f").exists()


def test_a_flipped_bit_leaves_no_file(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    metadata = pickle.loads((folder / "c" / ".metadata").read_bytes())
    (at,) = [
        at
        for key, at in metadata.storage_data.items()
        if key.fqn == "model.embedding_bags.t.weight"
    ]
    data = bytearray((folder / "c" / at.relative_path).read_bytes())
    data[data.index(torch.sin(torch.tensor(1.0)).numpy().tobytes(), at.offset)] ^= 1
    (folder / "c" / at.relative_path).write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        export_saved_rows(folder / "c", "t", folder / "f")
    assert not [path for path in folder.iterdir() if path.name.startswith("f")]
