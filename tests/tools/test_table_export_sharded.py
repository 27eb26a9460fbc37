"""export_table and read_batches of sharded collections: the ranks' shares together are the saved table."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import workers
from checkpoint_cases import TABLES, Setup, new, optimizer_of, quietly, train

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints, export_table, read_batches

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ALL = ["id", "row", "momentum1"]
OF_LIFE = ["id", "last_seen", "count", "row"]


def by_id(table: Any) -> dict[int, tuple[Any, ...]]:
    """The rows of a table by id, each id once."""
    rows = table.to_pydict()
    found = dict(zip(rows["id"], zip(*rows.values(), strict=True), strict=True))
    assert len(found) == table.num_rows
    return found


def of_parts(folder: Path) -> Any:
    return arrow.concat_tables([parquet.read_table(folder / name) for name in os.listdir(folder)])


def exported(setup: Setup, path: str) -> dict[str, list[str]]:
    """Checks live exports against the chain, and the chain at each step against the rows of then."""
    model, rank = new(setup), dist.get_rank()
    collection, optimizer = model.module.collection, optimizer_of(model)
    checkpoints = Checkpoints(f"{path}/run", full_every=2)
    rows_then: dict[int, dict[str, dict[int, list[float]]]] = {}
    for step in range(3):
        train(model, setup, [step])
        ids = dyn.read_ids(collection, "plain")
        dyn.erase_rows(collection, "plain", ids[step::5])
        quietly(checkpoints.save, model, optimizer, step=step)
        rows_then[step] = {}
        for name, *_ in TABLES:
            ids = dyn.read_ids(collection, name)
            rows, _ = dyn.lookup_rows(collection, name, ids)
            rows_then[step][name] = dict(zip(ids.tolist(), rows.float().tolist(), strict=True))
    checkpoints.close()
    files = {}
    for name, _, config in TABLES:
        columns = ALL if config is None or name == "sixteen" else OF_LIFE
        folder = Path(path) / f"{name}.live"
        count = export_table(
            collection, name, folder, columns=columns, kind="parquet", batch_bytes=5000
        )
        saved = read_batches(f"{path}/run", name, columns=columns, batch_bytes=2000).read_all()
        assert by_id(of_parts(folder)) == by_id(saved) and len(saved) == count > 0
        # Each rank reads the rows of the ids that it holds with the first columns.
        mine = read_batches(collection, name, columns=columns, batch_bytes=5000).read_all()
        files[name] = sorted(os.listdir(folder))
        if len(mine):
            part = files[name][rank if len(files[name]) > 1 else 0]
            assert by_id(mine) == by_id(parquet.read_table(folder / part))
        if config is not None and config.admission is not None and name == "counted":
            waiting = [
                table.to_pydict()["id"]
                for table in gathered(read_batches(collection, name, waiting=True).read_all())
            ]
            told = read_batches(f"{path}/run", name, waiting=True).read_all().to_pydict()["id"]
            assert sorted(one for some in waiting for one in some) == sorted(told) and told
    for step, by_name in rows_then.items() if rank == 0 else ():
        for name, rows in by_name.items():
            read = by_id(
                read_batches(f"{path}/run", name, columns=["id", "row"], step=step).read_all()
            )
            assert {one: row for one, (_, row) in read.items()} == rows, (step, name)
    return files


def gathered(table: Any) -> list[Any]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, table)
    return of_ranks


KINDS = [("row_wise", "column_wise", "table_wise"), ("column_wise", "row_wise")]


@pytest.mark.parametrize("kinds", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.deep)])
def test_shares_of_the_ranks(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    setup = Setup(2, kinds, optimizer="EXACT_ROWWISE_ADAGRAD", rows=400)
    files = workers.run(exported, setup, str(tmp_path), world_size=2)[0]
    whole, halves = (
        ["part-00000-of-00001.parquet"],
        [f"part-0000{i}-of-00002.parquet" for i in (0, 1)],
    )
    for turn, name in enumerate(files):
        assert files[name] == (halves if kinds[turn % len(kinds)] == "row_wise" else whole)
    assert not [one for one in os.listdir(tmp_path) if one.startswith(".")]


def faults(setup: Setup, path: str) -> list[str]:
    """Returns the errors of calls on this rank, where one rank is wrong."""
    model, rank, said = new(setup), dist.get_rank(), []
    collection = model.module.collection
    train(model, setup, [0])
    (Path(path) / "taken").mkdir(exist_ok=True)
    elsewhere = f"{path}/{rank}" if rank else path
    os.makedirs(elsewhere, exist_ok=True)
    for arguments in (
        {"table": "x" if rank else "plain", "path": f"{path}/new.parquet"},
        {"table": "plain", "path": f"{path}/taken", "kind": "parquet"},
        {
            "table": "plain",
            "path": f"{path}/new.parquet",
            "columns": ["id", "a"] if rank else ["id"],
        },
        {"table": "sixteen", "path": f"{elsewhere}/new.parquet"},
    ):
        with pytest.raises((ValueError, RuntimeError, OSError)) as caught:
            export_table(collection, **arguments)
        said.append(str(caught.value))
    from torchrec_dyn.tools.table_export import ArrowFile

    add = ArrowFile.add

    def full(self: Any, batch: Any) -> None:
        if rank:
            raise OSError(28, "No space left on device", "there")
        add(self, batch)

    ArrowFile.add = full
    try:
        with pytest.raises(OSError, match="No space") as caught:
            export_table(collection, "sixteen", f"{path}/new.parquet")
        assert caught.value.errno == 28
    finally:
        ArrowFile.add = add
    assert export_table(collection, "sixteen", f"{path}/new.parquet") > 0
    return said


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    setup = Setup(2, ("column_wise", "row_wise"), tables=2)
    both = workers.run(faults, setup, str(tmp_path), world_size=2)
    assert both[0] == both[1]
    name, taken, columns, place = both[0]
    assert "expected a name among ['plain', 'sixteen'], got 'x'" in name
    assert "expected nothing at" in taken and "expected distinct columns" in columns
    assert "expected the files of 2 ranks" in place
    left = [str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")]
    assert sorted(left) == [
        *("1", "new.parquet", "new.parquet/part-00000-of-00002.parquet"),
        *("new.parquet/part-00001-of-00002.parquet", "taken"),
    ]
