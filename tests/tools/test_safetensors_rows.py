"""export_rows and import_rows of an unsharded collection, and export_saved_rows of a checkpoint."""

import importlib
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from another_process import start
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import (
    export_delta,
    export_rows,
    export_saved_rows,
    import_rows,
    mark,
)
from torchrec_dyn.tools.safetensors_rows import SafetensorsReader, SafetensorsWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

module = importlib.import_module("torchrec_dyn.tools.safetensors_rows")
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, 2**62, -(10**12)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "CHUNK_BYTES", 5 * 4 * 8)  # 5 rows of 8 floats


def collection(
    data_type: str = "FP32", dim: int = 8, rows: int = 100, **options: Any
) -> dyn.DynamicEmbeddingBagCollection:
    config = EmbeddingBagConfig(rows, dim, "t", DataType[data_type], ["f"])
    rule = {"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1}
    return dyn.DynamicEmbeddingBagCollection([config], fused_params=rule, **options)


def filled(data_type: str = "FP32", count: int = 23, seed: int = 0) -> Any:
    made = collection(data_type, dynamic=dyn.DynamicTableConfig(seed=seed))
    ids = torch.tensor([*EXTREMES, *range(100, 200)])[:count]
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    made.table("t").assign(ids, torch.sin(ids[:, None] + torch.arange(8.0)))
    return made


def state_of(one: Any) -> dict[str, torch.Tensor]:
    return dict(one.local_tables()["t"].export_state())


def assert_same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("count", [0, 1, 5, 23])
@pytest.mark.parametrize("data_type", ["FP32", "FP16", "BF16"])
def test_rows_go_out_and_in(tmp_path: Path, data_type: str, count: int) -> None:
    one, other = filled(data_type, count), collection(data_type)
    export_rows(one, "t", tmp_path / "f")
    assert import_rows(other, "t", tmp_path / "f") == count
    assert_same_state(state_of(one), state_of(other))
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_the_file_tells_what_it_is(tmp_path: Path) -> None:
    one = filled("BF16", seed=7)
    export_rows(one, "t", tmp_path / "f")
    reader = SafetensorsReader(tmp_path / "f")
    assert reader.metadata == {"format": "torchrec_dyn_rows_1", "table": "t", "seed": "7"}
    assert reader.entries["rows"][:2] == (torch.bfloat16, (23, 8))
    assert torch.equal(reader.rows("ids", 0, 23), one.table("t").ids())


def test_the_file_depends_on_the_contents_alone(tmp_path: Path) -> None:
    one, other = filled(), collection()
    ids, weight = (state_of(one)[name] for name in ("ids", "weight"))
    other.table("t").assign(torch.arange(50), torch.zeros(50, 8))
    other.table("t").erase(torch.arange(50))
    other.table("t").assign(ids, weight)
    for name, of in (("one", one), ("other", other)):
        export_rows(of, "t", tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_sequence_collection(tmp_path: Path) -> None:
    configs = [EmbeddingConfig(100, 8, name, feature_names=[f"f_{name}"]) for name in "tu"]
    one, other = filled(), dyn.DynamicEmbeddingCollection(configs)
    export_rows(one, "t", tmp_path / "f")
    import_rows(other, "u", tmp_path / "f")  # another table may take them
    assert other.table("t").num_rows == 0 and other.table("u").num_rows == 23
    ids = one.table("t").ids()
    assert torch.equal(other.table("u").lookup(ids)[0], one.table("t").lookup(ids)[0])


def test_what_is_not_in_the_file_stays(tmp_path: Path) -> None:
    one, other = filled(count=5), collection()
    known, new = torch.tensor([EXTREMES[0], 77]), one.table("t").ids()
    other.table("t").assign(known, torch.full((2, 8), 9.0))
    export_rows(one, "t", tmp_path / "f")
    import_rows(other, "t", tmp_path / "f")
    assert other.table("t").num_rows == 6
    assert torch.equal(other.table("t").lookup(new)[0], one.table("t").lookup(new)[0])
    assert torch.equal(other.table("t").lookup(known[1:])[0], torch.full((1, 8), 9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["rows", "weight"])
def test_files_of_others(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    ids = torch.tensor([*EXTREMES, 5, 6, 5])  # a repeated id, in no order
    rows = torch.randn(len(ids), 8).to(dtype)
    torch_files.save_file({"ids": ids, name: rows}, tmp_path / "f")
    made = collection("FP16")
    assert import_rows(made, "t", tmp_path / "f") == len(ids)
    assert made.table("t").num_rows == len(ids) - 1
    assert torch.equal(made.table("t").lookup(ids[1:])[0], rows[1:].half()[[*range(6), 8, 7, 8]])


def file_with(path: Path, **tensors: torch.Tensor) -> None:
    entries = {name: (values.dtype, tuple(values.shape)) for name, values in tensors.items()}
    writer = SafetensorsWriter(path, entries, {})
    for name, values in tensors.items():
        writer.write(name, values)
    writer.finish()


WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no rows": (
        {"ids": torch.arange(3)},
        r"tensors 'ids' and 'rows' \(or 'weight'\), got \['ids'\]",
    ),
    "no ids": ({"rows": torch.ones(3, 8)}, r"got \['rows'\]"),
    "both": (
        {"ids": torch.arange(3), "rows": torch.ones(3, 8), "weight": torch.ones(3, 8)},
        r"got \['ids', 'rows', 'weight'\]",
    ),
    "state": (
        {"ids": torch.arange(3), "rows": torch.ones(3, 8), "momentum1": torch.ones(3, 8)},
        r"got \['ids', 'momentum1', 'rows'\]",
    ),
    "ids of floats": (
        {"ids": torch.ones(3), "rows": torch.ones(3, 8)},
        r"\[R\] of I64, got \[3\] of",
    ),
    "ids in a matrix": (
        {"ids": torch.ones(3, 1).long(), "rows": torch.ones(3, 8)},
        r"got \[3, 1\]",
    ),
    "rows of numbers": ({"ids": torch.arange(3), "rows": torch.ones(3, 8).long()}, "torch.int64"),
    "columns": (
        {"ids": torch.arange(3), "rows": torch.ones(3, 7)},
        r"rows \[3, 8\] for a table with 8 columns, got \[3, 7\]",
    ),
    "fewer rows": ({"ids": torch.arange(3), "rows": torch.ones(2, 8)}, r"\[3, D\] .* got \[2, 8\]"),
    "flat": ({"ids": torch.arange(8), "weight": torch.ones(64)}, r"weight \[8, D\] .* got \[64\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path, name: str) -> None:
    tensors, message = WRONG[name]
    file_with(tmp_path / "f", **tensors)
    made = filled()
    before = state_of(made)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/f: expected .*{message}"):
        import_rows(made, "t", tmp_path / "f")
    assert_same_state(before, state_of(made))


def test_a_truncated_file_changes_nothing(tmp_path: Path) -> None:
    export_rows(filled(), "t", tmp_path / "f")
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-1])
    made = filled(count=3)
    before = state_of(made)
    with pytest.raises(ValueError, match="as its header says"):
        import_rows(made, "t", tmp_path / "f")
    assert_same_state(before, state_of(made))


@pytest.mark.parametrize("limit", [45, 44])
def test_a_table_without_room_stays_as_it_was(tmp_path: Path, limit: int) -> None:
    file_with(tmp_path / "f", ids=torch.arange(40).repeat(2), rows=torch.randn(80, 8))
    made = collection(rows=limit)
    made.table("t").assign(torch.arange(38, 45), torch.ones(7, 8))  # with 40 ids, each twice: 45
    before = state_of(made)
    if limit == 45:
        import_rows(made, "t", tmp_path / "f")
        assert made.table("t").num_rows == 45
    else:
        with pytest.raises(RuntimeError, match=r"at most 44 rows here .* got 7 and 38 new"):
            import_rows(made, "t", tmp_path / "f")
        assert_same_state(before, state_of(made))


def test_a_table_that_evicts_takes_more_than_its_limit(tmp_path: Path) -> None:
    file_with(tmp_path / "f", ids=torch.arange(40), rows=torch.randn(40, 8))
    life = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    made = collection(rows=30, dynamic=life)
    import_rows(made, "t", tmp_path / "f")
    assert made.table("t").num_rows == 40


@pytest.mark.parametrize("function", [export_rows, import_rows])
def test_names_and_files_that_are_not_there(tmp_path: Path, function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"expected a (name|table) among \['t'\], got 'x'"):
        function(collection(), "x", tmp_path / "f")
    with pytest.raises(FileNotFoundError, match=r"nowhere/f'$"):
        function(collection(), "t", tmp_path / "nowhere" / "f")
    with pytest.raises(ValueError, match="expected a collection of dynamic tables, got Linear"):
        function(torch.nn.Linear(2, 2), "t", tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_rows_that_go_meanwhile_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, write = filled(), SafetensorsWriter.write

    def meanwhile(writer: SafetensorsWriter, name: str, values: torch.Tensor) -> None:
        made.table("t").erase(torch.tensor([EXTREMES[0], EXTREMES[1]]))
        write(writer, name, values)

    monkeypatch.setattr(SafetensorsWriter, "write", meanwhile)
    (tmp_path / "f").write_bytes(b"before")
    with pytest.raises(RuntimeError, match=r"got a table that was trained or edited since. Export"):
        export_rows(made, "t", tmp_path / "f")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def export_and_be_killed(path: Path, at: int) -> None:
    """Exports rows; the process ends before its `at`-th call of fsync or replace."""
    made, calls = collection(dim=2), 0
    made.table("t").assign(torch.arange(9), torch.ones(9, 2))

    def killing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call

    for name in ("fsync", "replace"):
        setattr(os, name, killing(getattr(os, name)))
    export_rows(made, "t", path)


@pytest.mark.parametrize(("at", "old"), [(1, True), (2, True), (3, False)])
def test_a_killed_export_leaves_the_file_before_or_the_new_one(
    tmp_path: Path, at: int, old: bool
) -> None:
    # fsync of the file, its renaming, fsync of its folder.
    path = tmp_path / "f"
    path.write_bytes(b"before")
    process = start(export_and_be_killed, path, at)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    if old:
        assert path.read_bytes() == b"before"
    else:
        assert import_rows(collection(dim=2), "t", path) == 9


def contents_of(made: Any) -> set[tuple[int, bytes]]:
    """The ids of a table with the bytes of their rows."""
    ids = made.table("t").ids()
    rows = made.table("t").lookup(ids)[0]
    return {(id, row.numpy().tobytes()) for id, row in zip(ids.tolist(), rows, strict=True)}


# A table of a checkpoint


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    monkeypatch.setattr(knobs, "CHUNK_BYTES", 5 * 4 * 8)
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


def test_what_is_not_one_full_table(saved: tuple[Any, Path]) -> None:
    made, folder = saved
    export_delta(made, folder / "delta", mark(made))
    for path, table, got in (
        ("delta", "t", "expected a full checkpoint, got .*delta, a delta, which"),
        ("c", "x", r"expected one table 'x', got tables \['model.embedding_bags.t', 'model"),
        ("two", "t", r"got \['one.embedding_bags.t', 'other.embedding_bags.t'\]. Give the key"),
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


def test_a_file_without_rows_is_imported_into_a_table_above_its_limit(tmp_path: Path) -> None:
    export_rows(collection(), "t", tmp_path / "none")
    recent = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    full = collection(rows=4, dynamic=recent)
    full.table("t").assign(torch.arange(6), torch.ones(6, 8))
    assert import_rows(full, "t", tmp_path / "none") == 0
    assert full.table("t").num_rows == 6
