"""Rows are summed while they are saved, by any writer and in any order, and are read once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import quietly, state_dict_of, tables_of
from checkpoint_damage import items_of
from checkpoint_small import AGED, COUNTED, case, on_one, read, sharded, step
from torch.distributed.checkpoint import FileSystemWriter

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import Checkpoints, TableWriter, open_checkpoint
from torchrec_dyn.checkpoint_format import (
    OPTIMIZER_CHECKSUM,
    SUMMED,
    from_words,
    saved_tensor,
)
from torchrec_dyn.state_dict import saved_sums, saving
from torchrec_dyn.storage import CanonicalRows
from torchrec_dyn.whole_model import tables_of as whole_tables_of

KINDS = ("row_wise", "table_wise", "three_columns")


def trained(kind: str, world: int = 2, **options: Any) -> Any:
    model = sharded(case(world, kind, rows=4000, **options))
    for ids in (range(0, 900, 3), range(600)):
        step(model, list(ids))
    return model


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(knobs, "SAVED_CHUNK_BYTES", 1 << 11)
    patch.setattr(knobs, "LAST_CHUNK_BYTES", 1 << 9)
    patch.setattr(knobs, "SUMMED_BYTES", 3000)


def state_without_reads(model: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CanonicalRows, "read", None)
        return state_dict_of(model)


class ChecksumsFirst(FileSystemWriter):
    """Writes the items from the last to the first, as DCP may on a GPU."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        plan.items.reverse()
        return super().write_data(plan, planner)


def saves_every_plan(path: str) -> None:
    cases = [*((kind, None) for kind in KINDS), ("row_wise", COUNTED), ("three_columns", AGED)]
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        for kind, config in cases:
            model = trained(kind, config=config, optimizer="ADAM")
            (sums,) = saved_sums(whole_tables_of(model, "test"), "test")
            for number, make in enumerate(
                (
                    FileSystemWriter,
                    ChecksumsFirst,
                    TableWriter,
                    lambda folder: TableWriter(folder, thread_count=3),
                )
            ):
                folder = f"{path}/{kind} {config} {number}"
                state = state_without_reads(model)
                quietly(dcp.save, state, storage_writer=make(folder))
                check_sums(folder, sums)
            quietly(dcp.save, copy.deepcopy(state), checkpoint_id=f"{folder} copy")
            check_sums(f"{folder} copy", sums)


def check_sums(folder: str, sums: dict[str, int]) -> None:
    if dist.get_rank() == 0:
        (table,) = open_checkpoint(folder).tables.values()
        table.verify()
        assert {name: table.sums[name] for name in SUMMED} == {**dict.fromkeys(SUMMED, 0), **sums}
        assert from_words(table.read(OPTIMIZER_CHECKSUM))["ids"] == sums["ids"]


def test_the_sums_are_those_of_the_table_under_every_plan_and_writer(tmp_path: Path) -> None:
    workers.run(saves_every_plan, str(tmp_path), world_size=2, timeout=300)


def counts_reads(path: str) -> bool:
    """With DCP's own writer, and where rows are copied first."""
    model = trained("row_wise", 1, config=AGED)
    rows, read = tables_of(model)[0].num_rows, {}
    real = saving._RowReader._read

    def counted(reader: Any, start: int, stop: int) -> torch.Tensor:
        read[reader.name] = read.get(reader.name, 0) + stop - start
        return real(reader, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving._RowReader, "_read", counted)
        for number, use in enumerate((lambda state: state, copy.deepcopy)):
            read.clear()
            quietly(dcp.save, use({"model": model.state_dict()}), checkpoint_id=f"{path} {number}")
            names = ("ids", "weight", "last_seen", "count")
            assert read == dict.fromkeys(names, rows), (number, read, rows)
    return True


def test_rows_are_read_once(tmp_path: Path) -> None:
    assert on_one(counts_reads, tmp_path)


def damaged_while_written(path: str) -> bool:
    """A number that changes between its sum and the file is found by the load."""
    model = trained("row_wise", 1)
    real = saved_tensor.SavedTensor.__get_tensor_shard__

    def damaged(self: Any, index: Any) -> torch.Tensor:
        block = real(self, index)
        if index.fqn.endswith(".weight"):
            block[0, 0] += 1
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tensor.SavedTensor, "__get_tensor_shard__", damaged)
        quietly(dcp.save, state_dict_of(model), storage_writer=TableWriter(path))
    loaded = trained("row_wise", 1)
    with pytest.raises(ValueError, match="expected weight with content sum"):
        loaded.load_state_dict(read(state_dict_of(loaded), path)["model"])
    return True


def test_the_sum_is_of_the_rows_of_the_table_not_of_what_was_written(tmp_path: Path) -> None:
    assert on_one(damaged_while_written, tmp_path)


def saves_over_another(path: str) -> None:
    """The save is killed when rank 0 has written its file: the index is still the old one."""
    model = trained("row_wise")
    quietly(dcp.save, {"model": model.state_dict()}, checkpoint_id=path)
    step(model, [1, 2])
    quietly(dcp.save, {"model": model.state_dict()}, checkpoint_id=f"{path} later")
    if dist.get_rank() == 0:
        Path(f"{path} later/__0_0.distcp").replace(f"{path}/__0_0.distcp")
    dist.barrier()
    with pytest.raises((ValueError, RuntimeError), match="those of several saves"):
        model.load_state_dict(read({"model": model.state_dict()}, path)["model"])


def test_a_save_that_was_killed_while_it_wrote_over_another_is_found(tmp_path: Path) -> None:
    workers.run(saves_over_another, str(tmp_path / "saved"), world_size=2)


def saves_checkpoints(path: str) -> None:
    model = trained("row_wise")
    folder = Checkpoints(path, full_every=1)
    entry = folder.save(model, model.fused_optimizer, step=3)
    folder.close()
    (sums,) = saved_sums(whole_tables_of(model, "test"), "test")
    (words,) = entry.sums.values()  # on every rank
    assert [int(word, 16) for word in words.split()] == [sums.get(name, 0) for name in SUMMED]
    quietly(dcp.save, state_dict_of(model), checkpoint_id=f"{path} plain")
    if dist.get_rank() == 0:
        saved, plain = (items_of(Path(one)) for one in (entry.tables, f"{path} plain"))
        assert [one.key for one in saved] == [one.key for one in plain]


def test_an_entry_of_checkpoints_has_the_sums_of_its_tables(tmp_path: Path) -> None:
    workers.run(saves_checkpoints, str(tmp_path / "saved"), world_size=2)
