"""export_rows and import_rows of sharded collections: the same file, the same rows, errors on every rank."""

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import workers
from oracle import unmixed
from sharded_cases import POOLED, SEQUENCE, Case, Table, usual_plan
from sharded_training import collection_of, shard
from shards import deep_but

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import export_rows, import_rows
from torchrec_dyn.tools.safetensors_rows import SafetensorsWriter

EXTREMES = [-(2**63), -1, 0, 2**63 - 1, int(unmixed(torch.tensor([-1]))[0])]
IDS = torch.tensor([*EXTREMES, *range(-39, 200, 3)[:13], *range(1, 80, 3)])
PLANS = [(2, 2, pooled, kind) for pooled in (True, False) for kind in SEQUENCE]
PLANS += [(3, 3, True, kind) for kind in POOLED if kind != "table_wise"]
PLANS += [(4, 2, True, "grid_shard")]
EVERYDAY = [
    *((2, 2, True, "row_wise"), (2, 2, False, "column_wise")),
    *((3, 3, True, "table_row_wise"), (4, 2, True, "grid_shard")),
]


def case_of(pooled: bool, kind: str, world: int, local: int, rows: int = 1000) -> Case:
    plan = usual_plan(kind, 8, world, local, 1, rows)
    config = dyn.DynamicTableConfig(seed=5)
    return Case(
        [Table("t", ["a"], plan, data_type="BF16", config=config, rows=rows)], pooled=pooled
    )


def filled(case: Case) -> Any:
    """The unsharded collection with rows, the same on every rank."""
    one = collection_of(case)
    dyn.assign_rows(one, "t", IDS, torch.sin(IDS[:, None] + torch.arange(8.0)))
    return one


small_chunks = mock.patch.object(knobs, "CHUNK_BYTES", 10 * 2 * 8)  # 10 rows of 8 half floats


@small_chunks
def out_and_in(case: Case, folder: str) -> None:
    rank, path = dist.get_rank(), Path(folder) / "sharded"
    # Other ranks need not see the file.
    mine = path if rank == 0 else Path("/nowhere/f")
    sharded = shard(case, filled(case)).module.collection
    export_rows(sharded, "t", mine)
    if rank == 0:
        whole = filled(case)
        export_rows(whole, "t", f"{path}.whole")
        assert path.read_bytes() == Path(f"{path}.whole").read_bytes()
        assert sorted(os.listdir(folder)) == ["sharded", "sharded.whole"]
    empty = shard(case, collection_of(case)).module.collection
    assert import_rows(empty, "t", mine) == len(IDS)
    assert torch.equal(dyn.read_ids(empty, "t"), dyn.read_ids(sharded, "t"))
    read, expected = (dyn.lookup_rows(one, "t", IDS)[0] for one in (empty, sharded))
    assert torch.equal(read, expected)
    assert torch.equal(empty.table("t").ids(), sharded.table("t").ids())


@pytest.mark.everyday(2)
@pytest.mark.parametrize("world, local, pooled, kind", deep_but(EVERYDAY, PLANS))
def test_the_file_and_the_rows_do_not_depend_on_the_plan(
    tmp_path: Path, world: int, local: int, pooled: bool, kind: str
) -> None:
    case = case_of(pooled, kind, world, local)
    workers.run(out_and_in, case, f"{tmp_path}", world_size=world, local_size=local)


def fault_of(call: Any, *args: Any) -> Exception:
    """What a call raises here; it must raise something."""
    with pytest.raises((ValueError, RuntimeError, OSError)) as caught:
        call(*args)
    return caught.value


@small_chunks
def errors(case: Case) -> list[str]:
    rank, faults = dist.get_rank(), []
    module = importlib.import_module("torchrec_dyn.tools.safetensors_rows")
    one = shard(case, filled(case)).module.collection
    before = dyn.lookup_rows(one, "t", IDS)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        faults.append(fault_of(export_rows, one, "t", path / "nowhere"))
        faults.append(fault_of(import_rows, one, "t", path))
        faults.append(fault_of(import_rows, one, "x", path))
        path.write_bytes(b"damaged")
        faults.append(fault_of(import_rows, one, "t", path))
        # The limit counts on the rank whose share is full; ids of a file may come twice.
        new = torch.arange(10**6, 10**6 + 900).repeat(2)
        writer = SafetensorsWriter(
            path, {"ids": (torch.int64, (1800,)), "rows": (torch.float32, (1800, 8))}, {}
        )
        writer.write("ids", new)
        writer.write("rows", torch.zeros(1800, 8))
        writer.finish()
        faults.append(fault_of(import_rows, one, "t", path))
        # The disk is full, or the file gone, in the middle: on rank 0 only.
        write, read = module.SafetensorsWriter.write, module.SafetensorsReader.rows

        def full(self: Any, name: str, values: torch.Tensor) -> None:
            if name == "rows" and dist.get_rank() == 0:
                raise OSError("no space left")
            write(self, name, values)

        module.SafetensorsWriter.write = full
        path.write_bytes(b"before")
        faults.append(fault_of(export_rows, one, "t", path))
        assert path.read_bytes() == b"before" and os.listdir(folder) == ["f"]
        module.SafetensorsWriter.write = write
        export_rows(one, "t", path)

        def gone(self: Any, name: str, first: int, last: int) -> torch.Tensor:
            if first > 0:
                raise OSError("file gone")
            return read(self, name, first, last)

        module.SafetensorsReader.rows = gone
        faults.append(fault_of(import_rows, one, "t", path))
        module.SafetensorsReader.rows = read
        dist.barrier()
    assert torch.equal(dyn.lookup_rows(one, "t", IDS)[0], before)
    assert dyn.read_num_rows(one, "t") == len(IDS)
    return [f"{rank if 'rank' in f'{fault}' else '-'} {fault}"[2:] for fault in faults]


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_what_is_wrong_on_rank_0_is_raised_on_all(kind: str) -> None:
    everyones = workers.run(errors, case_of(True, kind, 2, 2, 500), world_size=2)
    assert everyones[0] == everyones[1]
    no_folder, no_file, no_table, damaged, no_room, full, gone = everyones[0]
    assert no_folder.startswith("[Errno 2] export_rows(table='t')(rank=0): No such file")
    assert no_file.startswith("[Errno 2] import_rows(table='t')(rank=0): No such file")
    assert "expected a name among ['t'], got 'x'" in no_table
    assert "expected the length of a header that fits" in damaged
    assert "new ids" in no_room and "expected at most" in no_room
    assert full == "export_rows(table='t')(rank=0): no space left"
    assert gone == "import_rows(table='t')(rank=0): file gone"
