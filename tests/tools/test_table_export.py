"""export_table and read_batches: checkpoints, chains at each step, and tables of unsharded collections."""

import json
import os
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import workers
from checkpoint_cases import Setup, new, quietly, save, train
from delta_cases import NAMES, POOL, Model, batch, happen
from system_memory import peak_of
from torch import Tensor
from torchrec import EmbeddingBagConfig
from torchrec.optim.keyed import CombinedOptimizer

import torchrec_dyn as dyn
from torchrec_dyn.__main__ import main
from torchrec_dyn.checkpoint import Checkpoints, export_table, read_batches
from torchrec_dyn.checkpoint_format import SavedTable

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

STATES = ("momentum1",)
SMALL = 100  # bytes: a few rows
TENSORS = {"id": "ids", "row": "weight"}


def column(table: Any, name: str) -> Tensor:
    """A column as a tensor: lists are rows. pyarrow alone reads it, row by row."""
    values = table.column(name).to_pylist()
    return torch.tensor(
        values, dtype=torch.int64 if table.schema.field(name).type == "int64" else None
    )


def assert_is(table: Any, state: dict[str, Tensor], columns: Any = None) -> None:
    """Checks that rows as read are the exported state of a table, in its order."""
    columns = columns or [
        name for name in ("id", "row", "last_seen", "count") if name in told(state)
    ]
    assert table.column_names == list(columns)
    for name in columns:
        expected = state[TENSORS.get(name, name)]
        if not len(expected):
            assert table.num_rows == 0
            continue
        got = column(table, name).to(expected.dtype)
        assert torch.equal(got.reshape(expected.shape), expected), name


def told(state: dict[str, Tensor]) -> set[str]:
    return {{"ids": "id", "weight": "row"}.get(name, name) for name in state}


SAVES = 5  # full, three deltas, full


class Run:
    """A model whose saves are remembered."""

    def __init__(self, folder: Path, full_every: int = 4) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = CombinedOptimizer(
            [(name, getattr(self.model, name).fused_optimizer) for name in ("pooled", "sequence")]
        )
        self.folder = folder
        self.checkpoints = Checkpoints(folder, full_every=full_every, keep=9)
        self.states: dict[int, dict[str, dict[str, Tensor]]] = {}

    def save(self) -> None:
        step = len(self.states)
        quietly(self.checkpoints.save, self.model, self.optimizer, step=step)
        self.states[step] = self.model.states()


def eventful(folder: Path, seed: int) -> Run:
    """Trains, erases, assigns, sets the time, and saves: ids come, go and come back."""
    draw, run = random.Random(seed), Run(folder)
    for _ in range(SAVES):
        for _ in range(draw.randint(0, 4)):
            some = draw.choices(POOL, k=draw.randint(0, 4))
            what = draw.choice(("train", "train", "erase", "assign", "set_time"))
            if what == "train":
                happen(run.model, (what, {name: draw.choices(POOL, k=3) for name in NAMES}))
            elif what == "set_time":
                happen(run.model, (what, draw.randint(0, 8)))
            else:
                happen(run.model, (what, draw.choice(NAMES), some))
        run.save()
    run.checkpoints.close()
    return run


@pytest.mark.everyday(1)
@pytest.mark.parametrize("seed", range(40))
def test_each_step_of_a_chain_is_the_table_of_then(tmp_path: Path, seed: int) -> None:
    run = eventful(tmp_path / "run", seed)
    assert {entry.kind for entry in run.checkpoints.entries()} == {"full", "delta"}
    for step, states in run.states.items():
        for name, state in states.items():
            size = SMALL << step
            if not len(state["ids"]):  # saved without the numbers of no row
                state = {own: state[own] for own in ("ids", "weight")}
            read = read_batches(tmp_path / "run", name, step=step, batch_bytes=size)
            assert_is(read.read_all(), state)
            columns = [*read.schema.names, *(STATES if len(state["ids"]) else ())][::-1]
            read = read_batches(
                tmp_path / "run", name, columns=columns, step=step, batch_bytes=SMALL
            )
            assert_is(read.read_all(), state, columns)
            chosen = range(-1, 9)
            read = read_batches(tmp_path / "run", name, ids=chosen, step=step, batch_bytes=SMALL)
            inside = (state["ids"] >= -1) & (state["ids"] < 9)
            assert column(read.read_all(), "id").tolist() == state["ids"][inside].tolist()
            if "waiting" in state:
                waiting = read_batches(tmp_path / "run", name, step=step, waiting=True).read_all()
                told = dict(zip(("id", "last_seen", "count"), state["waiting"], strict=True))
                assert_is(waiting, {"ids" if k == "id" else k: v for k, v in told.items()}, told)
    newest = read_batches(tmp_path / "run", "plain")
    assert json.loads(newest.schema.metadata[b"torchrec_dyn"]) == {
        **{"format": "torchrec_dyn_table_1", "table": "plain", "seed": 0, "step": SAVES - 1},
    }
    assert_is(newest.read_all(), run.states[SAVES - 1]["plain"])


def test_a_live_table_is_as_its_checkpoint(tmp_path: Path) -> None:
    run = eventful(tmp_path / "run", 1)
    for name in NAMES:
        collection, end = run.model.collection(name), run.states[SAVES - 1][name]
        columns = ["id", "row", "momentum1"]
        for size in (SMALL, 1 << 20):
            assert_is(read_batches(collection, name, batch_bytes=size).read_all(), end)
            file = tmp_path / f"{name}.parquet"
            rows = export_table(collection, name, file, columns=columns, batch_bytes=size)
            assert rows == len(end["ids"])
            assert_is(parquet.read_table(file), end, columns)
        if "waiting" in end:
            read = read_batches(collection, name, waiting=True, batch_bytes=SMALL).read_all()
            assert column(read, "id").tolist() == end["waiting"][0].tolist()
        ids = torch.tensor(POOL)
        rows, found = dyn.lookup_rows(collection, name, ids)
        table = read_batches(collection, name).read_all()
        of_id = dict(zip(table["id"].to_pylist(), table["row"].to_pylist(), strict=True))
        assert of_id == {
            one: row
            for one, row, is_there in zip(POOL, rows.tolist(), found, strict=True)
            if is_there
        }
    with pytest.raises(ValueError, match=r"expected a name among \['plain', 'lru', 'old'\]"):
        read_batches(run.model.pooled)
    assert read_batches(run.model.sequence).schema.names == ["id", "row", "last_seen", "count"]


def test_times_of_rows(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for number, time in enumerate((3, 1, 0, 2)):
        happen(run.model, ("set_time", time))
        happen(run.model, ("train", batch(number)))
    run.save()
    for source in (run.model.sequence, tmp_path / "run"):
        columns = ["id", "last_seen_time", "last_seen"]
        read = read_batches(source, "timed", columns=columns).read_all().to_pydict()
        seen = dyn.read_last_seen(run.model.sequence, "timed", torch.tensor(read["id"]))
        assert read["last_seen_time"] == seen.tolist() and len(set(read["last_seen_time"])) == 3
        with pytest.raises(
            ValueError, match="columns among id, row, last_seen, count, momentum1, got"
        ):
            read_batches(run.model.pooled, "lru", columns=columns)
    run.checkpoints.close()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_dtypes(tmp_path: Path, kind: str) -> None:
    """float16 stays, bfloat16 becomes float32; both formats hold the same bits."""
    setup = Setup(0, optimizer="PARTIAL_ROWWISE_ADAM")
    model = new(setup)
    train(model, setup, [0, 1])
    save(model, tmp_path / "saved")
    for name, number in (("plain", "float"), ("sixteen", "halffloat"), ("brain", "float")):
        weight, table = None, model.collection.table(name)
        for source in (tmp_path / "saved", model.collection):
            file = tmp_path / f"{name}.{kind}"
            columns = ["row", "id", "momentum1", "momentum2"]
            export_table(source, name, file, columns=columns, batch_bytes=1000)
            read = (
                parquet.read_table(file)
                if kind == "parquet"
                else arrow.ipc.open_file(file).read_all()
            )
            assert read.schema.field("row").type.list_size == 12
            assert str(read.schema.field("row").type.value_type) == number
            assert read.schema.field("momentum2").type == "float"  # one number a row
            weight, _ = table.lookup(column(read, "id"))
            assert torch.equal(column(read, "row").to(weight.dtype), weight)
            assert sorted(os.listdir(tmp_path)) == sorted({f"{name}.{kind}", "saved"})
        file.unlink()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = eventful(tmp_path / "run", 3)
    to = str(tmp_path / "out.parquet")
    one = ["export", str(tmp_path / "run"), "--table", "plain", "--to", to]
    assert (
        main([*one, "--step", "3", "--ids", "2:7", "--columns", "id,row", "--row-group", "99"]) == 0
    )
    state = run.states[3]["plain"]
    expected = [i for i in state["ids"].tolist() if 2 <= i < 7]
    assert parquet.read_table(to).column("id").to_pylist() == expected
    size = os.path.getsize(to)
    assert capsys.readouterr().out == f"{to}: {len(expected)} rows, {size:,} bytes\n"
    assert main([*one, "--ids", ":"]) == 0
    assert_is(parquet.read_table(to), run.states[SAVES - 1]["plain"])
    full = tmp_path / "run" / "full-00000001" / "state"
    assert main(["export", str(full), "--table", "lru", "--waiting", "--to", to]) == 0
    assert parquet.read_table(to).num_rows == run.states[0]["lru"]["waiting"].shape[1]
    before = Path(to).read_bytes()
    for more, says in (
        (["--table", "x"], "expected one table 'x', got tables"),
        (["--step", "77"], "expected a step among [0, 1, 2"),
        (
            ["--columns", "id,momentum3"],
            "expected distinct columns among id, row, momentum1, got id, mom",
        ),
        (["--columns", "id,id"], "expected distinct columns"),
        (["--waiting", "--columns", "row"], "columns among id, last_seen, count, got row"),
    ):
        assert main([*one, *more]) == 1
        assert says in capsys.readouterr().err
    assert main([*one[:-1], str(tmp_path / "out.txt")]) == 1
    assert "ends in .parquet or .arrow, or one of" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--to", to]) == 1
    assert "expected one table, got ['model.pooled.embedding_bags.plain'" in capsys.readouterr().err
    assert main(["export", str(full), "--table", "plain", "--step", "1", "--to", to]) == 1
    assert "Give a step of a directory of Checkpoints only" in capsys.readouterr().err
    for wrong in ("5", "7:5", "a:"):
        with pytest.raises(SystemExit):
            main([*one, "--ids", wrong])
        assert f"expected LO:HI of int64, LO <= HI, got {wrong}" in capsys.readouterr().err
    assert Path(to).read_bytes() == before
    for function in (partial(export_table, path=to), read_batches):
        for ids in ([1], torch.tensor([1]), 1):
            with pytest.raises(
                ValueError, match=f"expected a range of ids, got {type(ids).__name__}"
            ):
                function(full, "plain", ids=ids)
    nowhere = tmp_path / "nowhere" / "out.parquet"
    assert main([*one[:-1], str(nowhere)]) == 1
    assert capsys.readouterr().err.endswith(f"No such file or directory: '{nowhere}'\n")
    assert Path(to).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["out.parquet", "run"]


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    run = Run(tmp_path / "run")
    run.save()
    run.checkpoints.close()
    assert main(["export", str(tmp_path / "run"), "--table", "lru", "--to", "x.parquet"]) == 1
    assert (
        "expected the package pyarrow, got none. Run `pip install 'pyarrow>=15'`"
        in capsys.readouterr().err
    )


def test_a_missing_delta_and_a_damaged_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    for step in range(3):
        rows = torch.rand(2, 4)
        run.model.pooled.table("plain").assign(torch.tensor([step, 50 + step]), rows)
        run.save()
    run.checkpoints.close()
    first, second, third = (entry.path for entry in run.checkpoints.entries())
    out = tmp_path / "out.parquet"
    # A row of the first delta: the sums of the entry see it, as no one else reads it.
    (file,) = (second / "changes").glob("*.distcp")
    data = bytearray(file.read_bytes())
    row = run.states[1]["plain"]["weight"][run.states[1]["plain"]["ids"] == 51].numpy().tobytes()
    at = data.find(row)
    assert at > 0
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"expected the content sum .* of weight, .* The checkpoint is damaged"
    ):
        export_table(tmp_path / "run", "plain", out, step=2)
    assert not out.exists()
    assert export_table(tmp_path / "run", "plain", out, step=2, columns=["id"]) == 6
    file = third.parent / "commits" / "00000003"
    commit = file.read_text()
    file.write_text("{}")
    says = r"export_table: expected whole saves in .*delta-00000003: expected .*Step 1 is"
    with pytest.warns(UserWarning, match=says):
        export_table(tmp_path / "run", "plain", out, columns=["id"])
    assert main(["export", str(tmp_path / "run"), "--table", "old", "--to", str(out)]) == 0
    assert re.match(f"{says} read.\n", capsys.readouterr().err)
    file.write_text(commit)
    second.rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError,
        match=r"expected the full save and all deltas before .*delta-00000003.* another step, whose",
    ):
        export_table(tmp_path / "run", "plain", out, step=2)
    with pytest.raises(ValueError, match="expected a checkpoint of torch"):
        export_table(tmp_path / "nothing", "plain", out)
    with pytest.raises(
        ValueError, match=r"expected a full checkpoint, got .*changes, a delta, which"
    ):
        read_batches(third / "changes", "plain")
    assert first.exists()


def test_a_table_that_is_trained_meanwhile(tmp_path: Path) -> None:
    model = Model()
    for step in range(5):
        happen(model, ("assign", "plain", [step]))
    reader = read_batches(model.pooled, "plain", batch_bytes=1)
    next(reader)
    happen(model, ("assign", "plain", [77]))
    with pytest.raises(RuntimeError, match=r"that was trained or edited since\. Export while"):
        reader.read_all()


MIB = 1 << 20


def measure(folder: str, rows: int, size: int) -> list[int]:
    """Peaks of exports of a table of `rows` rows of 64 columns: saved, a chain with a delta, and live."""
    config = EmbeddingBagConfig(2 * rows, 64, "t", feature_names=["f"])
    rule = {"optimizer": "EXACT_SGD", "learning_rate": 0.1}
    ebc = dyn.DynamicEmbeddingBagCollection([config], fused_params=rule)
    model = torch.nn.ModuleDict({"sparse": ebc})
    optimizer = CombinedOptimizer([("sparse", ebc.fused_optimizer)])
    checkpoints = Checkpoints(f"{folder}/run")
    for half in range(2):
        for start in range(half * rows // 2, rows, 20_000):
            ids = torch.arange(start, min(rows, start + 20_000))
            ebc.table("t").assign(ids, torch.rand(len(ids), 64))
        quietly(checkpoints.save, model, optimizer, step=half)
    checkpoints.close()
    export_table(ebc, "t", f"{folder}/warm.parquet", ids=range(10_000), batch_bytes=size)
    return [
        peak_of(
            lambda: export_table(source, "t", f"{folder}/t.parquet", step=step, batch_bytes=size)
        )
        for source, step in ((f"{folder}/run", 0), (f"{folder}/run", 1), (ebc, None))
    ]


def test_row_groups_bound_the_memory(tmp_path: Path) -> None:
    pool = workers._Pool(1, 1, 60.0)  # a process of its own: the others' memory has a history
    try:
        ((saved, chain, live),) = pool.run(measure, (str(tmp_path), 120_000, MIB), 300.0)
    finally:
        pool.kill()
    told = f"saved {saved / MIB:.0f}, chain {chain / MIB:.0f}, live {live / MIB:.0f} MiB"
    print(told)
    read = parquet.ParquetFile(tmp_path / "t.parquet").metadata
    assert read.num_rows == 120_000 and read.num_row_groups >= 29  # 30 MiB
    assert max(saved, chain, live) < 15 * MIB, told


def test_what_a_merged_table_reads_of_few_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a range of ids only the rows between the first and the last of a part are read."""
    run = Run(tmp_path / "run")
    for start in range(0, 400, 4):
        happen(run.model, ("assign", "plain", [*range(start, start + 4)]))
    run.save()
    run.checkpoints.close()
    read: list[int] = []
    rows = SavedTable.rows

    def counted(self: Any, name: str, first: int, last: int, columns: Any = None) -> Tensor:
        read.extend([last - first] * (name == "weight"))
        return rows(self, name, first, last, columns)

    monkeypatch.setattr(SavedTable, "rows", counted)
    found = read_batches(tmp_path / "run", "plain", ids=range(8, 9)).read_all()
    assert found.column("id").to_pylist() == [8] and read == [1]
